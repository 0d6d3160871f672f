/* What becomes of one shard: who leads it next, who has caught up, who moves. */
#include "coord/view_internal.h"

#include "base/mutant.h"

#include <string.h>

static const struct shard_report *report_of(const struct view_core *v, uint64_t id, uint32_t shard)
{
    const struct answer *a = view_change_answer(v, id);
    return a && a->shard[shard].role ? &a->shard[shard] : NULL;
}

bool view_rules_complete(const struct view_core *v, const struct view *next, uint32_t shard, int64_t *ret_complete)
{
    uint64_t old = v->base->shard[shard].primary;
    bool stays = view_server_find(next, old) != NULL;
    const struct shard_report *r = report_of(v, MUTANT(40) && stays ? old : next->shard[shard].primary, shard);
    if (r)
        *ret_complete = r->complete;
    return r != NULL;
}

static uint32_t listed(const struct view *next, const uint64_t *ids, uint32_t n, uint64_t *ret)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        if (view_server_find(next, ids[i]))
            ret[count++] = ids[i];
    return count;
}

static void remove_id(uint64_t *ids, uint32_t *n, uint64_t id)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < *n; i++)
        if (ids[i] != id)
            ids[count++] = ids[i];
    *n = count;
}

static bool has_id(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* ---- the primary stays, or moves ---- */

/* Joiners that have confirmed to this primary that they have everything: it waits for them already. */
static void take_synced(const struct view_core *v, uint32_t shard, struct holding *s)
{
    const struct shard_report *r = report_of(v, s->primary, shard);
    uint64_t joining[BACKUPS_MAX];
    uint32_t n = s->njoining;
    memcpy(joining, s->joining, sizeof joining);
    for (uint32_t i = 0; r && i < n; i++) {
        if (!has_id(r->synced, r->nsynced, joining[i]) && !MUTANT(42))
            continue;
        s->backup[s->nbackups++] = joining[i];
        remove_id(s->joining, &s->njoining, joining[i]);
    }
}

/* Only a backup that this PREPARE named and that the base view commits to: it holds all that was released, and takes
 * nothing more from the primary before. */
static void take_move(const struct view_core *v, uint32_t shard, struct holding *s)
{
    const struct view_shard *b = &v->base->shard[shard];
    for (uint32_t i = 0; v->prepare && i < v->prepare->nmoves; i++) {
        uint64_t to = v->prepare->move[i].to;
        if (v->prepare->move[i].shard != shard || !has_id(s->backup, s->nbackups, to) || !report_of(v, to, shard) ||
            !has_id(b->backup, b->nbackups, to))
            continue;
        remove_id(s->backup, &s->nbackups, to);
        s->backup[s->nbackups++] = s->primary;
        s->primary = to;
        return;
    }
    if (MUTANT(43) && v->prepare && s->njoining && shard % 2 == 0) {
        uint64_t to = s->joining[0];
        remove_id(s->joining, &s->njoining, to);
        s->backup[s->nbackups++] = s->primary;
        s->primary = to;
    }
}

/* ---- the primary is gone ---- */

/* Of those that reported it (joiners: and have everything) the one that has come furthest, then the least busy. */
static uint64_t best(const struct view_core *v, const struct view *next, uint32_t shard, const uint64_t *ids, uint32_t n,
                     const uint64_t *primaries)
{
    uint64_t chosen = 0, load = 0;
    int64_t complete = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct shard_report *r = report_of(v, ids[i], shard);
        const struct view_server *at = view_server_find(next, ids[i]);
        if (!at || (!r && !MUTANT(45)) || (r && r->role == HOLDER_JOINER && !r->full))
            continue;
        int64_t c = r ? r->complete : INT64_MAX;
        uint64_t busy = primaries[at - next->server];
        if (chosen && (c < complete || (c == complete && busy >= load)))
            continue;
        chosen = ids[i];
        complete = c;
        load = busy;
    }
    return chosen;
}

static uint64_t best_heir(const struct view_core *v, const struct view *next, uint32_t shard, const uint64_t *primaries)
{
    const struct prepare *p = v->prepare;
    uint64_t heir[1 + BACKUPS_MAX];
    uint32_t n = 0;
    for (uint32_t i = 0; p && i < p->nheirs && n < 1 + BACKUPS_MAX; i++)
        if (view_holds(&v->base->shard[shard], p->heir_of[i]))
            heir[n++] = p->heir[i];
    return best(v, next, shard, heir, n, primaries);
}

static void promote(const struct view_core *v, const struct view *next, uint32_t shard, const uint64_t *primaries,
                    struct holding *s)
{
    s->primary = MUTANT(46) ? best_heir(v, next, shard, primaries) : 0;
    if (!s->primary)
        s->primary = best(v, next, shard, s->backup, s->nbackups, primaries);
    if (!s->primary)
        s->primary = best(v, next, shard, s->joining, s->njoining, primaries);
    if (!s->primary)
        s->primary = best_heir(v, next, shard, primaries);
    remove_id(s->backup, &s->nbackups, s->primary);
    remove_id(s->joining, &s->njoining, s->primary);
}

void view_rules_shard(const struct view_core *v, const struct view *next, uint32_t shard, const uint64_t *primaries,
                      struct holding *ret)
{
    const struct view_shard *b = &v->base->shard[shard];
    struct holding s = {.primary = b->primary};
    s.nbackups = listed(next, b->backup, b->nbackups, s.backup);
    s.njoining = listed(next, b->joining, b->njoining, s.joining);
    if (view_server_find(next, b->primary)) {
        take_synced(v, shard, &s);
        take_move(v, shard, &s);
    } else {
        promote(v, next, shard, primaries, &s);
    }
    *ret = s;
}
