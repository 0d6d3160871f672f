/* test_view_moves.c - the controller moves shards: rebalancing, draining, a random soak. */
#include "tests/unit/view_replicas_rig.h"

static void report_without_a_shard_is_none(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    tick(&r);
    report(&r, 1);
    struct report nothing = {.from = 3, .ballot = r.prepare.ballot, .base_epoch = r.prepare.base->epoch, .clock = -1};
    step(&r, (struct view_event){.kind = VIEW_REPORT, .report = &nothing});
    assert_int_equal(r.ncas, 0);
    report(&r, 3);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
}

/* ---- movement ---- */

static void new_server_gets_its_share(void **state)
{
    (void)state;
    struct rig r;
    for (uint32_t replicas = 0; replicas <= 2; replicas++) {
        open_rig(&r, 3, 60, replicas, 0);
        server(&r, 4, 0);
        settle(&r);
        uint32_t copies = 0;
        for (uint32_t h = 0; h < 60; h++)
            copies += r.proposed->shard[h].njoining;
        assert_int_equal(copies, replicas ? 16 : 15);
        settle_synced(&r);
        assert_settled(r.proposed, replicas);
        struct loads l = loads_of(r.proposed);
        assert_even(r.proposed, l.primaries);
        assert_even(r.proposed, l.holders);
        close_rig(&r);
    }
}

static void moves_are_few_in_one_change(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 80, 1, 0);
    drain(&r, 2);
    uint32_t moved = 0;
    for (int i = 0; i < 3; i++) {
        change(&r);
        assert_int_equal(r.prepare.nmoves, i < 2 ? 16 : 8);
        moved += r.prepare.nmoves;
        for (uint32_t k = 0; k < r.prepare.nmoves; k++) {
            const struct view_shard *s = &r.proposed->shard[r.prepare.move[k].shard];
            assert_int_equal(s->primary, 1);
            assert_int_equal(s->since, r.proposed->epoch);
        }
        committed(&r);
    }
    assert_int_equal(moved, 40);
    close_rig(&r);
}

/* With one backup a shard moves there, and the old primary becomes the backup. */
static void old_primary_becomes_backup(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    struct view *before = view_copy(r.proposed);
    drain(&r, 2);
    change(&r);
    assert_int_equal(r.prepare.nmoves, 1);
    uint32_t h = r.prepare.move[0].shard;
    assert_int_equal(before->shard[h].primary, 2);
    assert_int_equal(r.proposed->shard[h].primary, before->shard[h].backup[0]);
    assert_true(backs(&r.proposed->shard[h], 2));
    view_free(before);
    close_rig(&r);
}

static void drained_server_leaves(void **state)
{
    (void)state;
    struct rig r;
    for (uint32_t replicas = 0; replicas <= 2; replicas++)
        for (uint64_t id = 1; id <= 3; id++) {       /* the controller's own server, too */
            open_rig(&r, 3, 12, replicas, 0);
            drain(&r, id);
            drain(&r, id);
            assert_true(view_core_draining(r.v, id));
            /* Never fewer holders than before, but for what the servers that stay can hold. */
            for (int i = 0; i < 60 && view_server_find(r.proposed, id); i++) {
                if (idle(&r))
                    for (uint64_t k = 1; k <= 3; k++)
                        synced(&r, k);
                change(&r);
                assert_int_equal(r.prepare.ngone, 0);
                bool lists = false;
                for (uint32_t h = 0; h < 12; h++) {
                    const struct view_shard *s = &r.proposed->shard[h];
                    assert_true(s->nbackups >= (replicas > 1 ? 1 : replicas));
                    lists |= s->primary == id || backs(s, id) || joins(s, id);
                }
                assert_true(!lists || view_server_find(r.proposed, id));
                committed(&r);
            }
            assert_null(view_server_find(r.proposed, id));
            assert_true(view_core_removed(r.v, id));
            assert_false(view_core_draining(r.v, id));
            settle_synced(&r);
            assert_settled(r.proposed, replicas > 1 ? 1 : replicas);
            close_rig(&r);
        }
}

static void nobody_to_drain_to(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 1, 4, 1, 0);
    drain(&r, 77);                     /* nobody */
    assert_true(idle(&r));
    drain(&r, 1);
    settle(&r);
    assert_non_null(view_server_find(r.proposed, 1));
    char text[200];
    view_core_describe(r.v, r.now_us, text, sizeof text);
    assert_string_equal(text, "idle, server s1 is drained, 4 shards are left");
    server(&r, 2, 0);
    settle_synced(&r);
    assert_null(view_server_find(r.proposed, 1));
    assert_settled(r.proposed, 0);
    close_rig(&r);
}

static void drained_target_gets_nothing(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 4, 12, 1, 0);
    drain(&r, 3);
    suspect(&r, 4);
    settle_synced(&r);
    assert_int_equal(r.proposed->nservers, 2);
    assert_settled(r.proposed, 1);
    close_rig(&r);
}

/* The target of a move dies: the old primary stays. */
static void dead_target_gets_nothing(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    drain(&r, 2);
    tick(&r);
    assert_int_equal(r.prepare.nmoves, 1);
    uint64_t to = r.prepare.move[0].to;
    uint32_t h = r.prepare.move[0].shard;
    if (to == SELF) {
        close_rig(&r);
        return;
    }
    suspect(&r, to);
    assert_int_equal(r.prepare.nmoves, 0);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    assert_int_equal(r.proposed->shard[h].primary, 2);
    committed(&r);
    settle_synced(&r);
    assert_settled(r.proposed, 0);
    assert_int_equal(r.proposed->nservers, 1);
    close_rig(&r);
}

static void elected_goes_on_with_the_plan(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 40, 0, 0);
    server(&r, 3, 0);
    settle(&r);
    struct view *base = view_copy(r.proposed);
    step(&r, (struct view_event){.kind = VIEW_DEPOSED});
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 9, .view = base});
    r.full[3] = true;                  /* the reports of the first change say so */
    settle_synced(&r);
    assert_settled(r.proposed, 0);
    assert_even(r.proposed, loads_of(r.proposed).primaries);
    view_free(base);
    close_rig(&r);
}

static void rebalance_runs_one_change(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 4, 1, 0);
    uint64_t epoch = r.proposed->epoch;
    step(&r, (struct view_event){.kind = VIEW_REBALANCE});
    assert_int_equal(settle(&r), 1);
    assert_int_equal(r.proposed->epoch, epoch + 1);
    close_rig(&r);
}

/* ---- too few ---- */

static void too_few_backups_stop_the_steps(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 4, 1, 1);
    assert_false(r.proposed->short_of_replicas);
    suspect(&r, 2);
    settle(&r);
    assert_true(r.proposed->short_of_replicas);
    char text[200];
    view_core_describe(r.v, r.now_us, text, sizeof text);
    assert_string_equal(text,
                        "idle, steps stand still: 4 shards have fewer than 1 backups, more servers are needed");
    server(&r, 3, 0);
    settle(&r);
    assert_true(r.proposed->short_of_replicas);
    synced(&r, 3);
    settle(&r);
    assert_false(r.proposed->short_of_replicas);
    close_rig(&r);
    open_rig(&r, 1, 4, 2, 1);
    assert_true(r.proposed->short_of_replicas);
    close_rig(&r);
}

/* ---- at random ---- */

struct soak {
    struct rig r;
    struct rng rng;
    uint64_t next_id, up[IDS];         /* up[id]: alive */
    uint32_t degree;
};

static bool named(const struct prepare *p, uint32_t shard, uint64_t to)
{
    for (uint32_t i = 0; i < p->nmoves; i++)
        if (p->move[i].shard == shard && p->move[i].to == to)
            return true;
    return false;
}

/* Whoever leads had everything in the view before; whoever is a backup had it, or has it now. */
static void check_step(const struct soak *s, const struct view *a, const struct view *b)
{
    for (uint32_t h = 0; h < b->nshards; h++) {
        const struct view_shard *x = &a->shard[h], *y = &b->shard[h];
        bool moved = x->primary != y->primary;
        assert_non_null(view_server_find(b, y->primary));
        assert_int_equal(y->since, moved ? b->epoch : x->since);
        assert_true(!moved || backs(x, y->primary) || (joins(x, y->primary) && s->r.full[y->primary]));
        for (uint32_t i = 0; i < y->nbackups; i++) {
            uint64_t id = y->backup[i];
            assert_non_null(view_server_find(b, id));
            assert_true(id == x->primary || backs(x, id) || (joins(x, id) && s->r.full[id]));
        }
        assert_true(y->nbackups <= (s->degree ? s->degree : 1));
        for (uint32_t i = 0; i < y->njoining; i++)
            assert_false(y->joining[i] == y->primary || backs(y, y->joining[i]));
        assert_true(!moved || !view_server_find(b, x->primary) || named(&s->r.prepare, h, y->primary));
    }
}

/* A shard whose holders would all be dead is not what is looked at here. */
static bool can_lose(const struct soak *s, uint64_t id)
{
    const struct view *v = s->r.proposed;
    for (uint32_t h = 0; h < v->nshards; h++) {
        const struct view_shard *x = &v->shard[h];
        bool other = x->primary != id && s->up[x->primary];
        for (uint32_t i = 0; i < x->nbackups; i++)
            other |= x->backup[i] != id && s->up[x->backup[i]];
        if (!other)
            return false;
    }
    return id != SELF && s->up[id];
}

static void disturb(struct soak *s)
{
    struct rig *r = &s->r;
    const struct view *v = r->proposed;
    uint64_t id = v->server[rng_below(&s->rng, v->nservers)].id;
    switch (rng_below(&s->rng, 6)) {
    case 0:
        if (s->next_id < IDS) {
            s->up[s->next_id] = true;
            server(r, s->next_id++, 0);
        }
        break;
    case 1:
        if (can_lose(s, id)) {
            s->up[id] = false;
            suspect(r, id);
        }
        break;
    case 2:
        if (v->nservers > 2 && id != SELF)
            drain(r, id);
        break;
    default:
        synced(r, id);
    }
}

static void one_change(struct soak *s)
{
    struct rig *r = &s->r;
    tick(r);
    for (int i = 0; i < 10 && !r->ncas; i++) {
        if (rng_below(&s->rng, 4) == 0)
            disturb(s);
        if (!r->ncas)
            report_all(r, 0);
    }
    struct view *before = view_copy(r->prepare.base);
    check_step(s, before, r->proposed);
    view_free(before);
    committed(r);
}

static void random_servers_come_and_go(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        struct soak s = {.rng = {seed}};
        uint32_t n = 1 + rng_below(&s.rng, 4), replicas = rng_below(&s.rng, 3);
        open_rig(&s.r, n, 1 + rng_below(&s.rng, SHARDS - 1), replicas, 0);
        s.next_id = n + 1;
        for (uint64_t id = 1; id <= n; id++)
            s.up[id] = true;
        s.degree = replicas;
        for (int i = 0; i < 60; i++) {
            disturb(&s);
            if (!idle(&s.r))
                one_change(&s);
        }
        settle_synced(&s.r);
        uint32_t there = s.r.proposed->nservers;
        assert_settled(s.r.proposed, replicas < there ? replicas : there - 1);
        /* What moving one backup at a time comes to; a path of several moves might end one lower. */
        assert_true(unevenness(s.r.proposed, loads_of(s.r.proposed).holders) <= 2);
        assert_true(unevenness(s.r.proposed, loads_of(s.r.proposed).primaries) <= 2);
        close_rig(&s.r);
    }
}

int main(void)
{
    log_level_set(LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(report_without_a_shard_is_none),
        cmocka_unit_test(new_server_gets_its_share),
        cmocka_unit_test(moves_are_few_in_one_change),
        cmocka_unit_test(old_primary_becomes_backup),
        cmocka_unit_test(drained_server_leaves),
        cmocka_unit_test(nobody_to_drain_to),
        cmocka_unit_test(drained_target_gets_nothing),
        cmocka_unit_test(dead_target_gets_nothing),
        cmocka_unit_test(elected_goes_on_with_the_plan),
        cmocka_unit_test(rebalance_runs_one_change),
        cmocka_unit_test(too_few_backups_stop_the_steps),
        cmocka_unit_test(random_servers_come_and_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
