/* The views that are proposed: the first, the outcome of a change, the last. */
#include "coord/view_internal.h"

#include "base/mem.h"
#include "base/mutant.h"
#include "base/rng.h"

#include <string.h>

/* Tells two proposals of the same epoch apart, also two of the same term. */
static uint64_t nonce_of(const struct view_core *v, uint64_t epoch)
{
    struct rng r = {v->cfg.self};
    r.state = rng_next(&r) ^ v->term;
    r.state = rng_next(&r) ^ epoch;
    r.state = rng_next(&r) ^ v->round;
    return rng_next(&r);
}

static void stamp(struct view_core *v, struct view *next, uint64_t epoch)
{
    next->epoch = epoch;
    next->term = v->term;
    next->nonce = nonce_of(v, epoch);
}

struct view *view_next_first(struct view_core *v)
{
    struct view *next = view_create(v->nservers, 0, v->cfg.job.nshards);
    next->nservers = 0;
    for (uint32_t i = 0; i < v->nservers; i++)
        if (view_nodes_starter(v, &v->server[i]))
            next->server[next->nservers++] = v->server[i].doc.server;
    v->round++;
    stamp(v, next, 1);
    next->nmodes = 1;
    next->mode[0] = v->cfg.job.mode;
    next->mode[0].from = 0;
    memcpy(next->ended, v->end, sizeof next->ended);
    view_place_first(v, next);
    return next;
}

struct view *view_next_ended(struct view_core *v)
{
    struct view *next = view_copy(v->base);
    v->round++;
    stamp(v, next, v->base->epoch + 1);
    memcpy(next->ended, v->end, sizeof next->ended);
    return next;
}

/* ---- the outcome of a change ---- */

/* L: the last step that counts the gone. One for all members, or the sets would differ between shards. */
static int64_t last_step(const struct view_core *v, const struct view *next)
{
    int64_t least = INT64_MAX, most = -1, c;
    for (uint32_t h = 0; h < v->base->nshards; h++) {
        if (!view_rules_complete(v, next, h, &c))
            continue;
        least = c < least ? c : least;
        most = c > most ? c : most;
    }
    return MUTANT(2) ? most : least == INT64_MAX ? -1 : least;
}

static bool is_live(const struct view_core *v, uint64_t id)
{
    const struct view_member *m = view_member_find(v->base, id);
    return m && m->live && !view_change_gone(v, id);
}

/* The least and the greatest clock that live members reported; false: none did. */
static bool clocks(const struct view_core *v, int64_t *ret_least, int64_t *ret_most)
{
    int64_t least = INT64_MAX, most = -1;
    for (uint32_t i = 0; i < v->nanswers; i++) {
        const struct answer *a = &v->answer[i];
        if (!is_live(v, a->id) || a->clock < 0)
            continue;
        least = a->clock < least ? a->clock : least;
        most = a->clock > most ? a->clock : most;
    }
    if (most < 0)
        return false;
    *ret_least = least;
    *ret_most = most;
    return true;
}

/* J: no holder has computed anything of this step, so that the joiners can be in its set everywhere. */
static int64_t join_step(const struct view_core *v)
{
    int64_t join = 0, least, most;
    for (uint32_t i = 0; i < v->nanswers; i++)
        if (v->answer[i].join_max > join)
            join = v->answer[i].join_max;
    if (MUTANT(7)) {
        for (uint32_t i = 0; i < v->nanswers; i++)
            if (v->answer[i].join_max >= 0 && v->answer[i].join_min < join)
                join = v->answer[i].join_min;
        return join;
    }
    if (view_mode_at(v->base, join).kind != MODE_SYNC && clocks(v, &least, &most) && least > join)
        join = least;
    return join;
}

static bool listed_anywhere(const struct view *b, uint64_t id)
{
    for (uint32_t h = 0; h < b->nshards; h++)
        if (view_holds(&b->shard[h], id) || view_joining(&b->shard[h], id))
            return true;
    return false;
}

/* A drained server leaves one view after the last that gives it something. */
static bool stays(const struct view_core *v, uint64_t id)
{
    if (view_change_gone(v, id))
        return false;
    return !view_nodes_draining(v, id) || (listed_anywhere(v->base, id) && !MUTANT(47));
}

void view_next_servers(const struct view_core *v, struct view *next)
{
    const struct view *b = v->base;
    uint64_t of;
    next->nservers = 0;
    for (uint32_t i = 0; i < b->nservers; i++)
        if (stays(v, b->server[i].id))
            next->server[next->nservers++] = b->server[i];
    for (uint32_t i = 0; i < v->nservers; i++) {
        const struct registered *r = &v->server[i];
        uint64_t id = r->doc.server.id;
        if (view_server_find(b, id) || !(view_change_heir(v, id, &of) || view_nodes_newcomer(v, r)))
            continue;
        uint32_t k = next->nservers++;
        for (; k > 0 && next->server[k - 1].id > id; k--)
            next->server[k] = next->server[k - 1];
        next->server[k] = r->doc.server;
    }
}

static const struct leaving *leave_of(const struct view_core *v, uint64_t id)
{
    for (uint32_t i = 0; i < v->nleaving; i++)
        if (v->leaving[i].id == id)
            return &v->leaving[i];
    return NULL;
}

/* What becomes of a member of the base view. false: it is listed no more. */
static bool member_next(const struct view_core *v, int64_t last, struct view_member *m)
{
    const struct leaving *leave = leave_of(v, m->id);
    if (m->live && view_change_gone(v, m->id)) {
        m->last = last;
        m->live = false;
    } else if (m->live && leave) {
        /* It has finished this step, so no shard can be more than one further: less would rewrite what is sealed. */
        int64_t least = last > 0 ? last - 1 : -1;
        m->last = leave->step > least ? leave->step : least;
        m->live = false;
    } else if (!m->live && m->last > last) {
        m->last = MUTANT(3) ? m->last : last;
    } else if (!m->live && m->last < last - 1) {
        /* c may be one more than what is complete: at last + 1 a shard may still hold `last` as its newest complete
         * step, and would reopen it when its set lost this member. */
        return false;
    }
    return true;
}

static void member_insert(struct view *next, const struct view_member *m)
{
    uint32_t k = next->nmembers++;
    for (; k > 0 && next->member[k - 1].id > m->id; k--)
        next->member[k] = next->member[k - 1];
    next->member[k] = *m;
}

static bool still_joining(const struct view_core *v, uint64_t id)
{
    for (uint32_t i = 0; i < v->njoins; i++)
        if (v->join[i].id == id)
            return true;
    return false;
}

static void next_members(const struct view_core *v, int64_t last, struct view *next)
{
    const struct view *b = v->base;
    for (uint32_t i = 0; i < b->nmembers; i++) {
        struct view_member m = b->member[i];
        if (!member_next(v, last, &m))
            continue;
        if (m.last != b->member[i].last || m.live != b->member[i].live)
            next->mchg = next->epoch;
        member_insert(next, &m);
    }
    int64_t join = v->prepare->njoins ? join_step(v) : 0;
    for (uint32_t i = 0; i < v->prepare->njoins; i++) {
        const struct join_doc *j = &v->prepare->joins[i];
        if (!still_joining(v, j->id))
            continue;
        struct view_member m = {.id = j->id, .join = join, .last = STEP_NONE, .live = true};
        m.local_size = j->local_size;
        memcpy(m.name, j->name, sizeof m.name);
        member_insert(next, &m);
        next->mchg = next->epoch;
    }
}

/* A mode that another has replaced at a step that every shard has left behind says nothing any more. */
static void modes_trim(struct view *next, int64_t last)
{
    while (next->nmodes > 1 && next->mode[1].from < last - 1) {
        memmove(next->mode, next->mode + 1, (next->nmodes - 1) * sizeof *next->mode);
        next->nmodes--;
        next->mode[0].from = 0;
    }
}

static void next_modes(const struct view_core *v, int64_t last, struct view *next)
{
    int64_t from = v->mode.from, least, most;
    modes_trim(next, last);
    if (!v->prepare->mode_change)
        return;
    if (clocks(v, &least, &most)) {
        from = from > most + 1 ? from : most + 1;
        from = from > last + 1 ? from : last + 1;
    } else {
        int64_t join = join_step(v);
        from = from > join ? from : join;
    }
    while (next->nmodes > 1 && next->mode[next->nmodes - 1].from >= from)
        next->nmodes--;
    if (from == 0)
        next->nmodes = 0;
    if (next->nmodes == MODES_MAX)
        return;
    next->mode[next->nmodes++] = (struct mode){from, v->mode.kind, v->mode.kind == MODE_SSP ? v->mode.bound : 0};
}

struct view *view_next_commit(struct view_core *v)
{
    const struct view *b = v->base;
    struct view *next = view_create(b->nservers + v->nservers, b->nmembers + v->prepare->njoins, b->nshards);
    next->nmembers = 0;
    stamp(v, next, b->epoch + 1);
    next->mchg = b->mchg;
    next->nmodes = b->nmodes;
    memcpy(next->mode, b->mode, sizeof next->mode);
    view_next_servers(v, next);
    if (!view_place_shards(v, next)) {
        view_free(next);
        return NULL;
    }
    int64_t last = v->last_step = last_step(v, next);
    next_members(v, last, next);
    next_modes(v, last, next);
    return next;
}
