/* Members that join, leave, fall silent and return; the mode changes under them. */
#include "tests/integration/rig.h"

#include <signal.h>

enum { HOSTS = 2, N = 200, STEPS = 4 };

struct world {
    _Atomic int64_t steps[HOSTS + 1], size[HOSTS + 1], pushed;
    _Atomic uint64_t epoch;
    _Atomic int joined, fenced, phase;
    _Atomic bool stop;
    _Atomic pid_t pid;
    _Atomic int64_t from[4];
};
struct task {
    struct world *w;
    unsigned slot;
};

static struct world *start(struct rig *r, const char *members, struct task *task)
{
    struct world *w = rig_shared(r, sizeof *w);
    rig_server_options(r, "--servers", "2", "--members", members, "--loops", "2", "--shards", "6", "--chunk-bytes",
                       "512", NULL);
    rig_servers_start(r, 2);
    for (unsigned i = 0; i <= HOSTS; i++)
        task[i] = (struct task){w, i};
    return w;
}

static void ones(int64_t *x)
{
    for (int i = 0; i < N; i++)
        x[i] = 1;
}

/* ---- ranks and sizes ---- */

static void check_members(struct ks_job *j)
{
    struct ks_member m[8];
    uint64_t epoch = ks_epoch(j);
    int64_t n = ks_members(j, m, 8), rank = ks_rank(j), size = ks_size(j), ranks = 0;
    bool found = false;
    if (ks_epoch(j) != epoch)
        return; /* it changed while we looked */
    for (int64_t i = 0; i < n; i++) {
        RIG_MUST(j, m[i].rank == ranks && m[i].name[0] == 'w');
        ranks += m[i].local_size;
        found |= m[i].id == ks_member_id(j) && m[i].rank == rank;
    }
    RIG_MUST(j, found && ranks == size);
}

static void sum_step(struct ks_job *j, struct ks_tensor *t, int64_t *ret_sum)
{
    int64_t in[N], out[N];
    struct ks_handle *h;
    ones(in);
    RIG_OK(j, ks_push_pull(t, in, out, 1.0, &h));
    RIG_OK(j, ks_step_end(j));
    RIG_OK(j, ks_wait(h, -1));
    for (int i = 1; i < N; i++)
        RIG_MUST(j, out[i] == out[0]);
    *ret_sum = out[0];
}

static void stays(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_REDUCE, NULL);
    int64_t sum, before = ks_step(j);
    while (!w->stop) {
        sum_step(j, t, &sum);
        RIG_MUST(j, ks_step(j) == ++before);
        RIG_MUST(j, sum >= 1 && sum <= HOSTS + 1);
        check_members(j);
        w->size[task->slot] = sum;
        w->steps[task->slot]++;
    }
    ks_close(j);
}

static void visits(struct rig_self *s)
{
    struct world *w = ((struct task *)s->arg)->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_REDUCE, NULL);
    int64_t sum;
    RIG_MUST(j, ks_size(j) == HOSTS + 1 && ks_rank(j) == HOSTS);
    for (int i = 0; i < STEPS; i++) {
        sum_step(j, t, &sum);
        RIG_MUST(j, sum == HOSTS + 1);
        check_members(j);
    }
    RIG_OK(j, ks_leave(j, -1));
    RIG_MUST(j, ks_rank(j) == -1);
    RIG_GIVES(j, ks_step_end(j), KS_ESTATE);
    w->joined++;
    ks_close(j);
}

static void test_joins(void **state)
{
    struct rig *r = *state;
    struct task task[HOSTS + 1];
    struct world *w = start(r, "2", task);
    for (unsigned i = 0; i < HOSTS; i++)
        rig_worker_start(r, stays, &task[i]);
    for (int round = 0; round < 3; round++) {
        for (unsigned i = 0; i < HOSTS; i++)
            RIG_UNTIL(r, w->size[i] == HOSTS);
        unsigned visitor = rig_worker_start(r, visits, &task[HOSTS]);
        for (unsigned i = 0; i < HOSTS; i++)
            RIG_UNTIL(r, w->size[i] == HOSTS + 1);
        rig_worker_done(r, visitor);
        RIG_ASSERT(r, w->joined == round + 1);
    }
    w->stop = true;
    rig_workers_done(r);
}

/* ---- fenced ---- */

static void falls_silent(struct rig_self *s)
{
    struct world *w = ((struct task *)s->arg)->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "t", KS_I64, N, KS_REDUCE, NULL);
    uint64_t id = ks_member_id(j);
    int64_t in[N], out[N];
    struct ks_handle *h;
    struct ks_stats stats;
    ones(in);
    while (!w->stop) {
        int rc = ks_push_pull(t, in, out, 1.0, &h), ended = rc ? rc : ks_step_end(j);
        int waited = rc ? rc : ks_wait(h, -1);
        rc = waited ? waited : ended;
        RIG_MUST(j, rc == KS_OK || rc == KS_EFENCED);
        w->steps[HOSTS] += rc == 0;
        if (rc == KS_EFENCED) {
            w->fenced++;
            /* It goes on by itself, as a new member. */
            RIG_AWAIT(j, ks_step(j) >= 0);
            RIG_MUST(j, ks_member_id(j) != id);
            id = ks_member_id(j);
        }
    }
    ks_stats(j, &stats);
    RIG_MUST(j, (int)stats.rejoins == w->fenced);
    ks_close(j);
}

static void test_fenced(void **state)
{
    struct rig *r = *state;
    struct task task[HOSTS + 1];
    struct world *w = start(r, "3", task);
    unsigned silent = 0;
    for (unsigned i = 0; i <= HOSTS; i++)
        silent = rig_worker_start(r, i == HOSTS ? falls_silent : stays, &task[i]);
    for (int round = 1; round <= 2; round++) {
        int64_t next = w->steps[HOSTS] + 5;
        RIG_UNTIL(r, w->steps[HOSTS] >= next);
        rig_worker_signal(r, silent, SIGSTOP);
        /* The others go on without it, and then it returns. */
        for (unsigned i = 0; i < HOSTS; i++)
            RIG_UNTIL(r, w->size[i] == HOSTS);
        rig_worker_signal(r, silent, SIGCONT);
        RIG_UNTIL(r, w->fenced >= round);
        for (unsigned i = 0; i < HOSTS; i++)
            RIG_UNTIL(r, w->size[i] == HOSTS + 1);
    }
    w->stop = true;
    rig_workers_done(r);
    RIG_ASSERT(r, w->fenced == 2);
}

/* ---- modes ---- */

/* Pushes in whatever mode it is; what was acknowledged is counted. */
static void any_mode(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add");
    int64_t in[N], out[N];
    struct ks_handle *h;
    ones(in);
    while (!w->stop) {
        RIG_OK(j, ks_push(t, in, 1.0, &h));
        RIG_OK(j, ks_step_end(j));
        RIG_OK(j, ks_wait(h, -1));
        w->pushed++;
        w->steps[task->slot]++;
        if (w->steps[task->slot] % 4)
            continue;
        RIG_OK(j, ks_pull(t, out, &h));
        RIG_OK(j, ks_wait(h, -1));
        RIG_MUST(j, out[0] >= w->steps[task->slot]);
    }
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
}

static const struct {
    enum ks_mode_kind kind;
    uint32_t bound;
} change[] = {{KS_ASYNC, 0}, {KS_SSP, 2}, {KS_SYNC, 0}, {KS_SSP, 0}, {KS_ASYNC, 0}, {KS_SYNC, 0}};
enum { CHANGES = sizeof change / sizeof *change };

static void changes_mode(struct rig_self *s)
{
    struct task *task = s->arg;
    struct world *w = task->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add");
    int64_t in[N], last = -1;
    struct ks_handle *h;
    ones(in);
    for (unsigned c = 0; c < CHANGES; c++) {
        int64_t from = -1, asked = ks_step(j) + (c % 2 ? 0 : 3);
        uint32_t bound;
        RIG_OK(j, ks_mode_set(j, change[c].kind, change[c].bound, asked, &from));
        RIG_MUST(j, from >= asked && from > last);
        last = from;
        while (ks_step(j) < from + 6) {
            if (ks_step(j) >= from)
                RIG_MUST(j, ks_mode(j, &bound) == change[c].kind && bound == change[c].bound);
            RIG_OK(j, ks_push(t, in, 1.0, &h));
            RIG_OK(j, ks_step_end(j));
            RIG_OK(j, ks_wait(h, -1));
            RIG_OK(j, ks_step_wait(j, -1));
            w->pushed++;
        }
    }
    w->phase = CHANGES;
    w->stop = true;
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
}

static void reads(struct rig_self *s)
{
    struct world *w = ((struct task *)s->arg)->w;
    struct ks_job *j = rig_open(s);
    struct ks_tensor *t = rig_tensor(j, "p", KS_I64, N, KS_PARAM, "add");
    int64_t out[N];
    struct ks_handle *h;
    RIG_OK(j, ks_pull(t, out, &h));
    RIG_OK(j, ks_wait(h, -1));
    for (int i = 0; i < N; i++)
        if (out[i] != w->pushed)
            rig_die(j, __FILE__, __LINE__, "element %d is %lld of %lld", i, (long long)out[i], (long long)w->pushed);
    ks_close(j);
}

static void test_modes(void **state)
{
    struct rig *r = *state;
    struct task task[HOSTS + 1];
    struct world *w = start(r, "3", task);
    for (unsigned i = 0; i <= HOSTS; i++)
        rig_worker_start(r, i == HOSTS ? changes_mode : any_mode, &task[i]);
    rig_workers_done(r);
    RIG_ASSERT(r, w->phase == CHANGES);
    rig_worker_done(r, rig_worker_start(r, reads, &task[0]));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, rig_setup, rig_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(test_joins), TEST(test_fenced), TEST(test_modes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
