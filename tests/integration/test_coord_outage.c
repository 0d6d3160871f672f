/* etcd stops answering, is killed, comes back, during training: training goes on without an error, and a new member can
 * join afterwards. */
#include "tests/integration/rig.h"

#include <signal.h>

#include "tests/contract/etcd_process.h"

enum { MEMBERS = 2, SERVERS = 2, N = 64, LONGER_THAN_LEASES_MS = 5000, JOIN_MS = 30000 };

struct world {
    _Atomic int64_t steps[MEMBERS], joined, rejoins;
    _Atomic bool stop;
};
struct task {
    struct world *w;
    unsigned slot;
};

static int64_t step(struct ks_job *j, struct ks_tensor *t)
{
    static int64_t in[N], out[N];
    struct ks_handle *h;
    for (unsigned i = 0; i < N; i++)
        in[i] = 1;
    RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
    RIG_OK(j, ks_step_end(j));
    RIG_OK(j, ks_wait(h, -1));
    for (unsigned i = 1; i < N; i++)
        RIG_MUST(j, out[i] == out[0]);
    return out[0];
}

static void member(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_REDUCE, NULL);
    struct ks_stats stats;
    while (!w->stop) {
        int64_t sum = step(j, t);
        RIG_MUST(j, sum >= 1 && sum <= MEMBERS + 1);
        w->steps[task->slot]++;
    }
    ks_stats(j, &stats);
    w->rejoins += (int64_t)stats.rejoins;
    ks_close(j);
}

static void guest(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_REDUCE, NULL);
    for (int i = 0; i < 3; i++)
        RIG_MUST(j, step(j, t) == MEMBERS + 1);
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
    w->joined++;
}

static int64_t least(const struct world *w)
{
    int64_t n = w->steps[0];
    for (unsigned i = 1; i < MEMBERS; i++)
        n = w->steps[i] < n ? w->steps[i] : n;
    return n;
}

/* Training goes on for that long; a hundred steps at the least. */
static void goes_on(struct rig *r, const struct world *w, int64_t ms)
{
    uint64_t end = clock_now_us() + (uint64_t)ms * 1000;
    int64_t next = least(w) + 100;
    RIG_UNTIL(r, least(w) >= next && clock_now_us() > end);
}

static void somebody_joins(struct rig *r, struct world *w)
{
    int64_t before = w->joined;
    rig_worker_start(r, guest, w);
    RIG_UNTIL_MS(r, w->joined > before, JOIN_MS);
}

static void stopped_and_continued(struct rig *r, struct world *w, struct etcd_member *etcd, int64_t ms)
{
    kill(etcd->pid, SIGSTOP);
    goes_on(r, w, ms);
    kill(etcd->pid, SIGCONT);
    goes_on(r, w, 0);
    somebody_joins(r, w);
}

static void killed_and_restarted(struct rig *r, struct world *w, struct etcd_member *etcd)
{
    etcd_kill(etcd);
    goes_on(r, w, LONGER_THAN_LEASES_MS);
    etcd_launch(etcd);
    RIG_ASSERT(r, etcd_await(etcd));
    goes_on(r, w, 0);
    somebody_joins(r, w);
}

static void test_outages(void **state)
{
    struct rig *r = *state;
    struct etcd_member etcd = {0};
    struct task task[MEMBERS];
    char url[128], coord[160];
    if (etcd_missing()) {
        print_message("skipped: %s\n", etcd_missing());
        skip();
    }
    struct world *w = rig_shared(r, sizeof *w);
    RIG_ASSERT(r, etcd_start_alone(&etcd, r->dir));
    etcd_url(&etcd, url, sizeof url);
    snprintf(coord, sizeof coord, "etcd:%s", url);
    rig_coord(r, coord);
    rig_server_options(r, "--durability", "none", "--loops", "2", "--shards", "8", "--servers", "2", "--members", "2",
                       NULL);
    rig_servers_start(r, SERVERS);
    for (unsigned i = 0; i < MEMBERS; i++) {
        task[i] = (struct task){w, i};
        rig_worker_start(r, member, &task[i]);
    }
    goes_on(r, w, 0);
    stopped_and_continued(r, w, &etcd, 500);
    stopped_and_continued(r, w, &etcd, LONGER_THAN_LEASES_MS);
    killed_and_restarted(r, w, &etcd);
    w->stop = true;
    rig_workers_done(r);
    RIG_ASSERT(r, w->rejoins == 0);
    for (unsigned i = 0; i < SERVERS; i++)
        rig_server_stop(r, i);
    etcd_kill(&etcd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_outages, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
