/* Connections, views, joining and leaving, asynchronous steps, changes of mode: narrated cases (see client_rig.h). */
#include "tests/unit/client_rig.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
