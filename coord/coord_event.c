#include "coord/coord_event.h"

#include <ctype.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"

enum { JOB_MAX = 64 };

void coord_event_done(struct coord_event *e)
{
    for (uint32_t i = 0; i < e->nkv; i++) {
        mem_free(e->kv[i].key);
        mem_free(e->kv[i].value);
    }
    mem_free(e->kv);
    e->kv = NULL;
    e->nkv = 0;
}

static bool key_valid(const char *key)
{
    return key[0] && memchr(key, 0, COORD_KEY_MAX);
}

static int txn_check(const struct coord_request *r, char *err)
{
    size_t bytes = 0;
    if (r->nguards > COORD_OPS_MAX || r->nops > COORD_OPS_MAX) {
        snprintf(err, COORD_ERR_TEXT, "transaction: %u guards and %u operations; at most %d of each", r->nguards,
                 r->nops, COORD_OPS_MAX);
        return KS_EINVAL;
    }
    for (uint32_t i = 0; i < r->nguards; i++) {
        const struct coord_guard *g = &r->guard[i];
        if (!key_valid(g->key) || g->kind < GUARD_ABSENT || g->kind > GUARD_CREATE_REVISION) {
            snprintf(err, COORD_ERR_TEXT, "transaction: guard %u has no valid key or kind", i);
            return KS_EINVAL;
        }
    }
    for (uint32_t i = 0; i < r->nops; i++) {
        if (!key_valid(r->op[i].key)) {
            snprintf(err, COORD_ERR_TEXT, "transaction: operation %u has no valid key", i);
            return KS_EINVAL;
        }
        bytes += r->op[i].value ? strlen(r->op[i].value) : 0;
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(r->op[i].key, r->op[j].key) == 0) {
                snprintf(err, COORD_ERR_TEXT, "transaction: key %s is written twice", r->op[i].key);
                return KS_EINVAL;
            }
        }
    }
    if (bytes > COORD_VALUE_MAX) {
        snprintf(err, COORD_ERR_TEXT, "transaction: %zu bytes of values; at most %d", bytes, COORD_VALUE_MAX);
        return KS_EINVAL;
    }
    return 0;
}

int coord_request_check(const struct coord_request *r, char *err)
{
    switch (r->kind) {
    case COORD_RANGE:
        if (!memchr(r->prefix, 0, COORD_KEY_MAX)) {
            snprintf(err, COORD_ERR_TEXT, "range: the prefix is longer than %d bytes", COORD_KEY_MAX - 1);
            return KS_EINVAL;
        }
        return 0;
    case COORD_TXN:
        return txn_check(r, err);
    case COORD_LEASE_GRANT:
        if (r->ttl_ms == 0) {
            snprintf(err, COORD_ERR_TEXT, "lease: the time to live must not be 0");
            return KS_EINVAL;
        }
        return 0;
    case COORD_LEASE_REVOKE:
        return 0;
    }
    snprintf(err, COORD_ERR_TEXT, "request: unknown kind %d", (int)r->kind);
    return KS_EINVAL;
}

int coord_job_check(const char *job, char *err)
{
    size_t n = job ? strlen(job) : 0;
    bool ok = n >= 1 && n <= JOB_MAX;
    for (size_t i = 0; ok && i < n; i++)
        ok = isalnum((unsigned char)job[i]) || strchr("._-", job[i]);
    if (ok)
        return 0;
    snprintf(err, COORD_ERR_TEXT, "job name \"%.80s\": give 1 to %d letters, digits, '.', '_' or '-'", job ? job : "",
             JOB_MAX);
    return KS_EINVAL;
}

struct coord_request *coord_request_copy(const struct coord_request *r)
{
    struct coord_request *copy = mem_dup(r, sizeof *r);
    for (uint32_t i = 0; i < r->nops && i < COORD_OPS_MAX; i++)
        copy->op[i].value = r->op[i].value ? mem_strdup(r->op[i].value) : NULL;
    return copy;
}

void coord_request_free(struct coord_request *r)
{
    if (!r)
        return;
    for (uint32_t i = 0; i < r->nops && i < COORD_OPS_MAX; i++)
        mem_free((char *)r->op[i].value);
    mem_free(r);
}

void coord_event_answer(struct coord_event *ret, const struct coord_request *r, int status, const char *format, ...)
{
    memset(ret, 0, sizeof *ret);
    ret->kind = COORD_ANSWER;
    ret->request = r->kind;
    ret->tag = r->tag;
    ret->status = status;
    if (format) {
        va_list args;
        va_start(args, format);
        vsnprintf(ret->text, sizeof ret->text, format, args);
        va_end(args);
    }
}

void coord_event_add(struct coord_event *e, const char *key, const void *value, size_t value_size,
                     int64_t create_revision, int64_t mod_revision)
{
    bool full = (e->nkv & (e->nkv - 1)) == 0;
    if (full)
        e->kv = mem_resize(e->kv, (e->nkv ? 2 * (size_t)e->nkv : 1) * sizeof *e->kv);
    struct coord_kv *kv = &e->kv[e->nkv++];
    *kv = (struct coord_kv){.key = mem_strdup(key), .create_revision = create_revision, .mod_revision = mod_revision};
    if (!value)
        return;
    kv->value = mem_alloc(value_size + 1);
    if (value_size)
        memcpy(kv->value, value, value_size);
    kv->value_size = value_size;
}

void coord_event_change(struct coord_event *ret, const char *key, const void *value, size_t value_size,
                        int64_t create_revision, int64_t revision)
{
    memset(ret, 0, sizeof *ret);
    ret->kind = COORD_CHANGE;
    ret->revision = revision;
    coord_event_add(ret, key, value, value_size, create_revision, revision);
}

void coord_queue_init(struct coord_queue *q, const struct coord_config *c)
{
    memset(q, 0, sizeof *q);
    CHECK(pthread_mutex_init(&q->lock, NULL) == 0);
    q->wake = c->wake;
    q->wake_arg = c->wake_arg;
}

void coord_queue_done(struct coord_queue *q)
{
    struct coord_event e;
    while (coord_queue_pop(q, &e))
        coord_event_done(&e);
    mem_free(q->event);
    pthread_mutex_destroy(&q->lock);
}

static void queue_grow(struct coord_queue *q)
{
    size_t cap = q->cap ? 2 * q->cap : 16;
    struct coord_event *event = mem_alloc(cap * sizeof *event);
    for (size_t i = 0; i < q->n; i++)
        event[i] = q->event[(q->first + i) % q->cap];
    mem_free(q->event);
    q->event = event;
    q->first = 0;
    q->cap = cap;
}

void coord_queue_push(struct coord_queue *q, struct coord_event *e)
{
    pthread_mutex_lock(&q->lock);
    if (q->n == q->cap)
        queue_grow(q);
    q->event[(q->first + q->n++) % q->cap] = *e;
    pthread_mutex_unlock(&q->lock);
    if (q->wake)
        q->wake(q->wake_arg);
}

bool coord_queue_pop(struct coord_queue *q, struct coord_event *ret)
{
    pthread_mutex_lock(&q->lock);
    bool some = q->n > 0;
    if (some) {
        *ret = q->event[q->first];
        q->first = (q->first + 1) % q->cap;
        q->n--;
    }
    pthread_mutex_unlock(&q->lock);
    return some;
}

void coord_queue_drop_changes(struct coord_queue *q)
{
    size_t kept = 0;
    pthread_mutex_lock(&q->lock);
    for (size_t i = 0; i < q->n; i++) {
        struct coord_event *e = &q->event[(q->first + i) % q->cap];
        if (e->kind == COORD_CHANGE || e->kind == COORD_RESYNC)
            coord_event_done(e);
        else
            q->event[(q->first + kept++) % q->cap] = *e;
    }
    q->n = kept;
    pthread_mutex_unlock(&q->lock);
}

int coord_thread_start(pthread_t *ret, void *(*run)(void *arg), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(ret, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
