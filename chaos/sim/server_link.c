/* server_link.c - data connections of a server's loops: those of members, and those that it makes to the loops of backups
 * and joiners of the shards that it leads. */
#include "chaos/sim/sim.h"

static bool travels_out(uint8_t type)
{
    return type == FRAME_IMAGE || type == FRAME_MARK || type == FRAME_SYNC_END || type == FRAME_DECLARE;
}

static struct proc *other_end(const struct link *l, const struct proc *p)
{
    return l->connector == p ? l->listener : l->connector;
}

struct link *loop_link_of(struct proc *p, uint32_t index, const struct shard_effect *e)
{
    if (!e->is_server)
        return link_find(p, e->to, false, index);
    return link_find_between(p, index, e->to, e->loop, travels_out(e->header.type));
}

void loop_link_up(struct world *w, struct proc *p, const struct link *l)
{
    const struct proc *peer = other_end(l, p);
    struct shard_event e = { .kind = SHARD_PEER_UP, .from = peer->id, .is_server = l->between,
                             .outgoing = l->between && l->connector == p, .loop = l->between ? link_loop(l, peer) : 0 };
    loop_event(w, p, link_loop(l, p), &e);
}

/* ---- what a view asks for ---- */

bool view_shard_names(const struct view_shard *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->nbackups; i++)
        if (s->backup[i] == id)
            return true;
    for (uint32_t i = 0; i < s->njoining; i++)
        if (s->joining[i] == id)
            return true;
    return false;
}

static bool link_due(const struct proc *p, const struct view *v, const struct link *l)
{
    const struct view_server *peer = view_server_find(v, l->listener->id);
    for (uint32_t s = 0; peer && s < v->nshards; s++)
        if (loop_of(s, p->server->machine->nloops) == l->connector_loop && v->shard[s].primary == p->id &&
            loop_of(s, peer->nloops) == l->loop && view_shard_names(&v->shard[s], peer->id))
            return true;
    return false;
}

/* A joiner of an older view may still be connected: whoever the view does not list is cut off, except those that
 * are not in any view yet (their first view is on its way). */
static bool to_close(struct world *w, const struct proc *p, uint32_t index, const struct view *v, const struct link *l)
{
    if (l->control || link_loop(l, p) != index)
        return false;
    if (!l->between)
        return l->listener_up && !view_lists(v, l->connector->id) && rng_chance(&w->rng, 500);
    if (l->connector == p)
        return l->wanted && !link_due(p, v, l);
    return l->listener_up && !view_server_find(v, l->connector->id);
}

static void holder_link(struct world *w, struct proc *p, uint32_t index, uint32_t shard, uint64_t id)
{
    struct proc *peer = world_proc(w, id);
    const struct view_server *s = view_server_find(p->server->loop[index].view, id);
    if (peer && peer->alive && s)
        link_want_between(w, p, index, peer, loop_of(shard, s->nloops));
}

void loop_links_follow(struct world *w, struct proc *p, uint32_t index)
{
    const struct view *v = p->server->loop[index].view;
    for (uint32_t i = 0; i < p->nlinks; i++)
        if (to_close(w, p, index, v, p->links[i]))
            link_close(w, p->links[i], p);
    for (uint32_t s = 0; s < v->nshards; s++) {
        const struct view_shard *x = &v->shard[s];
        if (loop_of(s, p->server->machine->nloops) != index || x->primary != p->id)
            continue;
        for (uint32_t i = 0; i < x->nbackups; i++)
            holder_link(w, p, index, s, x->backup[i]);
        for (uint32_t i = 0; i < x->njoining; i++)
            holder_link(w, p, index, s, x->joining[i]);
    }
}

void loop_links_reset(struct world *w, struct proc *p, uint32_t index, uint64_t peer)
{
    for (uint32_t i = 0; i < p->nlinks; i++) {
        struct link *l = p->links[i];
        if (l->control || link_loop(l, p) != index || other_end(l, p)->id != peer)
            continue;
        bool again = l->between && l->connector == p && l->wanted;
        link_close(w, l, p);
        if (again)
            link_want_between(w, p, index, l->listener, l->loop);
    }
}
