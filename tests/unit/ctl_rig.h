/* ctl_rig.h - control cores over one model store, with links, members and time, for test_ctl_*.c. */
#ifndef TESTS_UNIT_CTL_RIG_H
#define TESTS_UNIT_CTL_RIG_H

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

static inline struct node *node_of(struct world *w, uint64_t id)
{
    return id >= 1 && id <= NODES && w->node[id - 1].core ? &w->node[id - 1] : NULL;
}

/* ---- messages ---- */

static inline struct message *post(struct world *w, uint64_t to, enum ctl_event_kind kind, uint64_t from)
{
    assert_true(w->n < QUEUE);
    struct message *m = &w->queue[(w->first + w->n++) % QUEUE];
    memset(m, 0, sizeof *m);
    m->to = to;
    m->e.kind = kind;
    m->e.from = from;
    return m;
}

static inline void message_done(struct message *m)
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

static inline struct report *report_copy(const struct report *r)
{
    struct report *copy = mem_dup(r, sizeof *r);
    copy->shard = mem_dup(r->shard, r->nshards * sizeof *r->shard);
    return copy;
}

/* ---- the store ---- */

static inline void answer(struct world *w, struct node *n, const struct coord_request *r)
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
static inline bool deliver_changes(struct world *w, struct node *n)
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

static inline bool has(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static inline enum holder_role role_of(const struct prepare *p, const struct view_shard *s, uint64_t id)
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

static inline void loops_report(struct world *w, struct node *n, const struct prepare *p)
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

static inline void link_up(struct world *w, uint64_t a, uint64_t b)
{
    if (!node_of(w, a) || !node_of(w, b) || w->connected[a][b])
        return;
    w->connected[a][b] = w->connected[b][a] = true;
    post(w, a, CTL_PEER_UP, b)->e.is_server = true;
    post(w, b, CTL_PEER_UP, a)->e.is_server = true;
}

static inline void link_down(struct world *w, uint64_t a, uint64_t b)
{
    if (!w->connected[a][b])
        return;
    w->connected[a][b] = w->connected[b][a] = false;
    post(w, a, CTL_PEER_DOWN, b);
    post(w, b, CTL_PEER_DOWN, a);
}

static inline void to_member(struct world *w, const struct ctl_effect *e)
{
    uint64_t i = e->to - 101;
    if (e->kind != CTL_SEND_VIEW || i >= MEMBERS)
        return;
    view_free(w->member_view[i]);
    w->member_view[i] = view_copy(e->view);
}

static inline void frame(struct world *w, struct node *n, const struct ctl_effect *e)
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
static inline void joiners_synced(struct world *w, struct node *n, const struct view *v)
{
    for (uint32_t h = 0; h < v->nshards && n->syncs; h++)
        for (uint32_t i = 0; v->shard[h].primary == n->id && i < v->shard[h].njoining; i++) {
            struct message *m = post(w, n->id, CTL_LOOP_SYNCED, 0);
            m->e.loop = h % LOOPS;
            m->e.shard = h;
            m->e.id = v->shard[h].joining[i];
        }
}

static inline void effect(struct world *w, struct node *n, const struct ctl_effect *e)
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

static inline void deliver(struct world *w, struct message *m)
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

static inline void settle(struct world *w)
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
static inline void pass(struct world *w, uint64_t ms)
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

static inline struct world *world_open(void)
{
    struct world *w = mem_alloc(sizeof *w);
    w->store = coord_model_create();
    w->now_us = 1000 * MS;
    return w;
}

static inline struct ctl_config config(uint64_t id, uint32_t servers_min)
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

static inline struct node *boot(struct world *w, const struct ctl_config *c)
{
    struct node *n = &w->node[c->self.server.id - 1];
    assert_null(n->core);
    *n = (struct node){.core = ctl_core_create(c), .id = c->self.server.id, .watched = -1, .complete = 5};
    post(w, n->id, CTL_START, 0);
    settle(w);
    return n;
}

static inline struct node *boot_plain(struct world *w, uint64_t id, uint32_t servers_min)
{
    struct ctl_config c = config(id, servers_min);
    return boot(w, &c);
}

static inline struct node *boot_heir(struct world *w, uint64_t id, uint64_t heir_of)
{
    struct ctl_config c = config(id, 1);
    c.self.heir_of = heir_of;
    return boot(w, &c);
}

/* The process dies. Its lease lives on until the test says so. */
static inline void crash(struct world *w, uint64_t id)
{
    struct node *n = node_of(w, id);
    for (uint64_t other = 1; other <= NODES; other++)
        link_down(w, id, other);
    ctl_core_free(n->core);
    ctl_outbox_done(&n->out);
    n->core = NULL;
    settle(w);
}

static inline void lease_over(struct world *w, uint64_t id)
{
    coord_model_expire(w->store, w->node[id - 1].lease);
    settle(w);
}

static inline void world_close(struct world *w)
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

static inline void member_up(struct world *w, uint64_t server, uint64_t member)
{
    post(w, server, CTL_PEER_UP, member);
    settle(w);
}

static inline void member_joins(struct world *w, uint64_t server, uint64_t member)
{
    struct join_doc j = {.id = member, .name = "m", .local_size = 1};
    post(w, server, CTL_JOIN, member)->join = mem_dup(&j, sizeof j);
    settle(w);
}

static inline const struct view *view_of(struct world *w, uint64_t id)
{
    return ctl_core_view(node_of(w, id)->core);
}

/* Servers 1..n up and in the first view's successor; server 1 leads. */
static inline struct world *cluster(uint32_t n)
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

#endif
