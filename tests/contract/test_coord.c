/* The same cases and the same random sequence against every implementation of coord.h. The model is the oracle. */
#include "coord_rig.h"

#include <signal.h>

#include "base/rng.h"
#include "coord_world.h"

static struct world world;

static void open_rig(struct rig *r, const char *job)
{
    rig_init(r);
    world.backend->open(&world, r, job);
}

static void test_guards(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, "guards");
    struct coord_request q = {0};
    rig_guard(&q, GUARD_ABSENT, "a", 0);
    rig_op(&q, "a", "1", 0);
    struct coord_event first = rig_ask(&r, &q), again = rig_ask(&r, &q);
    assert_int_equal(first.status, 0);
    assert_true(first.succeeded);
    assert_int_equal(again.status, 0);
    assert_false(again.succeeded);
    assert_int_equal(again.revision, first.revision);

    struct coord_request mod = {0};
    rig_guard(&mod, GUARD_MOD_REVISION, "a", first.revision);
    rig_op(&mod, "a", "2", 0);
    struct coord_event second = rig_ask(&r, &mod);
    assert_true(second.succeeded);
    assert_int_equal(second.revision, first.revision + 1);
    assert_false(rig_ask(&r, &mod).succeeded);

    struct coord_request create = {0};
    rig_guard(&create, GUARD_CREATE_REVISION, "a", first.revision);
    rig_guard(&create, GUARD_ABSENT, "b", 0);
    rig_op(&create, "a", "3", 0);
    assert_true(rig_ask(&r, &create).succeeded);
    create.guard[0].revision++;
    assert_false(rig_ask(&r, &create).succeeded);
    struct coord_event e = rig_range(&r, "a");
    assert_int_equal(e.nkv, 1);
    assert_string_equal(e.kv[0].value, "3");
    assert_int_equal(e.kv[0].create_revision, first.revision);
    assert_int_equal(e.kv[0].mod_revision, e.revision);
    coord_event_done(&e);
    rig_done(&r);
}

static void test_txn_is_atomic(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, "atomic");
    int64_t before = rig_put(&r, "x", "old", 0);
    struct coord_request q = {0};
    rig_guard(&q, GUARD_MOD_REVISION, "x", before);
    rig_guard(&q, GUARD_ABSENT, "y", 0);
    rig_op(&q, "x", NULL, 0);
    rig_op(&q, "y", "1", 0);
    rig_op(&q, "z", "2", 0);
    struct coord_event e = rig_ask(&r, &q);
    assert_true(e.succeeded);
    assert_int_equal(e.revision, before + 1);
    q.op[2].value = "never";
    assert_false(rig_ask(&r, &q).succeeded);

    struct coord_request lost = {0};
    rig_op(&lost, "y", "never", 0);
    rig_op(&lost, "w", "never", 987654321);
    e = rig_ask(&r, &lost);
    assert_int_equal(e.status, KS_ENOENT);

    e = rig_range(&r, "");
    assert_int_equal(e.nkv, 2);
    assert_string_equal(e.kv[0].key, "y");
    assert_string_equal(e.kv[0].value, "1");
    assert_string_equal(e.kv[1].value, "2");
    assert_int_equal(e.kv[0].mod_revision, before + 1);
    assert_int_equal(e.kv[1].mod_revision, before + 1);
    coord_event_done(&e);
    rig_done(&r);
}

static void test_range_is_ordered(void **state)
{
    (void)state;
    struct rig r;
    static const char *const key[] = {"m/b", "m/a", "m/c/1", "n", "l", "m/", "m", "m0", "m/~", "m/\xc3\xa9"};
    static const char *const want[] = {"m/", "m/a", "m/b", "m/c/1", "m/~", "m/\xc3\xa9"};
    open_rig(&r, "range");
    for (size_t i = 0; i < sizeof key / sizeof *key; i++)
        rig_put(&r, key[i], key[i], 0);
    struct coord_event e = rig_range(&r, "m/");
    assert_int_equal(e.nkv, sizeof want / sizeof *want);
    for (uint32_t i = 0; i < e.nkv; i++)
        assert_string_equal(e.kv[i].key, want[i]);
    coord_event_done(&e);
    int64_t now = rig_delete(&r, "m/a");
    assert_int_equal(rig_delete(&r, "m/a"), now);
    rig_expect_absent(&r, "m/a");
    e = rig_range(&r, "");
    assert_int_equal(e.nkv, sizeof key / sizeof *key - 1);
    assert_int_equal(e.revision, now);
    coord_event_done(&e);
    rig_done(&r);
}

static void test_values(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, "values");
    static const char text[] = "line\nline\r\n\t\"quoted\\\" \xe6\xbc\xa2\xe5\xad\x97 \x01\x7f";
    char *big = mem_alloc(COORD_VALUE_MAX + 2);
    memset(big, 'v', COORD_VALUE_MAX);
    rig_put(&r, "text", text, 0);
    rig_put(&r, "empty", "", 0);
    rig_put(&r, "big", big, 0);
    struct coord_event e = rig_range(&r, "");
    assert_int_equal(e.nkv, 3);
    assert_int_equal(e.kv[0].value_size, COORD_VALUE_MAX);
    assert_string_equal(e.kv[0].value, big);
    assert_string_equal(e.kv[1].value, "");
    assert_string_equal(e.kv[2].value, text);
    coord_event_done(&e);
    big[COORD_VALUE_MAX] = 'v';
    struct coord_request q = {0};
    rig_op(&q, "big", big, 0);
    assert_int_equal(rig_ask(&r, &q).status, KS_EINVAL);
    mem_free(big);
    rig_done(&r);
}

static void test_bad_requests(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, "bad");
    struct coord_request twice = {0}, unnamed = {0}, guard = {0}, ttl = {.kind = COORD_LEASE_GRANT}, kind = {0};
    rig_op(&twice, "a", "1", 0);
    rig_op(&twice, "a", "2", 0);
    rig_op(&unnamed, "", "1", 0);
    rig_guard(&guard, 0, "a", 0);
    struct coord_request many = {.kind = COORD_TXN, .nops = COORD_OPS_MAX + 1}, longest = {.kind = COORD_RANGE};
    memset(longest.prefix, 'k', sizeof longest.prefix);
    struct coord_request *bad[] = {&twice, &unnamed, &guard, &ttl, &kind, &many, &longest};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct coord_event e = rig_ask(&r, bad[i]);
        assert_int_equal(e.status, KS_EINVAL);
        assert_true(e.text[0] != 0);
    }
    rig_expect_absent(&r, "");
    rig_done(&r);
}

static void test_watch_in_order(void **state)
{
    (void)state;
    struct rig a, b;
    char value[16];
    open_rig(&a, "watch");
    open_rig(&b, "watch");
    int64_t start = rig_put(&a, "w/0", "before", 0);
    rig_put(&a, "w/1", "missed", 0);
    rig_watch(&b, "w/", start);
    rig_put(&a, "other", "unseen", 0);
    assert_int_equal(rig_expect_change(&b, "w/1", "missed"), start + 1);
    for (int i = 0; i < 50; i++) {
        snprintf(value, sizeof value, "%d", i);
        rig_put(&a, "w/1", value, 0);
        rig_put(&a, "x/1", value, 0);
    }
    for (int i = 0; i < 50; i++) {
        snprintf(value, sizeof value, "%d", i);
        assert_int_equal(rig_expect_change(&b, "w/1", value), start + 3 + 2 * i);
    }
    struct coord_request q = {0};
    rig_op(&q, "w/2", "x", 0);
    rig_op(&q, "w/1", NULL, 0);
    int64_t both = rig_ask(&a, &q).revision;
    assert_int_equal(rig_expect_change(&b, "w/2", "x"), both);
    assert_int_equal(rig_expect_change(&b, "w/1", NULL), both);
    struct coord_event e;
    assert_false(b.coord->ops->next(b.coord, &e));
    rig_done(&a);
    rig_done(&b);
}

static void test_watch_is_replaced(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, "replaced");
    int64_t start = rig_put(&r, "p/0", "0", 0);
    rig_watch(&r, "p/", start);
    rig_put(&r, "p/1", "1", 0);
    rig_put(&r, "q/1", "1", 0);
    rig_watch(&r, "q/", start);
    rig_put(&r, "p/2", "2", 0);
    rig_put(&r, "q/2", "2", 0);
    rig_expect_change(&r, "q/1", "1");
    rig_expect_change(&r, "q/2", "2");
    rig_done(&r);
}

static void test_watch_resync(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, "resync");
    int64_t start = rig_put(&r, "k", "0", 0);
    rig_watch(&r, "", start + 1000000);
    struct coord_event e = rig_take(&r, COORD_RESYNC, 0);
    coord_event_done(&e);
    if (world.backend->compact) {
        world.backend->compact(&world, &r);
        rig_watch(&r, "", start - 1);
        e = rig_take(&r, COORD_RESYNC, 0);
        coord_event_done(&e);
    }
    e = rig_range(&r, "k");
    int64_t now = e.revision;
    coord_event_done(&e);
    rig_watch(&r, "", now);
    rig_put(&r, "k", "after", 0);
    assert_int_equal(rig_expect_change(&r, "k", "after"), now + 1);
    rig_done(&r);
}

static void test_lease_expires(void **state)
{
    (void)state;
    struct rig owner, other;
    open_rig(&owner, "expire");
    open_rig(&other, "expire");
    int64_t lease = rig_grant(&owner, 1000);
    rig_put(&owner, "stays", "1", 0);
    rig_put(&owner, "l/b", "1", lease);
    int64_t start = rig_put(&owner, "l/a", "1", lease);
    rig_put(&owner, "l/taken", "1", lease);
    rig_put(&other, "l/taken", "2", 0);
    rig_watch(&other, "", start + 2);
    world.backend->abandon(&world, &owner, lease);
    int64_t gone = rig_expect_change(&other, "l/a", NULL);
    assert_int_equal(rig_expect_change(&other, "l/b", NULL), gone);
    assert_int_equal(gone, start + 3);
    struct coord_event e = rig_range(&other, "");
    assert_int_equal(e.nkv, 2);
    assert_string_equal(e.kv[0].key, "l/taken");
    assert_string_equal(e.kv[1].key, "stays");
    coord_event_done(&e);
    assert_int_equal(rig_revoke(&other, lease), KS_ENOENT);
    rig_done(&owner);
    rig_done(&other);
}

static void test_lease_revoked(void **state)
{
    (void)state;
    struct rig r;
    struct coord_event e;
    open_rig(&r, "revoke");
    int64_t lease = rig_grant(&r, 60000), second = rig_grant(&r, 60000);
    assert_true(lease != second);
    rig_put(&r, "mine", "1", lease);
    int64_t start = rig_put(&r, "moved", "1", lease);
    rig_put(&r, "moved", "2", second);
    rig_watch(&r, "", start + 1);
    assert_int_equal(rig_revoke(&r, lease), 0);
    assert_int_equal(rig_expect_change(&r, "mine", NULL), start + 2);
    rig_expect_absent(&r, "mine");
    assert_int_equal(rig_revoke(&r, lease), KS_ENOENT);
    assert_int_equal(rig_revoke(&r, second), 0);
    rig_expect_change(&r, "moved", NULL);
    assert_false(rig_try(&r, COORD_LEASE_LOST, 0, 0, &e));
    rig_done(&r);
}

static void test_lease_lost(void **state)
{
    (void)state;
    struct rig owner, other;
    open_rig(&owner, "lost");
    open_rig(&other, "lost");
    int64_t lease = rig_grant(&owner, 1000), kept = rig_grant(&owner, 1000);
    rig_put(&owner, "key", "1", lease);
    rig_put(&owner, "kept", "1", kept);
    assert_int_equal(rig_revoke(&other, lease), 0);
    struct coord_event e = rig_take(&owner, COORD_LEASE_LOST, 0);
    assert_int_equal(e.lease, lease);
    rig_expect_absent(&other, "key");
    assert_false(rig_try(&owner, COORD_LEASE_LOST, 0, 0, &e));
    rig_done(&owner);
    rig_done(&other);
}

static void test_lease_is_kept_alive(void **state)
{
    (void)state;
    struct rig owner, other;
    struct coord_event e;
    open_rig(&owner, "alive");
    open_rig(&other, "alive");
    int64_t lease = rig_grant(&owner, world.backend->ttl_ms);
    int64_t start = rig_put(&owner, "key", "1", lease);
    rig_watch(&other, "", start);
    /* Nothing may happen for longer than the lease would last alone. */
    assert_false(rig_try(&other, COORD_CHANGE, 0, (int)world.backend->ttl_ms * 3 / 2, &e));
    assert_false(rig_try(&owner, COORD_LEASE_LOST, 0, 0, &e));
    e = rig_range(&other, "key");
    assert_int_equal(e.nkv, 1);
    coord_event_done(&e);
    rig_done(&owner);
    rig_done(&other);
}

static void test_owner_is_killed(void **state)
{
    (void)state;
    struct rig r;
    if (!world.backend->url)
        return;
    open_rig(&r, "killed");
    rig_watch(&r, "child", rig_put(&r, "start", "", 0));
    pid_t pid = world_spawn(&world, "killed", "hold");
    rig_expect_change(&r, "child", "here");
    uint64_t began = clock_now_us();
    assert_int_equal(kill(pid, SIGKILL), 0);
    rig_expect_change(&r, "child", NULL);
    assert_true(clock_now_us() - began < world.backend->death_ms * 1000);
    world_wait(pid);
    rig_done(&r);
}

/* A stopped process keeps its lock and its connections: the clock ends its lease, and it learns so when it goes on. */
static void test_owner_is_stopped(void **state)
{
    (void)state;
    struct rig r;
    if (!world.backend->url)
        return;
    open_rig(&r, "stopped");
    rig_watch(&r, "", rig_put(&r, "start", "", 0));
    pid_t pid = world_spawn(&world, "stopped", "stop");
    assert_int_equal(waitpid(pid, NULL, WUNTRACED), pid);
    rig_expect_change(&r, "child", "here");
    rig_expect_change(&r, "child", NULL);
    assert_int_equal(kill(pid, SIGCONT), 0);
    rig_expect_change(&r, "lost", "told");
    assert_int_equal(world_wait(pid), 0);
    rig_done(&r);
}

static void test_race_has_one_winner(void **state)
{
    (void)state;
    struct rig r[2];
    open_rig(&r[0], "race");
    open_rig(&r[1], "race");
    int64_t revision = rig_put(&r[0], "leader", "", 0);
    for (int round = 0; round < 50; round++) {
        struct coord_request q[2] = {{0}, {0}};
        uint64_t tag[2];
        for (int i = 0; i < 2; i++) {
            rig_guard(&q[i], GUARD_MOD_REVISION, "leader", revision);
            rig_op(&q[i], "leader", i ? "one" : "zero", 0);
            tag[i] = rig_submit(&r[i], &q[i]);
        }
        struct coord_event e[2] = {rig_take(&r[0], COORD_ANSWER, tag[0]), rig_take(&r[1], COORD_ANSWER, tag[1])};
        assert_int_equal(e[0].status, 0);
        assert_int_equal(e[1].status, 0);
        assert_int_equal(e[0].succeeded + e[1].succeeded, 1);
        revision = e[e[0].succeeded ? 0 : 1].revision;
    }
    rig_done(&r[0]);
    rig_done(&r[1]);
}

static void test_jobs_are_apart(void **state)
{
    (void)state;
    struct rig a, b;
    if (!world.backend->url)
        return;
    open_rig(&a, "job");
    open_rig(&b, "job2");
    int64_t start = rig_put(&a, "key", "a", 0);
    rig_watch(&a, "", start);
    rig_watch(&b, "", start);
    rig_put(&b, "key", "b", 0);
    rig_put(&a, "key2", "a2", 0);
    rig_expect_change(&a, "key2", "a2");
    rig_expect_change(&b, "key", "b");
    struct coord_event e = rig_range(&a, "");
    assert_int_equal(e.nkv, 2);
    assert_string_equal(e.kv[0].value, "a");
    coord_event_done(&e);
    rig_done(&a);
    rig_done(&b);
}

/* An outage is told, requests are answered within their deadline, and all works again afterwards. */
static void test_outage(void **state)
{
    (void)state;
    struct rig r;
    if (!world.backend->outage)
        return;
    open_rig(&r, "outage");
    int64_t start = rig_put(&r, "key", "before", 0);
    rig_watch(&r, "", start);
    world.backend->outage(&world, true);
    uint64_t began = clock_now_us();
    struct coord_request q = {.kind = COORD_LEASE_GRANT, .ttl_ms = 60000};
    struct coord_event e = rig_ask(&r, &q);
    assert_int_equal(e.status, KS_EUNAVAIL);
    assert_true(e.text[0] != 0);
    assert_true(clock_now_us() - began < 2 * WORLD_TIMEOUT_MS * 1000);
    e = rig_take(&r, COORD_REACHABLE, 0);
    assert_int_equal(e.status, KS_EUNAVAIL);
    assert_true(e.text[0] != 0);
    struct coord_request txn = {0};
    rig_op(&txn, "key", "during", 0);
    e = rig_ask(&r, &txn);
    assert_true(e.status == KS_EUNAVAIL || e.status == KS_EUNKNOWN);
    bool maybe = e.status == KS_EUNKNOWN;
    world.backend->outage(&world, false);
    e = rig_take(&r, COORD_REACHABLE, 0);
    assert_int_equal(e.status, 0);
    rig_put(&r, "key", "after", 0);
    e = rig_take(&r, COORD_CHANGE, 0);
    if (maybe && strcmp(e.kv[0].value, "during") == 0) {
        coord_event_done(&e);
        e = rig_take(&r, COORD_CHANGE, 0);
    }
    assert_string_equal(e.kv[0].value, "after");
    coord_event_done(&e);
    rig_done(&r);
}

enum { RANDOM_STEPS = 400, RANDOM_KEYS = 12, RANDOM_LEASES = 64 };
struct random_run {
    struct rng rng;
    struct coord_model *oracle;
    struct rig rig[2];
    int64_t oracle_lease[RANDOM_LEASES], real_lease[RANDOM_LEASES];
    int owner[RANDOM_LEASES];
    uint32_t nleases;
    int64_t offset; /* the store's revision less the oracle's */
    int64_t last_revision[RANDOM_KEYS];
    char value[COORD_OPS_MAX][32];
};

static void random_key(struct random_run *x, char *out)
{
    snprintf(out, COORD_KEY_MAX, "%s%d", rng_chance(&x->rng, 500) ? "r/" : "s/", (int)rng_below(&x->rng, RANDOM_KEYS));
}

/* The same transaction for the oracle and for the store: revisions and leases have other numbers there. */
static void random_txn(struct random_run *x, struct coord_request *oracle, struct coord_request *real)
{
    char key[COORD_KEY_MAX];
    int64_t now = coord_model_revision(x->oracle);
    for (uint64_t n = rng_below(&x->rng, 3); n; n--) {
        random_key(x, key);
        enum coord_guard_kind kind = (enum coord_guard_kind)(1 + rng_below(&x->rng, 3));
        int64_t revision = rng_chance(&x->rng, 200) ? 0 : now - (int64_t)rng_below(&x->rng, 6);
        revision = revision < 0 ? 0 : revision;
        rig_guard(oracle, kind, key, revision);
        rig_guard(real, kind, key, revision ? revision + x->offset : 0);
    }
    for (uint64_t n = 1 + rng_below(&x->rng, COORD_OPS_MAX); n; n--) {
        random_key(x, key);
        char *value = x->value[oracle->nops];
        snprintf(value, sizeof x->value[0], "%llx", (unsigned long long)rng_next(&x->rng));
        bool leased = x->nleases && rng_chance(&x->rng, 300), put = rng_chance(&x->rng, 700);
        uint64_t lease = rng_below(&x->rng, x->nleases);
        rig_op(oracle, key, put ? value : NULL, leased ? x->oracle_lease[lease] : 0);
        rig_op(real, key, put ? value : NULL, leased ? x->real_lease[lease] : 0);
    }
}

static void random_request(struct random_run *x, struct coord_request *oracle, struct coord_request *real)
{
    uint64_t dice = rng_below(&x->rng, 100);
    if (dice < 70) {
        random_txn(x, oracle, real);
    } else if (dice < 85) {
        oracle->kind = COORD_RANGE;
        snprintf(oracle->prefix, sizeof oracle->prefix, "%s", dice < 75 ? "" : dice < 80 ? "r/" : "s/1");
        *real = *oracle;
    } else if (dice < 93 && x->nleases < RANDOM_LEASES) {
        oracle->kind = COORD_LEASE_GRANT;
        oracle->ttl_ms = 60000;
        *real = *oracle;
    } else {
        uint64_t lease = rng_below(&x->rng, x->nleases);
        oracle->kind = real->kind = COORD_LEASE_REVOKE;
        oracle->lease = x->nleases ? x->oracle_lease[lease] : 4242;
        real->lease = x->nleases ? x->real_lease[lease] : 4242;
    }
}

static void expect_same_kv(const struct coord_event *want, const struct coord_event *got, int64_t offset)
{
    assert_int_equal(got->nkv, want->nkv);
    for (uint32_t i = 0; i < want->nkv; i++) {
        const struct coord_kv *w = &want->kv[i], *g = &got->kv[i];
        assert_string_equal(g->key, w->key);
        assert_int_equal(g->value_size, w->value_size);
        assert_int_equal(!g->value, !w->value);
        if (w->value)
            assert_string_equal(g->value, w->value);
        assert_int_equal(g->mod_revision, w->mod_revision + offset);
        if (w->create_revision)
            assert_int_equal(g->create_revision, w->create_revision + offset);
    }
}

static void random_step(struct random_run *x)
{
    struct coord_request oracle = {0}, real = {0};
    struct coord_event want;
    int who = (int)rng_below(&x->rng, 2);
    random_request(x, &oracle, &real);
    coord_model_apply(x->oracle, &oracle, &want);
    struct coord_event got = rig_ask(&x->rig[who], &real);
    if (got.status != want.status)
        fail_msg("request %d: %d (%s), the model says %d (%s)", (int)real.kind, got.status, got.text, want.status,
                 want.text);
    if (want.status == 0) {
        assert_int_equal(got.succeeded, want.succeeded);
        assert_int_equal(got.revision, want.revision + x->offset);
        expect_same_kv(&want, &got, x->offset);
    }
    if (oracle.kind == COORD_LEASE_GRANT) {
        x->oracle_lease[x->nleases] = want.lease;
        x->real_lease[x->nleases++] = got.lease;
    }
    coord_event_done(&want);
    coord_event_done(&got);
}

static void test_random_sequence(void **state)
{
    (void)state;
    struct random_run x = {.rng = {.state = 20240607}, .oracle = coord_model_create()};
    open_rig(&x.rig[0], "random");
    open_rig(&x.rig[1], "random");
    struct coord_event want, got = rig_range(&x.rig[0], "");
    x.offset = got.revision - coord_model_revision(x.oracle);
    rig_watch(&x.rig[0], "", got.revision);
    coord_event_done(&got);
    for (int i = 0; i < RANDOM_STEPS; i++)
        random_step(&x);
    for (size_t n = 0; coord_model_change(x.oracle, 1, n, &want); n++) {
        got = rig_take(&x.rig[0], COORD_CHANGE, 0);
        assert_int_equal(got.revision, want.revision + x.offset);
        expect_same_kv(&want, &got, x.offset);
        coord_event_done(&got);
        coord_event_done(&want);
    }
    assert_false(rig_try(&x.rig[0], COORD_CHANGE, 0, 0, &got));
    rig_done(&x.rig[0]);
    rig_done(&x.rig[1]);
    coord_model_free(x.oracle);
}

static int group_start(void **state)
{
    (void)state;
    return world.backend->start(&world);
}

static int group_stop(void **state)
{
    (void)state;
    world.backend->stop(&world);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_guards),
        cmocka_unit_test(test_txn_is_atomic),
        cmocka_unit_test(test_range_is_ordered),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_watch_in_order),
        cmocka_unit_test(test_watch_is_replaced),
        cmocka_unit_test(test_watch_resync),
        cmocka_unit_test(test_lease_expires),
        cmocka_unit_test(test_lease_revoked),
        cmocka_unit_test(test_lease_lost),
        cmocka_unit_test(test_lease_is_kept_alive),
        cmocka_unit_test(test_owner_is_killed),
        cmocka_unit_test(test_owner_is_stopped),
        cmocka_unit_test(test_race_has_one_winner),
        cmocka_unit_test(test_jobs_are_apart),
        cmocka_unit_test(test_outage),
        cmocka_unit_test(test_random_sequence),
    };
    int failed = 0;
    if (argc > 1)
        return world_child(argc, argv);
    for (size_t i = 0; i < WORLD_BACKENDS; i++) {
        world = (struct world){.backend = &world_backend[i]};
        if (world.backend->missing && world.backend->missing()) {
            printf("skipped: %s: %s\n", world.backend->name, world.backend->missing());
            continue;
        }
        failed +=
            _cmocka_run_group_tests(world.backend->name, tests, sizeof tests / sizeof *tests, group_start, group_stop);
    }
    return failed;
}
