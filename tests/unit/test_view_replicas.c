/* test_view_replicas.c - the controller with backups: placement, failover, joiners. */
#include "tests/unit/view_replicas_rig.h"

static void first_view_spreads_backups(void **state)
{
    (void)state;
    struct rig r;
    for (uint32_t n = 2; n <= 6; n++)
        for (uint32_t replicas = 0; replicas <= 2; replicas++) {
            open_rig(&r, n, 60, replicas, 0);
            uint32_t want = replicas < n ? replicas : n - 1;
            assert_int_equal(r.proposed->epoch, 1);     /* and nothing is left to be done */
            assert_settled(r.proposed, want);
            struct loads l = loads_of(r.proposed);
            assert_even(r.proposed, l.primaries);
            assert_even(r.proposed, l.holders);
            close_rig(&r);
        }
}

static void backups_of_one_server_are_on_different_ones(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 4, 24, 1, 0);
    uint32_t pairs[IDS][IDS] = {{0}};
    for (uint32_t h = 0; h < 24; h++)
        pairs[r.proposed->shard[h].primary][r.proposed->shard[h].backup[0]]++;
    for (uint32_t i = 1; i <= 4; i++)
        for (uint32_t k = 1; k <= 4; k++)
            assert_int_equal(pairs[i][k], i == k ? 0 : 2);
    close_rig(&r);
}

/* ---- failover ---- */

static void backup_takes_over_at_once(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 6, 1, 0);
    struct view *before = view_copy(r.proposed);
    suspect(&r, 2);
    tick(&r);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.nasked, 2);
    report(&r, 1);
    assert_int_equal(r.ncas, 0);       /* the backup must say how far it is */
    report(&r, 3);
    assert_int_equal(r.ncas, 1);
    assert_null(view_server_find(r.proposed, 2));
    for (uint32_t h = 0; h < 6; h++) {
        const struct view_shard *a = &before->shard[h], *b = &r.proposed->shard[h];
        bool lost = a->primary == 2;
        assert_int_equal(b->primary, lost ? a->backup[0] : a->primary);
        assert_int_equal(b->since, lost ? r.proposed->epoch : a->since);
        assert_int_equal(b->nbackups, lost || backs(a, 2) ? 0 : 1);
        assert_int_equal(b->njoining, lost || backs(a, 2) ? 1 : 0);
        assert_true(!b->njoining || b->joining[0] == 4 - b->primary);
    }
    committed(&r);
    settle_synced(&r);
    assert_settled(r.proposed, 1);
    view_free(before);
    close_rig(&r);
}

static void last_step_is_the_next_primarys(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    struct join_doc j = {.id = 50, .name = "m", .local_size = 1};
    step(&r, (struct view_event){.kind = VIEW_JOIN, .join = &j});
    j.id = 51;
    step(&r, (struct view_event){.kind = VIEW_JOIN, .join = &j});
    change(&r);
    committed(&r);
    /* Only what backups lack counts: 2 leads a shard that 3 or 1 backs. */
    uint64_t backup = 0;
    for (uint32_t h = 0; h < 3; h++)
        backup = r.proposed->shard[h].primary == 2 ? r.proposed->shard[h].backup[0] : backup;
    r.complete[1] = r.complete[3] = 9;
    r.complete[backup] = 8;
    suspect(&r, 2);
    suspect(&r, 51);
    change(&r);
    assert_int_equal(view_member_find(r.proposed, 51)->last, 8);
    close_rig(&r);
}

/* The old primary may count a step that the new one has not got yet. */
static void moved_shard_counts_at_its_new_primary(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 2, 1, 0);
    struct join_doc j = {.id = 50, .name = "m", .local_size = 1};
    step(&r, (struct view_event){.kind = VIEW_JOIN, .join = &j});
    j.id = 51;
    step(&r, (struct view_event){.kind = VIEW_JOIN, .join = &j});
    change(&r);
    committed(&r);
    r.complete[1] = r.complete[2] = 9;
    r.behind = 1;
    drain(&r, 2);
    suspect(&r, 51);
    change(&r);
    assert_int_equal(r.prepare.nmoves, 1);
    assert_int_equal(r.prepare.move[0].to, 1);
    assert_int_equal(r.proposed->shard[r.prepare.move[0].shard].primary, 1);
    assert_int_equal(view_member_find(r.proposed, 51)->last, 8);
    close_rig(&r);
}

static void furthest_backup_is_promoted(void **state)
{
    (void)state;
    struct rig r;
    for (uint64_t ahead = 2; ahead <= 3; ahead++) {
        open_rig(&r, 4, 4, 2, 0);
        uint32_t h = 0;
        while (r.proposed->shard[h].primary != 4)
            h++;
        const struct view_shard *s = &r.proposed->shard[h];
        uint64_t other = s->backup[ahead - 2], first = s->backup[3 - ahead];
        r.complete[other] = 7;
        r.complete[first] = 6;
        suspect(&r, 4);
        change(&r);
        assert_int_equal(r.proposed->shard[h].primary, other);
        assert_true(backs(&r.proposed->shard[h], first));
        close_rig(&r);
    }
}

static void promotions_go_to_the_least_busy(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 4, 24, 2, 0);
    suspect(&r, 4);
    change(&r);
    assert_true(unevenness(r.proposed, loads_of(r.proposed).primaries) <= 2);
    committed(&r);
    settle(&r);
    assert_even(r.proposed, loads_of(r.proposed).primaries);
    close_rig(&r);
}

static void several_servers_go_at_once(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 5, 20, 2, 0);
    suspect(&r, 4);
    suspect(&r, 5);
    change(&r);
    assert_int_equal(r.prepare.ngone, 2);
    committed(&r);
    settle_synced(&r);
    assert_settled(r.proposed, 2);
    close_rig(&r);
}

/* ---- joiners ---- */

static void joiner_becomes_backup_only_when_synced(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 4, 1, 0);
    suspect(&r, 2);
    settle(&r);
    assert_settled(r.proposed, 0);
    server(&r, 3, 0);
    settle(&r);
    for (uint32_t h = 0; h < 4; h++)
        assert_true(joins(&r.proposed->shard[h], 3));
    uint64_t epoch = r.proposed->epoch;
    /* Another change in between leaves them what they are. */
    step(&r, (struct view_event){.kind = VIEW_REBALANCE});
    settle(&r);
    assert_int_equal(r.proposed->epoch, epoch + 1);
    for (uint32_t h = 0; h < 4; h++)
        assert_true(joins(&r.proposed->shard[h], 3) && r.proposed->shard[h].nbackups == 0);
    synced(&r, 3);
    settle(&r);
    assert_settled(r.proposed, 1);
    assert_even(r.proposed, loads_of(r.proposed).primaries);
    close_rig(&r);
}

static void full_joiner_is_promoted(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 2, 1, 0);
    suspect(&r, 2);
    settle(&r);
    server(&r, 3, 0);
    settle(&r);
    /* Its primary, the controller's server, goes: another controller leads on. */
    struct view *base = view_copy(r.proposed);
    struct view_config c = {.self = 3, .batch_ms = 20, .report_ms = 1000};
    c.job = (struct job_doc){.nshards = 2, .servers_min = 2, .replicas = 1, .mode = {0, MODE_SYNC, 0}};
    for (int full = 0; full < 2; full++) {
        view_core_free(r.v);
        r.v = view_core_create(&c);
        server(&r, 3, 0);
        step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 6, .view = base});
        suspect(&r, 1);
        r.full[3] = full;
        tick(&r);
        /* Nothing is known of the joiner: it is asked before 1 is given up. */
        assert_int_equal(r.prepare.ngone, 0);
        report(&r, 3);
        if (!full) {
            assert_int_equal(r.ncas, 0);
            uint64_t since;
            assert_int_equal(view_core_waiting_for(r.v, &since), 1);
            continue;
        }
        assert_int_equal(r.prepare.ngone, 1);
        report(&r, 3);
        assert_int_equal(r.ncas, 1);
        assert_int_equal(r.proposed->shard[0].primary, 3);
        assert_int_equal(r.proposed->shard[0].njoining, 0);
        assert_int_equal(r.proposed->shard[0].since, r.proposed->epoch);
    }
    view_free(base);
    close_rig(&r);
}

static void joiners_count_for_j_only_when_full(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 2, 1, 0);
    suspect(&r, 2);
    settle(&r);
    server(&r, 3, 0);
    settle(&r);
    for (int full = 0; full < 2; full++) {
        r.full[3] = full;
        r.complete[3] = 9;
        r.complete[1] = 6;
        struct join_doc j = {.id = 50 + (uint64_t)full, .name = "m", .local_size = 1};
        step(&r, (struct view_event){.kind = VIEW_JOIN, .join = &j});
        change(&r);
        assert_int_equal(view_member_find(r.proposed, j.id)->join, full ? 10 : 7);
        committed(&r);
    }
    close_rig(&r);
}

static void gone_joiner_is_replaced(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 4, 4, 1, 0);
    suspect(&r, 4);
    settle(&r);
    uint32_t h = 0;
    while (!r.proposed->shard[h].njoining)
        h++;
    uint64_t joiner = r.proposed->shard[h].joining[0];
    if (joiner == SELF) {
        close_rig(&r);
        return;
    }
    suspect(&r, joiner);
    settle(&r);
    assert_false(joins(&r.proposed->shard[h], joiner));
    settle_synced(&r);
    assert_settled(r.proposed, 1);
    close_rig(&r);
}

/* ---- who must be waited for ---- */

static void both_holders_gone_are_waited_for(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    struct view *before = view_copy(r.proposed);
    suspect(&r, 2);
    suspect(&r, 3);
    tick(&r);
    assert_int_equal(r.nasked, 0);     /* one shard is theirs alone, and nobody is given up */
    uint64_t since;
    assert_true(view_core_waiting_for(r.v, &since) >= 2);
    /* Either of them can come back; the other one goes then. */
    server(&r, 3, 0);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 2);
    report_all(&r, 0);
    for (uint32_t h = 0; h < 3; h++) {
        const struct view_shard *a = &before->shard[h];
        assert_int_equal(r.proposed->shard[h].primary, a->primary == 2 ? a->backup[0] : a->primary);
    }
    view_free(before);
    close_rig(&r);
}

static void heir_of_a_backup_is_promoted(void **state)
{
    (void)state;
    struct rig r;
    for (uint64_t of = 2; of <= 3; of++) {
        open_rig(&r, 3, 3, 1, 0);
        struct view *before = view_copy(r.proposed);
        suspect(&r, 2);
        suspect(&r, 3);
        tick(&r);
        server(&r, 9, of);
        assert_int_equal(r.prepare.ngone, 2);
        assert_int_equal(r.prepare.nheirs, 1);
        assert_int_equal(r.prepare.heir_of[0], of);
        report_all(&r, 0);
        assert_int_equal(r.ncas, 1);
        for (uint32_t h = 0; h < 3; h++) {
            const struct view_shard *a = &before->shard[h], *b = &r.proposed->shard[h];
            bool alone = a->primary != 1 && !backs(a, 1);
            assert_int_equal(b->primary, alone ? 9 : 1);
            assert_true(b->nbackups == 0 && (b->njoining == 1) && b->joining[0] == (alone ? 1 : 9));
        }
        view_free(before);
        close_rig(&r);
    }
}

static void of_two_heirs_the_one_that_answers_serves(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    suspect(&r, 3);
    tick(&r);
    server(&r, 8, 2);
    server(&r, 9, 3);
    assert_int_equal(r.prepare.nheirs, 2);
    report_all(&r, 8);
    assert_int_equal(r.ncas, 0);
    tick(&r);
    assert_int_equal(r.prepare.nheirs, 1);
    assert_int_equal(r.prepare.heir[0], 9);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    assert_null(view_server_find(r.proposed, 8));
    close_rig(&r);
}

/* The shard is served: the disk that returns is not asked, its server is listed like any other. */
static void returned_disk_of_a_served_shard_joins(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 4, 1, 0);
    server(&r, 9, 2);
    tick(&r);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 2);
    assert_int_equal(r.prepare.nheirs, 0);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    assert_null(view_server_find(r.proposed, 2));
    assert_non_null(view_server_find(r.proposed, 9));
    for (uint32_t h = 0; h < 4; h++) {
        assert_int_equal(r.proposed->shard[h].primary, 1);
        assert_true(joins(&r.proposed->shard[h], 9));
    }
    committed(&r);
    close_rig(&r);
    /* Later, when its former life is long forgotten. */
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    settle(&r);
    server(&r, 9, 2);
    settle(&r);
    assert_int_equal(r.prepare.nheirs, 0);
    assert_non_null(view_server_find(r.proposed, 9));
    close_rig(&r);
}

static void silent_backup_goes(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    step(&r, (struct view_event){.kind = VIEW_REBALANCE});
    tick(&r);
    report_all(&r, 3);
    assert_int_equal(r.ncas, 0);
    tick(&r);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 3);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
}

/* Two that share a shard are silent: giving up one might give up the only one that lives. */
static void silent_pair_is_asked_again(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    step(&r, (struct view_event){.kind = VIEW_REBALANCE});
    tick(&r);
    report(&r, 1);
    tick(&r);
    assert_int_equal(r.prepare.ngone, 0);
    assert_int_equal(r.nasked, 2);
    report(&r, 3);
    tick(&r);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 2);
    close_rig(&r);
}

/* A backup dies while the change that gave up its primary is running. */
static void backup_dies_in_the_change(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    tick(&r);
    suspect(&r, 3);
    uint64_t since;
    assert_true(view_core_waiting_for(r.v, &since) >= 2);
    server(&r, 9, 2);
    assert_int_equal(r.prepare.ngone, 2);
    assert_int_equal(r.prepare.nheirs, 1);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
}

/* Who was called gone, and lives, is asked after all when nobody else has what it has. */
static void named_server_comes_back(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    tick(&r);
    assert_int_equal(r.prepare.gone[0], 2);
    server(&r, 2, 0);                  /* too late: the others can go on without it */
    assert_int_equal(r.nasked, 0);
    suspect(&r, 3);
    server(&r, 2, 0);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 3);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    assert_non_null(view_server_find(r.proposed, 2));
    close_rig(&r);
}

/* It was back already when it turned out that nobody else has it. */
static void named_server_was_back(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    tick(&r);
    server(&r, 2, 0);
    suspect(&r, 3);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 3);
    report_all(&r, 0);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
    open_rig(&r, 3, 3, 1, 0);
    suspect(&r, 2);
    tick(&r);
    server(&r, 2, 0);
    suspect(&r, 2);                    /* and gone again */
    suspect(&r, 3);
    assert_int_equal(r.nasked, 0);
    close_rig(&r);
}

/* The controller itself stood still: reports that have come meanwhile are read first. */
static void late_controller_gives_nobody_up(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 3, 3, 1, 0);
    step(&r, (struct view_event){.kind = VIEW_REBALANCE});
    tick(&r);
    report(&r, 1);
    report(&r, 2);
    r.now_us = view_core_deadline(r.v) + 500 * MS;
    step(&r, (struct view_event){.kind = VIEW_TICK});
    assert_int_equal(r.nasked, 0);
    assert_true(view_core_deadline(r.v) > r.now_us);
    report(&r, 3);
    assert_int_equal(r.ncas, 1);
    assert_non_null(view_server_find(r.proposed, 3));
    committed(&r);
    settle(&r);
    step(&r, (struct view_event){.kind = VIEW_REBALANCE});
    tick(&r);
    report(&r, 1);
    report(&r, 2);
    r.now_us = view_core_deadline(r.v) + 500 * MS;
    step(&r, (struct view_event){.kind = VIEW_TICK});
    tick(&r);                          /* nor does it wait for ever */
    assert_int_equal(r.prepare.gone[0], 3);
    close_rig(&r);
}

int main(void)
{
    log_level_set(LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_view_spreads_backups),
        cmocka_unit_test(backups_of_one_server_are_on_different_ones),
        cmocka_unit_test(backup_takes_over_at_once),
        cmocka_unit_test(last_step_is_the_next_primarys),
        cmocka_unit_test(moved_shard_counts_at_its_new_primary),
        cmocka_unit_test(furthest_backup_is_promoted),
        cmocka_unit_test(promotions_go_to_the_least_busy),
        cmocka_unit_test(several_servers_go_at_once),
        cmocka_unit_test(joiner_becomes_backup_only_when_synced),
        cmocka_unit_test(full_joiner_is_promoted),
        cmocka_unit_test(joiners_count_for_j_only_when_full),
        cmocka_unit_test(gone_joiner_is_replaced),
        cmocka_unit_test(both_holders_gone_are_waited_for),
        cmocka_unit_test(heir_of_a_backup_is_promoted),
        cmocka_unit_test(of_two_heirs_the_one_that_answers_serves),
        cmocka_unit_test(returned_disk_of_a_served_shard_joins),
        cmocka_unit_test(silent_backup_goes),
        cmocka_unit_test(silent_pair_is_asked_again),
        cmocka_unit_test(backup_dies_in_the_change),
        cmocka_unit_test(named_server_comes_back),
        cmocka_unit_test(named_server_was_back),
        cmocka_unit_test(late_controller_gives_nobody_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
