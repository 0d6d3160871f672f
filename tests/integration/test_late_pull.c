/* A member that takes its result, or pulls, long after the others went on: what it gets is right in every mode.
 *
 * Late means: the library's thread of the late member is held in a callback, so that nothing is read from its
 * connections, until the others have gone as far as the mode lets them. The tensor is larger than what sockets hold. */
#include "tests/integration/rig.h"

#include <pthread.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { N = 1 << 18 };
#else
enum { N = 2 << 20 };
#endif
enum { OTHERS = 2, SMALL = 4, ROUNDS = 3, BOUND = 2, BLOCKED_MS = 300 };

struct world {
    _Atomic int started, others_at[OTHERS]; /* how far each of the others is, a count of its own events */
    _Atomic int late_at;
    _Atomic int64_t acked[OTHERS];
    _Atomic bool held;
    bool param;
};
struct task {
    struct world *w;
    unsigned slot;
};

static int least(const struct world *w)
{
    int n = w->others_at[0];
    for (unsigned i = 1; i < OTHERS; i++)
        n = w->others_at[i] < n ? w->others_at[i] : n;
    return n;
}

static int64_t *numbers(int64_t value)
{
    int64_t *x = malloc(N * sizeof *x);
    for (size_t i = 0; x && i < N; i++)
        x[i] = value;
    return x;
}

static bool all_are(const int64_t *x, int64_t value)
{
    for (size_t i = 0; i < N; i++)
        if (x[i] != value)
            return false;
    return true;
}

/* Everybody is in the view before the first step. */
static struct ks_job *join(struct rig_self *s, struct ks_tensor **ret_big, struct ks_tensor **ret_small)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    *ret_big = rig_tensor(j, "big", KS_I64, N, task->w->param ? KS_PARAM : KS_REDUCE, task->w->param ? "add" : NULL);
    *ret_small = rig_tensor(j, "small", KS_I64, SMALL, KS_PARAM, "add");
    task->w->started++;
    RIG_AWAIT(j, task->w->started == OTHERS + 1);
    return j;
}

/* ---- the library's thread, held ---- */

struct hold {
    struct world *w;
    int until; /* of least() */
    pthread_t caller;
    _Atomic bool at_once;
};

static void hold_thread(void *arg, int outcome)
{
    struct hold *h = arg;
    uint64_t end = clock_now_us() + (uint64_t)rig_ms(10000) * 1000;
    (void)outcome;
    h->at_once = pthread_equal(pthread_self(), h->caller);
    if (h->at_once)
        return;
    h->w->held = true;
    while (least(h->w) < h->until && clock_now_us() < end)
        rig_pause();
}

static void hold(struct ks_job *j, struct ks_tensor *small, struct hold *h)
{
    static int64_t out[SMALL];
    struct ks_handle *handle;
    h->caller = pthread_self();
    h->w->held = false;
    do {
        h->at_once = false;
        RIG_OK(j, ks_pull(small, out, &handle));
        ks_on_done(handle, hold_thread, h);
        RIG_AWAIT(j, h->w->held || h->at_once);
    } while (h->at_once);
}

/* ---- synchronous ---- */

static int64_t pushed(unsigned slot, int round)
{
    return (int64_t)(slot + 1) * 1000 + round;
}

static int64_t sum_of(int round)
{
    int64_t sum = 0;
    for (unsigned i = 0; i < OTHERS; i++)
        sum += pushed(i, round);
    return sum;
}

/* Counts one event a step: it has ended the step, and has got all that it waited for before. */
static void other_sync(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_tensor *big, *small;
    struct ks_job *j = join(s, &big, &small);
    int64_t *out = numbers(0), total = 0;
    for (int round = 0; round < ROUNDS + 1; round++) {
        struct ks_handle *h;
        int64_t *in = numbers(pushed(task->slot, round));
        RIG_OK(j, ks_push_pull(big, in, out, 1.0, &h));
        RIG_OK(j, ks_step_end(j));
        task->w->others_at[task->slot]++;
        RIG_OK(j, ks_wait(h, -1));
        total += sum_of(round);
        RIG_MUST(j, all_are(out, task->w->param ? total : sum_of(round)));
        free(in);
    }
    free(out);
    ks_close(j);
}

static void late_sync(struct rig_self *s)
{
    struct world *w = ((struct task *)s->arg)->w;
    struct ks_tensor *big, *small;
    struct ks_job *j = join(s, &big, &small);
    int64_t *out = numbers(-1), *at_start = numbers(-1), total = 0;
    for (int round = 0; round < ROUNDS + 1; round++) {
        struct ks_handle *h, *p = NULL;
        struct hold until = {.w = w, .until = round + 2};
        if (round < ROUNDS)
            hold(j, small, &until);
        /* The others have pushed all of this step: a pull gives what was before all the same. */
        RIG_AWAIT(j, least(w) >= round + 1);
        if (w->param && round == ROUNDS) {
            RIG_OK(j, ks_pull(big, at_start, &p));
            RIG_OK(j, ks_wait(p, -1));
            RIG_MUST(j, all_are(at_start, total));
        }
        RIG_OK(j, ks_push_pull(big, NULL, out, 1.0, &h));
        RIG_OK(j, ks_step_end(j));
        /* Now they finish this step and push the next one while nothing is read here. */
        RIG_OK(j, ks_wait(h, -1));
        total += sum_of(round);
        RIG_MUST(j, all_are(out, w->param ? total : sum_of(round)));
    }
    free(out);
    free(at_start);
    ks_close(j);
}

/* ---- asynchronous and staleness-bounded ---- */

static int64_t acked(const struct world *w)
{
    int64_t sum = 0;
    for (unsigned i = 0; i < OTHERS; i++)
        sum += w->acked[i];
    return sum;
}

/* Each chunk is whole: all its numbers come from one version. */
static void check_between(const struct ks_job *j, const int64_t *x, int64_t low, int64_t high)
{
    const size_t chunk = (1 << 20) / sizeof *x;
    for (size_t i = 0; i < N; i++)
        RIG_MUST(j, x[i] == x[i - i % chunk] && x[i] >= low && x[i] <= high);
}

/* Counts one event a step, and one more when the mode lets it go no further. */
static void other_async(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_tensor *big, *small;
    struct ks_job *j = join(s, &big, &small);
    int64_t *in = numbers(1), *out = numbers(0);
    uint32_t bound;
    bool bounded = ks_mode(j, &bound) == KS_SSP;
    int steps = bounded ? BOUND : 2 * BOUND;
    struct ks_handle *h, *p;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < steps; i++) {
            RIG_OK(j, ks_push(big, in, 1.0, &h));
            RIG_OK(j, ks_wait(h, -1));
            w->acked[task->slot]++;
            RIG_OK(j, ks_step_end(j));
            RIG_OK(j, ks_pull(big, out, &p));
            RIG_OK(j, ks_wait(p, -1));
            check_between(j, out, w->acked[task->slot], INT64_MAX);
            w->others_at[task->slot]++;
        }
        RIG_OK(j, ks_push(big, in, 1.0, &h));
        RIG_OK(j, ks_wait(h, -1));
        w->acked[task->slot]++;
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_pull(big, out, &p));
        if (bounded)
            RIG_GIVES(j, ks_wait(p, BLOCKED_MS), KS_ETIMEOUT);
        w->others_at[task->slot]++;
        RIG_OK(j, ks_wait(p, -1));
        RIG_AWAIT(j, w->late_at > round);
    }
    free(in);
    free(out);
    ks_close(j);
}

static void late_async(struct rig_self *s)
{
    struct world *w = ((struct task *)s->arg)->w;
    struct ks_tensor *big, *small;
    struct ks_job *j = join(s, &big, &small);
    int64_t *out = numbers(-1);
    uint32_t bound;
    int steps = ks_mode(j, &bound) == KS_SSP ? BOUND : 2 * BOUND, all = 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct ks_handle *h;
        struct hold until = {.w = w, .until = all += steps + 1};
        int64_t before = acked(w);
        hold(j, small, &until);
        /* Asked now, read after the others can go no further. */
        RIG_OK(j, ks_pull(big, out, &h));
        RIG_OK(j, ks_wait(h, -1));
        check_between(j, out, before, acked(w));
        /* Asked when they can go no further: all that they did. */
        RIG_OK(j, ks_pull(big, out, &h));
        RIG_OK(j, ks_wait(h, -1));
        RIG_MUST(j, all_are(out, acked(w)));
        for (int i = 0; i < steps + 1; i++)
            RIG_OK(j, ks_step_end(j));
        w->late_at++;
    }
    free(out);
    ks_close(j);
}

static void run(void **state, const char *mode, bool param, void (*late)(struct rig_self *),
                void (*other)(struct rig_self *))
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[OTHERS + 1];
    w->param = param;
    rig_server_options(r, "--members", "3", "--mode", mode, "--durability", "none", NULL);
    rig_server_start(r, 0);
    for (unsigned i = 0; i <= OTHERS; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, i == OTHERS ? late : other, &task[i]);
    }
    rig_workers_done(r);
}

static void test_sync_sum(void **state)
{
    run(state, "sync", false, late_sync, other_sync);
}

static void test_sync_parameter(void **state)
{
    run(state, "sync", true, late_sync, other_sync);
}

static void test_bounded(void **state)
{
    run(state, "ssp:2", true, late_async, other_async);
}

static void test_async(void **state)
{
    run(state, "async", true, late_async, other_async);
}

static void test_async_sum(void **state)
{
    run(state, "async", false, late_async, other_async);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sync_sum, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_sync_parameter, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_bounded, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_sum, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
