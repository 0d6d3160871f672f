/* Declaring, initialising, synchronous steps, any frame: narrated cases (see client_rig.h). */
#include "tests/unit/client_rig.h"

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
        cmocka_unit_test(survives_every_frame),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
