/* What this server wants of the leader for as long as it takes: to be drained, and its joiners to become backups. A message
 * may be lost with a connection, and a new leader knows nothing: so all of it is said again to whoever leads. */
#include "server/ctl_internal.h"

#include "base/mem.h"

static bool other_leads(const struct ctl_core *c)
{
    return !c->leads && c->leader && c->leader != c->cfg.self.server.id;
}

static void tell_drain(struct ctl_core *c)
{
    uint64_t self = c->cfg.self.server.id;
    if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_DRAIN, .id = self});
    else if (other_leads(c))
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_DRAIN, .to = c->leader, .id = self});
}

static void tell_synced(struct ctl_core *c, struct ctl_synced s)
{
    if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_SYNCED, .id = s.id, .shard = s.shard});
    else if (other_leads(c))
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_SYNCED, .to = c->leader, .id = s.id, .shard = s.shard});
}

static void tell_all_synced(struct ctl_core *c)
{
    for (uint32_t i = 0; i < c->nsynced; i++)
        tell_synced(c, c->synced[i]);
}

void ctl_tell_leader(struct ctl_core *c)
{
    if (c->fenced || c->ended)
        return;
    if (c->draining)
        tell_drain(c);
    tell_all_synced(c);
}

/* ---- drain ---- */

static void drain_self(struct ctl_core *c)
{
    c->draining = true;
    if (c->listed)
        tell_drain(c);
    else
        ctl_stop(c, CTL_DRAINED, "no view lists this server, it holds nothing");
}

void ctl_tell_drained(struct ctl_core *c, uint64_t id)
{
    if (view_core_draining(c->controller, id))
        ctl_emit(c, &(struct ctl_effect){.kind = CTL_SEND_DRAIN, .to = id, .id = id});
}

/* A server that is to go must know it: the leader that was told may not be there for long. */
void ctl_tell_drain(struct ctl_core *c, const struct ctl_event *e)
{
    uint64_t self = c->cfg.self.server.id, id = e->id ? e->id : e->from ? e->from : self;
    if (c->view && view_member_find(c->view, e->from))
        return;
    if (id == self) {
        drain_self(c);
        return;
    }
    if (c->leads)
        ctl_controller_step(c, &(struct view_event){.kind = VIEW_DRAIN, .id = id});
    else
        ctl_pass_on(c, e, (struct ctl_effect){.kind = CTL_SEND_DRAIN, .id = id});
    if (c->leads && e->from != id)
        ctl_tell_drained(c, id);
}

/* ---- joiners ---- */

static bool still_joining(const struct ctl_core *c, const struct ctl_synced *s)
{
    if (!c->view || s->shard >= c->view->nshards)
        return false;
    const struct view_shard *shard = &c->view->shard[s->shard];
    bool joining = false;
    for (uint32_t i = 0; i < shard->njoining; i++)
        joining |= shard->joining[i] == s->id;
    return joining && shard->primary == c->cfg.self.server.id;
}

void ctl_tell_loop_synced(struct ctl_core *c, const struct ctl_event *e)
{
    struct ctl_synced s = {e->shard, e->id, c->promised};
    if (!still_joining(c, &s))
        return;
    for (uint32_t i = 0; i < c->nsynced; i++)
        if (c->synced[i].shard == s.shard && c->synced[i].id == s.id)
            return;
    ARRAY_ROOM(c->synced, c->nsynced, c->synced_cap);
    c->synced[c->nsynced++] = s;
    tell_synced(c, s);
}

void ctl_tell_synced(struct ctl_core *c, const struct ctl_event *e)
{
    if (!c->leads || e->shard >= c->view->nshards || c->view->shard[e->shard].primary != e->from)
        return;
    ctl_controller_step(c, &(struct view_event){.kind = VIEW_SYNCED, .id = e->id, .shard = e->shard});
}

void ctl_tell_adopted(struct ctl_core *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->nsynced; i++)
        if (still_joining(c, &c->synced[i]))
            c->synced[n++] = c->synced[i];
    c->nsynced = n;
    tell_all_synced(c);
}

static bool reported(const struct shard_report *r, uint64_t id)
{
    for (uint32_t i = 0; i < r->nsynced; i++)
        if (r->synced[i] == id)
            return true;
    return false;
}

static bool denied(const struct report *r, const struct ctl_synced *s)
{
    const struct ballot *a = &s->heard, *b = &r->ballot;
    if (b->term < a->term || (b->term == a->term && b->round <= a->round))
        return false;
    for (uint32_t i = 0; i < r->nshards; i++)
        if (r->shard[i].shard == s->shard)
            return r->shard[i].role != HOLDER_PRIMARY || !reported(&r->shard[i], s->id);
    return false;
}

void ctl_tell_reported(struct ctl_core *c, const struct report *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->nsynced; i++)
        if (!denied(r, &c->synced[i]))
            c->synced[n++] = c->synced[i];
    c->nsynced = n;
}
