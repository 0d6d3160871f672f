/* Who else holds a shard: may a server go, or must it be waited for? */
#include "coord/view_internal.h"

#include "base/mem.h"

bool view_holds(const struct view_shard *s, uint64_t id)
{
    if (s->primary == id)
        return true;
    for (uint32_t i = 0; i < s->nbackups; i++)
        if (s->backup[i] == id)
            return true;
    return false;
}

bool view_joining(const struct view_shard *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->njoining; i++)
        if (s->joining[i] == id)
            return true;
    return false;
}

bool view_holds_shards(const struct view *b, uint64_t id)
{
    for (uint32_t h = 0; h < b->nshards; h++)
        if (view_holds(&b->shard[h], id))
            return true;
    return false;
}

/* ---- what is known of joiners ---- */

static struct syncing *syncing_find(const struct view_core *v, uint32_t shard, uint64_t id)
{
    for (uint32_t i = 0; i < v->nsyncing; i++)
        if (v->syncing[i].shard == shard && v->syncing[i].id == id)
            return &v->syncing[i];
    return NULL;
}

void view_holders_note(struct view_core *v, uint32_t shard, uint64_t id, bool full, bool news)
{
    if (!v->base || shard >= v->base->nshards || !view_joining(&v->base->shard[shard], id))
        return;
    struct syncing *s = syncing_find(v, shard, id);
    if (!s) {
        ARRAY_ROOM(v->syncing, v->nsyncing, v->syncing_cap);
        s = &v->syncing[v->nsyncing++];
        *s = (struct syncing){.shard = shard, .id = id};
    }
    s->full |= full;
    s->news |= news;
}

bool view_holders_news(const struct view_core *v)
{
    for (uint32_t i = 0; i < v->nsyncing; i++)
        if (v->syncing[i].news)
            return true;
    return false;
}

/* Full it stays while it is listed as joining under the same primary. */
void view_holders_trim(struct view_core *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->nsyncing; i++) {
        struct syncing s = v->syncing[i];
        const struct view_shard *shard = v->base && s.shard < v->base->nshards ? &v->base->shard[s.shard] : NULL;
        if (!s.full || !shard || !view_joining(shard, s.id) || shard->since == v->base->epoch)
            continue;
        s.news = false;
        v->syncing[n++] = s;
    }
    v->nsyncing = n;
}

void view_holders_forget(struct view_core *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->nsyncing; i++)
        if (v->syncing[i].full)
            v->syncing[n++] = v->syncing[i];
    v->nsyncing = n;
}

/* ---- standing ---- */

static bool there(const struct view_core *v, uint64_t id, bool answered)
{
    return view_server_find(v->base, id) && !view_nodes_suspects(v, id) && !view_nodes_heir(v, id) &&
           !view_change_gone(v, id) && (!answered || view_change_answer(v, id));
}

static bool full_joiner(const struct view_core *v, uint32_t shard, uint64_t except, bool answered)
{
    const struct view_shard *s = &v->base->shard[shard];
    for (uint32_t i = 0; i < s->njoining; i++) {
        const struct syncing *known = syncing_find(v, shard, s->joining[i]);
        if (s->joining[i] != except && known && known->full && there(v, s->joining[i], answered))
            return true;
    }
    return false;
}

static bool committed(const struct view_core *v, const struct view_shard *s, uint64_t except, bool answered)
{
    if (s->primary != except && there(v, s->primary, answered))
        return true;
    for (uint32_t i = 0; i < s->nbackups; i++)
        if (s->backup[i] != except && there(v, s->backup[i], answered))
            return true;
    return false;
}

static bool heir_there(const struct view_core *v, uint64_t of, uint64_t except, bool answered)
{
    uint64_t heir = view_nodes_heir(v, of);
    return heir && heir != except && (!answered || view_change_answer(v, heir));
}

static bool heirs(const struct view_core *v, const struct view_shard *s, uint64_t except, bool answered)
{
    if (heir_there(v, s->primary, except, answered))
        return true;
    for (uint32_t i = 0; i < s->nbackups; i++)
        if (heir_there(v, s->backup[i], except, answered))
            return true;
    return false;
}

static bool unknown_joiner(const struct view_core *v, uint32_t shard, uint64_t except)
{
    const struct view_shard *s = &v->base->shard[shard];
    for (uint32_t i = 0; i < s->njoining; i++)
        if (s->joining[i] != except && there(v, s->joining[i], false) && !syncing_find(v, shard, s->joining[i]))
            return true;
    return false;
}

static bool concerns(const struct view_core *v, uint32_t shard, uint64_t id, uint64_t heir_of)
{
    const struct view_shard *s = &v->base->shard[shard];
    if (view_holds(s, id) || (heir_of && view_holds(s, heir_of)))
        return true;
    const struct syncing *known = view_joining(s, id) ? syncing_find(v, shard, id) : NULL;
    return known && known->full;
}

enum view_standing view_holders_standing(const struct view_core *v, uint64_t id, bool answered)
{
    enum view_standing worst = STANDING_OTHERS;
    uint64_t of = 0;
    view_change_heir(v, id, &of);
    for (uint32_t h = 0; h < v->base->nshards && worst != STANDING_ALONE; h++) {
        const struct view_shard *s = &v->base->shard[h];
        if (!concerns(v, h, id, of) || committed(v, s, id, answered) || heirs(v, s, id, answered) ||
            full_joiner(v, h, id, answered))
            continue;
        worst = unknown_joiner(v, h, id) ? STANDING_MAYBE : STANDING_ALONE;
    }
    return worst;
}

bool view_holders_orphan(const struct view_core *v, uint32_t shard)
{
    return !committed(v, &v->base->shard[shard], 0, false) && !full_joiner(v, shard, 0, false);
}
