/* Who is registered, away or removed. */
#include "coord/view_internal.h"

#include "base/mem.h"

#include <string.h>

static uint32_t server_slot(const struct view_core *v, uint64_t id)
{
    uint32_t i = 0;
    while (i < v->nservers && v->server[i].doc.server.id < id)
        i++;
    return i;
}

struct registered *view_nodes_find(const struct view_core *v, uint64_t id)
{
    uint32_t i = server_slot(v, id);
    return i < v->nservers && v->server[i].doc.server.id == id ? &v->server[i] : NULL;
}

void view_nodes_register(struct view_core *v, const struct server_doc *doc)
{
    uint32_t i = server_slot(v, doc->server.id);
    if (i == v->nservers || v->server[i].doc.server.id != doc->server.id) {
        ARRAY_ROOM(v->server, v->nservers, v->servers_cap);
        memmove(v->server + i + 1, v->server + i, (v->nservers - i) * sizeof *v->server);
        v->nservers++;
    }
    v->server[i] = (struct registered){.doc = *doc};
}

struct away *view_nodes_away(const struct view_core *v, uint64_t id)
{
    for (uint32_t i = 0; i < v->naway; i++)
        if (v->away[i].id == id)
            return &v->away[i];
    return NULL;
}

void view_nodes_away_add(struct view_core *v, uint64_t id, bool suspect)
{
    struct away *a = view_nodes_away(v, id);
    if (!a) {
        ARRAY_ROOM(v->away, v->naway, v->away_cap);
        a = &v->away[v->naway++];
        *a = (struct away){.id = id, .since_us = v->now_us};
    }
    a->suspect |= suspect;
    a->back = false;
}

void view_nodes_return(struct view_core *v, uint64_t id)
{
    struct away *a = view_nodes_away(v, id);
    if (!a)
        return;
    a->back = true;
    if (a->named && v->phase != PHASE_WAIT)
        return;
    *a = v->away[--v->naway];
    view_holders_forget(v);
}

bool view_nodes_take_back(struct view_core *v)
{
    uint32_t n = 0, before = v->naway;
    for (uint32_t i = 0; i < v->naway; i++)
        if (!v->away[i].named || !v->away[i].back || view_nodes_heir(v, v->away[i].id))
            v->away[n++] = v->away[i];
    v->naway = n;
    if (n < before)
        view_holders_forget(v);
    return n < before;
}

bool view_nodes_suspects(const struct view_core *v, uint64_t id)
{
    const struct away *a = view_nodes_away(v, id);
    return a && a->suspect;
}

bool view_core_removed(const struct view_core *v, uint64_t id)
{
    uint64_t n = v->nremoved < VIEW_REMOVED_MAX ? v->nremoved : VIEW_REMOVED_MAX;
    for (uint64_t i = 0; i < n; i++)
        if (v->removed[i] == id)
            return true;
    return false;
}

bool view_nodes_usable(const struct view_core *v, const struct registered *r)
{
    uint64_t id = r->doc.server.id;
    return !r->down && !view_nodes_suspects(v, id) && !view_core_removed(v, id);
}

/* Of one name, the life that started last has the directory, however many died in between. */
static bool later_life(const struct view_server *a, const struct view_server *b)
{
    return a->id > b->id && a->name[0] && strcmp(a->name, b->name) == 0;
}

/* A later life has opened its directory, so it has lost the lock and is dead, though its registration lives on. */
static bool outlived(const struct view_core *v, const struct registered *r)
{
    uint64_t id = r->doc.server.id, of = r->doc.heir_of;
    for (uint32_t i = 0; i < v->nservers; i++) {
        const struct server_doc *d = &v->server[i].doc;
        if (d->heir_of == id || (of && d->heir_of == of && d->server.id > id))
            return true;
    }
    return false;
}

bool view_nodes_starter(const struct view_core *v, const struct registered *r)
{
    for (uint32_t i = 0; i < v->nservers; i++)
        if (later_life(&v->server[i].doc.server, &r->doc.server))
            return false;
    return !outlived(v, r) && view_nodes_usable(v, r) && !view_nodes_draining(v, r->doc.server.id);
}

bool view_nodes_newcomer(const struct view_core *v, const struct registered *r)
{
    uint64_t id = r->doc.server.id, of = r->doc.heir_of;
    if (!view_nodes_usable(v, r) || outlived(v, r) || view_nodes_draining(v, id) || view_server_find(v->base, id))
        return false;
    return !of || !view_server_find(v->base, of) || (view_change_gone(v, of) && view_nodes_heir(v, of) == id);
}

bool view_nodes_draining(const struct view_core *v, uint64_t id)
{
    for (uint32_t i = 0; i < v->ndrains; i++)
        if (v->drain[i] == id)
            return true;
    return false;
}

bool view_core_draining(const struct view_core *v, uint64_t id)
{
    return view_nodes_draining(v, id);
}

/* Of several the newest: it opened the directory last, so the others have lost its lock and are dead. */
uint64_t view_nodes_heir(const struct view_core *v, uint64_t id)
{
    if (id == v->cfg.self)
        return 0;
    for (uint32_t i = v->nservers; i-- > 0;) {
        const struct registered *r = &v->server[i];
        if (r->doc.heir_of == id && r->doc.server.id != id && view_nodes_usable(v, r))
            return r->doc.server.id;
    }
    return 0;
}

uint32_t view_nodes_room(const struct view_core *v)
{
    return v->base->nmembers < MEMBERS_MAX ? MEMBERS_MAX - v->base->nmembers : 0;
}

/* The first members begin together, so that none of them trains alone for a moment. */
bool view_nodes_joins_ready(const struct view_core *v)
{
    if (!v->njoins || !view_nodes_room(v))
        return false;
    return v->base->mchg != 0 || v->njoins >= v->cfg.job.members_min;
}

void view_nodes_remove(struct view_core *v, uint64_t id)
{
    if (!view_core_removed(v, id))
        v->removed[v->nremoved++ % VIEW_REMOVED_MAX] = id;
}
