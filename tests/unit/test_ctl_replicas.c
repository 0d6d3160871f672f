/* test_ctl_replicas.c - control cores with backups: lost ones, joiners that caught up, drains. */
#include "tests/unit/ctl_rig.h"

static struct world *replicated(uint32_t n, uint32_t replicas)
{
    struct world *w = world_open();
    for (uint32_t id = 1; id <= n; id++) {
        struct ctl_config c = config(id, n);
        c.job.replicas = replicas;
        boot(w, &c)->syncs = true;
    }
    pass(w, 100);
    assert_true(ctl_core_leads(node_of(w, 1)->core));
    return w;
}

static bool lists_shards(const struct view *v, uint64_t id)
{
    for (uint32_t h = 0; h < v->nshards; h++)
        if (v->shard[h].primary == id || has(v->shard[h].backup, v->shard[h].nbackups, id))
            return true;
    return false;
}

static void assert_backups(const struct view *v, uint32_t n)
{
    for (uint32_t h = 0; h < v->nshards; h++)
        assert_true(v->shard[h].nbackups == n && v->shard[h].njoining == 0);
}

static void drain(struct world *w, uint64_t to, uint64_t from, uint64_t id)
{
    post(w, to, CTL_DRAIN, from)->e.id = id;
    settle(w);
}

static void lost_backup_is_replaced(void **state)
{
    (void)state;
    struct world *w = replicated(3, 1);
    assert_backups(view_of(w, 1), 1);
    crash(w, 3);
    lease_over(w, 3);
    pass(w, 1000);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    assert_backups(view_of(w, 2), 1);
    world_close(w);
}

/* The primary is not the leader: it says so, and again when the leader is another. */
static void joiners_are_told_of_until_they_are_backups(void **state)
{
    (void)state;
    struct world *w = replicated(2, 1);
    node_of(w, 1)->syncs = node_of(w, 2)->syncs = false;
    struct ctl_config c = config(3, 1);
    boot(w, &c);
    pass(w, 100);
    drain(w, 1, 0, 1);                 /* 1 gives its shards to 2, where 3 joins them */
    pass(w, 100);
    uint32_t joining = 0;
    for (uint32_t h = 0; h < NSHARDS; h++)
        joining += view_of(w, 2)->shard[h].primary == 2 && view_of(w, 2)->shard[h].njoining;
    assert_true(joining > 0);
    node_of(w, 1)->deaf = true;        /* what 2 says is lost with the leader */
    node_of(w, 2)->syncs = true;
    joiners_synced(w, node_of(w, 2), view_of(w, 2));
    pass(w, 100);
    crash(w, 1);
    lease_over(w, 1);
    pass(w, 2000);
    assert_null(view_server_find(view_of(w, 2), 1));
    assert_backups(view_of(w, 2), 1);
    world_close(w);
}

/* A joiner that the loops do not call synced is not spoken of for ever. */
static void denied_joiner_makes_no_views(void **state)
{
    (void)state;
    struct world *w = replicated(2, 1);
    crash(w, 2);
    lease_over(w, 2);
    pass(w, 1000);
    node_of(w, 1)->syncs = false;
    struct ctl_config c = config(3, 1);
    boot(w, &c);
    pass(w, 100);
    uint64_t epoch = view_of(w, 1)->epoch;
    assert_int_equal(view_of(w, 1)->shard[0].njoining, 1);
    struct message *m = post(w, 1, CTL_LOOP_SYNCED, 0);
    m->e.id = 3;
    pass(w, 2000);
    assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
    /* Nonsense makes none. */
    m = post(w, 1, CTL_LOOP_SYNCED, 0);
    m->e.id = 77;
    m = post(w, 1, CTL_LOOP_SYNCED, 0);
    m->e.id = 3;
    m->e.shard = 4711;
    m = post(w, 1, CTL_SYNCED, 3);     /* it is not the primary */
    m->e.id = 3;
    m = post(w, 1, CTL_SYNCED, 1);
    m->e.shard = 4711;
    pass(w, 2000);
    assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
    world_close(w);
}

/* A report from before the joiner had caught up, sent once more, does not silence it. */
static void old_report_denies_nothing(void **state)
{
    (void)state;
    struct world *w = replicated(2, 1);
    crash(w, 2);
    lease_over(w, 2);
    pass(w, 1000);
    node_of(w, 1)->syncs = false;
    struct ctl_config c = config(3, 1);
    boot(w, &c);
    pass(w, 100);
    node_of(w, 3)->mute_loops = true;  /* a change that cannot end yet */
    member_joins(w, 1, 101);
    pass(w, 50);
    for (uint32_t h = 0; h < NSHARDS; h++) {
        struct message *m = post(w, 1, CTL_LOOP_SYNCED, 0);
        m->e.shard = h;
        m->e.id = 3;
    }
    settle(w);
    post(w, 1, CTL_PEER_UP, 3)->e.is_server = true;
    node_of(w, 3)->mute_loops = false;
    node_of(w, 1)->syncs = true;       /* from the next change on */
    pass(w, 3000);
    assert_backups(view_of(w, 1), 1);
    world_close(w);
}

static void drained_server_leaves(void **state)
{
    (void)state;
    for (uint64_t id = 1; id <= 3; id++)           /* 1 leads */
        for (uint32_t replicas = 0; replicas < 2; replicas++) {
            struct world *w = replicated(3, replicas);
            drain(w, id, 0, 0);
            pass(w, 1000);
            uint64_t other = id == 3 ? 2 : 3;
            assert_true(node_of(w, id)->drained);
            assert_false(node_of(w, id)->fenced);
            assert_null(view_server_find(view_of(w, other), id));
            assert_backups(view_of(w, other), replicas);
            assert_true(ctl_core_leader(node_of(w, other)->core) != id);
            assert_true(ctl_core_leader(node_of(w, other)->core) != 0);
            world_close(w);
        }
}

/* Whoever hears of it first; from an operator, who has no id, or from a server. Not from members. */
static void drain_reaches_the_leader_and_the_server(void **state)
{
    (void)state;
    struct world *w = replicated(4, 1);
    member_up(w, 2, 101);
    member_joins(w, 2, 101);
    pass(w, 100);
    drain(w, 2, 101, 3);
    pass(w, 500);
    assert_true(lists_shards(view_of(w, 1), 3));
    drain(w, 2, 0, 4);
    pass(w, 1000);
    assert_true(node_of(w, 4)->drained);
    drain(w, 1, 0, 3);
    pass(w, 1000);
    assert_true(node_of(w, 3)->drained);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    world_close(w);
}

static void drain_outlives_the_leader(void **state)
{
    (void)state;
    struct world *w = replicated(4, 1);
    node_of(w, 1)->mute_loops = true;  /* the leader gets nowhere */
    drain(w, 1, 0, 4);
    pass(w, 200);
    assert_false(node_of(w, 4)->drained);
    crash(w, 1);
    lease_over(w, 1);
    pass(w, 3000);
    assert_true(node_of(w, 4)->drained);
    assert_int_equal(view_of(w, 2)->nservers, 2);
    assert_backups(view_of(w, 2), 1);
    world_close(w);
}

static void drained_before_it_was_listed(void **state)
{
    (void)state;
    struct world *w = world_open();
    boot_plain(w, 1, 2);
    drain(w, 1, 0, 0);
    assert_true(node_of(w, 1)->drained);
    world_close(w);
}

/* It was asleep from before the first view until it had been removed. */
static void removed_before_it_saw_a_view(void **state)
{
    (void)state;
    struct world *w = world_open();
    struct node *n[3];
    for (uint32_t id = 1; id <= 2; id++) {
        struct ctl_config c = config(id, 3);
        c.job.replicas = 1;
        n[id] = boot(w, &c);
    }
    pass(w, 50);
    n[2]->deaf = n[2]->store_cut = true;
    boot_plain(w, 3, 3);
    pass(w, 100);
    assert_non_null(view_server_find(view_of(w, 1), 2));
    assert_null(view_of(w, 2));
    link_down(w, 1, 2);
    link_down(w, 3, 2);
    lease_over(w, 2);
    pass(w, 2000);
    assert_null(view_server_find(view_of(w, 1), 2));
    n[2]->deaf = n[2]->store_cut = false;
    pass(w, 5000);
    assert_true(n[2]->fenced);
    world_close(w);
}

static void last_server_stays(void **state)
{
    (void)state;
    struct world *w = replicated(1, 1);
    drain(w, 1, 0, 1);
    pass(w, 2000);
    assert_false(node_of(w, 1)->drained);
    assert_true(ctl_core_leads(node_of(w, 1)->core));
    world_close(w);
}

int main(void)
{
    log_level_set(LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lost_backup_is_replaced),
        cmocka_unit_test(joiners_are_told_of_until_they_are_backups),
        cmocka_unit_test(denied_joiner_makes_no_views),
        cmocka_unit_test(old_report_denies_nothing),
        cmocka_unit_test(drained_server_leaves),
        cmocka_unit_test(drain_reaches_the_leader_and_the_server),
        cmocka_unit_test(drain_outlives_the_leader),
        cmocka_unit_test(drained_before_it_was_listed),
        cmocka_unit_test(removed_before_it_saw_a_view),
        cmocka_unit_test(last_server_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
