/* test_shard_core.c - the shards of one loop, told frame by frame. The simulator covers the rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "base/rng.h"
#include "server/optim.h"
#include "server/shard_core.h"

enum { SERVER = 1, SHARDS = 2, CHUNK = 64, N = 4 };

/* One server, one loop, members 11, 12 (and 13), and a disk that is a list of records. */
struct rig {
    struct pool *pool;
    struct shard_core *core;
    struct shard_outbox out;
    struct view *view;
    struct store_model_disk *disk;
    struct store *store;
    struct { uint64_t seq; struct buf *b[4]; } held[256];
    int nheld;
    bool durable;
    uint64_t self, declared_max;
    struct tensor_spec w;
};

static void view_set(struct rig *r, uint64_t epoch, int nmembers, int64_t gone_last)
{
    struct view *v = view_create(1, (uint32_t)nmembers, SHARDS);
    v->epoch = epoch;
    v->nmodes = 1;
    v->mode[0] = r->view ? r->view->mode[0] : (struct mode){0, MODE_SYNC, 0};
    v->server[0].id = r->self;
    for (int i = 0; i < nmembers; i++)
        v->member[i] = (struct view_member){.id = 11 + (uint64_t)i, .join = 0, .last = STEP_NONE, .live = true,
                                            .local_size = 1};
    if (gone_last >= -1) {
        v->member[nmembers - 1].last = gone_last;
        v->member[nmembers - 1].live = false;
    }
    for (int i = 0; i < SHARDS; i++)
        v->shard[i] = (struct view_shard){.primary = r->self, .since = r->view && r->view->shard[0].primary == r->self ?
                                                                        r->view->shard[0].since : epoch};
    view_free(r->view);
    r->view = v;
}

static void settle(struct rig *r)
{
    for (uint32_t i = 0; i < r->out.n; i++) {
        struct shard_effect *e = &r->out.effect[i];
        if (e->kind != SHARD_PERSIST)
            continue;
        r->store->ops->submit(r->store, e->seq, e->ops, e->nops);
        r->held[r->nheld].seq = e->seq;
        memcpy(r->held[r->nheld++].b, e->held, sizeof e->held);
    }
}

static void out_clear(struct rig *r)
{
    for (uint32_t i = 0; i < r->out.n; i++)
        if (r->out.effect[i].kind == SHARD_SEND)
            buf_unref(r->out.effect[i].payload);
    r->out.n = 0;
}

static void step(struct rig *r, struct shard_event e)
{
    out_clear(r);
    shard_core_step(r->core, &e, &r->out);
    settle(r);
}

static void commit(struct rig *r)
{
    uint64_t seq;
    char err[STORE_ERR_TEXT];
    store_model_commit(r->store, 1000);
    assert_int_equal(r->store->ops->poll(r->store, &seq, err), 0);
    step(r, (struct shard_event){.kind = SHARD_DURABLE, .seq = seq});
    for (int i = 0; i < r->nheld; i++)
        for (int k = 0; k < 4; k++)
            buf_unref(r->held[i].b[k]);
    r->nheld = 0;
}

static void adopt(struct rig *r)
{
    step(r, (struct shard_event){.kind = SHARD_ADOPT, .view = r->view});
}

static void core_open(struct rig *r, bool deterministic)
{
    struct shard_config c = {.self = r->self, .nloops = 1, .nshards = SHARDS, .chunk_bytes = CHUNK, .pool = r->pool,
                             .durable = r->durable, .deterministic = deterministic,
                             .declared_max = r->declared_max};
    char err[STORE_ERR_TEXT];
    r->core = shard_core_create(&c);
    assert_int_equal(store_model_open(r->disk, &r->store, err), 0);
}

static void rig_open(struct rig *r, bool durable, int nmembers)
{
    memset(r, 0, sizeof *r);
    r->durable = durable;
    r->self = SERVER;
    r->pool = pool_create(0);
    r->disk = store_model_disk_create();
    core_open(r, false);
    r->w = (struct tensor_spec){.name = "w", .id = tensor_id("w"), .dtype = DTYPE_F32, .ndims = 1, .dim = {N},
                                .kind = TENSOR_PARAM, .op = TENSOR_SUM, .finite = FINITE_REJECT, .group = "default",
                                .optimizer = "sgd lr=1"};
    view_set(r, 1, nmembers, -2);
    adopt(r);
}

static void core_close(struct rig *r)
{
    out_clear(r);
    shard_core_free(r->core);
    for (int i = 0; i < r->nheld; i++)
        for (int k = 0; k < 4; k++)
            buf_unref(r->held[i].b[k]);
    r->nheld = 0;
}

static void rig_close(struct rig *r)
{
    core_close(r);
    r->store->ops->close(r->store);
    store_model_disk_free(r->disk);
    shard_outbox_done(&r->out);
    assert_int_equal(pool_used_bytes(r->pool), 0);
    pool_free(r->pool);
    view_free(r->view);
}

static int load_one(void *arg, const uint8_t *k, size_t kn, const uint8_t *v, size_t n)
{
    char err[STORE_ERR_TEXT];
    return shard_core_load(arg, k, kn, v, n, err);
}

/* SIGKILL, then a new life on the same disk. */
static void restart(struct rig *r, uint64_t epoch, int nmembers)
{
    char err[STORE_ERR_TEXT];
    uint64_t old = r->self;
    core_close(r);
    store_model_crash(r->store);
    r->self = old + 1;
    core_open(r, false);
    assert_int_equal(r->store->ops->load(r->store, load_one, r->core, err), 0);
    shard_core_loaded(r->core, old);
    view_set(r, epoch, nmembers, -2);
    adopt(r);
    commit(r);
}

static void declare(struct rig *r, uint64_t from)
{
    struct frame_header h = {.type = FRAME_DECLARE, .tensor = r->w.id, .version = 7, .epoch = (uint32_t)r->view->epoch};
    step(r, (struct shard_event){.kind = SHARD_DECLARE, .from = from, .header = h, .spec = &r->w});
    if (r->durable && r->nheld)
        commit(r);
}

static struct buf *floats(struct rig *r, float x)
{
    struct buf *b = pool_get(r->pool, N * 4);
    for (int i = 0; i < N; i++)
        memcpy(b->data + 4 * i, &x, 4);
    return b;
}

static void push(struct rig *r, uint64_t from, int64_t k, uint32_t seq, float x)
{
    struct frame_header h = {.type = FRAME_PUSH, .dtype = DTYPE_F32, .tensor = r->w.id, .step = k, .seq = seq, .weight = 1,
                             .flags = FRAME_WANT, .len = N * 4, .epoch = (uint32_t)r->view->epoch};
    step(r, (struct shard_event){.kind = SHARD_FRAME, .from = from, .header = h, .payload = floats(r, x)});
}

static void done(struct rig *r, uint64_t from, int64_t k, bool pushed, uint8_t flags)
{
    struct frame_header h = {.type = FRAME_DONE, .step = k, .flags = flags, .epoch = (uint32_t)r->view->epoch};
    struct buf *b = pool_get(r->pool, done_size(pushed, 0));
    done_encode(&r->w.id, pushed, NULL, 0, b->data);
    h.len = b->len;
    step(r, (struct shard_event){.kind = SHARD_FRAME, .from = from, .header = h, .payload = b});
}

static void plain(struct rig *r, uint8_t type, uint64_t from, int64_t k, uint32_t seq)
{
    struct frame_header h = {.type = type, .tensor = r->w.id, .step = k, .seq = seq, .epoch = (uint32_t)r->view->epoch};
    step(r, (struct shard_event){.kind = SHARD_FRAME, .from = from, .header = h});
}

static const struct shard_effect *sent(const struct rig *r, uint64_t to, uint8_t type)
{
    for (uint32_t i = 0; i < r->out.n; i++)
        if (r->out.effect[i].kind == SHARD_SEND && r->out.effect[i].to == to && r->out.effect[i].header.type == type)
            return &r->out.effect[i];
    return NULL;
}

static float value_of(const struct shard_effect *e)
{
    float x;
    assert_non_null(e);
    assert_int_equal(e->header.len, N * 4);
    memcpy(&x, e->payload->data + e->offset, 4);
    return x;
}

static void step_of_two(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    assert_int_equal(sent(&r, 11, FRAME_DECLARED)->header.status, 0);
    push(&r, 11, 0, 0, 1);
    assert_null(sent(&r, 11, FRAME_RESULT));
    push(&r, 12, 0, 0, 2);
    assert_float_equal(value_of(sent(&r, 11, FRAME_RESULT)), -3, 0);
    assert_float_equal(value_of(sent(&r, 12, FRAME_RESULT)), -3, 0);
    done(&r, 11, 0, true, 0);
    assert_null(sent(&r, 11, FRAME_COMPLETE));
    done(&r, 12, 0, true, 0);
    assert_non_null(sent(&r, 11, FRAME_COMPLETE));
    assert_int_equal(sent(&r, 11, FRAME_COMPLETE)->header.len, 2 * SHARDS);
    /* Step 1: only member 12 pushes; a pull of step 1 gives the value after step 0, whatever came meanwhile. */
    done(&r, 11, 1, false, 0);
    push(&r, 12, 1, 0, 10);
    assert_float_equal(value_of(sent(&r, 12, FRAME_RESULT)), -13, 0);
    plain(&r, FRAME_PULL, 12, 1, 5);
    assert_float_equal(value_of(sent(&r, 12, FRAME_VALUE)), -3, 0);
    rig_close(&r);
}

static void duplicate_is_not_added(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    push(&r, 11, 0, 0, 1);
    push(&r, 11, 0, 0, 1);
    push(&r, 12, 0, 0, 2);
    assert_float_equal(value_of(sent(&r, 12, FRAME_RESULT)), -3, 0);
    push(&r, 11, 0, 0, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_RESULT)), -3, 0);
    rig_close(&r);
}

static void missing_is_needed(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    done(&r, 11, 0, true, 0);
    const struct shard_effect *e = sent(&r, 11, FRAME_NEED);
    assert_non_null(e);
    assert_int_equal(chunk_refs_count(e->header.len), 1);
    push(&r, 12, 0, 0, 2);
    assert_null(sent(&r, 12, FRAME_RESULT));
    push(&r, 11, 0, 0, 1);
    assert_float_equal(value_of(sent(&r, 12, FRAME_RESULT)), -3, 0);
    rig_close(&r);
}

static void dead_member_is_undone(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    push(&r, 11, 0, 0, 1);
    push(&r, 12, 0, 0, 2);
    done(&r, 11, 0, true, 0);
    /* 12 dies before its DONE: it is not in step 0, so the result with its part goes. */
    view_set(&r, 2, 2, -1);
    adopt(&r);
    done(&r, 11, 0, true, FRAME_AGAIN);
    assert_non_null(sent(&r, 11, FRAME_NEED));
    push(&r, 11, 0, 0, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_RESULT)), -1, 0);
    assert_non_null(sent(&r, 11, FRAME_COMPLETE));
    /* What the dead one sends now changes nothing and is answered. */
    push(&r, 12, 1, 0, 5);
    assert_non_null(sent(&r, 12, FRAME_FENCED));
    rig_close(&r);
}

static void nothing_before_the_disk(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, true, 1);
    declare(&r, 11);
    push(&r, 11, 0, 0, 1);
    done(&r, 11, 0, true, 0);
    assert_null(sent(&r, 11, FRAME_RESULT));
    assert_null(sent(&r, 11, FRAME_COMPLETE));
    commit(&r);
    assert_float_equal(value_of(sent(&r, 11, FRAME_RESULT)), -1, 0);
    assert_non_null(sent(&r, 11, FRAME_COMPLETE));
    rig_close(&r);
}

static void restart_keeps_what_was_released(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, true, 1);
    declare(&r, 11);
    push(&r, 11, 0, 0, 1);
    done(&r, 11, 0, true, 0);
    commit(&r);
    push(&r, 11, 1, 0, 10);
    restart(&r, 2, 1);
    assert_non_null(sent(&r, 11, FRAME_COMPLETE));
    assert_int_equal(sent(&r, 11, FRAME_COMPLETE)->header.step, 0);
    push(&r, 11, 1, 0, 10);
    done(&r, 11, 1, true, 0);
    commit(&r);
    assert_float_equal(value_of(sent(&r, 11, FRAME_RESULT)), -11, 0);
    rig_close(&r);
}

static void undone_on_disk_too(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, true, 2);
    declare(&r, 11);
    push(&r, 11, 0, 0, 1);
    push(&r, 12, 0, 0, 2);
    commit(&r);
    view_set(&r, 2, 2, -1);
    adopt(&r);
    commit(&r);
    done(&r, 11, 0, false, FRAME_AGAIN);
    commit(&r);
    assert_non_null(sent(&r, 11, FRAME_COMPLETE));
    restart(&r, 3, 1);
    plain(&r, FRAME_PULL, 11, 1, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_VALUE)), 0, 0);
    rig_close(&r);
}

static void rejected_gradient_is_told(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    push(&r, 11, 0, 0, __builtin_nanf(""));
    push(&r, 12, 0, 0, 2);
    assert_int_equal(sent(&r, 11, FRAME_RESULT)->header.status, KS_ENOTFINITE);
    assert_int_equal(sent(&r, 12, FRAME_RESULT)->header.status, KS_OK);
    assert_float_equal(value_of(sent(&r, 12, FRAME_RESULT)), -2, 0);
    rig_close(&r);
}

static void other_spec_is_refused(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    r.w.dim[0] = 5;
    declare(&r, 12);
    const struct shard_effect *e = sent(&r, 12, FRAME_DECLARED);
    assert_int_equal(e->header.status, KS_EEXIST);
    assert_non_null(strstr((const char *)e->payload->data, "f32[4]"));
    assert_non_null(strstr((const char *)e->payload->data, "f32[5]"));
    rig_close(&r);
}

static int declared(struct rig *r, const char *name, uint64_t chunks)
{
    snprintf(r->w.name, sizeof r->w.name, "%s", name);
    r->w.id = tensor_id(name);
    r->w.dim[0] = chunks * CHUNK / 4;
    declare(r, 11);
    return sent(r, 11, FRAME_DECLARED)->header.status;
}

/* Half of its chunks are another server's and do not count. */
static void too_large_is_refused(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    core_close(&r);
    r.store->ops->close(r.store);
    r.declared_max = 8 * CHUNK;
    core_open(&r, false);
    r.view->shard[1].primary = 2;
    adopt(&r);
    assert_int_equal(declared(&r, "w", 18), KS_ENOMEM);
    assert_non_null(strstr((const char *)sent(&r, 11, FRAME_DECLARED)->payload->data, "raise --memory"));
    assert_int_equal(declared(&r, "w", 16), KS_OK);
    assert_int_equal(declared(&r, "w", 16), KS_OK);
    assert_int_equal(declared(&r, "x", 2), KS_ENOMEM);
    rig_close(&r);
}

static void async_once_and_bounded(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    r.view->mode[0] = (struct mode){0, MODE_SSP, 1};
    view_set(&r, 2, 2, -2);
    adopt(&r);
    declare(&r, 11);
    push(&r, 11, 0, 1, 1);
    assert_non_null(sent(&r, 11, FRAME_ACK));
    push(&r, 11, 0, 1, 1);
    assert_non_null(sent(&r, 11, FRAME_ACK));
    plain(&r, FRAME_CLOCK, 11, 1, 0);
    plain(&r, FRAME_PULL, 11, 1, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_VALUE)), -1, 0);
    plain(&r, FRAME_CLOCK, 11, 2, 0);
    plain(&r, FRAME_PULL, 11, 2, 2);
    assert_null(sent(&r, 11, FRAME_VALUE));
    push(&r, 12, 0, 1, 4);
    plain(&r, FRAME_CLOCK, 12, 1, 0);
    assert_float_equal(value_of(sent(&r, 11, FRAME_VALUE)), -5, 0);
    /* A gap means that something was lost: nothing is applied, the connection starts over. */
    push(&r, 12, 1, 3, 4);
    assert_int_equal(r.out.effect[0].kind, SHARD_CLOSE);
    rig_close(&r);
}

static void async_restart_applies_once(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, true, 1);
    r.view->mode[0] = (struct mode){0, MODE_ASYNC, 0};
    view_set(&r, 2, 1, -2);
    adopt(&r);
    declare(&r, 11);
    push(&r, 11, 0, 1, 1);
    push(&r, 11, 0, 2, 1);
    assert_null(sent(&r, 11, FRAME_ACK));
    commit(&r);
    assert_non_null(sent(&r, 11, FRAME_ACK));
    restart(&r, 3, 1);
    push(&r, 11, 0, 2, 1);
    commit(&r);
    plain(&r, FRAME_PULL, 11, 1, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_VALUE)), -2, 0);
    assert_int_equal(shard_core_applied(r.core, r.w.id, 0, 11), 2);
    rig_close(&r);
}

static void settings_from_the_next_step(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 1);
    declare(&r, 11);
    struct setting s = {.from_step = 1, .group = hash_bytes("default", 7), .value = 0.5, .option = OPT_LR};
    push(&r, 11, 0, 0, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_RESULT)), -1, 0);
    struct frame_header h = {.type = FRAME_DONE, .step = 0, .epoch = 1};
    struct buf *b = pool_get(r.pool, done_size(1, 1));
    done_encode(&r.w.id, 1, &s, 1, b->data);
    h.len = b->len;
    step(&r, (struct shard_event){.kind = SHARD_FRAME, .from = 11, .header = h, .payload = b});
    push(&r, 11, 1, 0, 1);
    done(&r, 11, 1, true, 0);
    plain(&r, FRAME_PULL, 11, 2, 1);
    assert_float_equal(value_of(sent(&r, 11, FRAME_VALUE)), -1.5, 0);
    rig_close(&r);
}

static void weighted_average(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    r.w.op = TENSOR_AVERAGE;
    declare(&r, 11);
    struct frame_header h = {.type = FRAME_PUSH, .dtype = DTYPE_F32, .tensor = r.w.id, .weight = 3, .flags = FRAME_WANT,
                             .len = N * 4, .epoch = 1};
    step(&r, (struct shard_event){.kind = SHARD_FRAME, .from = 11, .header = h, .payload = floats(&r, 2)});
    push(&r, 12, 0, 0, 6);
    assert_float_equal(value_of(sent(&r, 12, FRAME_RESULT)), -3, 0);
    rig_close(&r);
}

static void report_caps_a_joiner(void **state)
{
    struct rig r;
    (void)state;
    rig_open(&r, false, 2);
    declare(&r, 11);
    push(&r, 11, 0, 0, 1);
    struct join_doc join = {.id = 13};
    uint64_t gone[] = {12};
    struct prepare p = {.ballot = {1, 1}, .base = r.view, .njoins = 1, .joins = &join, .ngone = 1, .gone = gone};
    step(&r, (struct shard_event){.kind = SHARD_PREPARE, .prepare = &p});
    const struct shard_effect *e = &r.out.effect[0];
    assert_int_equal(e->kind, SHARD_REPORT);
    assert_int_equal(e->nreports, SHARDS);
    assert_int_equal(e->reports[0].complete, -1);
    assert_int_equal(e->reports[0].join, 0);
    /* The gone is cut off, and nothing of step 0 may be computed until the view is decided. */
    push(&r, 12, 0, 0, 1);
    assert_int_equal(r.out.n, 0);
    done(&r, 11, 0, true, 0);
    assert_null(sent(&r, 11, FRAME_RESULT));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(step_of_two), cmocka_unit_test(duplicate_is_not_added), cmocka_unit_test(missing_is_needed),
        cmocka_unit_test(dead_member_is_undone), cmocka_unit_test(nothing_before_the_disk),
        cmocka_unit_test(restart_keeps_what_was_released), cmocka_unit_test(undone_on_disk_too),
        cmocka_unit_test(rejected_gradient_is_told), cmocka_unit_test(other_spec_is_refused),
        cmocka_unit_test(too_large_is_refused),
        cmocka_unit_test(async_once_and_bounded), cmocka_unit_test(async_restart_applies_once),
        cmocka_unit_test(settings_from_the_next_step), cmocka_unit_test(weighted_average),
        cmocka_unit_test(report_caps_a_joiner),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
