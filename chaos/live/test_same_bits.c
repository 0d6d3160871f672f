/* deterministic=on: a run in which a member dies at some step, and a server in the middle, equals bit for bit, step by step, a
 * run without faults that this member leaves in good order after the last step that counts it. */
#include "chaos/live/live.h"

#include <math.h>

enum { MEMBERS = 3, SERVERS = 3, STEPS = 400, N = 3000, TENSORS = 2, DIES = MEMBERS - 1, PAUSE_MS = 2 };

struct run {
    _Atomic uint64_t hash[STEPS];           /* of all values after the step */
    _Atomic int64_t set[STEPS];             /* bits: slots that it counts */
    _Atomic int64_t done[MEMBERS];          /* steps */
    _Atomic unsigned worker[MEMBERS];       /* that has the slot, plus 1 */
    int64_t last;                           /* of the slot DIES, which leaves then; STEPS: it does not leave */
};

static const struct ks_spec specs[TENSORS] = {
    {.dtype = KS_F32, .ndims = 1, .dims = {N}, .kind = KS_PARAM, .op = KS_AVERAGE, .optimizer = "adamw lr=0.01 wd=0.01"},
    {.dtype = KS_F32, .ndims = 1, .dims = {N}, .kind = KS_PARAM, .op = KS_SUM, .optimizer = "sgd lr=0.05 momentum=0.9"},
};

/* What has a bit of its own in the value comes back with all bits of it. */
static void gradient(unsigned slot, int64_t step, unsigned tensor, const float *value, float *ret)
{
    struct rng g = {slot * 1000003ull + (uint64_t)step * 1009 + tensor};
    for (unsigned i = 0; i < N; i++)
        ret[i] = (float)((double)rng_below(&g, 2000001) / 1e6 - 1.0) + 0.1f * value[i];
}

static void tensors_open(struct ks_job *j, struct ks_tensor **t, struct ks_tensor **ret_who, float value[TENSORS][N])
{
    struct ks_handle *h;
    for (unsigned i = 0; i < TENSORS; i++) {
        struct rng g = {i + 1};
        RIG_OK(j, ks_tensor_register(j, i ? "momentum" : "adam", &specs[i], &t[i]));
        for (unsigned k = 0; k < N; k++)
            value[i][k] = (float)((double)rng_below(&g, 2000001) / 1e6 - 1.0);
        RIG_OK(j, ks_init(t[i], value[i], -1, NULL));
        RIG_OK(j, ks_pull(t[i], value[i], &h));
        RIG_OK(j, ks_wait(h, -1));
    }
    *ret_who = rig_tensor(j, "who", KS_I64, 1, KS_REDUCE, NULL);
}

static void same(const struct ks_job *j, struct run *run, int64_t step, float value[TENSORS][N], int64_t who)
{
    uint64_t hash = hash_bytes(value, TENSORS * N * sizeof(float)) | 1, none = 0;
    int64_t nobody = 0;
    for (unsigned i = 0; i < TENSORS * N; i++)
        RIG_MUST(j, isfinite(value[i / N][i % N]));
    RIG_MUST(j, atomic_compare_exchange_strong(&run->hash[step], &none, hash) || none == hash);
    RIG_MUST(j, atomic_compare_exchange_strong(&run->set[step], &nobody, who) || nobody == who);
}

static void member(struct rig_self *s)
{
    static float value[TENSORS][N], grad[TENSORS][N];
    struct run *run = s->arg;
    struct ks_tensor *t[TENSORS], *who;
    struct ks_handle *h[TENSORS + 1];
    struct ks_job *j = rig_open(s);
    unsigned slot = (unsigned)ks_rank(j);
    RIG_MUST(j, ks_step(j) == 0 && ks_size(j) == MEMBERS);
    run->worker[slot] = s->index + 1;
    tensors_open(j, t, &who, value);
    for (int64_t step = 0; step < STEPS && (slot != DIES || step <= run->last); step++) {
        int64_t mine = 1 << slot, all = 0;
        RIG_MUST(j, ks_step(j) == step);
        for (unsigned i = 0; i < TENSORS; i++) {
            gradient(slot, step, i, value[i], grad[i]);
            RIG_OK(j, ks_push_pull(t[i], grad[i], value[i], 1.0, &h[i]));
        }
        RIG_OK(j, ks_push_pull(who, &mine, &all, 1.0, &h[TENSORS]));
        RIG_OK(j, ks_step_end(j));
        for (unsigned i = 0; i <= TENSORS; i++)
            RIG_OK(j, ks_wait(h[i], -1));
        RIG_OK(j, ks_step_wait(j, -1));
        same(j, run, step, value, all);
        run->done[slot]++;
        for (unsigned i = 0; i < PAUSE_MS; i++)
            rig_pause();
    }
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
}

static void start(struct rig *r, struct run *run, unsigned first_server)
{
    for (unsigned i = 0; i < SERVERS; i++)
        rig_server_launch(r, first_server + i, NULL, NULL, NULL);
    for (unsigned i = 0; i < SERVERS; i++)
        rig_server_await(r, first_server + i);
    for (unsigned i = 0; i < MEMBERS; i++)
        rig_worker_start(r, member, run);
}

static void with_faults(struct rig *r, struct run *run, struct rng *g)
{
    unsigned server = (unsigned)rng_below(g, SERVERS);
    int64_t member_dies = 20 + (int64_t)rng_below(g, 200), server_dies = 20 + (int64_t)rng_below(g, 200);
    int64_t first = member_dies < server_dies ? member_dies : server_dies;
    run->last = STEPS;
    start(r, run, 0);
    RIG_UNTIL(r, run->done[0] >= first);
    if (first != server_dies)
        rig_worker_kill(r, run->worker[DIES] - 1);
    RIG_UNTIL(r, run->done[0] >= server_dies);
    rig_server_kill(r, server);
    RIG_UNTIL(r, run->done[0] >= member_dies);
    if (first == server_dies)
        rig_worker_kill(r, run->worker[DIES] - 1);
    rig_server_start(r, server);
    rig_workers_done(r);
    fprintf(stderr, "member killed at step %lld, server %u at step %lld\n", (long long)member_dies, server,
            (long long)server_dies);
}

static int64_t last_of(const struct run *run)
{
    int64_t last = -1;
    for (int64_t step = 0; step < STEPS; step++)
        if (run->set[step] >> DIES & 1)
            last = step;
    return last;
}

static void stop(struct rig *r)
{
    char text[RIG_TEXT];
    for (unsigned i = 0; i < r->nservers; i++)
        r->server[i].may_end = true;
    if (rig_command(r, text, "stop", NULL))
        RIG_FAIL(r, "keepstep stop: %s", text);
    for (unsigned i = 0; i < r->nservers; i++)
        RIG_UNTIL(r, r->server[i].pid == 0);
}

static void test_same_bits(void **state)
{
    struct rig *r = *state;
    struct rng g = {live_seed("same bits")};
    uint64_t end = clock_now_us() + live_seconds(1) * 1000000ull;
    unsigned server = 0;
    rig_server_options(r, "--servers", "3", "--members", "3", "--loops", "2", "--shards", "8", "--chunk-bytes", "2048",
                       "--durability", "none", "--replicas", "1", "--deterministic", "on", NULL);
    do {
        struct run *a = rig_shared(r, sizeof *a), *b = rig_shared(r, sizeof *b);
        snprintf(r->job, sizeof r->job, "faults%u", server);
        with_faults(r, a, &g);
        stop(r);
        b->last = last_of(a);
        RIG_ASSERT(r, b->last >= 0 && b->last < STEPS - 1);
        snprintf(r->job, sizeof r->job, "none%u", server++);
        start(r, b, 0);
        rig_workers_done(r);
        for (int64_t step = 0; step < STEPS; step++)
            if (a->hash[step] != b->hash[step] || a->set[step] != b->set[step] || !a->hash[step])
                RIG_FAIL(r, "step %lld: sets %llx and %llx, hashes %llx and %llx; the member's last is %lld", (long long)step,
                         (long long)a->set[step], (long long)b->set[step], (unsigned long long)a->hash[step],
                         (unsigned long long)b->hash[step], (long long)b->last);
        stop(r);
    } while (clock_now_us() < end && r->nworkers + 2 * MEMBERS < RIG_WORKERS && r->nmaps + 2 < RIG_MAPS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_same_bits, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
