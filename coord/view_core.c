#include "coord/view_internal.h"

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/mutant.h"

#include <stdio.h>
#include <string.h>

/* ---- life, outbox ---- */

struct view_core *view_core_create(const struct view_config *c)
{
    struct view_core *v = mem_alloc(sizeof *v);
    v->cfg = *c;
    if (!v->cfg.batch_ms)
        v->cfg.batch_ms = 20;
    if (!v->cfg.report_ms)
        v->cfg.report_ms = 1000;
    if (!v->cfg.wait_for_server_ms)
        v->cfg.wait_for_server_ms = c->job.wait_for_server_s * 1000;
    if (!v->cfg.job.nshards)
        v->cfg.job.nshards = 1;
    v->due_us = UINT64_MAX;
    v->last_step = -1;
    return v;
}

static void forget_old(struct view_core *v)
{
    for (uint32_t i = 0; i < v->nold_prepares; i++) {
        prepare_done(v->old_prepare[i]);
        mem_free(v->old_prepare[i]);
    }
    for (uint32_t i = 0; i < v->nold_views; i++)
        view_free(v->old_view[i]);
    v->nold_prepares = v->nold_views = 0;
}

void view_core_retire_prepare(struct view_core *v)
{
    if (!v->prepare)
        return;
    ARRAY_ROOM(v->old_prepare, v->nold_prepares, v->old_prepares_cap);
    v->old_prepare[v->nold_prepares++] = v->prepare;
    v->prepare = NULL;
}

static void retire_view(struct view_core *v, struct view *old)
{
    if (!old)
        return;
    ARRAY_ROOM(v->old_view, v->nold_views, v->old_views_cap);
    v->old_view[v->nold_views++] = old;
}

void view_core_free(struct view_core *v)
{
    if (!v)
        return;
    view_change_clear(v);
    forget_old(v);
    view_free(v->base);
    view_free(v->next);
    mem_free(v->answer);
    mem_free(v->server);
    mem_free(v->away);
    mem_free(v->join);
    mem_free(v->leaving);
    mem_free(v->drain);
    mem_free(v->syncing);
    mem_free(v->old_prepare);
    mem_free(v->old_view);
    mem_free(v);
}

void view_outbox_done(struct view_outbox *o)
{
    mem_free(o->effect);
    memset(o, 0, sizeof *o);
}

void view_core_emit(struct view_core *v, const struct view_effect *e)
{
    struct view_outbox *o = v->out;
    ARRAY_ROOM(o->effect, o->n, o->cap);
    o->effect[o->n++] = *e;
}

/* ---- views that come and go ---- */

static void base_set(struct view_core *v, struct view *base)
{
    const struct view *old = v->base;
    for (uint32_t i = 0; old && base && i < old->nservers; i++)
        if (!view_server_find(base, old->server[i].id))
            view_nodes_remove(v, old->server[i].id);
    for (uint32_t i = 0; old && base && i < old->nmembers; i++)
        if (old->member[i].live && !view_lists(base, old->member[i].id))
            view_nodes_remove(v, old->member[i].id);
    retire_view(v, v->base);
    v->base = base;
    v->plan_known = false;
    view_holders_trim(v);
}

void view_core_propose(struct view_core *v, struct view *next)
{
    retire_view(v, v->next);
    v->next = next;
    v->phase = PHASE_CAS;
    v->due_us = UINT64_MAX;
    log_info("view_propose", "epoch=%llu term=%llu servers=%u members=%u", (unsigned long long)next->epoch,
             (unsigned long long)next->term, next->nservers, next->nmembers);
    view_core_emit(v, &(struct view_effect){.kind = VIEW_CAS, .view = next});
}

static void forget_change(struct view_core *v)
{
    view_change_clear(v);
    retire_view(v, v->next);
    v->next = NULL;
    v->due_us = UINT64_MAX;
}

static void go_off(struct view_core *v)
{
    forget_change(v);
    v->began_us = v->prepared_us = v->reported_us = 0;
    v->phase = PHASE_OFF;
    v->force = v->mode_wanted = false;
    v->naway = v->njoins = v->nleaving = v->ndrains = v->nsyncing = 0;
    v->end[0] = 0;
}

/* Drops the wishes that the new base has fulfilled or made void. */
static void wishes_trim(struct view_core *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->naway; i++)
        if (view_lists(v->base, v->away[i].id))
            v->away[n++] = v->away[i];
    v->naway = n;
    n = 0;
    for (uint32_t i = 0; i < v->njoins; i++)
        if (!view_member_find(v->base, v->join[i].id))
            v->join[n++] = v->join[i];
    v->njoins = n;
    n = 0;
    for (uint32_t i = 0; i < v->nleaving; i++)
        if (view_lists(v->base, v->leaving[i].id))
            v->leaving[n++] = v->leaving[i];
    v->nleaving = n;
    n = 0;
    for (uint32_t i = 0; i < v->ndrains; i++)
        if (!view_core_removed(v, v->drain[i]) &&
            (view_server_find(v->base, v->drain[i]) || view_nodes_find(v, v->drain[i])))
            v->drain[n++] = v->drain[i];
    v->ndrains = n;
}

static void change_finish(struct view_core *v)
{
    struct view *next = v->next;
    v->next = NULL;
    view_log_commit(v, next);
    if (v->prepare && v->prepare->mode_change)
        v->mode_wanted = false;
    v->force = false;
    view_change_clear(v);
    base_set(v, next);
    wishes_trim(v);
    v->phase = next->ended[0] ? PHASE_ENDED : PHASE_IDLE;
    v->due_us = UINT64_MAX;
    view_core_emit(v, &(struct view_effect){.kind = VIEW_ANNOUNCE, .view = next});
}

static bool same_view(const struct view *a, const struct view *b)
{
    return a && b && a->epoch == b->epoch && a->nonce == b->nonce;
}

/* ---- events ---- */

static void on_elected(struct view_core *v, const struct view_event *e)
{
    go_off(v);
    for (uint32_t i = 0; i < v->nservers; i++)
        v->server[i].down = false;
    if (e->term != v->term)
        v->round = 0;
    v->term = e->term;
    base_set(v, e->view ? view_copy(e->view) : NULL);
    v->force = !MUTANT(1);
    v->phase = !v->base ? PHASE_FIRST : v->base->ended[0] ? PHASE_ENDED : PHASE_IDLE;
}

static void on_deposed(struct view_core *v, const struct view_event *e)
{
    (void)e;
    go_off(v);
}

static void on_server(struct view_core *v, const struct view_event *e)
{
    uint64_t id = e->server ? e->server->server.id : 0;
    if (!id || view_core_removed(v, id))
        return;
    view_nodes_register(v, e->server);
    view_nodes_return(v, id);
    view_change_again(v, id);
}

static void on_suspect(struct view_core *v, const struct view_event *e)
{
    struct registered *r = view_nodes_find(v, e->id);
    if (e->id == v->cfg.self || !e->id)
        return;
    struct away *a = view_nodes_away(v, e->id);
    if (r)
        r->down = true;
    if (a)
        a->back = false;
    for (uint32_t i = 0; i < v->njoins; i++)
        if (v->join[i].id == e->id) {
            memmove(v->join + i, v->join + i + 1, (v->njoins - i - 1) * sizeof *v->join);
            v->njoins--;
            break;
        }
    if (v->phase == PHASE_OFF || !v->base || !view_lists(v->base, e->id) || view_nodes_suspects(v, e->id))
        return;
    view_log_suspect(v, e->id, e->text);
    view_nodes_away_add(v, e->id, true);
    view_holders_forget(v);
}

static void on_server_gone(struct view_core *v, const struct view_event *e)
{
    struct registered *r = view_nodes_find(v, e->id);
    if (e->id != v->cfg.self)
        on_suspect(v, e);
    if (!r)
        return;
    uint32_t i = (uint32_t)(r - v->server);
    memmove(r, r + 1, (v->nservers - i - 1) * sizeof *r);
    v->nservers--;
}

static void on_join(struct view_core *v, const struct view_event *e)
{
    if (v->phase == PHASE_OFF || !e->join || !e->join->id)
        return;
    uint64_t id = e->join->id;
    if (v->base && view_member_find(v->base, id)) {
        view_nodes_return(v, id);
        view_change_again(v, id);
        return;
    }
    uint32_t i = 0;
    while (i < v->njoins && v->join[i].id < id)
        i++;
    if ((i < v->njoins && v->join[i].id == id) || view_core_removed(v, id) || v->njoins == PREPARE_NODES_MAX)
        return;
    ARRAY_ROOM(v->join, v->njoins, v->joins_cap);
    memmove(v->join + i + 1, v->join + i, (v->njoins - i) * sizeof *v->join);
    v->join[i] = *e->join;
    v->njoins++;
}

static void on_leave(struct view_core *v, const struct view_event *e)
{
    if (v->phase == PHASE_OFF || !v->base || !view_member_find(v->base, e->id) || !view_lists(v->base, e->id))
        return;
    for (uint32_t i = 0; i < v->nleaving; i++)
        if (v->leaving[i].id == e->id)
            return;
    ARRAY_ROOM(v->leaving, v->nleaving, v->leaving_cap);
    v->leaving[v->nleaving++] = (struct leaving){e->id, e->step};
}

static void on_mode(struct view_core *v, const struct view_event *e)
{
    const struct view *b = v->base;
    if (v->phase == PHASE_OFF || !b || e->mode.kind < MODE_SYNC || e->mode.kind > MODE_ASYNC)
        return;
    const struct mode *last = b->nmodes ? &b->mode[b->nmodes - 1] : NULL;
    if (!v->mode_wanted && last && last->kind == e->mode.kind && last->bound == e->mode.bound)
        return;
    v->mode_wanted = true;
    v->mode = e->mode;
}

static void on_report(struct view_core *v, const struct view_event *e)
{
    if (e->report)
        view_change_report(v, e->report);
}

static void on_cas_done(struct view_core *v, const struct view_event *e)
{
    if (v->phase != PHASE_CAS)
        return;
    if (e->ok)
        v->phase = PHASE_ADOPT;
    else
        go_off(v);
}

static void on_cas_unknown(struct view_core *v, const struct view_event *e)
{
    if (v->phase != PHASE_CAS)
        return;
    if (same_view(e->view, v->next)) {
        v->phase = PHASE_ADOPT;
    } else if ((!e->view && !v->base) || same_view(e->view, v->base)) {
        /* The first attempt may still arrive: only this very view may be written on this base now. */
        if (MUTANT(6) && v->base)
            v->phase = PHASE_IDLE, v->force = true;
        else
            view_core_emit(v, &(struct view_effect){.kind = VIEW_CAS, .view = v->next});
    } else {
        go_off(v);
    }
}

static void on_adopted(struct view_core *v, const struct view_event *e)
{
    if (!e->view || (v->base && e->view->epoch <= v->base->epoch))
        return;
    if ((v->phase == PHASE_CAS || v->phase == PHASE_ADOPT) && same_view(e->view, v->next)) {
        change_finish(v);
        return;
    }
    /* Somebody else writes views: whatever runs here is void. */
    go_off(v);
    base_set(v, view_copy(e->view));
}

static void on_end(struct view_core *v, const struct view_event *e)
{
    if (v->phase == PHASE_OFF || v->phase == PHASE_ENDED || v->end[0])
        return;
    snprintf(v->end, sizeof v->end, "%s", e->text && e->text[0] ? e->text : "ended by the operator");
}

static void on_drain(struct view_core *v, const struct view_event *e)
{
    bool known = view_nodes_find(v, e->id) || (v->base && view_server_find(v->base, e->id));
    if (v->phase == PHASE_OFF || !known || view_nodes_draining(v, e->id))
        return;
    log_info("server_drain", "id=%llu", (unsigned long long)e->id);
    ARRAY_ROOM(v->drain, v->ndrains, v->drains_cap);
    v->drain[v->ndrains++] = e->id;
    v->plan_known = false;
}

static void on_rebalance(struct view_core *v, const struct view_event *e)
{
    (void)e;
    v->force |= v->phase != PHASE_OFF;
}

static void on_synced(struct view_core *v, const struct view_event *e)
{
    if (v->phase != PHASE_OFF)
        view_holders_note(v, e->shard, e->id, true, true);
}

/* ---- phases ---- */

static bool wanted(struct view_core *v)
{
    if (v->force || v->nleaving || v->mode_wanted || view_nodes_joins_ready(v) || view_holders_news(v))
        return true;
    for (uint32_t i = 0; i < v->naway; i++)
        if (v->away[i].suspect)
            return true;
    for (uint32_t i = 0; i < v->nservers; i++) {
        const struct registered *r = &v->server[i];
        if (view_nodes_newcomer(v, r))
            return true;
        if (r->doc.heir_of && view_server_find(v->base, r->doc.heir_of) && view_nodes_heir(v, r->doc.heir_of))
            return true;
    }
    return view_place_wanted(v);
}

static void first_view(struct view_core *v)
{
    uint32_t there = 0;
    for (uint32_t i = 0; i < v->nservers; i++)
        there += view_nodes_starter(v, &v->server[i]);
    if (there && (there >= v->cfg.job.servers_min || v->end[0]))
        view_core_propose(v, view_next_first(v));
}

static void collect(struct view_core *v)
{
    if (!wanted(v)) {
        v->phase = PHASE_IDLE;
        v->due_us = UINT64_MAX;
    } else if (v->phase == PHASE_IDLE) {
        v->phase = PHASE_COLLECT;
        v->began_us = v->began_us ? v->began_us : v->now_us;
        v->due_us = v->now_us + v->cfg.batch_ms * 1000ull;
    } else if (v->now_us >= v->due_us) {
        view_change_attempt(v);
    }
}

static void wait_for_server(struct view_core *v)
{
    const struct view_server *s = view_change_missing(v);
    if (!s || !view_change_overdue(v, s->id))
        view_change_attempt(v);
}

static void advance(struct view_core *v)
{
    bool running = v->phase == PHASE_PREPARE || v->phase == PHASE_WAIT;
    if (v->end[0] && (running || v->phase == PHASE_IDLE || v->phase == PHASE_COLLECT)) {
        view_core_propose(v, view_next_ended(v));
        return;
    }
    switch (v->phase) {
    case PHASE_FIRST:
        first_view(v);
        break;
    case PHASE_IDLE:
    case PHASE_COLLECT:
        collect(v);
        break;
    case PHASE_PREPARE:
        view_change_run(v);
        break;
    case PHASE_WAIT:
        wait_for_server(v);
        break;
    case PHASE_OFF:
    case PHASE_CAS:
    case PHASE_ADOPT:
    case PHASE_ENDED:
        break;
    }
}

void view_core_step(struct view_core *v, const struct view_event *e, struct view_outbox *out)
{
    static void (*const handler[])(struct view_core *, const struct view_event *) = {
        [VIEW_ELECTED] = on_elected,     [VIEW_DEPOSED] = on_deposed,   [VIEW_SERVER] = on_server,
        [VIEW_SERVER_GONE] = on_server_gone, [VIEW_JOIN] = on_join,     [VIEW_LEAVE] = on_leave,
        [VIEW_SUSPECT] = on_suspect,     [VIEW_MODE] = on_mode,         [VIEW_REPORT] = on_report,
        [VIEW_CAS_DONE] = on_cas_done,   [VIEW_CAS_UNKNOWN] = on_cas_unknown,
        [VIEW_ADOPTED] = on_adopted,     [VIEW_END] = on_end,           [VIEW_DRAIN] = on_drain,
        [VIEW_REBALANCE] = on_rebalance, [VIEW_SYNCED] = on_synced,     [VIEW_TICK] = NULL,
    };
    CHECK(e->kind >= VIEW_ELECTED && e->kind <= VIEW_TICK);
    forget_old(v);
    out->n = 0;
    v->out = out;
    if (v->now_us < v->due_us && e->now_us > v->due_us && e->now_us - v->due_us > LATE_US)
        v->grace_us = e->now_us + LATE_US;
    v->now_us = e->now_us;
    if (handler[e->kind])
        handler[e->kind](v, e);
    advance(v);
    v->out = NULL;
}

uint64_t view_core_deadline(const struct view_core *v)
{
    return v->due_us < v->grace_us ? v->grace_us : v->due_us;
}
