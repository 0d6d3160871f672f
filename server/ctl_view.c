/* Views that are taken over, PREPARE and what the loops report to it. */
#include "server/ctl_internal.h"

#include "base/log.h"
#include "base/mem.h"
#include "base/mutant.h"

#include <stdio.h>
#include <string.h>

static void release_view(void *memory)
{
    view_free(memory);
}

bool ctl_view_concerns(const struct ctl_core *c, uint64_t id)
{
    return c->view && (view_member_find(c->view, id) || view_server_find(c->view, id) ||
                       (c->controller && view_core_removed(c->controller, id)));
}

/* To everybody whom it lists, and to those whom it lists no more: they must learn that they are fenced. */
static void announce(struct ctl_core *c, const struct view *before)
{
    for (uint32_t i = 0; i < c->npeers; i++) {
        const struct ctl_peer *p = &c->peer[i];
        if (p->up && (p->is_server || ctl_view_concerns(c, p->id) || (before && view_lists(before, p->id))))
            ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_VIEW, .to = p->id, .view = c->view});
    }
}

/* A foreign view while we lead means that ours was not the last word: elect again, on what stands now. */
static bool is_ours(const struct ctl_core *c, const struct view *view)
{
    return c->cas && c->cas->epoch == view->epoch && c->cas->nonce == view->nonce;
}

static void raise_promise(struct ctl_core *c, uint64_t term)
{
    if (term > c->promised.term)
        c->promised = (struct ballot){.term = term};
    c->prepare.running = false;
}

static void run_under(struct ctl_core *c)
{
    c->listed = true;
    ctl_emit(c, &(struct ctl_effect){.kind = CTL_ADOPTED, .view = c->view});
    ctl_emit(c, &(struct ctl_effect){.kind = CTL_LOOPS_ADOPT, .view = c->view});
}

/* Registered, then cut off for some views: one may have listed this life, and another removed it. Then it would never be
 * listed again, and nobody would tell it. A life that held nothing is cheap to begin anew. */
static bool unsure_of_itself(const struct ctl_core *c, const struct view *before)
{
    return !c->listed && c->register_unsure && c->view->epoch > (before ? before->epoch : 0) + 1;
}

void ctl_view_take(struct ctl_core *c, const struct view *view)
{
    if (c->fenced || (c->view && view->epoch <= c->view->epoch))
        return;
    struct view *before = c->view;
    c->view = view_copy(view);
    if (before)
        ctl_hold(c, before, release_view);
    raise_promise(c, view->term);
    if (view_server_find(view, c->cfg.self.server.id)) {
        run_under(c);
    } else if (c->listed) {
        if (c->leads)
            announce(c, before);
        c->leads = false;
        if (c->draining)
            ctl_stop(c, CTL_DRAINED, "others hold now what this server held");
        else
            ctl_stop(c, CTL_FENCED, "this life was removed from the job");
        return;
    }
    if (unsure_of_itself(c, before)) {
        ctl_stop(c, CTL_FENCED, "views passed by unseen: it may have been part of the job, and removed from it");
        return;
    }
    if (c->leads && !is_ours(c, view)) {
        ctl_store_depose(c);
        c->want_range = true;
    }
    ctl_controller_step(c, &(struct view_event){.kind = VIEW_ADOPTED, .view = c->view});
    announce(c, before);
    ctl_peers_connect(c);
    if (c->leads)
        ctl_peers_watch(c);
    ctl_tell_adopted(c);
    if (view->ended[0])
        ctl_stop(c, CTL_ENDED, view->ended);
}

/* ---- PREPARE ---- */

static bool names_us(const struct ctl_core *c, const struct prepare *p)
{
    uint64_t self = c->cfg.self.server.id;
    if (view_server_find(p->base, self))
        return true;
    for (uint32_t i = 0; i < p->nheirs; i++)
        if (p->heir[i] == self)
            return true;
    return false;
}

static bool older(const struct ballot *a, const struct ballot *b)
{
    return a->term < b->term || (a->term == b->term && a->round < b->round);
}

static void ask_loops(struct ctl_core *c, const struct prepare *p)
{
    const struct prepare *held = ctl_hold_prepare(c, p);
    if (MUTANT(5)) {
        struct prepare *uncut = mem_dup(held, sizeof *uncut);
        uncut->ngone = 0;
        ctl_hold(c, uncut, mem_free);
        held = uncut;
    }
    c->prepare.running = true;
    c->prepare.since_us = c->now_us;
    c->prepare.controller = p->controller;
    c->prepare.loops = 0;
    struct report *r = &c->prepare.report;
    r->from = c->cfg.self.server.id;
    r->ballot = p->ballot;
    r->base_epoch = p->base->epoch;
    r->clock = -1;
    r->nshards = 0;
    ctl_emit(c, &(struct ctl_effect){.kind = CTL_LOOPS_PREPARE, .prepare = held});
}

void ctl_view_prepare(struct ctl_core *c, const struct prepare *p)
{
    if (c->view && p->base->epoch < c->view->epoch)
        return;
    ctl_view_take(c, p->base);
    if (c->fenced || c->ended || !names_us(c, p))
        return;
    if (older(&p->ballot, &c->promised) && !MUTANT(4))
        return;
    c->promised = p->ballot;
    ask_loops(c, p);
}

static void send_report(struct ctl_core *c)
{
    const struct report *r = &c->prepare.report;
    c->prepare.running = false;
    log_info("reported", "epoch=%llu round=%llu shards=%u ms=%.1f", (unsigned long long)r->base_epoch,
             (unsigned long long)r->ballot.round, r->nshards, (double)(c->now_us - c->prepare.since_us) / 1000);
    if (c->prepare.controller == c->cfg.self.server.id) {
        if (c->leads)
            ctl_controller_step(c, &(struct view_event){.kind = VIEW_REPORT, .report = r});
        return;
    }
    struct report *held = mem_dup(r, sizeof *r);
    held->shard = mem_dup(r->shard, r->nshards * sizeof *r->shard);
    ctl_hold(c, held->shard, mem_free);
    ctl_hold(c, held, mem_free);
    ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_REPORT, .to = c->prepare.controller, .report = held});
}

/* The report goes out only when every loop has cut off the gone. */
void ctl_view_loop_report(struct ctl_core *c, uint32_t loop, const struct report *r)
{
    struct report *all = &c->prepare.report;
    uint64_t bit = loop < c->cfg.nloops ? 1ull << loop : 0, every = ~0ull >> (64 - c->cfg.nloops);
    if (!c->prepare.running || !bit || (c->prepare.loops & bit) || r->ballot.term != all->ballot.term ||
        r->ballot.round != all->ballot.round)
        return;
    for (uint32_t i = 0; i < r->nshards; i++) {
        ARRAY_ROOM(all->shard, all->nshards, c->prepare.cap);
        all->shard[all->nshards++] = r->shard[i];
    }
    ctl_tell_reported(c, r);
    c->prepare.loops |= bit;
    if (c->prepare.loops == every)
        send_report(c);
}
