/* The controller with backups: who leads next, who is added and dropped, what moves, who leaves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "coord/view_core.h"

enum { SELF = 1, MS = 1000, IDS = 64, SHARDS = 96 };

struct rig {
    struct view_core *v;
    struct view_outbox out;
    uint64_t now_us;
    struct view *proposed;     /* copy of the newest VIEW_CAS */
    struct prepare prepare;    /* copy of the newest PREPARE */
    bool prepared;
    uint32_t nasked, ncas;
    int64_t complete[IDS];     /* what server `id` reports of all its shards; join is one more */
    int64_t behind;            /* what backups report less */
    bool full[IDS];            /* what it says as a joiner; its primary has heard so */
};

static void take(struct rig *r)
{
    r->nasked = r->ncas = 0;
    for (uint32_t i = 0; i < r->out.n; i++) {
        const struct view_effect *e = &r->out.effect[i];
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
        r->nasked++;
    }
}

static void step(struct rig *r, struct view_event e)
{
    e.now_us = r->now_us;
    view_core_step(r->v, &e, &r->out);
    take(r);
}

static void server(struct rig *r, uint64_t id, uint64_t heir_of)
{
    struct server_doc d = {.heir_of = heir_of, .server = {.id = id, .nloops = 1}};
    snprintf(d.server.name, sizeof d.server.name, "s%llu", (unsigned long long)id);
    snprintf(d.server.ctl, sizeof d.server.ctl, "host:%llu", (unsigned long long)id);
    step(r, (struct view_event){.kind = VIEW_SERVER, .server = &d});
}

static void suspect(struct rig *r, uint64_t id)
{
    step(r, (struct view_event){.kind = VIEW_SUSPECT, .id = id, .text = "test"});
}

static void drain(struct rig *r, uint64_t id)
{
    step(r, (struct view_event){.kind = VIEW_DRAIN, .id = id});
}

static void tick(struct rig *r)
{
    uint64_t at = view_core_deadline(r->v);
    assert_true(at != UINT64_MAX);
    r->now_us = at > r->now_us ? at : r->now_us;
    step(r, (struct view_event){.kind = VIEW_TICK});
}

static bool idle(const struct rig *r)
{
    return view_core_deadline(r->v) == UINT64_MAX;
}

static bool has(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static bool backs(const struct view_shard *s, uint64_t id)
{
    return has(s->backup, s->nbackups, id);
}

static bool joins(const struct view_shard *s, uint64_t id)
{
    return has(s->joining, s->njoining, id);
}

static uint64_t inherits(const struct rig *r, uint64_t id)
{
    for (uint32_t i = 0; i < r->prepare.nheirs; i++)
        if (r->prepare.heir[i] == id)
            return r->prepare.heir_of[i];
    return 0;
}

static struct shard_report report_of(const struct rig *r, uint64_t id, uint32_t h, const struct view_shard *s)
{
    struct shard_report p = {.shard = h, .complete = r->complete[id], .join = r->complete[id] + 1};
    uint64_t of = inherits(r, id);
    p.role = s->primary == id ? HOLDER_PRIMARY
             : backs(s, id)   ? HOLDER_BACKUP
             : joins(s, id)   ? HOLDER_JOINER
             : of && (s->primary == of || backs(s, of)) ? HOLDER_HEIR
                                                        : 0;
    if (p.role == HOLDER_BACKUP)
        p.complete -= r->behind;
    p.full = p.role == HOLDER_JOINER && r->full[id];
    for (uint32_t i = 0; p.role == HOLDER_PRIMARY && i < s->njoining; i++)
        if (r->full[s->joining[i]])
            p.synced[p.nsynced++] = s->joining[i];
    return p;
}

static void report(struct rig *r, uint64_t id)
{
    const struct view *b = r->prepare.base;
    struct shard_report shard[SHARDS];
    struct report p = {.from = id, .ballot = r->prepare.ballot, .base_epoch = b->epoch, .clock = -1, .shard = shard};
    for (uint32_t h = 0; h < b->nshards; h++) {
        shard[p.nshards] = report_of(r, id, h, &b->shard[h]);
        p.nshards += shard[p.nshards].role != 0;
    }
    step(r, (struct view_event){.kind = VIEW_REPORT, .report = &p});
}

/* Everybody who was asked and is not in `silent`. */
static void report_all(struct rig *r, uint64_t silent)
{
    struct prepare p;
    uint64_t ids[IDS];
    uint32_t n = 0;
    prepare_copy(&p, &r->prepare);
    for (uint32_t i = 0; i < p.base->nservers; i++)
        if (!has(p.gone, p.ngone, p.base->server[i].id))
            ids[n++] = p.base->server[i].id;
    for (uint32_t i = 0; i < p.nheirs; i++)
        ids[n++] = p.heir[i];
    prepare_done(&p);
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] != silent)
            report(r, ids[i]);
}

static void committed(struct rig *r)
{
    assert_int_equal(r->ncas, 1);
    step(r, (struct view_event){.kind = VIEW_CAS_DONE, .ok = true});
    step(r, (struct view_event){.kind = VIEW_ADOPTED, .view = r->proposed});
}

/* One change from the wish to the proposal. */
static void change(struct rig *r)
{
    tick(r);
    assert_true(r->nasked > 0);
    report_all(r, 0);
    assert_int_equal(r->ncas, 1);
}

/* Changes until nothing is wanted any more. */
static uint32_t settle(struct rig *r)
{
    uint32_t n = 0;
    while (!idle(r)) {
        change(r);
        committed(r);
        assert_true(++n < 200);
    }
    return n;
}

static void synced(struct rig *r, uint64_t id)
{
    r->full[id] = true;
    for (uint32_t h = 0; h < r->proposed->nshards; h++)
        if (joins(&r->proposed->shard[h], id))
            step(r, (struct view_event){.kind = VIEW_SYNCED, .id = id, .shard = h});
}

/* Joiners catch up, one change after the other, until nothing is left to do. */
static uint32_t settle_synced(struct rig *r)
{
    uint32_t n = settle(r);
    for (;;) {
        uint32_t before = n;
        for (uint32_t i = 0; i < r->proposed->nservers; i++)
            synced(r, r->proposed->server[i].id);
        n += settle(r);
        if (n == before)
            return n;
    }
}

static void open_rig(struct rig *r, uint32_t n, uint32_t nshards, uint32_t replicas, uint32_t replicas_min)
{
    memset(r, 0, sizeof *r);
    struct view_config c = {.self = SELF, .batch_ms = 20, .report_ms = 1000};
    c.job = (struct job_doc){.nshards = nshards, .servers_min = n, .replicas = replicas, .replicas_min = replicas_min,
                             .mode = {0, MODE_SYNC, 0}, .wait_for_server_s = 10};
    r->v = view_core_create(&c);
    r->now_us = 1000 * MS;
    for (uint32_t i = 0; i < IDS; i++)
        r->complete[i] = 5;
    for (uint64_t id = 1; id <= n; id++)
        server(r, id, 0);
    step(r, (struct view_event){.kind = VIEW_ELECTED, .term = 5});
    committed(r);
    settle(r);
}

static void close_rig(struct rig *r)
{
    view_core_free(r->v);
    view_outbox_done(&r->out);
    view_free(r->proposed);
    if (r->prepared)
        prepare_done(&r->prepare);
}

struct loads {
    uint32_t primaries[IDS], holders[IDS];
};

static struct loads loads_of(const struct view *v)
{
    struct loads l = {0};
    for (uint32_t h = 0; h < v->nshards; h++) {
        const struct view_shard *s = &v->shard[h];
        l.primaries[s->primary]++;
        l.holders[s->primary]++;
        for (uint32_t i = 0; i < s->nbackups; i++)
            l.holders[s->backup[i]]++;
    }
    return l;
}

static uint32_t unevenness(const struct view *v, const uint32_t *load)
{
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t i = 0; i < v->nservers; i++) {
        uint32_t x = load[v->server[i].id];
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    return most - least;
}

static void assert_even(const struct view *v, const uint32_t *load)
{
    assert_true(unevenness(v, load) <= 1);
}

/* Every shard: listed, distinct holders, so many backups. */
static void assert_backups(const struct view *v, uint32_t n)
{
    for (uint32_t h = 0; h < v->nshards; h++) {
        const struct view_shard *s = &v->shard[h];
        assert_int_equal(s->nbackups, n);
        assert_non_null(view_server_find(v, s->primary));
        assert_false(backs(s, s->primary));
        for (uint32_t i = 0; i < n; i++)
            assert_non_null(view_server_find(v, s->backup[i]));
        assert_true(n < 2 || s->backup[0] != s->backup[1]);
    }
}

static void assert_settled(const struct view *v, uint32_t n)
{
    assert_backups(v, n);
    for (uint32_t h = 0; h < v->nshards; h++)
        assert_int_equal(v->shard[h].njoining, 0);
}

/* ---- the first view ---- */

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
