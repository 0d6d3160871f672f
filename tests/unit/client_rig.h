/* client_rig.h - a client core on a bench: views, connections and servers' answers by hand, and what came out.
 *
 * Four shards on two servers of two loops each: shard n is alone on its loop, so a test names a loop by its shard.
 * Chunks have 64 bytes; tensor "w" has three of them (64, 64, 32). */
#ifndef TESTS_UNIT_CLIENT_RIG_H
#define TESTS_UNIT_CLIENT_RIG_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "worker/client_core.h"

enum { SELF = 7, OTHER = 8, S1 = 101, S2 = 102, S3 = 103, NSHARDS = 4, LOG_MAX = 4096, W_FLOATS = 40, W_CHUNKS = 3 };

struct logged {
    struct client_effect f;
    uint8_t payload[256];
};
struct rig {
    struct client_core *c;
    struct view *view;
    struct client_outbox out;
    struct logged *log;
    uint32_t n;
    uint64_t now_us, ops;
    uint32_t w;
};

/* ---- the rig ---- */

static inline void run(struct rig *r, struct client_event e)
{
    e.now_us = r->now_us;
    client_core_step(r->c, &e, &r->out);
    for (uint32_t i = 0; i < r->out.n; i++) {
        struct client_effect *f = &r->out.effect[i];
        assert_true(r->n < LOG_MAX);
        struct logged *l = &r->log[r->n++];
        l->f = *f;
        if (f->kind == CLIENT_SEND && f->header.len && f->header.len <= sizeof l->payload)
            memcpy(l->payload, f->payload, f->header.len);
        if (f->owned)
            mem_free((void *)f->payload);
    }
}

static inline void forget(struct rig *r)
{
    r->n = 0;
}

static inline struct view *view_make(uint64_t epoch)
{
    struct view *v = view_create(2, 2, NSHARDS);
    v->epoch = epoch;
    v->mchg = epoch;
    v->nmodes = 1;
    v->mode[0].kind = MODE_SYNC;
    for (uint32_t i = 0; i < 2; i++) {
        v->server[i].id = S1 + i;
        snprintf(v->server[i].name, NAME_MAX_BYTES, "s%u", i + 1);
        v->server[i].nloops = 2;
        v->member[i] = (struct view_member){.id = SELF + i, .last = STEP_NONE, .live = true, .local_size = 1};
    }
    for (uint32_t i = 0; i < NSHARDS; i++)
        v->shard[i] = (struct view_shard){.primary = i < 2 ? S1 : S2, .since = 1};
    return v;
}

/* The next view, for the caller to change before adopt(). */
static inline struct view *view_next(struct rig *r)
{
    r->view->epoch++;
    return r->view;
}

static inline void adopt(struct rig *r)
{
    run(r, (struct client_event){.kind = CLIENT_ADOPT, .view = r->view});
}

static inline uint64_t server_of(const struct rig *r, uint32_t shard)
{
    return r->view->shard[shard].primary;
}

static inline void up(struct rig *r, uint32_t shard)
{
    run(r, (struct client_event){.kind = CLIENT_PEER_UP, .from = server_of(r, shard), .loop = shard % 2});
}

static inline void up_all(struct rig *r)
{
    for (uint32_t i = 0; i < NSHARDS; i++)
        up(r, i);
}

static inline void down(struct rig *r, uint32_t shard)
{
    run(r, (struct client_event){.kind = CLIENT_PEER_DOWN, .from = server_of(r, shard), .loop = shard % 2});
}

static inline void frame_in(struct rig *r, uint32_t shard, struct frame_header h, const void *payload)
{
    if (!h.epoch)
        h.epoch = (uint32_t)r->view->epoch;
    run(r, (struct client_event){
               .kind = CLIENT_FRAME, .from = server_of(r, shard), .loop = shard % 2, .header = h, .payload = payload});
}

/* A frame whose payload goes where the core says. Returns whether it had a place. */
static inline bool sunk(struct rig *r, uint32_t shard, struct frame_header h, const void *payload)
{
    if (!h.epoch)
        h.epoch = (uint32_t)r->view->epoch;
    void *to = client_core_sink(r->c, server_of(r, shard), shard % 2, &h);
    if (to)
        memcpy(to, payload, h.len);
    frame_in(r, shard, h, NULL);
    return to;
}

static inline uint64_t op(struct rig *r, struct client_event e)
{
    e.op = ++r->ops;
    run(r, e);
    return e.op;
}

static inline struct tensor_spec spec_of(const char *name, uint64_t count)
{
    struct tensor_spec s = {.dtype = DTYPE_F32,
                            .ndims = 1,
                            .dim = {count},
                            .kind = TENSOR_PARAM,
                            .op = TENSOR_SUM,
                            .finite = FINITE_REJECT,
                            .group = "default",
                            .optimizer = "add"};
    assert_int_equal(0, str_copy(s.name, sizeof s.name, name));
    s.id = tensor_id(name);
    return s;
}

static inline const struct tensor_spec *w_spec(const struct rig *r)
{
    return client_core_tensor(r->c, r->w);
}

static inline uint32_t w_shard(const struct rig *r, uint32_t chunk)
{
    return shard_of(w_spec(r)->id, chunk, NSHARDS);
}

/* ---- what came out ---- */

/* The nth frame of this type to this shard's loop (-1: any), or NULL. */
static inline const struct logged *sent(const struct rig *r, int shard, unsigned type, uint32_t nth)
{
    for (uint32_t i = 0; i < r->n; i++) {
        const struct client_effect *f = &r->log[i].f;
        if ((f->kind != CLIENT_SEND && f->kind != CLIENT_SEND_SPEC) || f->header.type != type)
            continue;
        if (shard >= 0 && (f->to != server_of(r, (uint32_t)shard) || f->loop != (uint32_t)shard % 2))
            continue;
        if (nth-- == 0)
            return &r->log[i];
    }
    return NULL;
}

static inline uint32_t count(const struct rig *r, int shard, unsigned type)
{
    uint32_t n = 0;
    while (sent(r, shard, type, n))
        n++;
    return n;
}

static inline const struct client_effect *effect(const struct rig *r, enum client_effect_kind kind, uint64_t o)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (r->log[i].f.kind == kind && (!o || r->log[i].f.op == o))
            return &r->log[i].f;
    return NULL;
}

static inline bool is_done(const struct rig *r, uint64_t o)
{
    return effect(r, CLIENT_DONE, o) != NULL;
}

static inline int outcome(const struct rig *r, uint64_t o)
{
    const struct client_effect *f = effect(r, CLIENT_DONE, o);
    assert_non_null(f);
    return f->status;
}

/* The order of types to one loop, as letters. */
static inline const char *order(const struct rig *r, uint32_t shard)
{
    static char text[LOG_MAX + 1];
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        const struct client_effect *f = &r->log[i].f;
        if ((f->kind != CLIENT_SEND && f->kind != CLIENT_SEND_SPEC) || f->to != server_of(r, shard) ||
            f->loop != shard % 2)
            continue;
        switch (f->header.type) {
        case FRAME_DECLARE:
            text[n++] = 'd';
            break;
        case FRAME_INIT:
            text[n++] = 'i';
            break;
        case FRAME_PUSH:
            text[n++] = 'P';
            break;
        case FRAME_CLOCK:
            text[n++] = 'C';
            break;
        case FRAME_DONE:
            text[n++] = 'D';
            break;
        case FRAME_PULL:
            text[n++] = 'p';
            break;
        default:
            text[n++] = '?';
        }
    }
    text[n] = 0;
    return text;
}

/* ---- servers' answers ---- */

static inline uint64_t declare(struct rig *r, const struct tensor_spec *s)
{
    return op(r, (struct client_event){.kind = CLIENT_DECLARE, .spec = s});
}

static inline void declared_all(struct rig *r, const struct tensor_spec *s)
{
    for (uint32_t i = 0; i < NSHARDS; i++) {
        uint32_t shard = (shard_of(s->id, 0, NSHARDS) + i) % NSHARDS;
        const struct logged *l = sent(r, (int)shard, FRAME_DECLARE, 0);
        assert_non_null(l);
        frame_in(r, shard,
                 (struct frame_header){.type = FRAME_DECLARED, .tensor = s->id, .version = l->f.header.version}, NULL);
    }
}

static inline uint32_t declare_all(struct rig *r, const char *name, uint64_t n)
{
    struct tensor_spec s = spec_of(name, n);
    forget(r);
    uint64_t o = declare(r, &s);
    declared_all(r, &s);
    assert_int_equal(KS_OK, outcome(r, o));
    uint32_t index = effect(r, CLIENT_DONE, o)->tensor;
    forget(r);
    return index;
}

static inline void complete_at(struct rig *r, uint32_t shard, int64_t step, uint32_t epoch)
{
    uint8_t n[2] = {(uint8_t)shard, 0};
    frame_in(r, shard, (struct frame_header){.type = FRAME_COMPLETE, .step = step, .len = 2, .epoch = epoch}, n);
}

static inline void complete_all(struct rig *r, int64_t step)
{
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, step, 0);
}

static inline uint32_t w_bytes(uint32_t chunk)
{
    return chunk == 2 ? 32 : 64;
}

static inline struct frame_header answer_of(const struct rig *r, unsigned type, uint32_t chunk, int64_t step)
{
    return (struct frame_header){.type = (uint8_t)type,
                                 .dtype = DTYPE_F32,
                                 .tensor = w_spec(r)->id,
                                 .chunk = chunk,
                                 .step = step,
                                 .len = w_bytes(chunk)};
}

static inline bool result(struct rig *r, uint32_t chunk, int64_t step, uint32_t epoch, float value)
{
    float x[16];
    struct frame_header h = answer_of(r, FRAME_RESULT, chunk, step);
    for (int i = 0; i < 16; i++)
        x[i] = value;
    h.epoch = epoch;
    return sunk(r, w_shard(r, chunk), h, x);
}

static inline bool value(struct rig *r, uint32_t chunk, uint32_t seq, float v)
{
    float x[16];
    struct frame_header h = answer_of(r, FRAME_VALUE, chunk, 0);
    for (int i = 0; i < 16; i++)
        x[i] = v;
    h.seq = seq;
    return sunk(r, w_shard(r, chunk), h, x);
}

static inline void ack(struct rig *r, uint32_t chunk, uint32_t seq, int status, int64_t clock)
{
    struct frame_header h = answer_of(r, FRAME_ACK, chunk, clock);
    h.len = 0;
    h.seq = seq;
    h.status = (int16_t)status;
    frame_in(r, w_shard(r, chunk), h, NULL);
}

static inline void ack_all(struct rig *r, uint32_t seq)
{
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        ack(r, i, seq, KS_OK, 0);
}

static inline uint64_t push(struct rig *r, const void *in, void *out)
{
    return op(r, (struct client_event){.kind = CLIENT_PUSH, .tensor = r->w, .in = in, .out = out, .weight = 1});
}

static inline uint64_t pull(struct rig *r, void *out)
{
    return op(r, (struct client_event){.kind = CLIENT_PULL, .tensor = r->w, .out = out});
}

static inline uint64_t step_end(struct rig *r)
{
    return op(r, (struct client_event){.kind = CLIENT_STEP_END});
}

static inline void tick(struct rig *r, uint64_t seconds)
{
    r->now_us += seconds * 1000000;
    run(r, (struct client_event){.kind = CLIENT_TICK});
}

static inline const char *waiting(struct rig *r)
{
    static char text[256];
    client_core_waiting(r->c, r->now_us, text, sizeof text);
    return text;
}

static inline struct rig *rig_make(enum mode_kind mode)
{
    struct rig *r = calloc(1, sizeof *r);
    r->log = calloc(LOG_MAX, sizeof *r->log);
    r->now_us = 1000000;
    struct client_config config = {.self = SELF, .chunk_bytes = 64, .nshards = NSHARDS};
    r->c = client_core_create(&config);
    r->view = view_make(1);
    r->view->mode[0].kind = mode;
    r->view->mode[0].bound = mode == MODE_SSP ? 2 : 0;
    return r;
}

static inline struct rig *rig_started(enum mode_kind mode)
{
    struct rig *r = rig_make(mode);
    adopt(r);
    assert_non_null(effect(r, CLIENT_STARTED, 0));
    up_all(r);
    r->w = declare_all(r, "w", W_FLOATS);
    return r;
}

static inline void rig_free(struct rig *r)
{
    client_core_free(r->c);
    client_outbox_done(&r->out);
    view_free(r->view);
    free(r->log);
    free(r);
}

/* Ends the step and lets every server complete it. */
static inline void step_through(struct rig *r)
{
    int64_t step = client_core_step_now(r->c);
    step_end(r);
    complete_all(r, step);
    assert_int_equal(step + 1, client_core_step_now(r->c));
}

#endif
