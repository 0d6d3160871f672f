/* What the controller does, in words. */
#include "coord/view_internal.h"

#include <stdio.h>
#include <string.h>

enum { SHARDS_SHOWN = 8 };

void view_text_server(const struct view *b, uint64_t id, char *out, size_t size)
{
    const struct view_server *s = view_server_find(b, id);
    size_t n = (size_t)snprintf(out, size, "server %s", s ? s->name : "?");
    uint32_t shown = 0;
    for (uint32_t h = 0; h < b->nshards && n < size; h++) {
        if (!view_holds(&b->shard[h], id))
            continue;
        if (shown == SHARDS_SHOWN) {
            n += (size_t)snprintf(out + n, size - n, ", ...");
            break;
        }
        n += (size_t)snprintf(out + n, size - n, "%s%u", shown++ ? ", " : " (shards ", h);
    }
    if (shown && n < size)
        snprintf(out + n, size - n, ")");
}

uint64_t view_core_waiting_for(const struct view_core *v, uint64_t *ret_since_us)
{
    const struct view_server *s = v->phase == PHASE_WAIT ? view_change_missing(v) : NULL;
    for (uint32_t i = 0; v->phase == PHASE_PREPARE && !s && i < v->base->nservers; i++) {
        uint64_t id = v->base->server[i].id;
        if (view_nodes_away(v, id) && !view_change_gone(v, id) && view_holds_shards(v->base, id))
            s = &v->base->server[i];
    }
    if (!s)
        return 0;
    *ret_since_us = view_nodes_away(v, s->id)->since_us;
    return s->id;
}

static double seconds(uint64_t from_us, uint64_t to_us)
{
    return to_us > from_us ? (double)(to_us - from_us) / 1e6 : 0;
}

static const char *name_of(const struct view_core *v, uint64_t id)
{
    const struct view_server *s = view_server_find(v->base, id);
    const struct view_member *m = view_member_find(v->base, id);
    for (uint32_t i = 0; !s && i < v->nservers; i++)
        if (v->server[i].doc.server.id == id)
            s = &v->server[i].doc.server;
    return s ? s->name : m ? m->name : "?";
}

static size_t list_awaited(const struct view_core *v, char *out, size_t size, size_t n)
{
    const char *lead = " for reports of";
    for (uint32_t i = 0; i < v->base->nservers && n < size; i++)
        if (view_change_awaits(v, v->base->server[i].id)) {
            n += (size_t)snprintf(out + n, size - n, "%s server %s", lead, v->base->server[i].name);
            lead = ",";
        }
    for (uint32_t i = 0; i < v->prepare->nheirs && n < size; i++)
        if (view_change_awaits(v, v->prepare->heir[i])) {
            n += (size_t)snprintf(out + n, size - n, "%s server %s", lead, name_of(v, v->prepare->heir[i]));
            lead = ",";
        }
    for (uint32_t i = 0; i < v->base->nmembers && n < size; i++)
        if (view_change_awaits(v, v->base->member[i].id)) {
            n += (size_t)snprintf(out + n, size - n, "%s member %s", lead, v->base->member[i].name);
            lead = ",";
        }
    return n;
}

static void describe_prepare(const struct view_core *v, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "preparing epoch %llu, round %llu, waiting",
                                (unsigned long long)v->base->epoch + 1, (unsigned long long)v->round);
    if (n < size)
        list_awaited(v, out, size, n);
}

static uint32_t short_shards(const struct view_core *v)
{
    uint32_t n = 0;
    for (uint32_t h = 0; h < v->base->nshards; h++)
        n += v->base->shard[h].nbackups < v->cfg.job.replicas_min;
    return n;
}

static uint32_t shards_at(const struct view *b, uint64_t id)
{
    uint32_t n = 0;
    for (uint32_t h = 0; h < b->nshards; h++)
        n += view_holds(&b->shard[h], id);
    return n;
}

static void describe_idle(const struct view_core *v, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "idle");
    if (v->njoins && n < size)
        n += (size_t)snprintf(out + n, size - n, ", %u of %u members asked to join", v->njoins, v->cfg.job.members_min);
    for (uint32_t i = 0; i < v->ndrains && n < size; i++)
        if (view_server_find(v->base, v->drain[i]))
            n += (size_t)snprintf(out + n, size - n, ", server %s is drained, %u shards are left", name_of(v, v->drain[i]),
                                  shards_at(v->base, v->drain[i]));
    if (v->base->short_of_replicas && n < size)
        snprintf(out + n, size - n, ", steps stand still: %u shards have fewer than %u backups, more servers are needed",
                 short_shards(v), v->cfg.job.replicas_min);
}

void view_core_describe(const struct view_core *v, uint64_t now_us, char *out, size_t size)
{
    uint64_t since = 0, id = view_core_waiting_for(v, &since);
    if (!size)
        return;
    if (id) {
        char server[192];
        view_text_server(v->base, id, server, sizeof server);
        snprintf(out, size, "waiting %.1f s for %s", seconds(since, now_us), server);
        return;
    }
    switch (v->phase) {
    case PHASE_OFF:
        snprintf(out, size, "not leading");
        break;
    case PHASE_FIRST:
        snprintf(out, size, "waiting for servers: %u of %u are there", v->nservers, v->cfg.job.servers_min);
        break;
    case PHASE_IDLE:
        describe_idle(v, out, size);
        break;
    case PHASE_COLLECT:
        snprintf(out, size, "collecting %.0f ms", seconds(now_us, v->due_us) * 1000);
        break;
    case PHASE_PREPARE:
        describe_prepare(v, out, size);
        break;
    case PHASE_WAIT:
        snprintf(out, size, "waiting for a server");
        break;
    case PHASE_CAS:
    case PHASE_ADOPT:
        snprintf(out, size, "committing epoch %llu", (unsigned long long)v->next->epoch);
        break;
    case PHASE_ENDED:
        snprintf(out, size, "ended: %s", v->base->ended);
        break;
    }
}
