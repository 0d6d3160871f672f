/* Narrated cases of one member's life. Four shards on two servers of two loops each: shard n is alone on its loop, so a
 * test names a loop by its shard. Chunks have 64 bytes; tensor "w" has three of them (64, 64, 32). */
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

static void run(struct rig *r, struct client_event e)
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

static void forget(struct rig *r)
{
    r->n = 0;
}

static struct view *view_make(uint64_t epoch)
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
static struct view *view_next(struct rig *r)
{
    r->view->epoch++;
    return r->view;
}

static void adopt(struct rig *r)
{
    run(r, (struct client_event){.kind = CLIENT_ADOPT, .view = r->view});
}

static uint64_t server_of(const struct rig *r, uint32_t shard)
{
    return r->view->shard[shard].primary;
}

static void up(struct rig *r, uint32_t shard)
{
    run(r, (struct client_event){.kind = CLIENT_PEER_UP, .from = server_of(r, shard), .loop = shard % 2});
}

static void up_all(struct rig *r)
{
    for (uint32_t i = 0; i < NSHARDS; i++)
        up(r, i);
}

static void down(struct rig *r, uint32_t shard)
{
    run(r, (struct client_event){.kind = CLIENT_PEER_DOWN, .from = server_of(r, shard), .loop = shard % 2});
}

static void frame_in(struct rig *r, uint32_t shard, struct frame_header h, const void *payload)
{
    if (!h.epoch)
        h.epoch = (uint32_t)r->view->epoch;
    run(r, (struct client_event){
               .kind = CLIENT_FRAME, .from = server_of(r, shard), .loop = shard % 2, .header = h, .payload = payload});
}

/* A frame whose payload goes where the core says. Returns whether it had a place. */
static bool sunk(struct rig *r, uint32_t shard, struct frame_header h, const void *payload)
{
    if (!h.epoch)
        h.epoch = (uint32_t)r->view->epoch;
    void *to = client_core_sink(r->c, server_of(r, shard), shard % 2, &h);
    if (to)
        memcpy(to, payload, h.len);
    frame_in(r, shard, h, NULL);
    return to;
}

static uint64_t op(struct rig *r, struct client_event e)
{
    e.op = ++r->ops;
    run(r, e);
    return e.op;
}

static struct tensor_spec spec_of(const char *name, uint64_t count)
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

static const struct tensor_spec *w_spec(const struct rig *r)
{
    return client_core_tensor(r->c, r->w);
}

static uint32_t w_shard(const struct rig *r, uint32_t chunk)
{
    return shard_of(w_spec(r)->id, chunk, NSHARDS);
}

/* ---- what came out ---- */

/* The nth frame of this type to this shard's loop (-1: any), or NULL. */
static const struct logged *sent(const struct rig *r, int shard, unsigned type, uint32_t nth)
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

static uint32_t count(const struct rig *r, int shard, unsigned type)
{
    uint32_t n = 0;
    while (sent(r, shard, type, n))
        n++;
    return n;
}

static const struct client_effect *effect(const struct rig *r, enum client_effect_kind kind, uint64_t o)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (r->log[i].f.kind == kind && (!o || r->log[i].f.op == o))
            return &r->log[i].f;
    return NULL;
}

static bool is_done(const struct rig *r, uint64_t o)
{
    return effect(r, CLIENT_DONE, o) != NULL;
}

static int outcome(const struct rig *r, uint64_t o)
{
    const struct client_effect *f = effect(r, CLIENT_DONE, o);
    assert_non_null(f);
    return f->status;
}

/* The order of types to one loop, as letters. */
static const char *order(const struct rig *r, uint32_t shard)
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

static uint64_t declare(struct rig *r, const struct tensor_spec *s)
{
    return op(r, (struct client_event){.kind = CLIENT_DECLARE, .spec = s});
}

static void declared_all(struct rig *r, const struct tensor_spec *s)
{
    for (uint32_t i = 0; i < NSHARDS; i++) {
        uint32_t shard = (shard_of(s->id, 0, NSHARDS) + i) % NSHARDS;
        const struct logged *l = sent(r, (int)shard, FRAME_DECLARE, 0);
        assert_non_null(l);
        frame_in(r, shard,
                 (struct frame_header){.type = FRAME_DECLARED, .tensor = s->id, .version = l->f.header.version}, NULL);
    }
}

static uint32_t declare_all(struct rig *r, const char *name, uint64_t n)
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

static void complete_at(struct rig *r, uint32_t shard, int64_t step, uint32_t epoch)
{
    uint8_t n[2] = {(uint8_t)shard, 0};
    frame_in(r, shard, (struct frame_header){.type = FRAME_COMPLETE, .step = step, .len = 2, .epoch = epoch}, n);
}

static void complete_all(struct rig *r, int64_t step)
{
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, step, 0);
}

static uint32_t w_bytes(uint32_t chunk)
{
    return chunk == 2 ? 32 : 64;
}

static struct frame_header answer_of(const struct rig *r, unsigned type, uint32_t chunk, int64_t step)
{
    return (struct frame_header){.type = (uint8_t)type,
                                 .dtype = DTYPE_F32,
                                 .tensor = w_spec(r)->id,
                                 .chunk = chunk,
                                 .step = step,
                                 .len = w_bytes(chunk)};
}

static bool result(struct rig *r, uint32_t chunk, int64_t step, uint32_t epoch, float value)
{
    float x[16];
    struct frame_header h = answer_of(r, FRAME_RESULT, chunk, step);
    for (int i = 0; i < 16; i++)
        x[i] = value;
    h.epoch = epoch;
    return sunk(r, w_shard(r, chunk), h, x);
}

static bool value(struct rig *r, uint32_t chunk, uint32_t seq, float v)
{
    float x[16];
    struct frame_header h = answer_of(r, FRAME_VALUE, chunk, 0);
    for (int i = 0; i < 16; i++)
        x[i] = v;
    h.seq = seq;
    return sunk(r, w_shard(r, chunk), h, x);
}

static void ack(struct rig *r, uint32_t chunk, uint32_t seq, int status, int64_t clock)
{
    struct frame_header h = answer_of(r, FRAME_ACK, chunk, clock);
    h.len = 0;
    h.seq = seq;
    h.status = (int16_t)status;
    frame_in(r, w_shard(r, chunk), h, NULL);
}

static void ack_all(struct rig *r, uint32_t seq)
{
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        ack(r, i, seq, KS_OK, 0);
}

static uint64_t push(struct rig *r, const void *in, void *out)
{
    return op(r, (struct client_event){.kind = CLIENT_PUSH, .tensor = r->w, .in = in, .out = out, .weight = 1});
}

static uint64_t pull(struct rig *r, void *out)
{
    return op(r, (struct client_event){.kind = CLIENT_PULL, .tensor = r->w, .out = out});
}

static uint64_t step_end(struct rig *r)
{
    return op(r, (struct client_event){.kind = CLIENT_STEP_END});
}

static void tick(struct rig *r, uint64_t seconds)
{
    r->now_us += seconds * 1000000;
    run(r, (struct client_event){.kind = CLIENT_TICK});
}

static const char *waiting(struct rig *r)
{
    static char text[256];
    client_core_waiting(r->c, r->now_us, text, sizeof text);
    return text;
}

static struct rig *rig_make(enum mode_kind mode)
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

static struct rig *rig_started(enum mode_kind mode)
{
    struct rig *r = rig_make(mode);
    adopt(r);
    assert_non_null(effect(r, CLIENT_STARTED, 0));
    up_all(r);
    r->w = declare_all(r, "w", W_FLOATS);
    return r;
}

static void rig_free(struct rig *r)
{
    client_core_free(r->c);
    client_outbox_done(&r->out);
    view_free(r->view);
    free(r->log);
    free(r);
}

/* Ends the step and lets every server complete it. */
static void step_through(struct rig *r)
{
    int64_t step = client_core_step_now(r->c);
    step_end(r);
    complete_all(r, step);
    assert_int_equal(step + 1, client_core_step_now(r->c));
}

/* ---- declaring ---- */

static void declares_at_home_first(void **state)
{
    (void)state;
    struct rig *r = rig_make(MODE_SYNC);
    adopt(r);
    up_all(r);
    struct tensor_spec s = spec_of("w", W_FLOATS);
    uint32_t home = shard_of(s.id, 0, NSHARDS);
    uint64_t o = declare(r, &s);
    assert_int_equal(1, count(r, -1, FRAME_DECLARE));
    const struct logged *l = sent(r, (int)home, FRAME_DECLARE, 0);
    assert_non_null(l);
    assert_string_equal("w", l->f.spec->name);
    struct frame_header yes = {
        .type = FRAME_DECLARED, .tensor = s.id, .version = l->f.header.version, .flags = FRAME_INITIALISED};
    frame_in(r, home, yes, NULL);
    assert_int_equal(4, count(r, -1, FRAME_DECLARE));
    assert_false(is_done(r, o));
    for (uint32_t i = 0; i < NSHARDS; i++) {
        yes.version = sent(r, (int)i, FRAME_DECLARE, 0)->f.header.version;
        yes.flags = 0;
        if (i != home)
            frame_in(r, i, yes, NULL);
    }
    assert_int_equal(KS_OK, outcome(r, o));
    assert_int_equal(1, effect(r, CLIENT_DONE, o)->step);
    uint64_t again = declare(r, &s);
    assert_int_equal(KS_OK, outcome(r, again));
    rig_free(r);
}

static void says_who_declared_otherwise(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    struct tensor_spec s = spec_of("w", 9);
    uint64_t mine = declare(r, &s);
    assert_int_equal(KS_EEXIST, outcome(r, mine));
    assert_non_null(strstr(effect(r, CLIENT_DONE, mine)->text, "'w'"));
    struct tensor_spec v = spec_of("v", 9);
    uint32_t home = shard_of(v.id, 0, NSHARDS);
    uint64_t o = declare(r, &v);
    const char *why = "tensor 'v' is another one";
    frame_in(r, home,
             (struct frame_header){.type = FRAME_DECLARED,
                                   .tensor = v.id,
                                   .status = KS_EEXIST,
                                   .version = sent(r, (int)home, FRAME_DECLARE, 0)->f.header.version,
                                   .len = strlen(why)},
             why);
    assert_int_equal(KS_EEXIST, outcome(r, o));
    assert_string_equal(why, effect(r, CLIENT_DONE, o)->text);
    uint32_t index = effect(r, CLIENT_DONE, o)->tensor;
    uint64_t use = op(r, (struct client_event){.kind = CLIENT_PULL, .tensor = index, .out = r});
    assert_int_equal(KS_ENOENT, outcome(r, use));
    v.dim[0] = 3;
    forget(r);
    o = declare(r, &v);
    declared_all(r, &v);
    assert_int_equal(KS_OK, outcome(r, o));
    assert_int_equal(index, effect(r, CLIENT_DONE, o)->tensor);
    rig_free(r);
}

static void declares_again_on_a_new_tenure_before_pushes(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {0};
    push(r, x, NULL);
    struct view *v = view_next(r);
    uint32_t shard = w_shard(r, 1);
    v->shard[shard].since = v->epoch;
    forget(r);
    adopt(r);
    assert_string_equal("dP", order(r, shard));
    assert_int_equal(2, r->n);
    rig_free(r);
}

/* ---- initialising ---- */

static void inited(struct rig *r, uint32_t chunk, int status, uint64_t version)
{
    frame_in(r, w_shard(r, chunk == ~0u ? 0 : chunk),
             (struct frame_header){.type = FRAME_INITED,
                                   .tensor = w_spec(r)->id,
                                   .chunk = chunk,
                                   .status = (int16_t)status,
                                   .version = version},
             NULL);
}

static uint64_t init(struct rig *r, const void *x)
{
    return op(r, (struct client_event){.kind = CLIENT_INIT, .tensor = r->w, .in = x});
}

static void initialises_what_it_claimed(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {1, 2, 3};
    uint64_t o = init(r, x), second = init(r, x);
    assert_int_equal(1, count(r, -1, FRAME_INIT));
    assert_int_equal(~0u, sent(r, (int)w_shard(r, 0), FRAME_INIT, 0)->f.header.chunk);
    forget(r);
    inited(r, ~0u, KS_OK, 5);
    assert_int_equal(3, count(r, -1, FRAME_INIT));
    assert_int_equal(5, sent(r, -1, FRAME_INIT, 1)->f.header.version);
    assert_ptr_equal((uint8_t *)x + 128, sent(r, (int)w_shard(r, 2), FRAME_INIT, 0)->f.payload);
    inited(r, 0, KS_OK, 5);
    inited(r, 0, KS_OK, 5);
    inited(r, 1, KS_OK, 4);
    forget(r);
    inited(r, 1, KS_OK, 5);
    assert_int_equal(0, count(r, -1, FRAME_INIT));
    inited(r, 2, KS_EEXIST, 5);
    assert_int_equal(1, count(r, -1, FRAME_INIT));
    assert_int_equal(FRAME_INITIALISED, sent(r, -1, FRAME_INIT, 0)->f.header.flags);
    assert_false(is_done(r, o));
    inited(r, ~0u, KS_OK, 0);
    assert_int_equal(KS_OK, outcome(r, o));
    assert_int_equal(KS_EEXIST, outcome(r, second));
    rig_free(r);
}

static void somebody_else_initialises(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {0};
    uint64_t o = init(r, x);
    assert_non_null(strstr(waiting(r), "for the first value of tensor 'w'"));
    inited(r, ~0u, KS_EEXIST, 0);
    assert_int_equal(KS_EEXIST, outcome(r, o));
    rig_free(r);
}

static void claims_again_when_home_is_new(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {0};
    uint64_t o = init(r, x);
    inited(r, ~0u, KS_OK, 5);
    struct view *v = view_next(r);
    v->shard[w_shard(r, 0)].since = v->epoch;
    forget(r);
    adopt(r);
    assert_int_equal(1, count(r, -1, FRAME_INIT));
    assert_int_equal(~0u, sent(r, (int)w_shard(r, 0), FRAME_INIT, 0)->f.header.chunk);
    forget(r);
    inited(r, ~0u, KS_OK, 6);
    assert_int_equal(3, count(r, -1, FRAME_INIT));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        inited(r, i, KS_OK, 6);
    inited(r, ~0u, KS_OK, 0);
    assert_int_equal(KS_OK, outcome(r, o));
    rig_free(r);
}

static void sends_init_chunks_again_to_a_new_loop(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {0};
    init(r, x);
    inited(r, ~0u, KS_OK, 5);
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        inited(r, i, KS_OK, 5);
    struct view *v = view_next(r);
    v->shard[w_shard(r, 2)].since = v->epoch;
    forget(r);
    adopt(r);
    assert_string_equal("di", order(r, w_shard(r, 2)));
    assert_int_equal(1, count(r, -1, FRAME_INIT));
    forget(r);
    inited(r, 2, KS_OK, 5);
    assert_int_equal(FRAME_INITIALISED, sent(r, -1, FRAME_INIT, 0)->f.header.flags);
    forget(r);
    down(r, w_shard(r, 0));
    up(r, w_shard(r, 0));
    assert_string_equal("i", order(r, w_shard(r, 0)));
    rig_free(r);
}

/* ---- sync steps ---- */

static void finishes_when_every_shard_is_complete(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {1}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    assert_int_equal(3, count(r, -1, FRAME_PUSH));
    const struct logged *p = sent(r, (int)w_shard(r, 2), FRAME_PUSH, 0);
    assert_ptr_equal((uint8_t *)g + 128, p->f.payload);
    assert_int_equal(32, p->f.header.len);
    assert_int_equal(FRAME_WANT, p->f.header.flags);
    assert_int_equal(1, p->f.header.epoch);
    assert_false(client_core_step_ended(r->c));
    uint64_t end = step_end(r);
    assert_true(client_core_step_ended(r->c));
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(result(r, i, 0, 0, (float)i + 1));
    struct done_head d;
    const struct logged *done = sent(r, (int)w_shard(r, 0), FRAME_DONE, 0);
    assert_int_equal(0, done_decode(done->payload, done->f.header.len, &d));
    assert_int_equal(1, d.ntensors);
    assert_true(done_tensor(&d, 0) == w_spec(r)->id);
    for (uint32_t i = 0; i < NSHARDS; i++) {
        assert_false(is_done(r, o));
        complete_at(r, i, 0, 0);
    }
    assert_int_equal(KS_OK, outcome(r, o));
    assert_int_equal(KS_OK, outcome(r, end));
    assert_int_equal(1, effect(r, CLIENT_STEP, 0)->step);
    assert_true(x[0] == 1 && x[16] == 2 && x[39] == 3);
    struct client_stats st;
    client_core_stats(r->c, &st);
    assert_int_equal(3, st.pushes);
    assert_int_equal(3, st.acked);
    rig_free(r);
}

/* A shard that got no push of this member counts as well. */
static void waits_for_shards_that_it_pushed_nothing_to(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    uint32_t t = declare_all(r, "scalar", 1);
    float one = 1;
    uint64_t o = op(r, (struct client_event){.kind = CLIENT_PUSH, .tensor = t, .in = &one, .weight = 1});
    step_end(r);
    struct done_head d;
    uint32_t home = shard_of(client_core_tensor(r->c, t)->id, 0, NSHARDS);
    const struct logged *l = sent(r, (int)(home + 1) % NSHARDS, FRAME_DONE, 0);
    assert_int_equal(0, done_decode(l->payload, l->f.header.len, &d));
    assert_int_equal(0, d.ntensors);
    complete_at(r, home, 0, 0);
    assert_false(is_done(r, o));
    assert_non_null(strstr(waiting(r), "for members to end the step (shards"));
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, 0, 0);
    assert_true(is_done(r, o));
    rig_free(r);
}

static void in_place_lands_in_an_arena_first(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS];
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < W_FLOATS; i++)
            x[i] = 1;
        push(r, x, x);
        step_end(r);
        for (uint32_t i = 0; i < W_CHUNKS; i++)
            assert_true(result(r, i, step, 0, 5));
        assert_true(x[0] == 1 && x[39] == 1);
        complete_all(r, step);
        assert_true(x[0] == 5 && x[39] == 5);
        forget(r);
    }
    rig_free(r);
}

static void one_push_a_step(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    step_through(r);
    push(r, g, NULL);
    uint64_t o = push(r, g, NULL);
    assert_int_equal(KS_ESTATE, outcome(r, o));
    assert_string_equal(
        "tensor 'w' was already pushed in step 1: sync mode takes one push a step; call ks_step_end first",
        effect(r, CLIENT_DONE, o)->text);
    rig_free(r);
}

static void folds_the_worst_status(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    uint64_t o = push(r, g, NULL);
    step_end(r);
    struct frame_header h = answer_of(r, FRAME_RESULT, 1, 0);
    h.len = 0;
    h.status = KS_ENOTFINITE;
    frame_in(r, w_shard(r, 1), h, NULL);
    complete_all(r, 0);
    assert_int_equal(KS_ENOTFINITE, outcome(r, o));
    struct client_stats st;
    client_core_stats(r->c, &st);
    assert_int_equal(1, st.not_finite);
    assert_int_equal(2, st.acked);
    rig_free(r);
}

static void rejected_but_wants_the_result(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    struct frame_header h = answer_of(r, FRAME_RESULT, 0, 0);
    float v[16] = {9};
    h.status = KS_ENOTFINITE;
    assert_true(sunk(r, w_shard(r, 0), h, v));
    assert_true(result(r, 1, 0, 0, 9) && result(r, 2, 0, 0, 9));
    complete_all(r, 0);
    assert_int_equal(KS_ENOTFINITE, outcome(r, o));
    assert_true(x[0] == 9 && x[39] == 9);
    rig_free(r);
}

static void broadcast_pushes_nothing_and_wants(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {0};
    push(r, NULL, x);
    assert_int_equal(3, count(r, -1, FRAME_PUSH));
    assert_int_equal(0, sent(r, -1, FRAME_PUSH, 0)->f.header.len);
    assert_int_equal(FRAME_WANT, sent(r, -1, FRAME_PUSH, 0)->f.header.flags);
    step_end(r);
    struct done_head d;
    const struct logged *l = sent(r, (int)w_shard(r, 0), FRAME_DONE, 0);
    assert_int_equal(0, done_decode(l->payload, l->f.header.len, &d));
    assert_int_equal(1, d.ntensors);
    rig_free(r);
}

static void queues_what_belongs_to_the_next_step(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    push(r, g, NULL);
    step_end(r);
    forget(r);
    uint64_t o = push(r, g, NULL), end = step_end(r);
    assert_int_equal(0, r->n);
    complete_all(r, 0);
    assert_int_equal(3, count(r, -1, FRAME_PUSH));
    assert_int_equal(1, sent(r, -1, FRAME_PUSH, 0)->f.header.step);
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    complete_all(r, 1);
    assert_int_equal(KS_OK, outcome(r, o));
    assert_int_equal(KS_OK, outcome(r, end));
    assert_int_equal(2, client_core_step_now(r->c));
    rig_free(r);
}

static void asks_again_when_a_result_is_lacking(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    assert_true(result(r, 0, 0, 0, 1) && result(r, 1, 0, 0, 1));
    forget(r);
    complete_all(r, 0);
    uint32_t shard = w_shard(r, 2);
    assert_int_equal(1, count(r, -1, FRAME_DONE));
    assert_int_equal(FRAME_AGAIN, sent(r, (int)shard, FRAME_DONE, 0)->f.header.flags);
    complete_at(r, shard, 0, 0);
    assert_int_equal(1, count(r, -1, FRAME_DONE));
    tick(r, 2);
    assert_int_equal(2, count(r, -1, FRAME_DONE));
    assert_true(result(r, 2, 0, 0, 1));
    complete_at(r, shard, 0, 0);
    assert_int_equal(KS_OK, outcome(r, o));
    rig_free(r);
}

static void answers_need(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    push(r, g, NULL);
    step_end(r);
    forget(r);
    struct chunk_ref refs[3] = {{w_spec(r)->id, 1}, {w_spec(r)->id, 77}, {12345, 0}};
    uint8_t payload[64];
    chunk_refs_encode(refs, 3, payload);
    struct frame_header h = {.type = FRAME_NEED, .step = 0, .len = chunk_refs_size(3)};
    frame_in(r, w_shard(r, 1), h, payload);
    assert_int_equal(1, r->n);
    assert_int_equal(1, sent(r, (int)w_shard(r, 1), FRAME_PUSH, 0)->f.header.chunk);
    h.step = 1;
    frame_in(r, w_shard(r, 1), h, payload);
    assert_int_equal(1, r->n);
    rig_free(r);
}

static void sync_pull_comes_before_done(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float x[W_FLOATS] = {0};
    uint64_t o = pull(r, x);
    assert_int_equal(3, count(r, -1, FRAME_PULL));
    uint32_t seq = sent(r, -1, FRAME_PULL, 0)->f.header.seq;
    step_end(r);
    assert_int_equal(0, count(r, -1, FRAME_DONE));
    assert_true(value(r, 0, seq, 2) && value(r, 1, seq, 2));
    assert_false(value(r, 2, seq + 1, 2));
    down(r, w_shard(r, 2));
    forget(r);
    up(r, w_shard(r, 2));
    assert_string_equal("p", order(r, w_shard(r, 2)));
    assert_true(value(r, 2, seq, 2));
    assert_int_equal(KS_OK, outcome(r, o));
    assert_true(x[0] == 2 && x[39] == 2);
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    complete_all(r, 0);
    assert_int_equal(1, client_core_step_now(r->c));
    rig_free(r);
}

static void a_sum_has_no_value_to_pull(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    struct tensor_spec s = spec_of("g", 4);
    s.kind = TENSOR_REDUCE;
    s.finite = FINITE_APPLY;
    s.optimizer[0] = 0;
    forget(r);
    uint64_t o = declare(r, &s);
    declared_all(r, &s);
    uint32_t index = effect(r, CLIENT_DONE, o)->tensor;
    float x[4];
    o = op(r, (struct client_event){.kind = CLIENT_PULL, .tensor = index, .out = x});
    assert_int_equal(KS_ESTATE, outcome(r, o));
    rig_free(r);
}

static void settings_ride_on_done(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    struct setting s = {.group = 5, .option = 1, .value = .1};
    run(r, (struct client_event){.kind = CLIENT_OPTION, .setting = s});
    s.value = .2;
    run(r, (struct client_event){.kind = CLIENT_OPTION, .setting = s});
    step_end(r);
    struct done_head d;
    const struct logged *l = sent(r, 2, FRAME_DONE, 0);
    assert_int_equal(0, done_decode(l->payload, l->f.header.len, &d));
    assert_int_equal(1, d.nsettings);
    done_setting(&d, 0, &s);
    assert_int_equal(1, s.from_step);
    assert_true(s.value == .2);
    down(r, 2);
    forget(r);
    up(r, 2);
    l = sent(r, 2, FRAME_DONE, 0);
    assert_int_equal(0, done_decode(l->payload, l->f.header.len, &d));
    assert_int_equal(1, d.nsettings);
    complete_all(r, 0);
    forget(r);
    step_end(r);
    l = sent(r, 2, FRAME_DONE, 0);
    assert_int_equal(0, done_decode(l->payload, l->f.header.len, &d));
    assert_int_equal(0, d.nsettings);
    rig_free(r);
}

/* ---- connections ---- */

static void nothing_goes_to_a_loop_that_is_down(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint32_t shard = w_shard(r, 1);
    down(r, shard);
    push(r, g, x);
    step_end(r);
    assert_int_equal(0, count(r, (int)shard, FRAME_PUSH) + count(r, (int)shard, FRAME_DONE));
    assert_int_equal(2, count(r, -1, FRAME_PUSH));
    r->now_us += 12000000;
    char text[64];
    snprintf(text, sizeof text, "step 0: waiting 12 s for server s%d (no connection)", shard < 2 ? 1 : 2);
    assert_string_equal(text, waiting(r));
    forget(r);
    up(r, shard);
    assert_string_equal("PD", order(r, shard));
    assert_int_equal(FRAME_AGAIN, sent(r, (int)shard, FRAME_DONE, 0)->f.header.flags);
    assert_true(result(r, 1, 0, 0, 1));
    forget(r);
    up(r, shard);
    assert_string_equal("D", order(r, shard));
    complete_at(r, shard, 0, 0);
    forget(r);
    up(r, shard);
    assert_string_equal("", order(r, shard));
    rig_free(r);
}

static void tries_again_what_was_refused(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    push(r, g, NULL);
    step_end(r);
    struct frame_header h = answer_of(r, FRAME_REFUSED, 1, 0);
    h.len = 0;
    h.status = KS_ENOENT;
    frame_in(r, w_shard(r, 1), h, NULL);
    forget(r);
    assert_non_null(strstr(waiting(r), "(it refused: no such thing)"));
    tick(r, 2);
    assert_string_equal("dPD", order(r, w_shard(r, 1)));
    forget(r);
    tick(r, 2);
    assert_int_equal(0, r->n);
    h.status = KS_ELATE;
    frame_in(r, w_shard(r, 1), h, NULL);
    tick(r, 2);
    assert_int_equal(0, r->n);
    rig_free(r);
}

/* ---- views ---- */

static void member_gone(struct view *v, int64_t last)
{
    v->member[1].live = false;
    v->member[1].last = last;
    v->mchg = v->epoch;
}

static void takes_results_back_when_the_set_changes(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(result(r, i, 0, 0, 1));
    complete_at(r, 0, 0, 0);
    member_gone(view_next(r), -1);
    forget(r);
    adopt(r);
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    assert_int_equal(0, count(r, -1, FRAME_PUSH));
    assert_int_equal(FRAME_AGAIN, sent(r, 3, FRAME_DONE, 0)->f.header.flags);
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, 0, 1);
    assert_false(result(r, 0, 0, 1, 7));
    assert_false(is_done(r, o));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(result(r, i, 0, 2, 3));
    complete_all(r, 0);
    assert_true(is_done(r, o));
    assert_true(x[0] == 3 && x[39] == 3);
    rig_free(r);
}

static void a_set_change_before_the_end_asks_at_the_end(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    push(r, g, x);
    assert_true(result(r, 0, 0, 0, 1));
    member_gone(view_next(r), -1);
    forget(r);
    adopt(r);
    assert_int_equal(0, r->n);
    step_end(r);
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    assert_int_equal(FRAME_AGAIN, sent(r, 0, FRAME_DONE, 0)->f.header.flags);
    assert_true(result(r, 0, 0, 2, 1));
    rig_free(r);
}

static void a_view_that_leaves_the_set_alone_changes_nothing(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(result(r, i, 0, 0, 1));
    member_gone(view_next(r), 0);
    forget(r);
    adopt(r);
    assert_int_equal(0, r->n);
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, 0, 1);
    assert_true(is_done(r, o));
    rig_free(r);
}

static void a_skipped_view_may_have_changed_the_set(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    push(r, g, x);
    step_end(r);
    assert_true(result(r, 0, 0, 0, 1));
    struct view *v = view_next(r);
    v->epoch = 5;
    v->mchg = 1;
    forget(r);
    adopt(r);
    assert_int_equal(0, r->n);
    v->epoch = 8;
    v->mchg = 7;
    adopt(r);
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    assert_true(result(r, 0, 0, 8, 2));
    rig_free(r);
}

static void a_new_tenure_gets_what_has_no_result(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    push(r, g, x);
    step_end(r);
    assert_true(result(r, 0, 0, 0, 1));
    struct view *v = view_next(r);
    v->shard[w_shard(r, 0)].since = v->epoch;
    v->shard[w_shard(r, 1)].since = v->epoch;
    forget(r);
    adopt(r);
    assert_string_equal("dD", order(r, w_shard(r, 0)));
    assert_string_equal("dPD", order(r, w_shard(r, 1)));
    assert_string_equal("", order(r, w_shard(r, 2)));
    assert_int_equal(FRAME_AGAIN, sent(r, (int)w_shard(r, 0), FRAME_DONE, 0)->f.header.flags);
    rig_free(r);
}

static void a_server_is_replaced(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    struct view *v = view_next(r);
    v->server[1].id = S3;
    for (uint32_t i = 2; i < NSHARDS; i++)
        v->shard[i] = (struct view_shard){.primary = S3, .since = v->epoch};
    forget(r);
    adopt(r);
    assert_int_equal(0, r->n);
    up(r, 2);
    up(r, 3);
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_string_equal(w_shard(r, i) < 2 ? "" : "dPD", order(r, w_shard(r, i)));
    struct frame_header old = answer_of(r, FRAME_RESULT, 0, 0);
    old.epoch = 1;
    assert_null(client_core_sink(r->c, S2, 0, &old));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(result(r, i, 0, 0, 1));
    complete_all(r, 0);
    assert_true(is_done(r, o));
    rig_free(r);
}

/* A result of a newer view than ours is in its place; it counts when the view is here. */
static void early_answers_count_after_the_view(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    assert_true(result(r, 0, 0, 1, 1));
    assert_true(result(r, 1, 0, 2, 1));
    assert_non_null(effect(r, CLIENT_WANT_VIEW, 0));
    assert_true(result(r, 2, 0, 2, 1));
    forget(r);
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, 0, 2);
    assert_int_equal(0, r->n);
    tick(r, 2);
    assert_non_null(effect(r, CLIENT_WANT_VIEW, 0));
    forget(r);
    view_next(r);
    adopt(r);
    assert_int_equal(KS_OK, outcome(r, o));
    assert_int_equal(0, count(r, -1, FRAME_DONE));
    rig_free(r);
}

static void early_complete_without_a_result_asks(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    assert_true(result(r, 0, 0, 1, 1));
    assert_true(result(r, 1, 0, 2, 1));
    assert_true(result(r, 2, 0, 2, 1));
    for (uint32_t i = 0; i < NSHARDS; i++)
        complete_at(r, i, 0, 2);
    member_gone(view_next(r), -1);
    forget(r);
    adopt(r);
    assert_false(is_done(r, o));
    assert_int_equal(1, count(r, -1, FRAME_DONE));
    assert_true(result(r, 0, 0, 2, 1));
    complete_at(r, w_shard(r, 0), 0, 2);
    assert_true(is_done(r, o));
    rig_free(r);
}

/* The chunk moved while its result was coming in from the old primary: only one of the two may write. */
static void two_never_write_to_one_place(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t o = push(r, g, x);
    step_end(r);
    uint32_t shard = w_shard(r, 0);
    uint64_t was = server_of(r, shard);
    struct frame_header h = answer_of(r, FRAME_RESULT, 0, 0);
    h.epoch = 1;
    assert_non_null(client_core_sink(r->c, was, shard % 2, &h));
    struct view *v = view_next(r);
    v->shard[shard] = (struct view_shard){.primary = was == S1 ? S2 : S1, .since = v->epoch};
    adopt(r);
    assert_false(result(r, 0, 0, 2, 1));
    forget(r);
    run(r, (struct client_event){.kind = CLIENT_PEER_DOWN, .from = was, .loop = shard % 2});
    assert_int_equal(FRAME_AGAIN, sent(r, (int)shard, FRAME_DONE, 0)->f.header.flags);
    assert_true(result(r, 0, 0, 2, 4));
    run(r, (struct client_event){.kind = CLIENT_PEER_UP, .from = was, .loop = shard % 2});
    assert_true(result(r, 1, 0, 2, 4) && result(r, 2, 0, 2, 4));
    complete_all(r, 0);
    assert_true(is_done(r, o));
    assert_true(x[0] == 4);
    rig_free(r);
}

/* ---- joining and leaving ---- */

static void a_joiner_reads_the_step_before(void **state)
{
    (void)state;
    struct rig *r = rig_make(MODE_SYNC);
    r->view->member[0].join = 5;
    float g[W_FLOATS] = {0};
    adopt(r);
    up_all(r);
    assert_null(effect(r, CLIENT_STARTED, 0));
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    const struct logged *l = sent(r, 1, FRAME_DONE, 0);
    assert_int_equal(4, l->f.header.step);
    assert_true(l->f.header.flags & FRAME_READER);
    r->w = declare_all(r, "w", W_FLOATS);
    push(r, g, NULL);
    assert_int_equal(0, r->n);
    assert_non_null(strstr(waiting(r), "for step 4 to be complete (shards 0, 1, 2, 3)"));
    complete_at(r, 0, 4, 0);
    member_gone(view_next(r), 3);
    adopt(r);
    assert_int_equal(4, count(r, -1, FRAME_DONE));
    for (uint32_t i = 1; i < NSHARDS; i++)
        complete_at(r, i, 4, 0);
    assert_null(effect(r, CLIENT_STARTED, 0));
    complete_at(r, 0, 4, 0);
    assert_int_equal(5, effect(r, CLIENT_STARTED, 0)->step);
    assert_int_equal(5, sent(r, -1, FRAME_PUSH, 0)->f.header.step);
    rig_free(r);
}

/* A shard that is still behind enters the synchronous steps by the clocks of all, also by this one's. */
static void a_joiner_after_a_change_of_mode_says_its_clock(void **state)
{
    (void)state;
    struct rig *r = rig_make(MODE_SSP);
    r->view->member[0].join = 9;
    r->view->nmodes = 2;
    r->view->mode[1] = (struct mode){.from = 8, .kind = MODE_SYNC};
    adopt(r);
    up_all(r);
    assert_string_equal("CD", order(r, 1));
    assert_int_equal(9, sent(r, 1, FRAME_CLOCK, 0)->f.header.step);
    assert_int_equal(8, sent(r, 1, FRAME_DONE, 0)->f.header.step);
    complete_all(r, 8);
    assert_int_equal(9, effect(r, CLIENT_STARTED, 0)->step);
    assert_int_equal(4, count(r, -1, FRAME_CLOCK));
    rig_free(r);
}

/* Others may still be in the last synchronous step when asynchronous ones can be joined. */
static void an_async_joiner_reads_the_last_sync_step(void **state)
{
    (void)state;
    struct rig *r = rig_make(MODE_SYNC);
    r->view->member[0].join = 9;
    r->view->nmodes = 2;
    r->view->mode[1] = (struct mode){.from = 7, .kind = MODE_ASYNC};
    adopt(r);
    up_all(r);
    assert_int_equal(6, sent(r, 1, FRAME_DONE, 0)->f.header.step);
    assert_null(effect(r, CLIENT_STARTED, 0));
    complete_at(r, 1, 6, 0);
    forget(r);
    tick(r, 2);
    assert_int_equal(0, count(r, 1, FRAME_DONE));
    assert_int_equal(3, count(r, -1, FRAME_DONE));
    complete_all(r, 6);
    assert_int_equal(9, effect(r, CLIENT_STARTED, 0)->step);
    rig_free(r);
}

static void is_fenced_by_a_view(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint64_t a = push(r, g, x), b = step_end(r), c = push(r, g, x), d = pull(r, x);
    struct view *v = view_next(r);
    v->member[0].live = false;
    v->member[0].last = 0;
    adopt(r);
    assert_int_equal(KS_EFENCED, outcome(r, a));
    assert_int_equal(KS_EFENCED, outcome(r, b));
    assert_int_equal(KS_EFENCED, outcome(r, c));
    assert_int_equal(KS_EFENCED, outcome(r, d));
    assert_int_equal(CLIENT_FENCED, r->log[r->n - 1].f.kind);
    assert_int_equal(KS_EFENCED, outcome(r, push(r, g, x)));
    rig_free(r);
}

static void is_fenced_by_a_frame(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    view_next(r);
    adopt(r);
    frame_in(r, 0, (struct frame_header){.type = FRAME_FENCED, .epoch = 1}, NULL);
    frame_in(r, 0, (struct frame_header){.type = FRAME_FENCED, .epoch = 2}, NULL);
    assert_null(effect(r, CLIENT_FENCED, 0));
    frame_in(r, 0, (struct frame_header){.type = FRAME_FENCED, .epoch = 3}, NULL);
    assert_non_null(effect(r, CLIENT_FENCED, 0));
    rig_free(r);
}

static void hears_that_the_job_has_ended(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    uint64_t o = push(r, g, NULL);
    snprintf(view_next(r)->ended, sizeof r->view->ended, "stopped by the operator");
    adopt(r);
    assert_int_equal(KS_EJOB, outcome(r, o));
    assert_string_equal("stopped by the operator", effect(r, CLIENT_ENDED, 0)->text);
    rig_free(r);
}

static void leaves_after_the_step_that_it_ended(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    step_end(r);
    uint64_t o = op(r, (struct client_event){.kind = CLIENT_LEAVE});
    assert_null(effect(r, CLIENT_SEND_LEAVE, 0));
    complete_all(r, 0);
    assert_int_equal(0, effect(r, CLIENT_SEND_LEAVE, 0)->step);
    forget(r);
    tick(r, 2);
    assert_int_equal(0, effect(r, CLIENT_SEND_LEAVE, 0)->step);
    assert_int_equal(KS_ECLOSED, outcome(r, step_end(r)));
    struct view *v = view_next(r);
    v->member[0].live = false;
    v->member[0].last = 0;
    adopt(r);
    assert_int_equal(KS_OK, outcome(r, o));
    assert_null(effect(r, CLIENT_FENCED, 0));
    rig_free(r);
}

/* ---- asynchronous and staleness-bounded steps ---- */

static void async_pushes_are_acknowledged(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_ASYNC);
    float g[W_FLOATS] = {0};
    uint64_t a = push(r, g, NULL), b = push(r, g, NULL);
    assert_int_equal(1, sent(r, (int)w_shard(r, 0), FRAME_PUSH, 0)->f.header.seq);
    assert_int_equal(2, sent(r, (int)w_shard(r, 0), FRAME_PUSH, 1)->f.header.seq);
    uint64_t end = step_end(r);
    assert_true(is_done(r, end));
    assert_int_equal(4, count(r, -1, FRAME_CLOCK));
    assert_int_equal(1, sent(r, 0, FRAME_CLOCK, 0)->f.header.step);
    ack(r, 0, 1, KS_OK, 3);
    ack(r, 0, 1, KS_OK, 3);
    ack(r, 1, 1, KS_ESTALE, 0);
    assert_false(is_done(r, a));
    ack(r, 2, 2, KS_OK, 100);
    assert_int_equal(KS_ESTALE, outcome(r, a));
    assert_false(is_done(r, b));
    ack(r, 0, 2, KS_OK, 0);
    ack(r, 1, 2, KS_OK, 0);
    assert_int_equal(KS_OK, outcome(r, b));
    const uint64_t *h = client_core_staleness(r->c, r->w);
    assert_int_equal(1, h[3]);
    assert_int_equal(2, h[63]);
    assert_int_equal(2, h[0]);
    struct client_stats st;
    client_core_stats(r->c, &st);
    assert_int_equal(5, st.acked);
    assert_int_equal(1, st.stale);
    rig_free(r);
}

static void async_push_pull_sees_its_own_push(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_ASYNC);
    float x[W_FLOATS] = {0};
    uint64_t o = push(r, x, x);
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_string_equal("Pp", order(r, w_shard(r, i)));
    uint32_t seq = sent(r, -1, FRAME_PULL, 0)->f.header.seq;
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(value(r, i, seq, 6));
    assert_true(x[0] == 0);
    assert_false(is_done(r, o));
    ack_all(r, 1);
    assert_int_equal(KS_OK, outcome(r, o));
    assert_true(x[0] == 6 && x[39] == 6);
    forget(r);
    o = push(r, x, x);
    seq = sent(r, -1, FRAME_PULL, 0)->f.header.seq;
    ack_all(r, 2);
    assert_false(is_done(r, o));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(value(r, i, seq, 7));
    assert_int_equal(KS_OK, outcome(r, o));
    assert_true(x[0] == 7 && x[39] == 7);
    rig_free(r);
}

/* A server keeps one parked pull of a member for a chunk: the second waits for its turn. */
static void one_pull_of_a_tensor_at_a_time(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SSP);
    float x[W_FLOATS] = {0}, y[W_FLOATS] = {0};
    uint64_t a = pull(r, x), b = pull(r, y);
    assert_int_equal(3, count(r, -1, FRAME_PULL));
    uint32_t seq = sent(r, -1, FRAME_PULL, 0)->f.header.seq;
    assert_non_null(strstr(waiting(r), "within the staleness bound"));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(value(r, i, seq, 1));
    assert_true(is_done(r, a));
    assert_false(is_done(r, b));
    assert_int_equal(6, count(r, -1, FRAME_PULL));
    for (uint32_t i = 0; i < W_CHUNKS; i++)
        assert_true(value(r, i, sent(r, -1, FRAME_PULL, 3)->f.header.seq, 2));
    assert_true(is_done(r, b));
    assert_true(x[0] == 1 && y[0] == 2);
    rig_free(r);
}

static void async_sends_again_in_order(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SSP);
    float g[W_FLOATS] = {0}, x[W_FLOATS] = {0};
    uint32_t shard = w_shard(r, 0);
    push(r, g, NULL);
    struct setting s = {.group = 5, .option = 1, .value = .1};
    run(r, (struct client_event){.kind = CLIENT_OPTION, .setting = s});
    step_end(r);
    push(r, g, NULL);
    pull(r, x);
    ack(r, 0, 1, KS_OK, 0);
    forget(r);
    down(r, shard);
    up(r, shard);
    assert_string_equal("PCp", order(r, shard));
    assert_int_equal(2, sent(r, (int)shard, FRAME_PUSH, 0)->f.header.seq);
    struct done_head d;
    const struct logged *l = sent(r, (int)shard, FRAME_CLOCK, 0);
    assert_int_equal(0, done_decode(l->payload, l->f.header.len, &d));
    assert_int_equal(1, d.nsettings);
    done_setting(&d, 0, &s);
    assert_int_equal(1, s.from_step);
    struct view *v = view_next(r);
    shard = w_shard(r, 1);
    v->shard[shard].since = v->epoch;
    forget(r);
    adopt(r);
    assert_string_equal("dPPCp", order(r, shard));
    assert_string_equal("", order(r, w_shard(r, 2)));
    rig_free(r);
}

static void async_leaver_waits_for_acknowledgements(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_ASYNC);
    float g[W_FLOATS] = {0};
    push(r, g, NULL);
    step_end(r);
    op(r, (struct client_event){.kind = CLIENT_LEAVE});
    assert_null(effect(r, CLIENT_SEND_LEAVE, 0));
    ack_all(r, 1);
    assert_int_equal(0, effect(r, CLIENT_SEND_LEAVE, 0)->step);
    rig_free(r);
}

static void async_joiner_announces_its_clock(void **state)
{
    (void)state;
    struct rig *r = rig_make(MODE_ASYNC);
    r->view->member[0].join = 9;
    adopt(r);
    assert_int_equal(9, effect(r, CLIENT_STARTED, 0)->step);
    up_all(r);
    assert_int_equal(4, count(r, -1, FRAME_CLOCK));
    assert_int_equal(9, sent(r, 3, FRAME_CLOCK, 0)->f.header.step);
    rig_free(r);
}

/* ---- changing the mode ---- */

static struct prepare prepare_make(struct rig *r, uint64_t round, bool mode_change)
{
    return (struct prepare){.ballot = {1, round}, .base = r->view, .controller = S1, .mode_change = mode_change};
}

static void prepare(struct rig *r, uint64_t round, bool mode_change)
{
    struct prepare p = prepare_make(r, round, mode_change);
    run(r, (struct client_event){.kind = CLIENT_PREPARE, .prepare = &p});
}

static void async_becomes_sync(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_ASYNC);
    float g[W_FLOATS] = {0};
    step_end(r);
    forget(r);
    prepare(r, 1, true);
    const struct client_effect *f = effect(r, CLIENT_SEND_REPORT, 0);
    assert_int_equal(1, f->report->clock);
    assert_int_equal(1, f->report->ballot.round);
    uint64_t end = step_end(r), o = push(r, g, NULL);
    assert_false(is_done(r, end));
    assert_non_null(strstr(waiting(r), "for the change of the mode"));
    struct view *v = view_next(r);
    v->nmodes = 2;
    v->mode[1] = (struct mode){.from = 2, .kind = MODE_SYNC};
    adopt(r);
    assert_true(is_done(r, end));
    assert_int_equal(2, client_core_step_now(r->c));
    assert_string_equal("CD", order(r, 0));
    const struct logged *l = sent(r, 0, FRAME_DONE, 0);
    assert_int_equal(1, l->f.header.step);
    assert_int_equal(FRAME_READER, l->f.header.flags);
    assert_int_equal(0, count(r, -1, FRAME_PUSH));
    complete_all(r, 1);
    assert_int_equal(3, count(r, -1, FRAME_PUSH));
    assert_int_equal(2, sent(r, -1, FRAME_PUSH, 0)->f.header.step);
    step_end(r);
    complete_all(r, 2);
    assert_true(is_done(r, o));
    rig_free(r);
}

static void sync_becomes_async(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_SYNC);
    float g[W_FLOATS] = {0};
    step_end(r);
    prepare(r, 1, true);
    uint64_t o = push(r, g, NULL);
    complete_all(r, 0);
    assert_int_equal(1, client_core_step_now(r->c));
    assert_int_equal(0, count(r, -1, FRAME_PUSH));
    struct view *v = view_next(r);
    v->nmodes = 2;
    v->mode[1] = (struct mode){.from = 1, .kind = MODE_ASYNC};
    forget(r);
    adopt(r);
    assert_string_equal("CP", order(r, w_shard(r, 0)));
    ack_all(r, 1);
    assert_true(is_done(r, o));
    rig_free(r);
}

static void a_newer_ballot_lifts_the_hold(void **state)
{
    (void)state;
    struct rig *r = rig_started(MODE_ASYNC);
    prepare(r, 2, true);
    uint64_t end = step_end(r);
    prepare(r, 1, false);
    assert_false(is_done(r, end));
    prepare(r, 3, false);
    assert_true(is_done(r, end));
    uint64_t self = SELF;
    struct prepare p = prepare_make(r, 4, true);
    p.ngone = 1;
    p.gone = &self;
    forget(r);
    run(r, (struct client_event){.kind = CLIENT_PREPARE, .prepare = &p});
    assert_int_equal(0, r->n);
    rig_free(r);
}

/* ---- any frame ---- */

static void survives_every_frame(void **state)
{
    (void)state;
    uint32_t x = 12345;
    float g[W_FLOATS] = {0}, out[W_FLOATS] = {0};
    uint8_t junk[64];
    for (int round = 0; round < 60; round++) {
        struct rig *r = rig_started(round % 2 ? MODE_ASYNC : MODE_SYNC);
        for (int i = 0; i < 300; i++) {
            x = x * 1664525 + 1013904223;
            struct frame_header h = {.type = (uint8_t)(16 + (x >> 8) % 15),
                                     .status = (int16_t) - ((x >> 12) % 3 * 8),
                                     .tensor = (x >> 14) % 8 ? w_spec(r)->id : x,
                                     .step = (int64_t)((x >> 17) % 4) - 1,
                                     .chunk = (x >> 20) % 5 ? (x >> 21) % 4 : ~0u,
                                     .seq = (x >> 23) % 4,
                                     .epoch = 1 + (x >> 25) % 8 / 7,
                                     .version = (x >> 28) % 3};
            for (size_t k = 0; k < sizeof junk; k++)
                junk[k] = (uint8_t)((x >> (k % 24)) % 5);
            h.len = (x >> 5) % 2 ? 64 : (x >> 6) % 64;
            if ((x >> 27) % 9 == 0)
                push(r, g, (x >> 9) % 2 ? out : NULL);
            if ((x >> 26) % 11 == 0)
                step_end(r);
            if ((x >> 25) % 13 == 0)
                up(r, x % NSHARDS);
            void *to = (x >> 4) % 2 && h.type != FRAME_FENCED ? client_core_sink(r->c, S1, x % 2, &h) : NULL;
            if (to)
                memset(to, 1, h.len);
            if (h.type == FRAME_FENCED)
                h.epoch = 1;
            frame_in(r, x % NSHARDS, h, (x >> 3) % 3 ? junk : NULL);
            forget(r);
        }
        rig_free(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(declares_at_home_first),
        cmocka_unit_test(says_who_declared_otherwise),
        cmocka_unit_test(declares_again_on_a_new_tenure_before_pushes),
        cmocka_unit_test(initialises_what_it_claimed),
        cmocka_unit_test(somebody_else_initialises),
        cmocka_unit_test(claims_again_when_home_is_new),
        cmocka_unit_test(sends_init_chunks_again_to_a_new_loop),
        cmocka_unit_test(finishes_when_every_shard_is_complete),
        cmocka_unit_test(waits_for_shards_that_it_pushed_nothing_to),
        cmocka_unit_test(in_place_lands_in_an_arena_first),
        cmocka_unit_test(one_push_a_step),
        cmocka_unit_test(folds_the_worst_status),
        cmocka_unit_test(rejected_but_wants_the_result),
        cmocka_unit_test(broadcast_pushes_nothing_and_wants),
        cmocka_unit_test(queues_what_belongs_to_the_next_step),
        cmocka_unit_test(asks_again_when_a_result_is_lacking),
        cmocka_unit_test(answers_need),
        cmocka_unit_test(sync_pull_comes_before_done),
        cmocka_unit_test(a_sum_has_no_value_to_pull),
        cmocka_unit_test(settings_ride_on_done),
        cmocka_unit_test(nothing_goes_to_a_loop_that_is_down),
        cmocka_unit_test(tries_again_what_was_refused),
        cmocka_unit_test(takes_results_back_when_the_set_changes),
        cmocka_unit_test(a_set_change_before_the_end_asks_at_the_end),
        cmocka_unit_test(a_view_that_leaves_the_set_alone_changes_nothing),
        cmocka_unit_test(a_skipped_view_may_have_changed_the_set),
        cmocka_unit_test(a_new_tenure_gets_what_has_no_result),
        cmocka_unit_test(a_server_is_replaced),
        cmocka_unit_test(early_answers_count_after_the_view),
        cmocka_unit_test(early_complete_without_a_result_asks),
        cmocka_unit_test(two_never_write_to_one_place),
        cmocka_unit_test(a_joiner_reads_the_step_before),
        cmocka_unit_test(a_joiner_after_a_change_of_mode_says_its_clock),
        cmocka_unit_test(an_async_joiner_reads_the_last_sync_step),
        cmocka_unit_test(is_fenced_by_a_view),
        cmocka_unit_test(is_fenced_by_a_frame),
        cmocka_unit_test(hears_that_the_job_has_ended),
        cmocka_unit_test(leaves_after_the_step_that_it_ended),
        cmocka_unit_test(async_pushes_are_acknowledged),
        cmocka_unit_test(async_push_pull_sees_its_own_push),
        cmocka_unit_test(one_pull_of_a_tensor_at_a_time),
        cmocka_unit_test(async_sends_again_in_order),
        cmocka_unit_test(async_leaver_waits_for_acknowledgements),
        cmocka_unit_test(async_joiner_announces_its_clock),
        cmocka_unit_test(async_becomes_sync),
        cmocka_unit_test(sync_becomes_async),
        cmocka_unit_test(a_newer_ballot_lifts_the_hold),
        cmocka_unit_test(survives_every_frame),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
