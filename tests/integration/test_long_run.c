/* A hundred thousand steps, and fewer in the other modes and on disk: neither a server's nor a member's memory grows,
 * nor what is on disk. A shorter run with two members while a third joins and leaves, over and over. */
#include "tests/integration/rig.h"

#include <ftw.h>
#include <sys/stat.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
/* Sanitizers keep what is freed and trace what runs: memory says nothing, the steps do. */
enum { STEPS = 4000, WARM_UP = 1000, GUESTS = 8, WATCH_MEMORY = 0, SHORT_STEPS = 1000 };
#else
enum { STEPS = 100000, WARM_UP = 10000, GUESTS = 40, WATCH_MEMORY = 1, SHORT_STEPS = 12000 };
#endif
enum { N = 16, GROWTH_KIB_MAX = 1024, GROWTH_DISK_MAX = 1 << 20, MEMBERS = 2, GUEST_STEPS = 5 };

struct world {
    _Atomic int64_t steps[MEMBERS];
    _Atomic int guests_left;
    _Atomic bool stop;
    int64_t last, wanted;
};
struct task {
    struct world *w;
    unsigned slot;
};

static void step(struct ks_job *j, struct ks_tensor *p, struct ks_tensor *sum, int64_t *ret_value)
{
    static int64_t in[N], out[N];
    struct ks_handle *a, *b;
    in[0] = 1;
    RIG_OK(j, ks_push_pull(p, in, ret_value, 1.0, &a));
    RIG_OK(j, ks_push_pull(sum, in, out, 1.0, &b));
    RIG_OK(j, ks_step_end(j));
    RIG_OK(j, ks_wait(a, -1));
    RIG_OK(j, ks_wait(b, -1));
    RIG_MUST(j, out[0] >= 1 && ret_value[0] >= 1);
}

static void alone(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *p = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add"),
                     *sum = rig_tensor(j, "s", KS_I64, N, KS_REDUCE, NULL);
    int64_t value[N];
    for (int64_t i = 1; i <= w->wanted; i++) {
        step(j, p, sum, value);
        RIG_MUST(j, value[0] == i);
        w->steps[0] = i;
    }
    w->last = value[0];
    /* The process stays until its memory has been measured. */
    RIG_AWAIT(j, w->stop);
    ks_close(j);
}

static void host(struct rig_self *s)
{
    struct task *task = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *p = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add"),
                     *sum = rig_tensor(j, "s", KS_I64, N, KS_REDUCE, NULL);
    int64_t value[N];
    while (!task->w->stop) {
        step(j, p, sum, value);
        task->w->steps[task->slot]++;
    }
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
}

static void guest(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *p = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add"),
                     *sum = rig_tensor(j, "s", KS_I64, N, KS_REDUCE, NULL);
    int64_t value[N];
    for (int i = 0; i < GUEST_STEPS; i++)
        step(j, p, sum, value);
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
    w->guests_left++;
}

static void check_growth(struct rig *r, const char *who, long before, long after)
{
    if (WATCH_MEMORY && after > before + GROWTH_KIB_MAX)
        RIG_FAIL(r, "%s grew from %ld to %ld KiB", who, before, after);
}

static off_t disk_bytes;

static int add_bytes(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)path;
    (void)ftw;
    disk_bytes += flag == FTW_F ? st->st_blocks * 512 : 0;
    return 0;
}

static off_t on_disk(const struct rig *r)
{
    char dir[200];
    snprintf(dir, sizeof dir, "%s/data-0", r->dir);
    disk_bytes = 0;
    nftw(dir, add_bytes, 16, FTW_PHYS);
    return disk_bytes;
}

static void run_alone(void **state, const char *mode, const char *durability, int64_t steps, int64_t warm_up)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    w->wanted = steps;
    rig_server_options(r, "--durability", durability, "--mode", mode, "--loops", "2", "--shards", "8", NULL);
    rig_server_start(r, 0);
    unsigned m = rig_worker_start(r, alone, w);
    RIG_UNTIL_MS(r, w->steps[0] >= warm_up, 60000);
    long server = rig_rss(r->server[0].pid), member = rig_rss(r->worker[m].pid);
    off_t disk = on_disk(r);
    RIG_UNTIL_MS(r, w->steps[0] >= steps, 120000);
    check_growth(r, "the server", server, rig_rss(r->server[0].pid));
    check_growth(r, "the member", member, rig_rss(r->worker[m].pid));
    if (on_disk(r) > disk + GROWTH_DISK_MAX)
        RIG_FAIL(r, "the data grew from %lld to %lld bytes", (long long)disk, (long long)on_disk(r));
    w->stop = true;
    rig_workers_done(r);
    RIG_ASSERT(r, w->last == steps);
}

static void test_alone(void **state)
{
    run_alone(state, "sync", "none", STEPS, WARM_UP);
}

static void test_alone_async(void **state)
{
    run_alone(state, "async", "none", SHORT_STEPS, SHORT_STEPS / 4);
}

static void test_alone_bounded(void **state)
{
    run_alone(state, "ssp:1", "none", SHORT_STEPS, SHORT_STEPS / 4);
}

static void test_alone_on_disk(void **state)
{
    run_alone(state, "sync", "write", SHORT_STEPS / 8, SHORT_STEPS / 32);
}

static void test_alone_async_on_disk(void **state)
{
    run_alone(state, "async", "write", SHORT_STEPS / 8, SHORT_STEPS / 32);
}

static void test_joins_and_leaves(void **state)
{
    struct rig *r = *state;
    struct world *w = rig_shared(r, sizeof *w);
    struct task task[MEMBERS];
    long server = 0, member[MEMBERS] = {0};
    rig_server_options(r, "--durability", "none", "--loops", "2", "--shards", "8", NULL);
    rig_server_start(r, 0);
    for (unsigned i = 0; i < MEMBERS; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, host, &task[i]);
    }
    for (int i = 0; i < GUESTS; i++) {
        if (i == GUESTS / 4) {
            server = rig_rss(r->server[0].pid);
            for (unsigned k = 0; k < MEMBERS; k++)
                member[k] = rig_rss(r->worker[k].pid);
        }
        rig_worker_done(r, rig_worker_start(r, guest, w));
        RIG_ASSERT(r, w->guests_left == i + 1);
    }
    check_growth(r, "the server", server, rig_rss(r->server[0].pid));
    for (unsigned k = 0; k < MEMBERS; k++)
        check_growth(r, "a member", member[k], rig_rss(r->worker[k].pid));
    w->stop = true;
    rig_workers_done(r);
    RIG_ASSERT(r, w->steps[0] >= GUESTS * GUEST_STEPS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_alone, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_alone_async, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_alone_bounded, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_alone_on_disk, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_alone_async_on_disk, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_joins_and_leaves, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
