/* Stories that must end well, told over the simulator's world. Besides what each test asserts, script_end checks every
 * invariant: each value that an application was shown, the sets of all finished steps, what is on the disks at the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "chaos/sim/script.h"

/* A worker is killed when it has pushed part of a step. The step closes without it, for everybody. */
static void worker_dies_in_the_middle_of_a_step(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 3, .tensors = 4, .compute_ms = 8 });
    assert_true(script_until_half_pushed(w, 2, 3));
    int64_t step = script_member(w, 2)->member->step;
    script_kill_member(w, 2);
    assert_true(script_until_removed(w, 2));
    assert_true(script_until_step(w, step + 2));
    assert_int_equal(w->history.set[step - 1] & 7, 7);
    assert_int_equal(w->history.set[step] & 7, 3);
    assert_int_equal(w->history.member[2].last, step - 1);
    assert_int_equal(script_end(w), 0);
}

/* A worker is killed just after it ended a step: the step may count it, and then on every chunk. */
static void worker_dies_after_it_ended_a_step(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 2, .compute_ms = 4 });
    assert_true(script_until_step(w, 2));
    int64_t ended = w->history.member[1].ended;
    while (w->history.member[1].ended == ended)
        assert_true(world_step(w));
    script_kill_member(w, 1);
    assert_true(script_until_removed(w, 1));
    assert_in_range(w->history.member[1].last, ended, ended + 1);
    assert_true(script_until_step(w, ended + 3));
    assert_int_equal(script_end(w), 0);
}

/* The only server is killed when it has sent the first results of a step, and restarts from its disk. */
static void server_restarts_between_result_and_mark(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .members = 3, .shards = 3, .compute_ms = 6 });
    assert_true(script_until_step(w, 2));
    assert_true(script_until_moment(w, TRIGGER_RESULT));
    uint64_t epoch = w->view->epoch, old = script_server(w, 0)->id;
    int64_t finished = w->history.finished;
    script_kill_server(w, script_server(w, 0));
    assert_true(script_until_step(w, finished + 3));
    assert_int_equal(w->stats.restarts, 1);
    assert_true(w->view->epoch > epoch);
    assert_null(view_server_find(w->view, old));
    for (uint32_t m = 0; m < 3; m++)
        assert_int_equal(w->history.member[m].gone_epoch, 0);
    assert_int_equal(script_end(w), 0);
}

/* Killed again before anybody knows the new life: the third one is the heir all the same. */
static void server_dies_again_while_it_returns(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 2 });
    assert_true(script_until_step(w, 3));
    int64_t finished = w->history.finished;
    script_kill_server(w, script_server(w, 0));
    while (!script_server(w, 0))
        assert_true(world_step(w));
    assert_true(script_until_moment(w, TRIGGER_CAS));
    if (script_server(w, 0))
        script_kill_server(w, script_server(w, 0));
    assert_true(script_until_step(w, finished + 4));
    assert_int_equal(script_end(w), 0);
}

/* What servers send to one worker comes two seconds late. The fast one has pushed its next step long before: the slow
 * one still gets the sums of its own step, and nobody is taken for dead. */
static void slow_worker_pulls_two_seconds_late(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 2, .in_memory = true });
    w->cfg.suspect_ms = 5000;
    assert_true(script_until_step(w, 4));
    uint64_t before = w->now;
    int64_t finished = w->history.finished;
    script_stall(w, 0, 2000);
    assert_true(script_until_step(w, finished + 3));
    assert_true(w->now - before >= 1900 * SIM_MS);
    assert_int_equal(w->history.member[0].gone_epoch, 0);
    assert_int_equal(w->history.set[finished + 3], 3);
    assert_int_equal(script_end(w), 0);
}

/* A worker joins; the view that lists it is written, the answer is lost, and the leader dies. One view stands. */
static void leader_dies_with_the_answer_to_its_write_lost(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 3, .members = 2 });
    assert_true(script_until_step(w, 3));
    uint64_t epoch = w->view->epoch, elections = w->stats.elections;
    w->lose_next_cas_answer = true;
    struct proc *joiner = member_start(w);
    assert_true(script_until_moment(w, TRIGGER_CAS));
    assert_int_equal(w->view->epoch, epoch + 1);
    assert_true(view_lists(w->view, joiner->id));
    script_kill_server(w, script_leader(w));
    assert_true(script_until_step(w, w->history.finished + 4));
    assert_int_equal(w->stats.cas_answer_lost, 1);
    assert_true(w->stats.elections > elections);
    assert_true(script_until_listed(w, 2));
    assert_int_equal(script_end(w), 0);
}

/* A leader decides, is paused, loses its lease; what it wrote arrives after another was elected. */
static void paused_leader_writes_late(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 3, .members = 2 });
    assert_true(script_until_step(w, 3));
    struct proc *leader = script_leader(w);
    w->delay_next_cas = true;
    member_start(w);
    assert_true(script_until_moment(w, TRIGGER_PREPARE));
    script_run_ms(w, 3);
    proc_pause(w, leader, 1500 * SIM_MS);
    script_run_ms(w, 1400);
    assert_true(w->leader != leader->id);
    assert_true(script_until_listed(w, 2));
    assert_int_equal(script_end(w), 0);
}

/* Pushes that a server had only in memory when it died are pushed again, once, and the others are not. */
static void unacknowledged_pushes_survive_a_restart(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .members = 3, .mode = { .kind = MODE_ASYNC }, .compute_ms = 1 });
    assert_true(script_until_step(w, 10));
    w->disk_slow_until = w->now + 400 * SIM_MS;
    script_run_ms(w, 60);
    uint64_t acked = w->stats.pushes_acked;
    script_kill_server(w, script_server(w, 0));
    assert_true(w->stats.batches_lost + w->stats.batches_kept > 0);
    script_run_ms(w, 1500);
    assert_true(w->stats.pushes_acked > acked);
    assert_int_equal(script_end(w), 0);
}

/* With bound 1 nobody is shown a value that lacks what the others pushed two steps ago, also across a restart. */
static void bound_holds_across_a_restart(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 3, .mode = { .kind = MODE_SSP, .bound = 1 } });
    assert_true(script_until_step(w, 6));
    script_kill_server(w, script_server(w, 1));
    script_run_ms(w, 1000);
    assert_true(script_until_step(w, w->history.member[0].ended + 3));
    assert_int_equal(script_end(w), 0);
}

/* A worker that cannot be heard is removed; when it can again it is told, and comes back as a new life. */
static void unheard_worker_is_fenced(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 3 });
    assert_true(script_until_step(w, 3));
    struct proc *m = script_member(w, 1);
    for (uint32_t s = 0; s < 2; s++)
        net_partition(w, m, script_server(w, s), true, w->now + 800 * SIM_MS);
    assert_true(script_until_removed(w, 1));
    int64_t finished = w->history.finished;
    assert_true(script_until_step(w, finished + 2));
    script_run_ms(w, 900);
    assert_false(m->alive);
    assert_int_equal(w->stats.member_fenced, 1);
    assert_int_equal(script_end(w), 0);
}

/* The store is away for two seconds: training goes on, since nobody dies. */
static void store_is_down_and_training_goes_on(void **state)
{
    (void)state;
    struct world *w = script_begin((struct script){ .servers = 2, .members = 2 });
    assert_true(script_until_step(w, 3));
    uint64_t epoch = w->view->epoch;
    int64_t finished = w->history.finished;
    store_down(w, w->now + 2000 * SIM_MS);
    script_run_ms(w, 1900);
    assert_true(w->history.finished > finished + 20);
    assert_int_equal(w->view->epoch, epoch);
    assert_int_equal(script_end(w), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worker_dies_in_the_middle_of_a_step),
        cmocka_unit_test(worker_dies_after_it_ended_a_step),
        cmocka_unit_test(server_restarts_between_result_and_mark),
        cmocka_unit_test(server_dies_again_while_it_returns),
        cmocka_unit_test(slow_worker_pulls_two_seconds_late),
        cmocka_unit_test(leader_dies_with_the_answer_to_its_write_lost),
        cmocka_unit_test(paused_leader_writes_late),
        cmocka_unit_test(unacknowledged_pushes_survive_a_restart),
        cmocka_unit_test(bound_holds_across_a_restart),
        cmocka_unit_test(unheard_worker_is_fenced),
        cmocka_unit_test(store_is_down_and_training_goes_on),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    pools_drop();
    return failed;
}
