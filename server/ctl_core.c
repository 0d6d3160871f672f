#include "server/ctl_internal.h"

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

struct ctl_core *ctl_core_create(const struct ctl_config *config)
{
    struct ctl_core *c = mem_alloc(sizeof *c);
    CHECK(config->nformer <= CTL_FORMER_MAX && config->nloops <= LOOPS_MAX);
    c->cfg = *config;
    if (!c->cfg.nloops)
        c->cfg.nloops = 1;
    if (!c->cfg.lease_ms)
        c->cfg.lease_ms = 3000;
    if (!c->cfg.suspect_ms)
        c->cfg.suspect_ms = 300;
    return c;
}

static void forget_held(struct ctl_core *c)
{
    for (uint32_t i = 0; i < c->nheld; i++)
        c->held[i].release(c->held[i].memory);
    c->nheld = 0;
    c->held_prepare = NULL;
}

void ctl_core_free(struct ctl_core *c)
{
    if (!c)
        return;
    forget_held(c);
    view_core_free(c->controller);
    view_free(c->view);
    view_free(c->cas);
    mem_free(c->prepare.report.shard);
    mem_free(c->server);
    mem_free(c->synced);
    mem_free(c->peer);
    mem_free(c->held);
    mem_free(c);
}

void ctl_outbox_done(struct ctl_outbox *o)
{
    mem_free(o->effect);
    memset(o, 0, sizeof *o);
}

/* ---- effects ---- */

void ctl_emit(struct ctl_core *c, const struct ctl_effect *e)
{
    struct ctl_outbox *o = c->out;
    ARRAY_ROOM(o->effect, o->n, o->cap);
    o->effect[o->n++] = *e;
}

void ctl_hold(struct ctl_core *c, void *memory, void (*release)(void *))
{
    ARRAY_ROOM(c->held, c->nheld, c->held_cap);
    c->held[c->nheld++] = (struct ctl_held){memory, release};
}

static void release_prepare(void *memory)
{
    prepare_done(memory);
    mem_free(memory);
}

const struct prepare *ctl_hold_prepare(struct ctl_core *c, const struct prepare *p)
{
    const struct prepare *held = c->held_prepare;
    if (held && held->ballot.term == p->ballot.term && held->ballot.round == p->ballot.round)
        return held;
    struct prepare *copy = mem_alloc(sizeof *copy);
    prepare_copy(copy, p);
    ctl_hold(c, copy, release_prepare);
    c->held_prepare = copy;
    return copy;
}

/* This life has nothing to do here any more. */
void ctl_stop(struct ctl_core *c, enum ctl_effect_kind kind, const char *text)
{
    struct ctl_effect e = {.kind = kind};
    snprintf(e.text, sizeof e.text, "%s", text);
    c->fenced |= kind == CTL_FENCED || kind == CTL_DRAINED;
    c->ended |= kind == CTL_ENDED;
    LOG_AT(kind == CTL_FENCED ? LOG_WARN : LOG_INFO, kind == CTL_FENCED ? "fenced" : kind == CTL_DRAINED ? "drained" : "job_ended", "cause=\"%s\"", e.text);
    ctl_emit(c, &e);
}

/* ---- the controller ---- */

void ctl_controller_open(struct ctl_core *c, const struct job_doc *job)
{
    struct view_config v = c->cfg.view;
    v.self = c->cfg.self.server.id;
    v.job = *job;
    c->controller = view_core_create(&v);
    for (uint32_t i = 0; i < c->nservers; i++)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_SERVER, .server = &c->server[i].doc});
}

static void controller_effect(struct ctl_core *c, const struct view_effect *e)
{
    uint64_t self = c->cfg.self.server.id;
    if (e->kind == VIEW_CAS) {
        ctl_store_cas(c, e->view);
    } else if (e->kind == VIEW_ANNOUNCE) {
        /* Whoever takes a view over passes it on: ctl_view_take. */
        return;
    } else if (e->to == self) {
        ctl_view_prepare(c, e->prepare);
    } else {
        const struct prepare *p = ctl_hold_prepare(c, e->prepare);
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_PREPARE, .to = e->to, .prepare = p});
    }
}

void ctl_controller_step(struct ctl_core *c, const struct view_event *event)
{
    struct view_outbox out = {0};
    struct view_event e = *event;
    if (!c->controller)
        return;
    e.now_us = c->now_us;
    view_core_step(c->controller, &e, &out);
    for (uint32_t i = 0; i < out.n; i++)
        controller_effect(c, &out.effect[i]);
    view_outbox_done(&out);
}

/* ---- what members ask for ---- */

/* Only servers pass on what others say. */
static bool speaks_for(const struct ctl_core *c, uint64_t from, uint64_t id)
{
    const struct ctl_peer *p = ctl_peer_find(c, from);
    return from == id || (p && p->is_server);
}

void ctl_pass_on(struct ctl_core *c, const struct ctl_event *from, struct ctl_effect e)
{
    if (!c->leader || c->leader == c->cfg.self.server.id || c->leader == from->from)
        return;
    e.to = c->leader;
    ctl_emit(c, &e);
}

static void on_join(struct ctl_core *c, const struct ctl_event *e)
{
    if (!e->join || !speaks_for(c, e->from, e->join->id))
        return;
    if (ctl_view_concerns(c, e->join->id))
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_VIEW, .to = e->join->id, .view = c->view});
    else if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_JOIN, .join = e->join});
    else {
        struct join_doc *join = mem_dup(e->join, sizeof *join);
        ctl_hold(c, join, mem_free);
        ctl_pass_on(c, e, (struct ctl_effect){.kind = CTL_SEND_JOIN, .join = join});
    }
}

static void on_leave(struct ctl_core *c, const struct ctl_event *e)
{
    uint64_t id = e->id ? e->id : e->from;
    if (!speaks_for(c, e->from, id))
        return;
    if (c->view && ctl_view_concerns(c, id) && !view_lists(c->view, id))
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_VIEW, .to = id, .view = c->view});
    else if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_LEAVE, .id = id, .step = e->step});
    else
        ctl_pass_on(c, e, (struct ctl_effect){.kind = CTL_SEND_LEAVE, .id = id, .step = e->step});
}

static void on_mode(struct ctl_core *c, const struct ctl_event *e)
{
    if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_MODE, .mode = e->mode});
    else
        ctl_pass_on(c, e, (struct ctl_effect){.kind = CTL_SEND_MODE, .mode = e->mode});
}

static void on_end(struct ctl_core *c, const struct ctl_event *e)
{
    struct ctl_effect pass = {.kind = CTL_SEND_END};
    snprintf(pass.text, sizeof pass.text, "%s", e->text ? e->text : "");
    if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_END, .text = pass.text});
    else
        ctl_pass_on(c, e, pass);
}

static void on_report(struct ctl_core *c, const struct ctl_event *e)
{
    if (c->leads && e->report && e->report->from == e->from)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_REPORT, .report = e->report});
}

/* ---- events ---- */

static void dispatch(struct ctl_core *c, const struct ctl_event *e)
{
    switch (e->kind) {
    case CTL_START:
        c->started = c->want_range = true;
        break;
    case CTL_TICK:
        break;
    case CTL_COORD:
        ctl_store_event(c, e->coord);
        break;
    case CTL_PEER_UP:
        ctl_peer_up(c, e);
        break;
    case CTL_PEER_DOWN:
        ctl_peer_down(c, e);
        break;
    case CTL_PEER_DEAD:
        ctl_peer_dead(c, e);
        break;
    case CTL_LOOP_PEER_DOWN:
        ctl_peer_loop_down(c, e);
        break;
    case CTL_SUSPECT:
        ctl_peer_suspected(c, e);
        break;
    case CTL_PREPARE:
        if (e->prepare && e->prepare->base)
            ctl_view_prepare(c, e->prepare);
        break;
    case CTL_REPORT:
        on_report(c, e);
        break;
    case CTL_VIEW:
        if (e->view)
            ctl_view_take(c, e->view);
        break;
    case CTL_JOIN:
        on_join(c, e);
        break;
    case CTL_LEAVE:
        on_leave(c, e);
        break;
    case CTL_MODE:
        on_mode(c, e);
        break;
    case CTL_END:
        on_end(c, e);
        break;
    case CTL_DRAIN:
        ctl_tell_drain(c, e);
        break;
    case CTL_SYNCED:
        ctl_tell_synced(c, e);
        break;
    case CTL_LOOP_SYNCED:
        ctl_tell_loop_synced(c, e);
        break;
    case CTL_LOOP_REPORT:
        if (e->report)
            ctl_view_loop_report(c, e->loop, e->report);
        break;
    case CTL_WANT_VIEW:
        c->want_range = true;
        break;
    }
}

void ctl_core_step(struct ctl_core *c, const struct ctl_event *e, struct ctl_outbox *out)
{
    forget_held(c);
    out->n = 0;
    if (c->fenced)
        return;
    c->out = out;
    c->before_us = c->now_us;
    c->now_us = e->now_us;
    dispatch(c, e);
    if (!c->fenced && !c->ended) {
        ctl_peers_expire(c);
        if (c->leads)
            ctl_controller_step(c, &(struct view_event){.kind = VIEW_TICK});
        ctl_store_pursue(c);
    }
    c->out = NULL;
}

uint64_t ctl_core_deadline(const struct ctl_core *c)
{
    if (c->fenced || c->ended || !c->started)
        return UINT64_MAX;
    uint64_t at = ctl_peers_deadline(c);
    if (c->retry_us > c->now_us && c->retry_us < at)
        at = c->retry_us;
    if (c->leads && view_core_deadline(c->controller) < at)
        at = view_core_deadline(c->controller);
    return at;
}

const struct view *ctl_core_view(const struct ctl_core *c)
{
    return c->view;
}

bool ctl_core_leads(const struct ctl_core *c)
{
    return c->leads;
}

const struct view_core *ctl_core_controller(const struct ctl_core *c)
{
    return c->leads ? c->controller : NULL;
}

uint64_t ctl_core_leader(const struct ctl_core *c)
{
    return c->leader;
}
