/* A server with little memory, not much more than one step needs: pushes wait until there is room, and sums are right.
 */
#include "tests/integration/rig.h"

enum { MEMBERS = 4, N = 2 << 20, STEPS = 6 };

struct world {
    _Atomic int opened;
};
struct task {
    struct world *w;
    unsigned slot;
};

static void member(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I32, N, KS_REDUCE, NULL),
                     *p = rig_tensor(j, "p", KS_I32, N, KS_PARAM, "add");
    int32_t *in = malloc(N * sizeof *in), *out = malloc(N * sizeof *out), *value = malloc(N * sizeof *value);
    struct ks_handle *h, *k;
    task->w->opened++;
    RIG_AWAIT(j, task->w->opened == MEMBERS);
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < N; i++)
            in[i] = (int32_t)task->slot + 1;
        RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
        RIG_OK(j, ks_push_pull(p, in, value, 1.0, &k));
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
        RIG_OK(j, ks_wait(k, -1));
        for (int i = 0; i < N; i++)
            RIG_MUST(j, out[i] == MEMBERS * (MEMBERS + 1) / 2 && value[i] == step * out[i]);
    }
    free(in);
    free(out);
    free(value);
    ks_close(j);
}

static void run(void **state, const char *memory, const char *deterministic)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    rig_server_options(r, "--members", "4", "--loops", "2", "--durability", "none", "--memory", memory,
                       "--deterministic", deterministic, "--chunk-bytes", "256K", NULL);
    rig_server_start(r, 0);
    for (unsigned i = 0; i < MEMBERS; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, member, &task[i]);
    }
    rig_workers_done(r);
}

static void test_sums_at_once(void **state)
{
    run(state, "64M", "off");
}

/* In the order of members: a step's contributions are all there before the first sum. */
static void test_sums_in_order(void **state)
{
    run(state, "128M", "on");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sums_at_once, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_sums_in_order, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
