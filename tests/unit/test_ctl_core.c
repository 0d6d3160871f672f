/* test_ctl_core.c - a few servers' control cores over one store: election, views, outages, told case by case. */
#include "tests/unit/ctl_rig.h"

static void servers_make_the_first_view(void **state)
{
    (void)state;
    struct world *w = world_open();
    boot_plain(w, 1, 2);
    pass(w, 500);
    assert_true(ctl_core_leads(node_of(w, 1)->core));
    assert_null(view_of(w, 1));
    boot_plain(w, 2, 2);
    pass(w, 100);
    assert_int_equal(view_of(w, 2)->nservers, 2);
    assert_int_equal(view_of(w, 2)->nshards, NSHARDS);
    assert_false(ctl_core_leads(node_of(w, 2)->core));
    assert_null(ctl_core_controller(node_of(w, 2)->core));
    assert_int_equal(ctl_core_leader(node_of(w, 2)->core), 1);
    assert_true(w->connected[1][2]);
    world_close(w);
}

static void member_joins_and_dies(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    member_up(w, 1, 101);
    member_joins(w, 1, 101);
    pass(w, 100);
    assert_non_null(w->member_view[0]);
    assert_int_equal(view_member_find(w->member_view[0], 101)->join, 6);
    assert_true(view_lists(view_of(w, 2), 101));
    /* Its data connection to server 2 breaks, but the leader still hears it. */
    post(w, 2, CTL_LOOP_PEER_DOWN, 101);
    pass(w, 1000);
    assert_int_equal(node_of(w, 2)->suspects_sent, 1);
    assert_true(view_lists(view_of(w, 2), 101));
    /* A short break of the control connection is forgiven. */
    post(w, 1, CTL_PEER_DOWN, 101);
    pass(w, 100);
    member_up(w, 1, 101);
    pass(w, 1000);
    assert_true(view_lists(view_of(w, 1), 101));
    post(w, 1, CTL_PEER_DOWN, 101);
    pass(w, 500);
    assert_false(view_lists(view_of(w, 1), 101));
    assert_false(view_lists(view_of(w, 2), 101));
    /* It comes back as the same life, and is told. */
    view_free(w->member_view[0]);
    w->member_view[0] = NULL;
    member_up(w, 1, 101);
    assert_false(view_lists(w->member_view[0], 101));
    member_joins(w, 1, 101);
    pass(w, 1000);
    assert_false(view_lists(view_of(w, 1), 101));
    world_close(w);
}

static void members_are_passed_on_to_the_leader(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    member_up(w, 2, 101);
    member_joins(w, 2, 101);
    pass(w, 100);
    assert_true(view_lists(view_of(w, 1), 101));
    assert_non_null(w->member_view[0]);
    struct message *m = post(w, 2, CTL_LEAVE, 101);
    m->e.step = 5;
    pass(w, 100);
    assert_false(view_lists(view_of(w, 1), 101));
    assert_int_equal(view_member_find(view_of(w, 1), 101)->last, 5);
    /* One member cannot speak for another. */
    member_up(w, 1, 102);
    struct join_doc j = {.id = 103, .name = "m", .local_size = 1};
    post(w, 1, CTL_JOIN, 102)->join = mem_dup(&j, sizeof j);
    pass(w, 100);
    assert_null(view_member_find(view_of(w, 1), 103));
    m = post(w, 2, CTL_MODE, 102);
    m->e.mode = (struct mode){9, MODE_ASYNC, 0};
    pass(w, 100);
    assert_int_equal(view_of(w, 2)->nmodes, 2);
    snprintf(post(w, 2, CTL_END, 0)->text, 160, "enough");
    pass(w, 100);
    assert_true(node_of(w, 1)->ended && node_of(w, 2)->ended);
    assert_string_equal(node_of(w, 2)->text, "enough");
    world_close(w);
}

static void dead_leader_is_succeeded_and_its_heir_serves(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    member_up(w, 1, 101);
    member_joins(w, 1, 101);
    pass(w, 100);
    uint64_t epoch = view_of(w, 2)->epoch;
    crash(w, 1);
    pass(w, 400);
    assert_false(ctl_core_leads(node_of(w, 2)->core));
    /* Its lease lives on; nobody waits for that. */
    pass(w, 400);
    assert_true(ctl_core_leads(node_of(w, 2)->core));
    lease_over(w, 1);
    assert_true(ctl_core_leads(node_of(w, 2)->core));
    member_up(w, 2, 101);
    pass(w, 5000);
    assert_int_equal(view_of(w, 2)->epoch, epoch);
    uint64_t since;
    assert_int_equal(view_core_waiting_for(ctl_core_controller(node_of(w, 2)->core), &since), 1);
    boot_heir(w, 3, 1);
    pass(w, 200);
    assert_int_equal(view_of(w, 3)->epoch, epoch + 1);
    for (uint32_t h = 0; h < NSHARDS; h++)
        assert_int_equal(view_of(w, 3)->shard[h].primary, h % 2 ? 2 : 3);
    assert_true(view_lists(view_of(w, 2), 101));
    world_close(w);
}

static void heir_of_the_only_server_leads(void **state)
{
    (void)state;
    struct world *w = cluster(1);
    uint64_t epoch = view_of(w, 1)->epoch;
    crash(w, 1);
    struct node *heir = boot_heir(w, 2, 1);
    pass(w, 1000);
    assert_false(ctl_core_leads(heir->core));
    lease_over(w, 1);
    pass(w, 200);
    assert_true(ctl_core_leads(heir->core));
    assert_int_equal(view_of(w, 2)->epoch, epoch + 1);
    assert_int_equal(view_of(w, 2)->shard[3].primary, 2);
    assert_int_equal(heir->heir_told, 0);
    /* It died before it noted that it had been listed: the next life knows both. */
    crash(w, 2);
    lease_over(w, 2);
    struct ctl_config c = config(3, 1);
    c.self.heir_of = 1;
    c.nformer = 2;
    c.former[0] = 1;
    c.former[1] = 2;
    struct node *next = boot(w, &c);
    pass(w, 200);
    assert_int_equal(next->heir_of, 2);
    assert_int_equal(view_of(w, 3)->shard[3].primary, 3);
    world_close(w);
}

static void newcomer_is_listed_without_shards_and_removed_when_dead(void **state)
{
    (void)state;
    struct world *w = cluster(1);
    boot_plain(w, 2, 1);
    pass(w, 100);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    assert_int_equal(node_of(w, 2)->adopted, 1);
    crash(w, 2);
    pass(w, 1000);
    assert_int_equal(view_of(w, 1)->nservers, 1);
    /* The view took the record with it. */
    struct coord_event e;
    coord_model_apply(w->store, &(struct coord_request){.kind = COORD_RANGE, .prefix = "servers/2"}, &e);
    assert_int_equal(e.nkv, 0);
    coord_event_done(&e);
    world_close(w);
}

static void removed_server_is_fenced(void **state)
{
    (void)state;
    struct world *w = cluster(1);
    boot_plain(w, 2, 1);
    pass(w, 100);
    /* Alive, but cut off from server 1 for longer than that is forgiven. */
    link_down(w, 1, 2);
    pass(w, 1000);
    assert_int_equal(view_of(w, 1)->nservers, 1);
    assert_true(node_of(w, 2)->fenced);
    assert_true(ctl_core_deadline(node_of(w, 2)->core) == UINT64_MAX);
    world_close(w);
}

static void lost_lease_is_renewed_under_the_same_id(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    uint64_t epoch = view_of(w, 2)->epoch;
    coord_model_expire(w->store, w->node[0].lease);
    struct message *m = post(w, 1, CTL_COORD, 0);
    m->coord = mem_alloc(sizeof *m->coord);
    m->coord->kind = COORD_LEASE_LOST;
    m->coord->lease = w->node[0].lease;
    pass(w, 1000);
    /* One of the two leads again, with one change; nobody was lost. */
    assert_true(ctl_core_leads(node_of(w, 1)->core) != ctl_core_leads(node_of(w, 2)->core));
    assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    assert_false(node_of(w, 1)->fenced);
    struct coord_event e;
    coord_model_apply(w->store, &(struct coord_request){.kind = COORD_RANGE, .prefix = "servers/"}, &e);
    assert_int_equal(e.nkv, 2);
    coord_event_done(&e);
    world_close(w);
}

static void store_outage_stops_nothing(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    uint64_t epoch = view_of(w, 1)->epoch;
    node_of(w, 1)->store_cut = node_of(w, 2)->store_cut = true;
    member_up(w, 1, 101);
    member_joins(w, 1, 101);
    pass(w, 20000);
    assert_int_equal(view_of(w, 1)->epoch, epoch);
    assert_false(node_of(w, 1)->fenced || node_of(w, 2)->fenced);
    node_of(w, 1)->store_cut = node_of(w, 2)->store_cut = false;
    pass(w, 1000);
    assert_int_equal(view_of(w, 2)->epoch, epoch + 1);
    assert_true(view_lists(view_of(w, 2), 101));
    world_close(w);
}

static void lost_answers_make_one_view(void **state)
{
    (void)state;
    for (int done = 0; done < 2; done++) {
        struct world *w = cluster(2);
        uint64_t epoch = view_of(w, 1)->epoch;
        node_of(w, 1)->lose_answer = done;
        node_of(w, 1)->lose_request = !done;
        member_up(w, 1, 101);
        member_joins(w, 1, 101);
        pass(w, 2000);
        assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
        assert_int_equal(view_of(w, 2)->epoch, epoch + 1);
        assert_int_equal(view_of(w, 2)->nonce, view_of(w, 1)->nonce);
        assert_true(ctl_core_leads(node_of(w, 1)->core));
        world_close(w);
    }
}

static void lost_answers_at_the_start(void **state)
{
    (void)state;
    for (int done = 0; done < 2; done++) {
        struct world *w = world_open();
        struct ctl_config c = config(1, 1);
        struct node *n = &w->node[0];
        *n = (struct node){.core = ctl_core_create(&c), .id = 1, .watched = -1, .complete = -1};
        n->lose_answer = done;      /* of the creation of the job */
        n->lose_request = !done;
        post(w, 1, CTL_START, 0);
        pass(w, 2000);
        assert_int_equal(view_of(w, 1)->nservers, 1);
        world_close(w);
    }
}

static void deposed_leader_writes_nothing(void **state)
{
    (void)state;
    struct world *w = cluster(1);
    boot_plain(w, 2, 1);
    pass(w, 100);
    uint64_t epoch = view_of(w, 1)->epoch;
    /* Server 1 hears nothing of it: its leadership passes to server 2, which it takes for dead. */
    node_of(w, 1)->watched = -1;
    link_down(w, 1, 2);
    coord_model_expire(w->store, w->node[0].lease);
    settle(w);
    assert_true(ctl_core_leads(node_of(w, 1)->core) && ctl_core_leads(node_of(w, 2)->core));
    uint32_t prepared = node_of(w, 1)->prepared;
    pass(w, 1000);
    assert_true(node_of(w, 1)->prepared > prepared);
    assert_false(ctl_core_leads(node_of(w, 1)->core));
    assert_int_equal(view_of(w, 1)->epoch, epoch);
    link_up(w, 1, 2);
    pass(w, 2000);
    assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    assert_int_equal(view_of(w, 1)->nonce, view_of(w, 2)->nonce);
    world_close(w);
}

static struct prepare *prepare_of(struct world *w, uint64_t controller, uint64_t term, uint64_t round)
{
    struct prepare p = {.ballot = {term, round}, .controller = controller};
    struct prepare *copy = mem_alloc(sizeof *copy);
    p.base = view_copy(view_of(w, 1));
    prepare_copy(copy, &p);
    prepare_done(&p);
    return copy;
}

static void stale_ballots_are_ignored(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    struct node *n = node_of(w, 2);
    uint64_t term = view_of(w, 1)->term;
    uint32_t before = n->prepared;
    post(w, 2, CTL_PREPARE, 1)->prepare = prepare_of(w, 1, term + 3, 2);
    settle(w);
    assert_int_equal(n->prepared, before + 1);
    post(w, 2, CTL_PREPARE, 1)->prepare = prepare_of(w, 1, term + 3, 1);
    post(w, 2, CTL_PREPARE, 1)->prepare = prepare_of(w, 1, term + 2, 9);
    settle(w);
    assert_int_equal(n->prepared, before + 1);
    /* The same once more is answered once more: the first answer may be lost. */
    post(w, 2, CTL_PREPARE, 1)->prepare = prepare_of(w, 1, term + 3, 2);
    settle(w);
    assert_int_equal(n->prepared, before + 2);
    struct prepare *old = prepare_of(w, 1, term + 9, 1);
    old->base->epoch--;
    post(w, 2, CTL_PREPARE, 1)->prepare = old;
    settle(w);
    assert_int_equal(n->prepared, before + 2);
    world_close(w);
}

static void prepare_brings_a_newer_view(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    struct node *n = node_of(w, 2);
    struct prepare *p = prepare_of(w, 1, view_of(w, 1)->term, 99);
    p->base->epoch += 5;
    uint32_t adopted = n->adopted, prepared = n->prepared;
    post(w, 2, CTL_PREPARE, 1)->prepare = p;
    settle(w);
    assert_int_equal(n->adopted, adopted + 1);
    assert_int_equal(n->prepared, prepared + 1);
    /* Older views change nothing. */
    post(w, 2, CTL_VIEW, 1)->view = view_copy(view_of(w, 1));
    settle(w);
    assert_int_equal(n->adopted, adopted + 1);
    world_close(w);
}

static void report_waits_for_every_loop(void **state)
{
    (void)state;
    struct world *w = cluster(1);
    struct node *n = node_of(w, 1);
    uint64_t epoch = view_of(w, 1)->epoch;
    n->mute_loops = true;
    member_up(w, 1, 101);
    member_joins(w, 1, 101);
    pass(w, 100);
    struct shard_report shard[2] = {{.shard = 0, .role = HOLDER_PRIMARY, .complete = 3, .join = 4},
                                    {.shard = 2, .role = HOLDER_PRIMARY, .complete = 3, .join = 4}};
    struct report r = {.from = 1, .ballot = n->ballot, .base_epoch = epoch, .nshards = 2, .shard = shard};
    post(w, 1, CTL_LOOP_REPORT, 0)->report = report_copy(&r);
    post(w, 1, CTL_LOOP_REPORT, 0)->report = report_copy(&r);
    settle(w);
    assert_int_equal(view_of(w, 1)->epoch, epoch);
    struct message *m = post(w, 1, CTL_LOOP_REPORT, 0);
    m->e.loop = 1;
    shard[0].shard = 1;
    shard[1].shard = 3;
    shard[1].join = 7;
    m->report = report_copy(&r);
    settle(w);
    assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
    assert_int_equal(view_member_find(view_of(w, 1), 101)->join, 7);
    world_close(w);
}

static void returning_server_is_not_lost(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    uint64_t epoch = view_of(w, 1)->epoch;
    link_down(w, 1, 2);
    pass(w, 400);
    uint64_t since;
    assert_int_equal(view_core_waiting_for(ctl_core_controller(node_of(w, 1)->core), &since), 2);
    link_up(w, 1, 2);
    pass(w, 200);
    assert_int_equal(view_core_waiting_for(ctl_core_controller(node_of(w, 1)->core), &since), 0);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    assert_int_equal(view_of(w, 2)->epoch, epoch + 1);
    assert_false(node_of(w, 2)->fenced);
    world_close(w);
}

/* Cut off for longer, the other one leads, and waits just as well. */
static void leader_that_is_cut_off_is_succeeded(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    link_down(w, 1, 2);
    pass(w, 2000);
    uint64_t since, leader = ctl_core_leads(node_of(w, 1)->core) ? 1 : 2;
    assert_true(ctl_core_leads(node_of(w, 1)->core) != ctl_core_leads(node_of(w, 2)->core));
    assert_int_equal(view_core_waiting_for(ctl_core_controller(node_of(w, leader)->core), &since), 3 - leader);
    link_up(w, 1, 2);
    pass(w, 200);
    assert_int_equal(view_of(w, 1)->nservers, 2);
    assert_int_equal(view_of(w, 1)->epoch, view_of(w, 2)->epoch);
    assert_false(node_of(w, 1)->fenced || node_of(w, 2)->fenced);
    world_close(w);
}

static void gone_process_is_suspected_at_once(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    uint64_t since;
    crash(w, 2);
    post(w, 1, CTL_PEER_DEAD, 2);
    pass(w, 50);
    assert_int_equal(view_core_waiting_for(ctl_core_controller(node_of(w, 1)->core), &since), 2);
    world_close(w);
    w = cluster(2);
    crash(w, 1);
    /* Of one that is connected it says nothing. */
    post(w, 2, CTL_PEER_DEAD, 2);
    post(w, 2, CTL_PEER_DEAD, 1);
    pass(w, 50);
    assert_true(ctl_core_leads(node_of(w, 2)->core));
    assert_int_equal(view_core_waiting_for(ctl_core_controller(node_of(w, 2)->core), &since), 1);
    world_close(w);
}

static void lost_prepare_is_sent_again(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    uint64_t epoch = view_of(w, 1)->epoch;
    node_of(w, 2)->deaf = true;
    member_up(w, 1, 101);
    member_joins(w, 1, 101);
    pass(w, 1500);
    assert_int_equal(view_of(w, 1)->epoch, epoch);
    node_of(w, 2)->deaf = false;
    pass(w, 1100);
    assert_int_equal(view_of(w, 1)->epoch, epoch + 1);
    world_close(w);
}

static void waiting_is_over_and_all_end(void **state)
{
    (void)state;
    struct world *w = cluster(2);
    crash(w, 2);
    lease_over(w, 2);
    pass(w, 31000);
    assert_true(node_of(w, 1)->ended);
    assert_string_equal(node_of(w, 1)->text, "server s2 (shards 1, 3) did not return within 30 s");
    assert_true(ctl_core_deadline(node_of(w, 1)->core) == UINT64_MAX);
    boot_heir(w, 3, 2);
    assert_true(node_of(w, 3)->ended);
    world_close(w);
}

static void same_id_twice_is_refused(void **state)
{
    (void)state;
    struct world *w = world_open();
    struct coord_request r = {.kind = COORD_TXN, .nops = 1, .op = {{.key = "servers/1", .value = "{}"}}};
    struct coord_event e;
    coord_model_apply(w->store, &r, &e);
    coord_event_done(&e);
    boot_plain(w, 1, 1);
    assert_true(node_of(w, 1)->fenced);
    world_close(w);
}

static void unreadable_view_is_left_alone(void **state)
{
    (void)state;
    struct world *w = world_open();
    struct coord_request r = {.kind = COORD_TXN, .nops = 1, .op = {{.key = "view", .value = "{\"epoch\":7}"}}};
    struct coord_event e;
    coord_model_apply(w->store, &r, &e);
    coord_event_done(&e);
    boot_plain(w, 1, 1);
    pass(w, 1000);
    assert_false(ctl_core_leads(node_of(w, 1)->core));
    assert_null(view_of(w, 1));
    world_close(w);
}

/* ---- replication ---- */

int main(void)
{
    log_level_set(LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(servers_make_the_first_view),
        cmocka_unit_test(member_joins_and_dies),
        cmocka_unit_test(members_are_passed_on_to_the_leader),
        cmocka_unit_test(dead_leader_is_succeeded_and_its_heir_serves),
        cmocka_unit_test(heir_of_the_only_server_leads),
        cmocka_unit_test(newcomer_is_listed_without_shards_and_removed_when_dead),
        cmocka_unit_test(removed_server_is_fenced),
        cmocka_unit_test(lost_lease_is_renewed_under_the_same_id),
        cmocka_unit_test(store_outage_stops_nothing),
        cmocka_unit_test(lost_answers_make_one_view),
        cmocka_unit_test(lost_answers_at_the_start),
        cmocka_unit_test(deposed_leader_writes_nothing),
        cmocka_unit_test(stale_ballots_are_ignored),
        cmocka_unit_test(prepare_brings_a_newer_view),
        cmocka_unit_test(report_waits_for_every_loop),
        cmocka_unit_test(returning_server_is_not_lost),
        cmocka_unit_test(leader_that_is_cut_off_is_succeeded),
        cmocka_unit_test(gone_process_is_suspected_at_once),
        cmocka_unit_test(lost_prepare_is_sent_again),
        cmocka_unit_test(waiting_is_over_and_all_end),
        cmocka_unit_test(same_id_twice_is_refused),
        cmocka_unit_test(unreadable_view_is_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
