/* view_replicas_rig.h - one controller and the servers it talks to, for test_view_replicas.c and test_view_moves.c. */
#ifndef TESTS_UNIT_VIEW_REPLICAS_RIG_H
#define TESTS_UNIT_VIEW_REPLICAS_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "coord/view_core.h"

enum { SELF = 1, MS = 1000, IDS = 64, SHARDS = 96 };

struct rig {
    struct view_core *v;
    struct view_outbox out;
    uint64_t now_us;
    struct view *proposed;     /* copy of the newest VIEW_CAS */
    struct prepare prepare;    /* copy of the newest PREPARE */
    bool prepared;
    uint32_t nasked, ncas;
    int64_t complete[IDS];     /* what server `id` reports of all its shards; join is one more */
    int64_t behind;            /* what backups report less */
    bool full[IDS];            /* what it says as a joiner; its primary has heard so */
};

static inline void take(struct rig *r)
{
    r->nasked = r->ncas = 0;
    for (uint32_t i = 0; i < r->out.n; i++) {
        const struct view_effect *e = &r->out.effect[i];
        if (e->kind == VIEW_CAS) {
            view_free(r->proposed);
            r->proposed = view_copy(e->view);
            r->ncas++;
        }
        if (e->kind != VIEW_SEND_PREPARE)
            continue;
        if (r->prepared)
            prepare_done(&r->prepare);
        prepare_copy(&r->prepare, e->prepare);
        r->prepared = true;
        r->nasked++;
    }
}

static inline void step(struct rig *r, struct view_event e)
{
    e.now_us = r->now_us;
    view_core_step(r->v, &e, &r->out);
    take(r);
}

static inline void server(struct rig *r, uint64_t id, uint64_t heir_of)
{
    struct server_doc d = {.heir_of = heir_of, .server = {.id = id, .nloops = 1}};
    snprintf(d.server.name, sizeof d.server.name, "s%llu", (unsigned long long)id);
    snprintf(d.server.ctl, sizeof d.server.ctl, "host:%llu", (unsigned long long)id);
    step(r, (struct view_event){.kind = VIEW_SERVER, .server = &d});
}

static inline void suspect(struct rig *r, uint64_t id)
{
    step(r, (struct view_event){.kind = VIEW_SUSPECT, .id = id, .text = "test"});
}

static inline void drain(struct rig *r, uint64_t id)
{
    step(r, (struct view_event){.kind = VIEW_DRAIN, .id = id});
}

static inline void tick(struct rig *r)
{
    uint64_t at = view_core_deadline(r->v);
    assert_true(at != UINT64_MAX);
    r->now_us = at > r->now_us ? at : r->now_us;
    step(r, (struct view_event){.kind = VIEW_TICK});
}

static inline bool idle(const struct rig *r)
{
    return view_core_deadline(r->v) == UINT64_MAX;
}

static inline bool has(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static inline bool backs(const struct view_shard *s, uint64_t id)
{
    return has(s->backup, s->nbackups, id);
}

static inline bool joins(const struct view_shard *s, uint64_t id)
{
    return has(s->joining, s->njoining, id);
}

static inline uint64_t inherits(const struct rig *r, uint64_t id)
{
    for (uint32_t i = 0; i < r->prepare.nheirs; i++)
        if (r->prepare.heir[i] == id)
            return r->prepare.heir_of[i];
    return 0;
}

static inline struct shard_report report_of(const struct rig *r, uint64_t id, uint32_t h, const struct view_shard *s)
{
    struct shard_report p = {.shard = h, .complete = r->complete[id], .join = r->complete[id] + 1};
    uint64_t of = inherits(r, id);
    p.role = s->primary == id ? HOLDER_PRIMARY
             : backs(s, id)   ? HOLDER_BACKUP
             : joins(s, id)   ? HOLDER_JOINER
             : of && (s->primary == of || backs(s, of)) ? HOLDER_HEIR
                                                        : 0;
    if (p.role == HOLDER_BACKUP)
        p.complete -= r->behind;
    p.full = p.role == HOLDER_JOINER && r->full[id];
    for (uint32_t i = 0; p.role == HOLDER_PRIMARY && i < s->njoining; i++)
        if (r->full[s->joining[i]])
            p.synced[p.nsynced++] = s->joining[i];
    return p;
}

static inline void report(struct rig *r, uint64_t id)
{
    const struct view *b = r->prepare.base;
    struct shard_report shard[SHARDS];
    struct report p = {.from = id, .ballot = r->prepare.ballot, .base_epoch = b->epoch, .clock = -1, .shard = shard};
    for (uint32_t h = 0; h < b->nshards; h++) {
        shard[p.nshards] = report_of(r, id, h, &b->shard[h]);
        p.nshards += shard[p.nshards].role != 0;
    }
    step(r, (struct view_event){.kind = VIEW_REPORT, .report = &p});
}

/* Everybody who was asked and is not in `silent`. */
static inline void report_all(struct rig *r, uint64_t silent)
{
    struct prepare p;
    uint64_t ids[IDS];
    uint32_t n = 0;
    prepare_copy(&p, &r->prepare);
    for (uint32_t i = 0; i < p.base->nservers; i++)
        if (!has(p.gone, p.ngone, p.base->server[i].id))
            ids[n++] = p.base->server[i].id;
    for (uint32_t i = 0; i < p.nheirs; i++)
        ids[n++] = p.heir[i];
    prepare_done(&p);
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] != silent)
            report(r, ids[i]);
}

static inline void committed(struct rig *r)
{
    assert_int_equal(r->ncas, 1);
    step(r, (struct view_event){.kind = VIEW_CAS_DONE, .ok = true});
    step(r, (struct view_event){.kind = VIEW_ADOPTED, .view = r->proposed});
}

/* One change from the wish to the proposal. */
static inline void change(struct rig *r)
{
    tick(r);
    assert_true(r->nasked > 0);
    report_all(r, 0);
    assert_int_equal(r->ncas, 1);
}

/* Changes until nothing is wanted any more. */
static inline uint32_t settle(struct rig *r)
{
    uint32_t n = 0;
    while (!idle(r)) {
        change(r);
        committed(r);
        assert_true(++n < 200);
    }
    return n;
}

static inline void synced(struct rig *r, uint64_t id)
{
    r->full[id] = true;
    for (uint32_t h = 0; h < r->proposed->nshards; h++)
        if (joins(&r->proposed->shard[h], id))
            step(r, (struct view_event){.kind = VIEW_SYNCED, .id = id, .shard = h});
}

/* Joiners catch up, one change after the other, until nothing is left to do. */
static inline uint32_t settle_synced(struct rig *r)
{
    uint32_t n = settle(r);
    for (;;) {
        uint32_t before = n;
        for (uint32_t i = 0; i < r->proposed->nservers; i++)
            synced(r, r->proposed->server[i].id);
        n += settle(r);
        if (n == before)
            return n;
    }
}

static inline void open_rig(struct rig *r, uint32_t n, uint32_t nshards, uint32_t replicas, uint32_t replicas_min)
{
    memset(r, 0, sizeof *r);
    struct view_config c = {.self = SELF, .batch_ms = 20, .report_ms = 1000};
    c.job = (struct job_doc){.nshards = nshards, .servers_min = n, .replicas = replicas, .replicas_min = replicas_min,
                             .mode = {0, MODE_SYNC, 0}, .wait_for_server_s = 10};
    r->v = view_core_create(&c);
    r->now_us = 1000 * MS;
    for (uint32_t i = 0; i < IDS; i++)
        r->complete[i] = 5;
    for (uint64_t id = 1; id <= n; id++)
        server(r, id, 0);
    step(r, (struct view_event){.kind = VIEW_ELECTED, .term = 5});
    committed(r);
    settle(r);
}

static inline void close_rig(struct rig *r)
{
    view_core_free(r->v);
    view_outbox_done(&r->out);
    view_free(r->proposed);
    if (r->prepared)
        prepare_done(&r->prepare);
}

struct loads {
    uint32_t primaries[IDS], holders[IDS];
};

static inline struct loads loads_of(const struct view *v)
{
    struct loads l = {0};
    for (uint32_t h = 0; h < v->nshards; h++) {
        const struct view_shard *s = &v->shard[h];
        l.primaries[s->primary]++;
        l.holders[s->primary]++;
        for (uint32_t i = 0; i < s->nbackups; i++)
            l.holders[s->backup[i]]++;
    }
    return l;
}

static inline uint32_t unevenness(const struct view *v, const uint32_t *load)
{
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t i = 0; i < v->nservers; i++) {
        uint32_t x = load[v->server[i].id];
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    return most - least;
}

static inline void assert_even(const struct view *v, const uint32_t *load)
{
    assert_true(unevenness(v, load) <= 1);
}

/* Every shard: listed, distinct holders, so many backups. */
static inline void assert_backups(const struct view *v, uint32_t n)
{
    for (uint32_t h = 0; h < v->nshards; h++) {
        const struct view_shard *s = &v->shard[h];
        assert_int_equal(s->nbackups, n);
        assert_non_null(view_server_find(v, s->primary));
        assert_false(backs(s, s->primary));
        for (uint32_t i = 0; i < n; i++)
            assert_non_null(view_server_find(v, s->backup[i]));
        assert_true(n < 2 || s->backup[0] != s->backup[1]);
    }
}

static inline void assert_settled(const struct view *v, uint32_t n)
{
    assert_backups(v, n);
    for (uint32_t h = 0; h < v->nshards; h++)
        assert_int_equal(v->shard[h].njoining, 0);
}

/* ---- the first view ---- */

#endif
