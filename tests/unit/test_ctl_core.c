/* A server's control core, case by case, over the model store: several cores in one process, with messages, loops and
 * time played by the test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/coord.h"
#include "server/ctl_core.h"

enum { NODES = 4, MEMBERS = 4, QUEUE = 4096, MS = 1000, LOOPS = 2, NSHARDS = 4 };

/* Servers have ids 1..NODES (slot id - 1), members 101.. */
struct node {
    struct ctl_core *core;
    struct ctl_outbox out;
    uint64_t id;
    int64_t lease, watched;        /* watched: revision that changes were delivered up to; -1: no watch */
    bool store_cut;                /* requests are answered KS_EUNAVAIL */
    bool lose_answer;              /* the next transaction is done, its answer lost */
    bool lose_request;             /* the next transaction is not done, and the answer is lost */
    bool mute_loops, deaf;         /* deaf: frames to it are lost */
    bool fenced, ended, drained;
    bool syncs;                    /* as a primary it has heard that every joiner has everything */
    uint32_t adopted, prepared, suspects_sent, heir_told;
    uint64_t heir_of;
    int64_t complete;
    struct ballot ballot;          /* of the newest LOOPS_PREPARE */
    char text[160];
};
struct message {
    struct ctl_event e;
    uint64_t to;
    struct coord_event *coord;
    struct prepare *prepare;
    struct report *report;
    struct view *view;
    struct join_doc *join;
    char text[160];
};
struct world {
    struct coord_model *store;
    struct node node[NODES];
    uint64_t now_us;
    bool connected[NODES + 1][NODES + 1];
    struct view *member_view[MEMBERS];     /* newest that the member was sent */
    struct message queue[QUEUE];
    uint32_t first, n;
};

static struct node *node_of(struct world *w, uint64_t id)
{
    return id >= 1 && id <= NODES && w->node[id - 1].core ? &w->node[id - 1] : NULL;
}

/* ---- messages ---- */

static struct message *post(struct world *w, uint64_t to, enum ctl_event_kind kind, uint64_t from)
{
    assert_true(w->n < QUEUE);
    struct message *m = &w->queue[(w->first + w->n++) % QUEUE];
    memset(m, 0, sizeof *m);
    m->to = to;
    m->e.kind = kind;
    m->e.from = from;
    return m;
}

static void message_done(struct message *m)
{
    if (m->coord) {
        coord_event_done(m->coord);
        mem_free(m->coord);
    }
    if (m->prepare) {
        prepare_done(m->prepare);
        mem_free(m->prepare);
    }
    if (m->report) {
        report_done(m->report);
        mem_free(m->report);
    }
    view_free(m->view);
    mem_free(m->join);
}

static struct report *report_copy(const struct report *r)
{
    struct report *copy = mem_dup(r, sizeof *r);
    copy->shard = mem_dup(r->shard, r->nshards * sizeof *r->shard);
    return copy;
}

/* ---- the store ---- */

static void answer(struct world *w, struct node *n, const struct coord_request *r)
{
    struct coord_event *e = mem_alloc(sizeof *e);
    bool txn = r->kind == COORD_TXN;
    if (n->store_cut || (txn && n->lose_request)) {
        e->kind = COORD_ANSWER;
        e->request = r->kind;
        e->tag = r->tag;
        e->status = n->store_cut ? KS_EUNAVAIL : KS_EUNKNOWN;
        n->lose_request = txn ? false : n->lose_request;
    } else {
        coord_model_apply(w->store, r, e);
        if (r->kind == COORD_LEASE_GRANT)
            n->lease = e->lease;
        if (txn && n->lose_answer) {
            n->lose_answer = false;
            e->status = KS_EUNKNOWN;
            e->succeeded = false;
        }
    }
    struct message *m = post(w, n->id, CTL_COORD, 0);
    m->coord = e;
}

/* Delivers what the watch has; true: something. */
static bool deliver_changes(struct world *w, struct node *n)
{
    if (!n->core || n->watched < 0 || n->store_cut || n->watched >= coord_model_revision(w->store))
        return false;
    struct coord_event *e;
    for (size_t i = 0;; i++) {
        e = mem_alloc(sizeof *e);
        if (!coord_model_change(w->store, n->watched, i, e))
            break;
        post(w, n->id, CTL_COORD, 0)->coord = e;
    }
    mem_free(e);
    n->watched = coord_model_revision(w->store);
    return true;
}

/* ---- effects ---- */

static bool has(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static enum holder_role role_of(const struct prepare *p, const struct view_shard *s, uint64_t id)
{
    if (s->primary == id)
        return HOLDER_PRIMARY;
    if (has(s->backup, s->nbackups, id))
        return HOLDER_BACKUP;
    if (has(s->joining, s->njoining, id))
        return HOLDER_JOINER;
    for (uint32_t i = 0; i < p->nheirs; i++)
        if (p->heir[i] == id && (p->heir_of[i] == s->primary || has(s->backup, s->nbackups, p->heir_of[i])))
            return HOLDER_HEIR;
    return 0;
}

static void loops_report(struct world *w, struct node *n, const struct prepare *p)
{
    for (uint32_t loop = 0; loop < LOOPS && !n->mute_loops; loop++) {
        struct shard_report shard[NSHARDS];
        struct report r = {.from = n->id, .ballot = p->ballot, .base_epoch = p->base->epoch, .clock = -1};
        r.shard = shard;
        for (uint32_t h = loop; h < NSHARDS; h += LOOPS) {
            const struct view_shard *s = &p->base->shard[h];
            struct shard_report x = {.shard = h, .role = role_of(p, s, n->id), .complete = n->complete,
                                     .join = n->complete + 1};
            x.full = x.role == HOLDER_JOINER;
            x.nsynced = x.role == HOLDER_PRIMARY && n->syncs ? s->njoining : 0;
            memcpy(x.synced, s->joining, sizeof x.synced);
            if (x.role)
                shard[r.nshards++] = x;
        }
        struct message *m = post(w, n->id, CTL_LOOP_REPORT, 0);
        m->e.loop = loop;
        m->report = report_copy(&r);
    }
}

static void link_up(struct world *w, uint64_t a, uint64_t b)
{
    if (!node_of(w, a) || !node_of(w, b) || w->connected[a][b])
        return;
    w->connected[a][b] = w->connected[b][a] = true;
    post(w, a, CTL_PEER_UP, b)->e.is_server = true;
    post(w, b, CTL_PEER_UP, a)->e.is_server = true;
}

static void link_down(struct world *w, uint64_t a, uint64_t b)
{
    if (!w->connected[a][b])
        return;
    w->connected[a][b] = w->connected[b][a] = false;
    post(w, a, CTL_PEER_DOWN, b);
    post(w, b, CTL_PEER_DOWN, a);
}

static void to_member(struct world *w, const struct ctl_effect *e)
{
    uint64_t i = e->to - 101;
    if (e->kind != CTL_SEND_VIEW || i >= MEMBERS)
        return;
    view_free(w->member_view[i]);
    w->member_view[i] = view_copy(e->view);
}

static void frame(struct world *w, struct node *n, const struct ctl_effect *e)
{
    static const enum ctl_event_kind event[] = {
        [CTL_SEND_PREPARE] = CTL_PREPARE, [CTL_SEND_REPORT] = CTL_REPORT, [CTL_SEND_VIEW] = CTL_VIEW,
        [CTL_SEND_JOIN] = CTL_JOIN,       [CTL_SEND_LEAVE] = CTL_LEAVE,   [CTL_SEND_SUSPECT] = CTL_SUSPECT,
        [CTL_SEND_MODE] = CTL_MODE,       [CTL_SEND_END] = CTL_END,     [CTL_SEND_DRAIN] = CTL_DRAIN,
        [CTL_SEND_SYNCED] = CTL_SYNCED};
    if (e->to > 100)
        to_member(w, e);
    if (!node_of(w, e->to) || !w->connected[n->id][e->to] || node_of(w, e->to)->deaf)
        return;
    struct message *m = post(w, e->to, event[e->kind], n->id);
    m->e.is_server = true;
    m->e.id = e->id;
    m->e.shard = e->shard;
    m->e.step = e->step;
    m->e.mode = e->mode;
    memcpy(m->text, e->text, sizeof m->text);
    if (e->kind == CTL_SEND_PREPARE) {
        m->prepare = mem_alloc(sizeof *m->prepare);
        prepare_copy(m->prepare, e->prepare);
    }
    if (e->kind == CTL_SEND_REPORT)
        m->report = report_copy(e->report);
    if (e->kind == CTL_SEND_VIEW)
        m->view = view_copy(e->view);
    if (e->kind == CTL_SEND_JOIN)
        m->join = mem_dup(e->join, sizeof *e->join);
}

/* The loops of a primary hear from its joiners. */
static void joiners_synced(struct world *w, struct node *n, const struct view *v)
{
    for (uint32_t h = 0; h < v->nshards && n->syncs; h++)
        for (uint32_t i = 0; v->shard[h].primary == n->id && i < v->shard[h].njoining; i++) {
            struct message *m = post(w, n->id, CTL_LOOP_SYNCED, 0);
            m->e.loop = h % LOOPS;
            m->e.shard = h;
            m->e.id = v->shard[h].joining[i];
        }
}

static void effect(struct world *w, struct node *n, const struct ctl_effect *e)
{
    switch (e->kind) {
    case CTL_DO_COORD:
        answer(w, n, e->request);
        break;
    case CTL_DO_WATCH:
        n->watched = e->revision;
        break;
    case CTL_LOOPS_PREPARE:
        n->prepared++;
        n->ballot = e->prepare->ballot;
        loops_report(w, n, e->prepare);
        break;
    case CTL_LOOPS_ADOPT:
        n->adopted++;
        joiners_synced(w, n, e->view);
        break;
    case CTL_CONNECT:
        assert_true(e->to < n->id);
        assert_true(e->addr[0]);
        link_up(w, n->id, e->to);
        break;
    case CTL_DISCONNECT:
        link_down(w, n->id, e->to);
        break;
    case CTL_ADOPTED:
        assert_non_null(view_server_find(e->view, n->id));
        break;
    case CTL_FENCED:
        n->fenced = true;
        memcpy(n->text, e->text, sizeof n->text);
        break;
    case CTL_DRAINED:
        n->drained = true;
        break;
    case CTL_ENDED:
        n->ended = true;
        memcpy(n->text, e->text, sizeof n->text);
        break;
    case CTL_HEIR_OF:
        n->heir_told++;
        n->heir_of = e->id;
        break;
    default:
        n->suspects_sent += e->kind == CTL_SEND_SUSPECT;
        frame(w, n, e);
        break;
    }
}

static void deliver(struct world *w, struct message *m)
{
    struct node *n = node_of(w, m->to);
    if (n) {
        m->e.now_us = w->now_us;
        m->e.coord = m->coord;
        m->e.prepare = m->prepare;
        m->e.report = m->report;
        m->e.view = m->view;
        m->e.join = m->join;
        m->e.text = m->text;
        ctl_core_step(n->core, &m->e, &n->out);
        for (uint32_t i = 0; i < n->out.n; i++)
            effect(w, n, &n->out.effect[i]);
    }
    message_done(m);
}

static void settle(struct world *w)
{
    for (;;) {
        while (w->n) {
            struct message m = w->queue[w->first];
            w->first = (w->first + 1) % QUEUE;
            w->n--;
            deliver(w, &m);
        }
        bool any = false;
        for (int i = 0; i < NODES; i++)
            any |= deliver_changes(w, &w->node[i]);
        if (!any)
            return;
    }
}

/* Lets `ms` pass; every core is ticked when it asked for it. */
static void pass(struct world *w, uint64_t ms)
{
    uint64_t end = w->now_us + ms * MS;
    settle(w);
    for (;;) {
        uint64_t next = UINT64_MAX;
        for (int i = 0; i < NODES; i++)
            if (w->node[i].core && ctl_core_deadline(w->node[i].core) < next)
                next = ctl_core_deadline(w->node[i].core);
        if (next > end)
            break;
        w->now_us = next > w->now_us ? next : w->now_us;
        for (int i = 0; i < NODES; i++)
            if (w->node[i].core && ctl_core_deadline(w->node[i].core) <= w->now_us)
                post(w, w->node[i].id, CTL_TICK, 0);
        settle(w);
    }
    w->now_us = end;
}

/* ---- cast ---- */

static struct world *world_open(void)
{
    struct world *w = mem_alloc(sizeof *w);
    w->store = coord_model_create();
    w->now_us = 1000 * MS;
    return w;
}

static struct ctl_config config(uint64_t id, uint32_t servers_min)
{
    struct ctl_config c = {.nloops = LOOPS};
    c.self.server.id = id;
    c.self.server.nloops = LOOPS;
    snprintf(c.self.server.name, sizeof c.self.server.name, "s%d", (int)id);
    snprintf(c.self.server.ctl, sizeof c.self.server.ctl, "host:%d", (int)id);
    for (int i = 0; i < LOOPS; i++)
        snprintf(c.self.server.loop[i], sizeof c.self.server.loop[i], "host:%d%d", (int)id, i);
    snprintf(c.job.job, sizeof c.job.job, "test");
    snprintf(c.job.durability, sizeof c.job.durability, "write");
    c.job.nshards = NSHARDS;
    c.job.chunk_bytes = 1024;
    c.job.servers_min = servers_min;
    c.job.mode.kind = MODE_SYNC;
    c.job.wait_for_server_s = 30;
    return c;
}

static struct node *boot(struct world *w, const struct ctl_config *c)
{
    struct node *n = &w->node[c->self.server.id - 1];
    assert_null(n->core);
    *n = (struct node){.core = ctl_core_create(c), .id = c->self.server.id, .watched = -1, .complete = 5};
    post(w, n->id, CTL_START, 0);
    settle(w);
    return n;
}

static struct node *boot_plain(struct world *w, uint64_t id, uint32_t servers_min)
{
    struct ctl_config c = config(id, servers_min);
    return boot(w, &c);
}

static struct node *boot_heir(struct world *w, uint64_t id, uint64_t heir_of)
{
    struct ctl_config c = config(id, 1);
    c.self.heir_of = heir_of;
    return boot(w, &c);
}

/* The process dies. Its lease lives on until the test says so. */
static void crash(struct world *w, uint64_t id)
{
    struct node *n = node_of(w, id);
    for (uint64_t other = 1; other <= NODES; other++)
        link_down(w, id, other);
    ctl_core_free(n->core);
    ctl_outbox_done(&n->out);
    n->core = NULL;
    settle(w);
}

static void lease_over(struct world *w, uint64_t id)
{
    coord_model_expire(w->store, w->node[id - 1].lease);
    settle(w);
}

static void world_close(struct world *w)
{
    for (uint64_t id = 1; id <= NODES; id++)
        if (node_of(w, id)) {
            ctl_core_free(node_of(w, id)->core);
            ctl_outbox_done(&node_of(w, id)->out);
        }
    for (; w->n; w->n--) {
        message_done(&w->queue[w->first]);
        w->first = (w->first + 1) % QUEUE;
    }
    for (int i = 0; i < MEMBERS; i++)
        view_free(w->member_view[i]);
    coord_model_free(w->store);
    mem_free(w);
}

static void member_up(struct world *w, uint64_t server, uint64_t member)
{
    post(w, server, CTL_PEER_UP, member);
    settle(w);
}

static void member_joins(struct world *w, uint64_t server, uint64_t member)
{
    struct join_doc j = {.id = member, .name = "m", .local_size = 1};
    post(w, server, CTL_JOIN, member)->join = mem_dup(&j, sizeof j);
    settle(w);
}

static const struct view *view_of(struct world *w, uint64_t id)
{
    return ctl_core_view(node_of(w, id)->core);
}

/* Servers 1..n up and in the first view's successor; server 1 leads. */
static struct world *cluster(uint32_t n)
{
    struct world *w = world_open();
    for (uint32_t id = 1; id <= n; id++)
        boot_plain(w, id, n);
    pass(w, 100);
    for (uint32_t id = 1; id <= n; id++) {
        assert_non_null(view_of(w, id));
        assert_int_equal(view_of(w, id)->epoch, view_of(w, 1)->epoch);
        assert_int_equal(view_of(w, id)->nservers, n);
    }
    assert_true(ctl_core_leads(node_of(w, 1)->core));
    return w;
}

/* ---- cases ---- */

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
        cmocka_unit_test(lost_backup_is_replaced),
        cmocka_unit_test(joiners_are_told_of_until_they_are_backups),
        cmocka_unit_test(denied_joiner_makes_no_views),
        cmocka_unit_test(old_report_denies_nothing),
        cmocka_unit_test(drained_server_leaves),
        cmocka_unit_test(drain_reaches_the_leader_and_the_server),
        cmocka_unit_test(drain_outlives_the_leader),
        cmocka_unit_test(drained_before_it_was_listed),
        cmocka_unit_test(last_server_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
