/* coord_rig.h - a coord handle of a test with its wake, and waiting for events with a deadline. */
#ifndef TESTS_CONTRACT_COORD_RIG_H
#define TESTS_CONTRACT_COORD_RIG_H

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "coord/coord.h"

enum { RIG_WAIT_MS = 10000 };

struct rig {
    struct coord *coord;
    int wake_fd;
    uint64_t last_tag;
    struct coord_event *kept; /* taken while something else was awaited */
    size_t nkept, kept_cap;
};

static inline void rig_wake(void *arg)
{
    uint64_t one = 1;
    if (write(((struct rig *)arg)->wake_fd, &one, sizeof one) < 0)
        abort();
}

static inline void rig_init(struct rig *r)
{
    memset(r, 0, sizeof *r);
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_true(r->wake_fd >= 0);
}

static inline void rig_done(struct rig *r)
{
    if (r->coord)
        r->coord->ops->close(r->coord);
    for (size_t i = 0; i < r->nkept; i++)
        coord_event_done(&r->kept[i]);
    mem_free(r->kept);
    close(r->wake_fd);
}

/* The next event of that kind (and tag, when not 0) within ms; false: none came. */
static inline bool rig_try(struct rig *r, enum coord_event_kind kind, uint64_t tag, int ms, struct coord_event *ret)
{
    uint64_t end = clock_now_us() + (uint64_t)ms * 1000, dump;
    for (size_t i = 0; i < r->nkept; i++) {
        if (r->kept[i].kind != kind || (tag && r->kept[i].tag != tag))
            continue;
        *ret = r->kept[i];
        memmove(&r->kept[i], &r->kept[i + 1], (--r->nkept - i) * sizeof *r->kept);
        return true;
    }
    for (;;) {
        while (r->coord->ops->next(r->coord, ret)) {
            if (ret->kind == kind && (!tag || ret->tag == tag))
                return true;
            ARRAY_ROOM(r->kept, r->nkept, r->kept_cap);
            r->kept[r->nkept++] = *ret;
        }
        uint64_t now = clock_now_us();
        if (now >= end)
            return false;
        struct pollfd p = {.fd = r->wake_fd, .events = POLLIN};
        poll(&p, 1, (int)((end - now) / 1000) + 1);
        while (read(r->wake_fd, &dump, sizeof dump) > 0)
            continue;
    }
}

static inline struct coord_event rig_take(struct rig *r, enum coord_event_kind kind, uint64_t tag)
{
    struct coord_event e;
    if (!rig_try(r, kind, tag, RIG_WAIT_MS, &e))
        fail_msg("no event of kind %d within %d ms", (int)kind, RIG_WAIT_MS);
    return e;
}

static inline uint64_t rig_submit(struct rig *r, struct coord_request *q)
{
    q->tag = ++r->last_tag;
    r->coord->ops->submit(r->coord, q);
    return q->tag;
}

static inline struct coord_event rig_ask(struct rig *r, struct coord_request *q)
{
    return rig_take(r, COORD_ANSWER, rig_submit(r, q));
}

/* Watches; what an earlier watch has told is forgotten. */
static inline void rig_watch(struct rig *r, const char *prefix, int64_t revision)
{
    size_t n = 0;
    for (size_t i = 0; i < r->nkept; i++) {
        if (r->kept[i].kind == COORD_CHANGE || r->kept[i].kind == COORD_RESYNC)
            coord_event_done(&r->kept[i]);
        else
            r->kept[n++] = r->kept[i];
    }
    r->nkept = n;
    r->coord->ops->watch(r->coord, prefix, revision);
}

static inline void rig_op(struct coord_request *q, const char *key, const char *value, int64_t lease)
{
    struct coord_op *op = &q->op[q->nops++];
    q->kind = COORD_TXN;
    snprintf(op->key, sizeof op->key, "%s", key);
    op->value = value;
    op->lease = lease;
}

static inline void rig_guard(struct coord_request *q, enum coord_guard_kind kind, const char *key, int64_t revision)
{
    struct coord_guard *g = &q->guard[q->nguards++];
    q->kind = COORD_TXN;
    g->kind = kind;
    snprintf(g->key, sizeof g->key, "%s", key);
    g->revision = revision;
}

/* Puts and returns the revision. */
static inline int64_t rig_put(struct rig *r, const char *key, const char *value, int64_t lease)
{
    struct coord_request q = {0};
    rig_op(&q, key, value, lease);
    struct coord_event e = rig_ask(r, &q);
    if (e.status)
        fail_msg("put %s: %d %s", key, e.status, e.text);
    assert_true(e.succeeded);
    return e.revision;
}

static inline int64_t rig_delete(struct rig *r, const char *key)
{
    return rig_put(r, key, NULL, 0);
}

static inline struct coord_event rig_range(struct rig *r, const char *prefix)
{
    struct coord_request q = {.kind = COORD_RANGE};
    snprintf(q.prefix, sizeof q.prefix, "%s", prefix);
    struct coord_event e = rig_ask(r, &q);
    if (e.status)
        fail_msg("range %s: %d %s", prefix, e.status, e.text);
    return e;
}

static inline int64_t rig_grant(struct rig *r, uint32_t ttl_ms)
{
    struct coord_request q = {.kind = COORD_LEASE_GRANT, .ttl_ms = ttl_ms};
    struct coord_event e = rig_ask(r, &q);
    if (e.status)
        fail_msg("grant: %d %s", e.status, e.text);
    assert_true(e.lease != 0);
    return e.lease;
}

static inline int rig_revoke(struct rig *r, int64_t lease)
{
    struct coord_request q = {.kind = COORD_LEASE_REVOKE, .lease = lease};
    struct coord_event e = rig_ask(r, &q);
    return e.status;
}

/* The next change must be of this key; value NULL: deleted. Returns its revision. */
static inline int64_t rig_expect_change(struct rig *r, const char *key, const char *value)
{
    struct coord_event e = rig_take(r, COORD_CHANGE, 0);
    int64_t revision = e.revision;
    assert_int_equal(e.nkv, 1);
    assert_string_equal(e.kv[0].key, key);
    if (value)
        assert_string_equal(e.kv[0].value, value);
    else
        assert_null(e.kv[0].value);
    coord_event_done(&e);
    return revision;
}

static inline void rig_expect_absent(struct rig *r, const char *key)
{
    struct coord_event e = rig_range(r, key);
    assert_int_equal(e.nkv, 0);
    coord_event_done(&e);
}

#endif
