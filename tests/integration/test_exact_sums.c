/* Integers pushed while members and servers are killed at random moments: the final sums are exactly what was
 * acknowledged, for each life and each chunk. TEST_SEED sets the seed. */
#include "tests/integration/rig.h"

#include <signal.h>

enum {
    LIVES = 64,
    CHUNKS = 5,
    N = LIVES * CHUNKS,
    PARAMS = 2,
    MEMBERS = 3,
    SERVERS = 2,
    EVENTS = 10,
    STEPS_MAX = 1 << 16,
    IN_FLIGHT = 3
};

struct life {
    _Atomic int64_t pushed, acked, steps;
    _Atomic bool ended_well;
};
struct world {
    struct life life[LIVES];
    _Atomic unsigned next_life;
    _Atomic bool stop;
    _Atomic uint64_t result_of_step[STEPS_MAX]; /* hash of a step's sum: everybody sees the same */
    int64_t final[PARAMS][N], running[N];
    bool sync, mixed, read;
};

/* A life's numbers stand in one place of every chunk. */
static void fill(int64_t *out, unsigned life, int64_t value)
{
    memset(out, 0, N * sizeof *out);
    for (unsigned c = 0; c < CHUNKS; c++)
        out[c * LIVES + life] = value;
}

static struct ks_tensor *tensor(struct ks_job *j, unsigned i)
{
    char name[16];
    snprintf(name, sizeof name, "p%u", i);
    return i < PARAMS ? rig_tensor(j, name, KS_I64, N, KS_PARAM, "add")
                      : rig_tensor(j, "sum", KS_I64, N, KS_REDUCE, NULL);
}

static unsigned life_new(struct world *w, const struct ks_job *j)
{
    unsigned l = atomic_fetch_add(&w->next_life, 1);
    RIG_MUST(j, l < LIVES);
    return l;
}

/* ---- a member ---- */

/* All of a step or nothing of it; the same for all. */
static void step_check(struct world *w, const struct ks_job *j, int64_t step, unsigned life, int64_t value,
                       const int64_t *sum)
{
    uint64_t hash = hash_bytes(sum, N * sizeof *sum) | 1, none = 0;
    for (unsigned i = LIVES; i < N; i++)
        RIG_MUST(j, sum[i] == sum[i % LIVES]);
    RIG_MUST(j, sum[life] == value);
    RIG_MUST(j, step < STEPS_MAX);
    RIG_MUST(j, atomic_compare_exchange_strong(&w->result_of_step[step], &none, hash) || none == hash);
}

/* Slow machines may find a living member dead: it goes on as a new life. */
static bool fenced(const struct ks_job *j, int rc)
{
    RIG_MUST(j, rc == KS_OK || rc == KS_EFENCED);
    return rc == KS_EFENCED;
}

/* KS_OK or KS_EFENCED. */
static int sync_step(struct world *w, struct ks_job *j, struct ks_tensor **t, unsigned life, int64_t value)
{
    static int64_t in[N], out[PARAMS + 1][N];
    struct ks_handle *h[PARAMS + 1];
    int64_t step = ks_step(j);
    int worst = 0;
    fill(in, life, value);
    atomic_fetch_add(&w->life[life].pushed, value);
    for (unsigned i = 0; i <= PARAMS; i++) {
        int rc = ks_push_pull(t[i], in, out[i], 1.0, &h[i]);
        h[i] = rc ? NULL : h[i];
        worst = fenced(j, rc) ? rc : worst;
    }
    worst = fenced(j, ks_step_end(j)) ? KS_EFENCED : worst;
    for (unsigned i = 0; i <= PARAMS; i++)
        if (h[i] && fenced(j, ks_wait(h[i], -1)))
            worst = KS_EFENCED;
    if (worst)
        return worst;
    step_check(w, j, step, life, value, out[PARAMS]);
    for (unsigned i = 0; i < PARAMS; i++)
        for (unsigned k = LIVES; k < N; k++)
            RIG_MUST(j, out[i][k] == out[i][k % LIVES]);
    atomic_fetch_add(&w->life[life].acked, value);
    return 0;
}

/* What was acknowledged before is seen by a pull after it. */
static int own_pushes_seen(struct ks_job *j, struct ks_tensor *t, unsigned life, int64_t acked)
{
    static int64_t now[N];
    struct ks_handle *h;
    if (fenced(j, ks_pull(t, now, &h)) || fenced(j, ks_wait(h, -1)))
        return KS_EFENCED;
    for (unsigned c = 0; c < CHUNKS; c++)
        RIG_MUST(j, now[c * LIVES + life] >= acked);
    return 0;
}

static int async_step(struct world *w, struct ks_job *j, struct ks_tensor **t, unsigned life, int64_t value)
{
    static int64_t in[IN_FLIGHT][N];
    struct ks_handle *h[IN_FLIGHT][PARAMS + 1];
    int worst = 0;
    for (unsigned f = 0; f < IN_FLIGHT; f++) {
        fill(in[f], life, value);
        atomic_fetch_add(&w->life[life].pushed, value);
        for (unsigned i = 0; i <= PARAMS; i++) {
            int rc = ks_push(t[i], in[f], 1.0, &h[f][i]);
            h[f][i] = fenced(j, rc) ? NULL : h[f][i];
        }
    }
    for (unsigned f = 0; f < IN_FLIGHT; f++) {
        int mine = 0;
        for (unsigned i = 0; i <= PARAMS; i++)
            if (!h[f][i] || fenced(j, ks_wait(h[f][i], -1)))
                mine = KS_EFENCED;
        if (mine == 0)
            atomic_fetch_add(&w->life[life].acked, value);
        worst = mine ? mine : worst;
    }
    if (!worst)
        worst = own_pushes_seen(j, t[0], life, w->life[life].acked);
    return fenced(j, ks_step_end(j)) ? KS_EFENCED : worst;
}

/* Whatever the mode is; now and then somebody changes it. */
static int mixed_step(struct world *w, struct ks_job *j, struct ks_tensor **t, unsigned life, int64_t value)
{
    static const enum ks_mode_kind kinds[] = {KS_SYNC, KS_SSP, KS_ASYNC};
    static struct rng g;
    static int64_t in[N];
    struct ks_handle *h[PARAMS];
    int worst = 0;
    g.state = g.state ? g.state : ks_member_id(j);
    if (rng_chance(&g, 30)) {
        enum ks_mode_kind kind = kinds[rng_below(&g, 3)];
        uint32_t bound = kind == KS_SSP ? (uint32_t)rng_below(&g, 3) : 0;
        if (fenced(j, ks_mode_set(j, kind, bound, ks_step(j) + (int64_t)rng_below(&g, 4), NULL)))
            return KS_EFENCED;
    }
    fill(in, life, value);
    atomic_fetch_add(&w->life[life].pushed, value);
    for (unsigned i = 0; i < PARAMS; i++) {
        int rc = ks_push(t[i], in, 1.0, &h[i]);
        h[i] = fenced(j, rc) ? NULL : h[i];
    }
    worst = fenced(j, ks_step_end(j)) ? KS_EFENCED : 0;
    for (unsigned i = 0; i < PARAMS; i++)
        if (!h[i] || fenced(j, ks_wait(h[i], -1)))
            worst = KS_EFENCED;
    if (worst)
        return worst;
    atomic_fetch_add(&w->life[life].acked, value);
    return own_pushes_seen(j, t[0], life, w->life[life].acked);
}

static void member(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_tensor *t[PARAMS + 1];
    struct ks_job *j = rig_open(s);
    unsigned life = life_new(w, j);
    for (unsigned i = 0; i <= PARAMS; i++)
        t[i] = tensor(j, i);
    for (int64_t n = 0; !w->stop; n++) {
        int rc = (w->mixed ? mixed_step : w->sync ? sync_step : async_step)(w, j, t, life, 1 + n % 5);
        if (rc == KS_EFENCED)
            life = life_new(w, j);
        else
            atomic_fetch_add(&w->life[life].steps, 1);
    }
    RIG_OK(j, ks_leave(j, -1));
    ks_close(j);
    w->life[life].ended_well = true;
}

static void reader(struct rig_self *s)
{
    struct world *w = s->arg;
    struct ks_job *j = rig_open(s);
    struct ks_handle *h;
    for (unsigned i = 0; i < (w->sync || w->mixed ? PARAMS : PARAMS + 1u); i++) {
        RIG_OK(j, ks_pull(tensor(j, i), i < PARAMS ? w->final[i] : w->running, &h));
        RIG_OK(j, ks_wait(h, -1));
    }
    w->read = true;
    ks_close(j);
}

/* ---- the test ---- */

static int64_t steps(const struct world *w)
{
    int64_t n = 0;
    for (unsigned l = 0; l < LIVES; l++)
        n += w->life[l].steps;
    return n;
}

static void check_sums(struct rig *r, const struct world *w, const int64_t *sum, const char *what)
{
    for (unsigned i = 0; i < N; i++) {
        const struct life *l = &w->life[i % LIVES];
        int64_t acked = l->acked, pushed = l->pushed;
        if (sum[i] < acked || sum[i] > pushed || (l->ended_well && acked != pushed))
            RIG_FAIL(r, "%s: life %u, chunk %u: %lld is applied, %lld acknowledged, %lld pushed%s", what, i % LIVES,
                     i / LIVES, (long long)sum[i], (long long)acked, (long long)pushed,
                     l->ended_well ? " (ended well)" : "");
        if (w->sync && sum[i] != sum[i % LIVES])
            RIG_FAIL(r, "%s: life %u: chunk %u has %lld, chunk 0 %lld", what, i % LIVES, i / LIVES, (long long)sum[i],
                     (long long)sum[i % LIVES]);
    }
}

static uint64_t seed(void)
{
    const char *v = getenv("TEST_SEED");
    return v && *v ? strtoull(v, NULL, 10) : 1;
}

static void hurt_servers(struct rig *r, struct rng *g)
{
    unsigned i = (unsigned)rng_below(g, SERVERS);
    rig_server_kill(r, i);
    if (rng_chance(g, 250)) {
        /* All of them. */
        for (unsigned k = 0; k < SERVERS; k++)
            if (k != i)
                rig_server_kill(r, k);
        rig_servers_start(r, SERVERS);
        return;
    }
    if (rng_chance(g, 250)) {
        /* Once more while it starts. */
        rig_server_launch(r, i, NULL, NULL, NULL);
        for (uint64_t n = rng_below(g, 40); n > 0; n--)
            rig_look(r);
        rig_server_kill(r, i);
    }
    rig_server_start(r, i);
}

static void hurt(struct rig *r, struct world *w, struct rng *g, unsigned *member_of, bool servers_too)
{
    if (servers_too && rng_chance(g, 400)) {
        hurt_servers(r, g);
        return;
    }
    unsigned i = (unsigned)rng_below(g, MEMBERS);
    rig_worker_kill(r, member_of[i]);
    member_of[i] = rig_worker_start(r, member, w);
}

static void run(void **state, const char *mode, const char *durability)
{
    struct rig *r = *state;
    struct rng g = {seed()};
    struct world *w = rig_shared(r, sizeof *w);
    unsigned member_of[MEMBERS];
    w->mixed = !strcmp(mode, "mixed");
    w->sync = !strcmp(mode, "sync");
    rig_server_options(r, "--servers", "2", "--loops", "2", "--shards", "6", "--chunk-bytes", "512", "--mode",
                       w->mixed ? "sync" : mode, "--durability", durability, NULL);
    rig_servers_start(r, SERVERS);
    for (unsigned i = 0; i < MEMBERS; i++)
        member_of[i] = rig_worker_start(r, member, w);
    for (unsigned e = 0; e < EVENTS; e++) {
        int64_t next = steps(w) + 1 + (int64_t)rng_below(&g, 40);
        RIG_UNTIL(r, steps(w) >= next);
        hurt(r, w, &g, member_of, !strcmp(durability, "write"));
    }
    int64_t next = steps(w) + 20;
    RIG_UNTIL(r, steps(w) >= next);
    w->stop = true;
    rig_workers_done(r);
    rig_worker_done(r, rig_worker_start(r, reader, w));
    RIG_ASSERT(r, w->read);
    for (unsigned i = 0; i < PARAMS; i++)
        check_sums(r, w, w->final[i], "parameter");
    if (!w->sync && !w->mixed)
        check_sums(r, w, w->running, "running sum");
}

static void test_sync(void **state)
{
    run(state, "sync", "write");
}

static void test_sync_in_memory(void **state)
{
    run(state, "sync", "none");
}

static void test_ssp(void **state)
{
    run(state, "ssp:2", "write");
}

static void test_async(void **state)
{
    run(state, "async", "write");
}

static void test_mixed(void **state)
{
    run(state, "mixed", "write");
}

static void test_mixed_in_memory(void **state)
{
    run(state, "mixed", "none");
}

static void test_async_in_memory(void **state)
{
    run(state, "async", "none");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sync, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_sync_in_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_ssp, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_in_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_mixed, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_mixed_in_memory, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
