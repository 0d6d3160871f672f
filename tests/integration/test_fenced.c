/* A member that is stopped in the middle of a step is removed; when it goes on it hears that once, and is a new member.
 *
 * Every step each member pushes 1 to a parameter that averages and adds: the value is the number of steps, whoever was
 * in them, and nobody may see another one. */
#include "tests/integration/rig.h"

#include <signal.h>

enum { N = 50000, STEPS_BEFORE = 5, STEPS_AFTER = 10 };

struct world {
    _Atomic int opened;
    _Atomic int64_t step[2];
    _Atomic bool in_step, go, over;
    _Atomic int fenced, outcome;
    _Atomic uint64_t id_before, id_after;
    _Atomic int64_t rank_after, size_after;
};
struct task {
    struct world *w;
    unsigned slot;
};

static struct ks_tensor *join(struct rig_self *s, struct ks_job **ret_job)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_spec spec = {.dtype = KS_F32, .ndims = 1, .dims = {N}, .kind = KS_PARAM};
    struct ks_tensor *t;
    RIG_OK(j, ks_tensor_register(j, "value", &spec, &t));
    task->w->opened++;
    RIG_AWAIT(j, task->w->opened == 2);
    *ret_job = j;
    return t;
}

static void check_value(struct ks_job *j, const float *x, int64_t steps)
{
    for (size_t i = 0; i < N; i += N - 1)
        RIG_MUST(j, x[i] == (float)steps);
}

static int one_step(struct ks_job *j, struct ks_tensor *t, const float *one, float *x)
{
    struct ks_handle *h;
    int64_t step = ks_step(j);
    RIG_OK(j, ks_push_pull(t, one, x, 1.0, &h));
    RIG_OK(j, ks_step_end(j));
    int rc = ks_wait(h, -1);
    if (rc == KS_OK)
        check_value(j, x, step + 1);
    return rc;
}

static void steady(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j;
    struct ks_tensor *t = join(s, &j);
    float *one = malloc(N * sizeof *one), *x = malloc(N * sizeof *x);
    for (size_t i = 0; i < N; i++)
        one[i] = 1;
    while (!task->w->over) {
        RIG_OK(j, one_step(j, t, one, x));
        task->w->step[task->slot] = ks_step(j);
    }
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
    free(one);
    free(x);
}

static void stopped(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j;
    struct ks_handle *h;
    struct ks_tensor *t = join(s, &j);
    float *one = malloc(N * sizeof *one), *x = malloc(N * sizeof *x);
    for (size_t i = 0; i < N; i++)
        one[i] = 1;
    for (int i = 0; i < STEPS_BEFORE; i++)
        RIG_OK(j, one_step(j, t, one, x));
    w->id_before = ks_member_id(j);
    RIG_OK(j, ks_push_pull(t, one, x, 1.0, &h));
    w->in_step = true;
    RIG_AWAIT(j, w->go);
    RIG_AWAIT(j, ks_member_id(j) != w->id_before);
    /* What was pushed is lost: ending the step would end another one. */
    RIG_GIVES(j, ks_step_end(j), KS_EFENCED);
    w->fenced++;
    RIG_MUST(j, strstr(ks_last_error(j), "lost"));
    w->outcome = ks_wait(h, -1);
    RIG_OK(j, ks_pull(t, x, &h));
    RIG_OK(j, ks_wait(h, -1));
    check_value(j, x, ks_step(j));
    w->id_after = ks_member_id(j);
    w->rank_after = ks_rank(j);
    w->size_after = ks_size(j);
    for (int i = 0; i < STEPS_AFTER; i++)
        RIG_OK(j, one_step(j, t, one, x));
    struct ks_stats stats;
    ks_stats(j, &stats);
    RIG_MUST(j, stats.rejoins == 1);
    w->over = true;
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
    free(one);
    free(x);
}

static void test_stopped_member_comes_back(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task a = {w, 0}, b = {w, 1};
    rig_server_options(r, "--durability", "none", "--members", "2", NULL);
    rig_servers_start(r, 1);
    rig_worker_start(r, steady, &a);
    unsigned victim = rig_worker_start(r, stopped, &b);
    RIG_UNTIL(r, w->in_step);
    int64_t before = w->step[0];
    rig_worker_signal(r, victim, SIGSTOP);
    RIG_UNTIL(r, w->step[0] > before + 5);
    rig_worker_signal(r, victim, SIGCONT);
    w->go = true;
    rig_workers_done(r);
    assert_int_equal(w->fenced, 1);
    assert_int_equal(w->outcome, KS_EFENCED);
    assert_true(w->id_after > w->id_before);
    assert_int_equal(w->rank_after, 1);
    assert_int_equal(w->size_after, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_stopped_member_comes_back, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
