/* check_view.c - I8, I4, I7: one view an epoch, a removed life never comes back, the set of a finished step stays. */
#include "chaos/sim/sim.h"

#include <stdio.h>

int member_index(const struct world *w, uint64_t id)
{
    for (uint32_t i = 0; i < w->nmembers; i++)
        if (w->history.member[i].id == id)
            return (int)i;
    return -1;
}

/* Members that a newer view dropped (their last step is sealed) count as that view's predecessor had them. */
static bool in_set(const struct world *w, const struct view *v, uint32_t index, int64_t step)
{
    const struct known_member *m = &w->history.member[index];
    const struct view_member *x = view_member_find(v, m->id);
    if (x)
        return view_member_in(x, step);
    return m->first_epoch && m->first_epoch <= v->epoch && m->join <= step && step <= m->last;
}

static uint32_t set_of(const struct world *w, const struct view *v, int64_t step)
{
    uint32_t set = 0;
    for (uint32_t i = 0; i < w->nmembers; i++)
        if (in_set(w, v, i, step))
            set |= 1u << i;
    return set;
}

static void check_servers(struct world *w, const struct view *v)
{
    for (uint32_t i = 0; i < v->nservers; i++) {
        struct proc *p = world_proc(w, v->server[i].id);
        if (!p || p->kind != PROC_SERVER)
            world_fail(w, "I8 view %lu lists a server that never lived", (unsigned long)v->epoch);
        else if (p->unlisted)
            world_fail(w, "I7 view %lu lists %s again", (unsigned long)v->epoch, p->name);
        else
            p->listed = true;
    }
    for (uint32_t i = 0; i < w->nprocs; i++)
        if (w->proc[i]->kind == PROC_SERVER && w->proc[i]->listed && !view_server_find(v, w->proc[i]->id))
            w->proc[i]->unlisted = true;
    for (uint32_t s = 0; s < v->nshards; s++)
        if (!view_server_find(v, v->shard[s].primary))
            world_fail(w, "I8 view %lu: the primary of shard %u is not listed", (unsigned long)v->epoch, s);
}

static void member_seen(struct world *w, const struct view *v, const struct view_member *x)
{
    int i = member_index(w, x->id);
    if (i < 0) {
        world_fail(w, "I8 view %lu lists a member that never lived", (unsigned long)v->epoch);
        return;
    }
    struct known_member *m = &w->history.member[i];
    if ((m->gone_epoch && x->live) || (m->first_epoch && !m->listed))
        world_fail(w, "I7 view %lu lists m%d again", (unsigned long)v->epoch, i);
    if (m->first_epoch && (m->join != x->join || x->last > m->last))
        world_fail(w, "I4 view %lu: m%d was in steps %ld to %ld, now %ld to %ld", (unsigned long)v->epoch, i, (long)m->join,
                   (long)m->last, (long)x->join, (long)x->last);
    if (!m->first_epoch) {
        m->first_epoch = v->epoch;
        w->stats.joins++;
    }
    if (!x->live && !m->gone_epoch)
        m->gone_epoch = v->epoch;
    m->join = x->join;
    m->last = x->last;
    m->live = x->live;
}

static void check_members(struct world *w, const struct view *v)
{
    for (uint32_t i = 0; i < v->nmembers; i++)
        member_seen(w, v, &v->member[i]);
    for (uint32_t i = 0; i < w->nmembers; i++) {
        struct known_member *m = &w->history.member[i];
        m->listed = view_member_find(v, m->id) != NULL;
        if (m->first_epoch && !m->listed && !m->gone_epoch) {
            m->gone_epoch = v->epoch;
            m->live = false;
        }
    }
}

static const char *name_of(const struct world *w, uint64_t id)
{
    const struct proc *p = world_proc(w, id);
    return p ? p->name : "?";
}

/* What happened to the shards, so that coverage shows. */
static void count_moves(struct world *w, const struct view *v)
{
    for (uint32_t s = 0; w->view && s < v->nshards; s++) {
        const struct view_shard *a = &w->view->shard[s], *b = &v->shard[s];
        bool stays = view_server_find(v, a->primary) != NULL;
        w->stats.moved += a->primary != b->primary && stays;
        w->stats.failovers += a->primary != b->primary && !stays;
        for (uint32_t i = 0; i < a->nbackups; i++)
            w->stats.backups_lost += !view_server_find(v, a->backup[i]);
        for (uint32_t i = 0; i < b->nbackups; i++)
            for (uint32_t k = 0; k < a->njoining; k++)
                w->stats.backups_made += a->joining[k] == b->backup[i];
    }
}

static void note_view(struct world *w, const struct view *v)
{
    char text[600] = "";
    int n = 0;
    for (uint32_t i = 0; i < v->nmembers && n < 300; i++) {
        const struct view_member *x = &v->member[i];
        struct proc *p = world_proc(w, x->id);
        n += snprintf(text + n, sizeof text - (size_t)n, " %s[%ld,", p ? p->name : "?", (long)x->join);
        n += x->last == STEP_NONE ? snprintf(text + n, sizeof text - (size_t)n, "]")
                                  : snprintf(text + n, sizeof text - (size_t)n, "%ld]", (long)x->last);
    }
    for (uint32_t s = 0; s < v->nshards && n < 520; s++) {
        const struct view_shard *x = &v->shard[s];
        n += snprintf(text + n, sizeof text - (size_t)n, " %u:%s@%lu", s, name_of(w, x->primary), (unsigned long)x->since);
        for (uint32_t i = 0; i < x->nbackups && n < 560; i++)
            n += snprintf(text + n, sizeof text - (size_t)n, "+%s", name_of(w, x->backup[i]));
        for (uint32_t i = 0; i < x->njoining && n < 560; i++)
            n += snprintf(text + n, sizeof text - (size_t)n, "<%s", name_of(w, x->joining[i]));
    }
    for (uint32_t i = 0; v->nmodes > 1 && i < v->nmodes && n < 540; i++) {
        char mode[32];
        mode_format(&v->mode[i], mode, sizeof mode);
        n += snprintf(text + n, sizeof text - (size_t)n, " %s from %ld", mode, (long)v->mode[i].from);
    }
    world_note(w, "store: view %lu term %lu:%s", (unsigned long)v->epoch, (unsigned long)v->term, text);
}

/* A member that was removed and does not know it yet goes on under the view that it has. */
struct mode check_mode(const struct world *w, const struct proc *p, int64_t step)
{
    bool live = w->history.member[p->member->index].live;
    return live ? w->history.mode[step] : view_mode_at(client_core_view(p->member->core), step);
}

/* The oldest mode of a later view is said to hold from 0 on: what it was before is known here. */
static void modes_take(struct world *w, const struct view *v)
{
    for (uint32_t i = 0; i < v->nmodes; i++)
        for (int64_t k = v->mode[i].from; k < SIM_STEPS_MAX && (!w->view || v->mode[i].from > 0); k++)
            w->history.mode[k] = v->mode[i];
}

void check_view(struct world *w, const struct view *v)
{
    if (w->view && v->epoch != w->view->epoch + 1)
        world_fail(w, "I8 view %lu follows view %lu", (unsigned long)v->epoch, (unsigned long)w->view->epoch);
    if (w->opt.verbose)
        note_view(w, v);
    if (v->ended[0])
        world_fail(w, "I6 the job was ended: %s", v->ended);
    modes_take(w, v);
    count_moves(w, v);
    check_members(w, v);
    check_servers(w, v);
    int64_t top = w->history.finished, low = top > 64 ? top - 64 : 0;
    for (int64_t k = low; k <= top && !w->failed; k++)
        if (set_of(w, v, k) != w->history.set[k] && w->history.mode[k].kind == MODE_SYNC)
            world_fail(w, "I4 view %lu changes the members of finished step %ld from %x to %x", (unsigned long)v->epoch,
                       (long)k, w->history.set[k], set_of(w, v, k));
}

void check_ended(struct world *w, uint32_t member, int64_t step)
{
    struct known_member *m = &w->history.member[member];
    if (m->ended >= step)
        world_fail(w, "I3 m%u ends step %ld after step %ld", member, (long)step, (long)m->ended);
    m->ended = step;
}

static void set_known(struct world *w, const struct view *v, int64_t k)
{
    struct history *h = &w->history;
    h->set[k] = set_of(w, v, k);
    for (uint32_t m = 0; m < SIM_MEMBERS_MAX; m++)
        h->until[k][m] = h->set[k] >> m & 1 ? (uint16_t)(k + 1) : k ? h->until[k - 1][m] : 0;
}

/* Somebody who runs under v was shown that step is over: it and all before are sealed. */
void history_finish(struct world *w, const struct view *v, const char *who, int64_t step)
{
    struct history *h = &w->history;
    if (step < 0)
        return;
    if (step >= SIM_STEPS_MAX) {
        world_fail(w, "I6 %s is in step %ld", who, (long)step);
        return;
    }
    bool sync = h->mode[step].kind == MODE_SYNC;
    if (!sync && step <= h->known)
        h->set[step] = set_of(w, v, step);   /* whoever left since is only asked for what was acknowledged */
    if (sync && step <= h->known && step <= h->finished && h->set[step] != set_of(w, v, step)) {
        world_fail(w, "I4 step %ld is finished with members %x, for %s with %x", (long)step, h->set[step], who,
                   set_of(w, v, step));
        return;
    }
    while (h->known < step)
        set_known(w, v, ++h->known);
    if (step <= h->finished)
        return;
    h->finished = step;
    w->stats.steps_finished++;
    for (uint32_t m = 0; m < w->nmembers; m++)
        if (h->set[step] >> m & 1 && h->member[m].ended < step && view_mode_at(v, step).kind == MODE_SYNC &&
            h->mode[step].kind == MODE_SYNC)
            world_fail(w, "I4 step %ld is finished for %s with m%u, which has not ended it (its step is %ld)", (long)step,
                       who, m, (long)h->member[m].ended + 1);
}
