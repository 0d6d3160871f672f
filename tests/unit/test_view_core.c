/* The controller, case by case: what it asks, what it commits, whom it waits for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "coord/view_core.h"

enum { SELF = 1, MS = 1000 };

struct rig {
    struct view_core *v;
    struct view_outbox out;
    uint64_t now_us;
    struct view *proposed;     /* copy of the newest VIEW_CAS */
    struct prepare prepare;    /* copy of the newest PREPARE */
    bool prepared;
    uint64_t asked[16];        /* who got a PREPARE in the newest step */
    uint32_t nasked, ncas, nannounce;
};

static struct server_doc server_doc(uint64_t id, uint64_t heir_of)
{
    struct server_doc d = {.heir_of = heir_of, .server = {.id = id, .nloops = 1}};
    snprintf(d.server.name, sizeof d.server.name, "s%llu", (unsigned long long)id);
    snprintf(d.server.ctl, sizeof d.server.ctl, "host:%llu", (unsigned long long)id);
    return d;
}

static void take(struct rig *r)
{
    r->nasked = r->ncas = r->nannounce = 0;
    for (uint32_t i = 0; i < r->out.n; i++) {
        const struct view_effect *e = &r->out.effect[i];
        if (e->kind == VIEW_ANNOUNCE)
            r->nannounce++;
        if (e->kind == VIEW_CAS) {
            view_free(r->proposed);
            r->proposed = view_copy(e->view);
            r->ncas++;
        }
        if (e->kind != VIEW_SEND_PREPARE)
            continue;
        if (r->prepared)
            prepare_done(&r->prepare);
        prepare_copy(&r->prepare, e->prepare);
        r->prepared = true;
        assert_true(r->nasked < 16);
        r->asked[r->nasked++] = e->to;
    }
}

static void step(struct rig *r, struct view_event e)
{
    e.now_us = r->now_us;
    view_core_step(r->v, &e, &r->out);
    take(r);
}

static void open_rig(struct rig *r, uint32_t servers_min, uint32_t members_min, uint32_t nshards)
{
    memset(r, 0, sizeof *r);
    struct view_config c = {.self = SELF, .batch_ms = 20, .report_ms = 1000};
    c.job.nshards = nshards;
    c.job.servers_min = servers_min;
    c.job.members_min = members_min;
    c.job.mode = (struct mode){0, MODE_SYNC, 0};
    c.job.wait_for_server_s = 10;
    r->v = view_core_create(&c);
    r->now_us = 1000 * MS;
}

static void close_rig(struct rig *r)
{
    view_core_free(r->v);
    view_outbox_done(&r->out);
    view_free(r->proposed);
    if (r->prepared)
        prepare_done(&r->prepare);
}

static void tick(struct rig *r)
{
    r->now_us = view_core_deadline(r->v);
    assert_true(r->now_us != UINT64_MAX);
    step(r, (struct view_event){.kind = VIEW_TICK});
}

static void server(struct rig *r, uint64_t id, uint64_t heir_of)
{
    struct server_doc d = server_doc(id, heir_of);
    step(r, (struct view_event){.kind = VIEW_SERVER, .server = &d});
}

static void join(struct rig *r, uint64_t id)
{
    struct join_doc j = {.id = id, .name = "m", .local_size = 1};
    step(r, (struct view_event){.kind = VIEW_JOIN, .join = &j});
}

static void suspect(struct rig *r, uint64_t id)
{
    step(r, (struct view_event){.kind = VIEW_SUSPECT, .id = id, .text = "test"});
}

/* `node` reports the running ballot: c and j for each of its shards (as the heir of `heir_of` for that one's). */
static void report_as(struct rig *r, uint64_t node, uint64_t heir_of, int64_t c, int64_t j)
{
    struct shard_report shard[16];
    struct report p = {.from = node, .ballot = r->prepare.ballot, .base_epoch = r->prepare.base->epoch, .clock = -1,
                       .shard = shard};
    for (uint32_t h = 0; h < r->prepare.base->nshards; h++) {
        uint64_t primary = r->prepare.base->shard[h].primary;
        if (primary != node && (primary != heir_of || !heir_of))
            continue;
        shard[p.nshards++] = (struct shard_report){.shard = h, .complete = c, .join = j,
                                                   .role = primary == node ? HOLDER_PRIMARY : HOLDER_HEIR};
    }
    step(r, (struct view_event){.kind = VIEW_REPORT, .report = &p});
}

static void report(struct rig *r, uint64_t node, int64_t c, int64_t j)
{
    report_as(r, node, 0, c, j);
}

static void member_report(struct rig *r, uint64_t node, int64_t clock)
{
    struct report p = {.from = node, .ballot = r->prepare.ballot, .base_epoch = r->prepare.base->epoch, .clock = clock};
    step(r, (struct view_event){.kind = VIEW_REPORT, .report = &p});
}

/* The store wrote the proposal; this process adopts it. */
static void committed(struct rig *r)
{
    step(r, (struct view_event){.kind = VIEW_CAS_DONE, .ok = true});
    assert_int_equal(r->nannounce, 0);
    step(r, (struct view_event){.kind = VIEW_ADOPTED, .view = r->proposed});
    assert_int_equal(r->nannounce, 1);
}

/* Servers 1..n, a first view, members 11..10+m; the view after that stands. */
static void start(struct rig *r, uint32_t n, uint32_t m, uint32_t nshards)
{
    open_rig(r, n, m, nshards);
    for (uint64_t id = 1; id <= n; id++)
        server(r, id, 0);
    step(r, (struct view_event){.kind = VIEW_ELECTED, .term = 5});
    assert_int_equal(r->ncas, 1);
    committed(r);
    for (uint64_t id = 11; id < 11 + m; id++)
        join(r, id);
    if (!m)
        return;
    tick(r);
    for (uint64_t id = 1; id <= n; id++)
        report(r, id, 0, 0);
    assert_int_equal(r->ncas, 1);
    committed(r);
}

static const struct view_member *member(const struct rig *r, uint64_t id)
{
    return view_member_find(r->proposed, id);
}

static void first_view_waits_for_servers(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 1, 4);
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 7});
    server(&r, 1, 0);
    assert_int_equal(r.ncas, 0);
    server(&r, 2, 0);
    assert_int_equal(r.ncas, 1);
    assert_int_equal(r.proposed->epoch, 1);
    assert_int_equal(r.proposed->term, 7);
    assert_int_equal(r.proposed->nservers, 2);
    assert_int_equal(r.proposed->nmembers, 0);
    assert_int_equal(r.proposed->nmodes, 1);
    for (uint32_t h = 0; h < 4; h++) {
        assert_int_equal(r.proposed->shard[h].primary, 1 + h % 2);
        assert_int_equal(r.proposed->shard[h].since, 1);
    }
    committed(&r);
    close_rig(&r);
}

static void first_view_skips_lives_that_ended(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 2, 1, 2);
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 1});
    server(&r, 1, 0);
    server(&r, 3, 2);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
    open_rig(&r, 2, 1, 2);
    server(&r, 1, 0);
    server(&r, 2, 0);                  /* its registration outlives it */
    server(&r, 3, 2);
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 1});
    assert_int_equal(r.proposed->nservers, 2);
    assert_null(view_server_find(r.proposed, 2));
    assert_int_equal(r.proposed->shard[1].primary, 3);
    close_rig(&r);
}

static void joins_make_one_view(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 0, 4);
    join(&r, 12);
    r.now_us += 5 * MS;
    join(&r, 11);
    join(&r, 11);
    assert_int_equal(r.nasked, 0);
    tick(&r);
    assert_int_equal(r.nasked, 2);
    assert_int_equal(r.prepare.njoins, 2);
    assert_int_equal(r.prepare.joins[0].id, 11);
    report(&r, 1, 6, 7);
    assert_int_equal(r.ncas, 0);
    report(&r, 2, 6, 8);
    assert_int_equal(r.ncas, 1);
    assert_int_equal(r.proposed->nmembers, 2);
    assert_int_equal(member(&r, 11)->join, 8);
    assert_int_equal(member(&r, 12)->join, 8);
    assert_true(member(&r, 12)->last == STEP_NONE);
    assert_int_equal(r.proposed->mchg, 2);
    committed(&r);
    close_rig(&r);
}

static void first_members_wait_for_each_other(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, 1, 3, 1);
    server(&r, 1, 0);
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 1});
    committed(&r);
    join(&r, 11);
    join(&r, 12);
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    char text[200];
    view_core_describe(r.v, r.now_us, text, sizeof text);
    assert_string_equal(text, "idle, 2 of 3 members asked to join");
    join(&r, 13);
    tick(&r);
    assert_int_equal(r.prepare.njoins, 3);
    report(&r, 1, 0, 0);
    committed(&r);
    /* Later ones do not wait any more. */
    join(&r, 14);
    tick(&r);
    assert_int_equal(r.prepare.njoins, 1);
    close_rig(&r);
}

static void dead_member_ends_at_the_least_step(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 3, 2);
    suspect(&r, 12);
    tick(&r);
    assert_int_equal(r.prepare.ngone, 1);
    assert_int_equal(r.prepare.gone[0], 12);
    assert_int_equal(r.nasked, 4);   /* two servers, two members */
    report(&r, 1, 9, 10);
    report(&r, 2, 8, 9);
    assert_int_equal(member(&r, 12)->last, 8);
    assert_false(member(&r, 12)->live);
    assert_true(member(&r, 11)->live);
    assert_int_equal(r.proposed->mchg, 3);
    committed(&r);
    assert_true(view_core_removed(r.v, 12));
    join(&r, 12);
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    close_rig(&r);
}

static void change(struct rig *r, int64_t c)
{
    join(r, 50 + (uint64_t)c);
    tick(r);
    report(r, 1, c, c);
    committed(r);
}

static void departed_are_lowered_then_dropped(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 2, 1);
    step(&r, (struct view_event){.kind = VIEW_LEAVE, .id = 12, .step = 4});
    step(&r, (struct view_event){.kind = VIEW_LEAVE, .id = 12, .step = 4});
    tick(&r);
    report(&r, 1, 4, 5);
    assert_int_equal(member(&r, 12)->last, 4);
    assert_false(member(&r, 12)->live);
    committed(&r);
    change(&r, 3);
    assert_int_equal(member(&r, 12)->last, 3);
    change(&r, 4);
    assert_non_null(member(&r, 12));   /* the shard may be complete to 3 only */
    change(&r, 5);
    assert_null(member(&r, 12));
    close_rig(&r);
}

static void leave_cannot_rewrite_history(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 2, 1);
    step(&r, (struct view_event){.kind = VIEW_LEAVE, .id = 12, .step = -5});
    tick(&r);
    report(&r, 1, 7, 8);
    assert_int_equal(member(&r, 12)->last, 6);
    close_rig(&r);
}

static void heir_takes_the_shards(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 4);
    suspect(&r, 2);
    r.now_us += 20 * MS;
    step(&r, (struct view_event){.kind = VIEW_TICK});
    assert_int_equal(r.nasked, 0);
    uint64_t since;
    assert_int_equal(view_core_waiting_for(r.v, &since), 2);
    char text[200];
    view_core_describe(r.v, since + 4200 * MS, text, sizeof text);
    assert_string_equal(text, "waiting 4.2 s for server s2 (shards 1, 3)");
    suspect(&r, 11);    /* stays queued with it */
    server(&r, 3, 2);
    assert_int_equal(r.nasked, 2);
    assert_int_equal(r.prepare.ngone, 2);
    assert_int_equal(r.prepare.nheirs, 1);
    assert_int_equal(r.prepare.heir[0], 3);
    assert_int_equal(r.prepare.heir_of[0], 2);
    report(&r, 1, 6, 7);
    report(&r, 3, 6, 7);            /* not a word about the shards: not a report */
    assert_int_equal(r.ncas, 0);
    report_as(&r, 3, 2, 5, 6);
    assert_int_equal(r.ncas, 1);
    assert_null(view_server_find(r.proposed, 2));
    assert_non_null(view_server_find(r.proposed, 3));
    for (uint32_t h = 0; h < 4; h++) {
        assert_int_equal(r.proposed->shard[h].primary, h % 2 ? 3 : 1);
        assert_int_equal(r.proposed->shard[h].since, h % 2 ? 3 : 1);
    }
    assert_int_equal(member(&r, 11)->last, 5);
    committed(&r);
    assert_int_equal(view_core_waiting_for(r.v, &since), 0);
    close_rig(&r);
}

static void registered_heir_proves_death(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 2);
    server(&r, 3, 2);
    server(&r, 4, 2);     /* the directory was opened once more: 3 is dead too */
    tick(&r);
    assert_int_equal(r.prepare.gone[0], 2);
    assert_int_equal(r.prepare.heir[0], 4);
    server(&r, 2, 0);     /* too late: it was named */
    report(&r, 1, 0, 0);
    report_as(&r, 4, 2, 0, 0);
    assert_null(view_server_find(r.proposed, 2));
    assert_int_equal(r.proposed->shard[1].primary, 4);
    assert_null(view_server_find(r.proposed, 3));
    close_rig(&r);
}

static void suspicion_is_taken_back(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 2);
    suspect(&r, 2);
    suspect(&r, 11);
    r.now_us += 20 * MS;
    step(&r, (struct view_event){.kind = VIEW_TICK});
    assert_int_equal(r.nasked, 0);
    join(&r, 11);
    server(&r, 2, 0);
    assert_int_equal(r.nasked, 3);
    assert_int_equal(r.prepare.ngone, 0);
    close_rig(&r);
}

static void waiting_is_over_and_the_job_ends(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 4);
    suspect(&r, 2);
    tick(&r);
    assert_int_equal(r.ncas, 0);
    uint64_t before = r.now_us;
    tick(&r);
    assert_int_equal(r.now_us - before, 10 * 1000 * MS - 20 * MS);
    assert_int_equal(r.ncas, 1);
    assert_int_equal(r.proposed->epoch, 3);
    assert_string_equal(r.proposed->ended, "server s2 (shards 1, 3) did not return within 10 s");
    committed(&r);
    join(&r, 12);
    server(&r, 3, 2);
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    close_rig(&r);
}

static void lost_answer_same_view(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    join(&r, 12);
    struct view *base = view_copy(r.proposed);
    tick(&r);
    report(&r, 1, 3, 3);
    struct view *first = view_copy(r.proposed);
    suspect(&r, 11);                   /* no new PREPARE on this base any more */
    assert_int_equal(r.nasked, 0);
    step(&r, (struct view_event){.kind = VIEW_CAS_UNKNOWN, .view = base});
    assert_int_equal(r.ncas, 1);
    assert_int_equal(r.proposed->nonce, first->nonce);
    step(&r, (struct view_event){.kind = VIEW_CAS_UNKNOWN, .view = first});
    assert_int_equal(r.ncas, 0);
    step(&r, (struct view_event){.kind = VIEW_ADOPTED, .view = first});
    assert_int_equal(r.nannounce, 1);
    tick(&r);                          /* and now the dead member */
    assert_int_equal(r.prepare.gone[0], 11);
    view_free(base);
    view_free(first);
    close_rig(&r);
}

static void lost_answer_foreign_view(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    join(&r, 12);
    tick(&r);
    report(&r, 1, 3, 3);
    struct view *other = view_copy(r.proposed);
    other->nonce++;
    step(&r, (struct view_event){.kind = VIEW_CAS_UNKNOWN, .view = other});
    assert_int_equal(r.ncas, 0);
    char text[64];
    view_core_describe(r.v, r.now_us, text, sizeof text);
    assert_string_equal(text, "not leading");
    step(&r, (struct view_event){.kind = VIEW_ADOPTED, .view = other});
    assert_int_equal(r.nannounce, 0);
    view_free(other);
    close_rig(&r);
}

static void refused_write_forgets_the_change(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    join(&r, 12);
    tick(&r);
    uint64_t round = r.prepare.ballot.round;
    report(&r, 1, 3, 3);
    struct view *base = view_copy(r.prepare.base);
    step(&r, (struct view_event){.kind = VIEW_CAS_DONE, .ok = false});
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    /* Elected again in the same term: ballots go on ascending. */
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 5, .view = base});
    tick(&r);
    assert_true(r.prepare.ballot.round > round);
    view_free(base);
    close_rig(&r);
}

static void silent_server_without_shards_goes(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 2);
    server(&r, 3, 0);
    tick(&r);
    report(&r, 1, 0, 0);
    report(&r, 2, 0, 0);
    assert_non_null(view_server_find(r.proposed, 3));
    committed(&r);
    join(&r, 12);
    tick(&r);
    uint64_t round = r.prepare.ballot.round;
    report(&r, 1, 1, 1);
    report(&r, 2, 1, 1);
    assert_int_equal(r.ncas, 0);
    tick(&r);
    assert_int_equal(r.prepare.ballot.round, round + 1);
    assert_int_equal(r.prepare.gone[0], 3);
    report(&r, 1, 1, 1);
    assert_int_equal(r.ncas, 0);       /* all reports anew */
    report(&r, 2, 1, 1);
    assert_int_equal(r.ncas, 1);
    assert_null(view_server_find(r.proposed, 3));
    close_rig(&r);
}

static void silent_holder_is_asked_again(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 2);
    join(&r, 12);
    tick(&r);
    struct ballot ballot = r.prepare.ballot;
    report(&r, 1, 1, 1);
    tick(&r);
    assert_int_equal(r.nasked, 1);
    assert_int_equal(r.asked[0], 2);
    assert_int_equal(r.prepare.ballot.round, ballot.round);
    uint64_t since;
    assert_int_equal(view_core_waiting_for(r.v, &since), 2);
    server(&r, 2, 0);                  /* reconnected */
    assert_int_equal(r.nasked, 1);
    report(&r, 2, 1, 1);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
}

static void silent_self_is_waited_for(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    join(&r, 12);
    tick(&r);
    tick(&r);
    assert_int_equal(r.nasked, 0);
    report(&r, 1, 0, 0);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
}

static void death_while_reports_come_starts_a_round(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 2, 1, 1);                /* the shard is server 1's; server 2 has none */
    join(&r, 12);
    tick(&r);
    struct prepare old;
    prepare_copy(&old, &r.prepare);
    suspect(&r, 2);
    assert_int_equal(r.prepare.ballot.round, old.ballot.round + 1);
    assert_int_equal(r.prepare.gone[0], 2);
    /* A report of the round before is stale. */
    struct prepare now = r.prepare;
    r.prepare = old;
    report(&r, 1, 0, 0);
    assert_int_equal(r.ncas, 0);
    r.prepare = now;
    r.prepare.ballot.term--;
    report(&r, 1, 0, 0);
    assert_int_equal(r.ncas, 0);
    r.prepare.ballot.term++;
    r.prepare.base->epoch--;
    report(&r, 1, 0, 0);
    assert_int_equal(r.ncas, 0);
    r.prepare.base->epoch++;
    report(&r, 77, 0, 0);
    report(&r, 1, 0, 0);
    assert_int_equal(r.ncas, 1);
    prepare_done(&old);
    close_rig(&r);
}

static void elected_always_changes_once(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    struct view *base = view_copy(r.proposed);
    step(&r, (struct view_event){.kind = VIEW_DEPOSED});
    join(&r, 12);
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    step(&r, (struct view_event){.kind = VIEW_ELECTED, .term = 9, .view = base});
    tick(&r);
    assert_int_equal(r.prepare.ballot.term, 9);
    assert_int_equal(r.prepare.ballot.round, 1);
    assert_int_equal(r.prepare.njoins, 0);
    report(&r, 1, 3, 3);
    assert_int_equal(r.proposed->epoch, base->epoch + 1);
    assert_int_equal(r.proposed->mchg, base->mchg);
    committed(&r);
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    view_free(base);
    close_rig(&r);
}

static void mode_starts_after_every_clock(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 2, 1);
    step(&r, (struct view_event){.kind = VIEW_MODE, .mode = {3, MODE_SSP, 2}});
    tick(&r);
    assert_true(r.prepare.mode_change);
    report(&r, 1, 6, 7);
    assert_int_equal(r.ncas, 0);       /* members are waited for */
    member_report(&r, 11, 7);
    member_report(&r, 12, 8);
    assert_int_equal(r.ncas, 1);
    assert_int_equal(r.proposed->nmodes, 2);
    assert_int_equal(r.proposed->mode[1].from, 9);
    assert_int_equal(r.proposed->mode[1].kind, MODE_SSP);
    assert_int_equal(r.proposed->mode[1].bound, 2);
    committed(&r);
    step(&r, (struct view_event){.kind = VIEW_MODE, .mode = {3, MODE_SSP, 2}});
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    close_rig(&r);
}

static void asynchronous_joiners_start_with_the_slowest(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 2, 1);
    step(&r, (struct view_event){.kind = VIEW_MODE, .mode = {0, MODE_ASYNC, 0}});
    tick(&r);
    report(&r, 1, 1, 2);
    member_report(&r, 11, 1);
    member_report(&r, 12, 1);
    assert_int_equal(r.proposed->mode[1].from, 2);
    committed(&r);
    join(&r, 13);
    tick(&r);
    member_report(&r, 11, 30);
    member_report(&r, 12, 40);
    report(&r, 1, 19, 21);
    assert_int_equal(member(&r, 13)->join, 30);
    assert_int_equal(r.proposed->nmodes, 1);   /* the first mode is long past */
    assert_int_equal(r.proposed->mode[0].kind, MODE_ASYNC);
    assert_int_equal(r.proposed->mode[0].from, 0);
    close_rig(&r);
}

static void silent_member_delays_no_mode(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 2, 1);
    step(&r, (struct view_event){.kind = VIEW_MODE, .mode = {0, MODE_ASYNC, 0}});
    tick(&r);
    report(&r, 1, 1, 2);
    member_report(&r, 11, 1);
    tick(&r);
    assert_int_equal(r.prepare.gone[0], 12);
    report(&r, 1, 1, 2);
    member_report(&r, 11, 1);
    assert_int_equal(r.ncas, 1);
    close_rig(&r);
}

static void everybody_left_and_one_comes(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    suspect(&r, 11);
    tick(&r);
    report(&r, 1, 5, 6);
    assert_int_equal(r.proposed->nmembers, 1);
    committed(&r);
    join(&r, 12);
    tick(&r);
    report(&r, 1, 6, 6);
    assert_int_equal(member(&r, 12)->join, 6);
    assert_int_equal(member(&r, 11)->last, 5);
    close_rig(&r);
}

static void operator_ends_the_job(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    step(&r, (struct view_event){.kind = VIEW_END, .text = "enough"});
    assert_int_equal(r.ncas, 1);
    assert_string_equal(r.proposed->ended, "enough");
    assert_int_equal(r.proposed->nmembers, 1);
    committed(&r);
    close_rig(&r);
}

static void same_history_same_nonce(void **state)
{
    (void)state;
    struct rig a, b;
    start(&a, 2, 2, 4);
    start(&b, 2, 2, 4);
    assert_int_equal(a.proposed->nonce, b.proposed->nonce);
    close_rig(&a);
    close_rig(&b);
}

static void nonsense_is_ignored(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 1, 1, 1);
    struct report huge = {.from = 1, .ballot = {5, 99}, .base_epoch = 2};
    for (int kind = VIEW_LEAVE; kind <= VIEW_TICK; kind++) {
        if (kind == VIEW_END || kind == VIEW_REBALANCE)
            continue;
        step(&r, (struct view_event){.kind = kind, .id = 999, .report = &huge, .mode = {0, 77, 0}});
        assert_int_equal(r.out.n, 0);
    }
    suspect(&r, SELF);
    join(&r, 0);
    assert_true(view_core_deadline(r.v) == UINT64_MAX);
    close_rig(&r);
}

int main(void)
{
    log_level_set(LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_view_waits_for_servers),
        cmocka_unit_test(first_view_skips_lives_that_ended),
        cmocka_unit_test(joins_make_one_view),
        cmocka_unit_test(first_members_wait_for_each_other),
        cmocka_unit_test(dead_member_ends_at_the_least_step),
        cmocka_unit_test(departed_are_lowered_then_dropped),
        cmocka_unit_test(leave_cannot_rewrite_history),
        cmocka_unit_test(heir_takes_the_shards),
        cmocka_unit_test(registered_heir_proves_death),
        cmocka_unit_test(suspicion_is_taken_back),
        cmocka_unit_test(waiting_is_over_and_the_job_ends),
        cmocka_unit_test(lost_answer_same_view),
        cmocka_unit_test(lost_answer_foreign_view),
        cmocka_unit_test(refused_write_forgets_the_change),
        cmocka_unit_test(silent_server_without_shards_goes),
        cmocka_unit_test(silent_holder_is_asked_again),
        cmocka_unit_test(silent_self_is_waited_for),
        cmocka_unit_test(death_while_reports_come_starts_a_round),
        cmocka_unit_test(elected_always_changes_once),
        cmocka_unit_test(mode_starts_after_every_clock),
        cmocka_unit_test(asynchronous_joiners_start_with_the_slowest),
        cmocka_unit_test(silent_member_delays_no_mode),
        cmocka_unit_test(everybody_left_and_one_comes),
        cmocka_unit_test(operator_ends_the_job),
        cmocka_unit_test(same_history_same_nonce),
        cmocka_unit_test(nonsense_is_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
