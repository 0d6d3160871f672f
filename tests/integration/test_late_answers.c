/* Calls that wait, when they cannot: a server pauses for longer than the deadline, or a callback calls. Nothing is left
 * half begun, and what the call was about still ends right. */
#include "tests/integration/rig.h"

#include <signal.h>
#include <sys/mman.h>

enum { N = 1 << 20, DEADLINE_MS = 300 };

struct world {
    _Atomic bool pause, paused, resume;
};

static struct ks_job *open_impatient(struct rig_self *s)
{
    struct ks_job *j = NULL;
    struct ks_options o = {.coord = s->rig->coord, .job = s->rig->job, .token = s->rig->token,
                           .timeout_ms = rig_ms(DEADLINE_MS), .join_timeout_ms = rig_ms(30000)};
    RIG_OK(NULL, ks_open(&o, &j));
    return j;
}

static void pause_server(const struct ks_job *j, struct world *w)
{
    w->resume = w->paused = false;
    w->pause = true;
    RIG_AWAIT(j, w->paused);
}

static int64_t *block(const struct ks_job *j, int64_t value)
{
    int64_t *p = mmap(NULL, N * sizeof *p, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    RIG_MUST(j, p != MAP_FAILED);
    for (int i = 0; i < N; i++)
        p[i] = value;
    return p;
}

static void read_value(struct ks_job *j, struct ks_tensor *t, int64_t *out)
{
    struct ks_handle *h;
    RIG_OK(j, ks_pull(t, out, &h));
    RIG_OK(j, ks_wait(h, rig_ms(30000)));
}

/* The caller's memory is its own again as soon as ks_init has returned. */
static void init_late(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_job *j = open_impatient(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_PARAM, "add");
    int64_t *first = block(j, 7), *out = block(j, 0);
    int won = -1;
    pause_server(j, w);
    RIG_GIVES(j, ks_init(t, first, rig_ms(DEADLINE_MS), &won), KS_ETIMEOUT);
    munmap(first, N * sizeof *first);
    w->resume = true;
    first = block(j, 7);
    RIG_OK(j, ks_init(t, first, rig_ms(30000), &won));
    munmap(first, N * sizeof *first);
    read_value(j, t, out);
    for (int i = 0; i < N; i++)
        RIG_MUST(j, out[i] == 7);
    munmap(out, N * sizeof *out);
    ks_close(j);
}

/* Registering again finds what the first call began, and not another tensor. */
static void register_late(struct rig_self *s)
{
    static const int64_t first[4] = {3, 3, 3, 3};
    struct world *w = s->arg;
    struct ks_job *j = open_impatient(s);
    struct ks_tensor *a = rig_tensor(j, "a", KS_I64, 4, KS_PARAM, "add"), *b = NULL;
    struct ks_spec spec = {.dtype = KS_I64, .ndims = 1, .dims = {4}, .kind = KS_PARAM, .op = KS_SUM};
    int64_t out[4];
    pause_server(j, w);
    RIG_GIVES(j, ks_tensor_register(j, "b", &spec, &b), KS_ETIMEOUT);
    RIG_GIVES(j, ks_tensor_register(j, "b", &spec, &b), KS_ETIMEOUT);
    w->resume = true;
    uint64_t end = clock_now_us() + (uint64_t)rig_ms(30000) * 1000;
    int rc;
    while ((rc = ks_tensor_register(j, "b", &spec, &b)) == KS_ETIMEOUT)
        RIG_MUST(j, clock_now_us() < end);
    RIG_OK(j, rc);
    RIG_OK(j, ks_init(b, first, rig_ms(30000), NULL));
    read_value(j, a, out);
    RIG_MUST(j, out[0] == 0 && out[3] == 0);
    read_value(j, b, out);
    RIG_MUST(j, out[0] == 3 && out[3] == 3);
    ks_close(j);
}

/* ---- from a callback ---- */

struct inside {
    struct ks_job *j;
    struct ks_tensor *t, *other;
    _Atomic int registered, inited, waited;
};

static void in_callback(void *arg, int outcome)
{
    static const int64_t first[4];
    struct inside *i = arg;
    struct ks_spec spec = {.dtype = KS_I64, .ndims = 1, .dims = {4}, .kind = KS_PARAM, .op = KS_SUM};
    i->registered = ks_tensor_register(i->j, "b", &spec, &i->other);
    i->inited = ks_init(i->t, first, rig_ms(30000), NULL);
    i->waited = outcome ? outcome : ks_step_wait(i->j, 0) ? 1 : 2;
}

/* Nothing that waits begins in a callback, and nothing is left behind by the try. */
static void from_callback(struct rig_self *s)
{
    struct ks_job *j = rig_open(s);
    struct inside i = {.j = j, .t = rig_tensor(j, "a", KS_I64, 4, KS_PARAM, "add")};
    struct ks_handle *h;
    int64_t out[4];
    RIG_OK(j, ks_pull(i.t, out, &h));
    ks_on_done(h, in_callback, &i);
    RIG_AWAIT(j, i.waited);
    /* Done before the callback was set, it ran on this thread. */
    RIG_MUST(j, i.registered == i.inited && (i.registered == KS_ESTATE || i.registered == KS_OK));
    RIG_OK(j, ks_init(rig_tensor(j, "b", KS_I64, 4, KS_PARAM, "add"), out, rig_ms(30000), NULL));
    ks_close(j);
}

static void close_again(void *arg, int outcome)
{
    struct inside *i = arg;
    i->waited = outcome;
    ks_close(i->j);
}

/* What is still under way when a job is closed that cannot leave has its callbacks run by ks_close itself. */
static void closed_by_callback(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_job *j = rig_open(s);
    struct inside i = {.j = j, .t = rig_tensor(j, "a", KS_I64, 4, KS_PARAM, "add")};
    struct ks_handle *h;
    int64_t out[4];
    pause_server(j, w);
    RIG_OK(j, ks_pull(i.t, out, &h));
    ks_on_done(h, close_again, &i);
    ks_close(j);
    w->resume = true;
    RIG_MUST(NULL, i.waited == KS_ECLOSED);
}

static void test_from_callback(void **state)
{
    struct rig *r = *state;
    rig_server_start(r, 0);
    for (int i = 0; i < 10; i++)
        rig_worker_start(r, from_callback, NULL);
    rig_workers_done(r);
}

static void run(struct rig *r, void (*fn)(struct rig_self *))
{
    struct world *w = rig_shared(r, sizeof *w);
    rig_server_start(r, 0);
    unsigned m = rig_worker_start(r, fn, w);
    RIG_UNTIL(r, w->pause);
    RIG_ASSERT(r, kill(r->server[0].pid, SIGSTOP) == 0);
    w->paused = true;
    RIG_UNTIL(r, w->resume);
    RIG_ASSERT(r, kill(r->server[0].pid, SIGCONT) == 0);
    rig_worker_done(r, m);
}

static void test_init_late(void **state)
{
    run(*state, init_late);
}

static void test_closed_by_callback(void **state)
{
    run(*state, closed_by_callback);
}

static void test_register_late(void **state)
{
    run(*state, register_late);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_init_late, rig_setup, rig_teardown),
                                       cmocka_unit_test_setup_teardown(test_from_callback, rig_setup, rig_teardown),
                                       cmocka_unit_test_setup_teardown(test_closed_by_callback, rig_setup, rig_teardown),
                                       cmocka_unit_test_setup_teardown(test_register_late, rig_setup, rig_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
