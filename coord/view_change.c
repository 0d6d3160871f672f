/* One change: who is gone, PREPARE, reports, silence. */
#include "coord/view_internal.h"

#include "base/log.h"
#include "base/mem.h"
#include "base/mutant.h"

#include <stdio.h>
#include <string.h>

static bool has_id(const uint64_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

bool view_change_gone(const struct view_core *v, uint64_t id)
{
    return v->prepare && has_id(v->prepare->gone, v->prepare->ngone, id);
}

bool view_change_heir(const struct view_core *v, uint64_t id, uint64_t *ret_of)
{
    for (uint32_t i = 0; v->prepare && i < v->prepare->nheirs; i++)
        if (v->prepare->heir[i] == id) {
            *ret_of = v->prepare->heir_of[i];
            return true;
        }
    return false;
}

bool view_holds_shards(const struct view *b, uint64_t id)
{
    for (uint32_t h = 0; h < b->nshards; h++)
        if (b->shard[h].primary == id)
            return true;
    return false;
}

/* ---- reports ---- */

static void answers_clear(struct view_core *v)
{
    for (uint32_t i = 0; i < v->nanswers; i++)
        mem_free(v->answer[i].complete);
    v->nanswers = 0;
}

void view_change_clear(struct view_core *v)
{
    view_core_retire_prepare(v);
    answers_clear(v);
}

const struct answer *view_change_answer(const struct view_core *v, uint64_t id)
{
    for (uint32_t i = 0; i < v->nanswers; i++)
        if (v->answer[i].id == id)
            return &v->answer[i];
    return NULL;
}

bool view_change_awaits(const struct view_core *v, uint64_t id)
{
    uint64_t of;
    if (v->phase != PHASE_PREPARE || view_change_gone(v, id) || view_change_answer(v, id))
        return false;
    if (view_change_heir(v, id, &of) || view_server_find(v->base, id))
        return true;
    return v->prepare->mode_change && view_lists(v->base, id);
}

static struct answer answer_of(const struct report *r, uint32_t nshards)
{
    struct answer a = {.id = r->from, .clock = r->clock, .join_max = -1, .join_min = INT64_MAX};
    a.complete = mem_alloc(nshards * sizeof *a.complete);
    for (uint32_t h = 0; h < nshards; h++)
        a.complete[h] = REPORT_NONE;
    for (uint32_t i = 0; i < r->nshards; i++) {
        const struct shard_report *s = &r->shard[i];
        if (s->shard >= nshards || s->complete < -1 || (s->role == HOLDER_JOINER && !s->full))
            continue;
        a.complete[s->shard] = s->complete;
        a.join_max = s->join > a.join_max ? s->join : a.join_max;
        a.join_min = s->join < a.join_min ? s->join : a.join_min;
    }
    return a;
}

/* Without a word about a shard that it is to serve next there is no L. */
static bool answer_whole(const struct view_core *v, const struct answer *a)
{
    for (uint32_t h = 0; h < v->base->nshards; h++)
        if (view_next_primary(v, h) == a->id && a->complete[h] == REPORT_NONE)
            return false;
    return true;
}

void view_change_report(struct view_core *v, const struct report *r)
{
    if (v->phase != PHASE_PREPARE || r->base_epoch != v->base->epoch || r->ballot.term != v->term ||
        (r->ballot.round != v->round && !MUTANT(9)))
        return;
    uint64_t of;
    bool known = view_lists(v->base, r->from) || view_change_heir(v, r->from, &of);
    if (!known || view_change_gone(v, r->from) || view_change_answer(v, r->from))
        return;
    struct answer a = answer_of(r, v->base->nshards);
    if (!answer_whole(v, &a)) {
        log_warn("report_refused", "id=%llu cause=\"a shard that it serves is missing\"", (unsigned long long)r->from);
        mem_free(a.complete);
        return;
    }
    ARRAY_ROOM(v->answer, v->nanswers, v->answers_cap);
    v->answer[v->nanswers++] = a;
    struct away *w = view_nodes_away(v, r->from);
    if (w && !w->suspect)
        *w = v->away[--v->naway];
}

/* ---- PREPARE ---- */

const struct view_server *view_change_missing(const struct view_core *v)
{
    for (uint32_t i = 0; i < v->base->nservers; i++) {
        const struct view_server *s = &v->base->server[i];
        if (view_nodes_suspects(v, s->id) && view_holds_shards(v->base, s->id) && !view_nodes_heir(v, s->id))
            return s;
    }
    return NULL;
}

static void sort_ids(uint64_t *ids, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        uint64_t x = ids[i];
        uint32_t k = i;
        for (; k > 0 && ids[k - 1] > x; k--)
            ids[k] = ids[k - 1];
        ids[k] = x;
    }
}

/* Fills gone and heirs: a registered heir proves that the life before it is dead. */
static void prepare_nodes(struct view_core *v, struct prepare *p)
{
    const struct view *b = v->base;
    p->heir = mem_alloc((b->nservers + 1) * sizeof *p->heir);
    p->heir_of = mem_alloc((b->nservers + 1) * sizeof *p->heir_of);
    for (uint32_t i = 0; i < b->nservers; i++) {
        uint64_t id = b->server[i].id, heir = view_nodes_heir(v, id);
        if (!heir)
            continue;
        view_nodes_away_add(v, id, true);
        p->heir[p->nheirs] = heir;
        p->heir_of[p->nheirs++] = id;
    }
    p->gone = mem_alloc((v->naway + 1) * sizeof *p->gone);
    for (uint32_t i = 0; i < v->naway && p->ngone < PREPARE_NODES_MAX; i++)
        if (v->away[i].suspect) {
            v->away[i].named = true;
            p->gone[p->ngone++] = v->away[i].id;
        }
    sort_ids(p->gone, p->ngone);
}

static void prepare_send(struct view_core *v, uint64_t to)
{
    view_core_emit(v, &(struct view_effect){.kind = VIEW_SEND_PREPARE, .to = to, .prepare = v->prepare});
}

static void prepare_send_all(struct view_core *v)
{
    const struct prepare *p = v->prepare;
    for (uint32_t i = 0; i < v->base->nservers; i++)
        if (!view_change_gone(v, v->base->server[i].id))
            prepare_send(v, v->base->server[i].id);
    for (uint32_t i = 0; i < p->nheirs; i++)
        if (!view_server_find(v->base, p->heir[i]))
            prepare_send(v, p->heir[i]);
    for (uint32_t i = 0; i < v->base->nmembers; i++)
        if (v->base->member[i].live && !view_change_gone(v, v->base->member[i].id))
            prepare_send(v, v->base->member[i].id);
}

void view_change_attempt(struct view_core *v)
{
    view_core_retire_prepare(v);
    if (!MUTANT(9))
        answers_clear(v);
    const struct view_server *missing = view_change_missing(v);
    if (missing) {
        uint64_t wait_us = v->cfg.wait_for_server_ms * 1000ull;
        if (v->phase != PHASE_WAIT)
            log_warn("view_wait", "server=%s id=%llu", missing->name, (unsigned long long)missing->id);
        v->phase = PHASE_WAIT;
        v->due_us = wait_us ? view_nodes_away(v, missing->id)->since_us + wait_us : UINT64_MAX;
        return;
    }
    struct prepare *p = mem_alloc(sizeof *p);
    p->ballot = (struct ballot){v->term, ++v->round};
    p->base = view_copy(v->base);
    p->controller = v->cfg.self;
    p->mode_change = v->mode_wanted;
    prepare_nodes(v, p);
    if (view_nodes_joins_ready(v)) {
        uint32_t njoins = v->njoins < view_nodes_room(v) ? v->njoins : view_nodes_room(v);
        p->joins = mem_dup(v->join, njoins * sizeof *v->join);
        p->njoins = njoins;
    }
    v->prepare = p;
    v->phase = PHASE_PREPARE;
    v->due_us = v->now_us + v->cfg.report_ms * 1000ull;
    log_info("view_prepare", "epoch=%llu term=%llu round=%llu gone=%u joins=%u heirs=%u",
             (unsigned long long)v->base->epoch, (unsigned long long)v->term, (unsigned long long)v->round, p->ngone,
             p->njoins, p->nheirs);
    prepare_send_all(v);
}

void view_change_again(struct view_core *v, uint64_t id)
{
    if (view_change_awaits(v, id))
        prepare_send(v, id);
}

/* ---- while reports are awaited ---- */

/* Somebody who was asked has died, or another life holds its disk: the set that was cut off is too small. */
static bool round_void(const struct view_core *v)
{
    const struct prepare *p = v->prepare;
    for (uint32_t i = 0; i < v->base->nservers; i++) {
        uint64_t id = v->base->server[i].id;
        if (!view_change_gone(v, id) && (view_nodes_suspects(v, id) || view_nodes_heir(v, id)))
            return true;
    }
    for (uint32_t i = 0; i < p->nheirs; i++)
        if (view_nodes_heir(v, p->heir_of[i]) != p->heir[i])
            return true;
    for (uint32_t i = 0; p->mode_change && i < v->base->nmembers; i++) {
        uint64_t id = v->base->member[i].id;
        if (v->base->member[i].live && !view_change_gone(v, id) && view_nodes_suspects(v, id))
            return true;
    }
    return false;
}

static uint32_t awaited(const struct view_core *v, uint64_t *ret_ids)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->base->nservers; i++)
        if (view_change_awaits(v, v->base->server[i].id))
            ret_ids[n++] = v->base->server[i].id;
    for (uint32_t i = 0; i < v->prepare->nheirs; i++)
        if (!view_server_find(v->base, v->prepare->heir[i]) && view_change_awaits(v, v->prepare->heir[i]))
            ret_ids[n++] = v->prepare->heir[i];
    for (uint32_t i = 0; i < v->base->nmembers; i++)
        if (view_change_awaits(v, v->base->member[i].id))
            ret_ids[n++] = v->base->member[i].id;
    return n;
}

bool view_change_overdue(struct view_core *v, uint64_t id)
{
    const struct away *a = view_nodes_away(v, id);
    uint64_t wait_us = v->cfg.wait_for_server_ms * 1000ull;
    if (!a || !wait_us || v->now_us < a->since_us + wait_us)
        return false;
    char name[128];
    view_text_server(v->base, id, name, sizeof name);
    snprintf(v->end, sizeof v->end, "%s did not return within %llu s", name,
             (unsigned long long)(wait_us + 999999) / 1000000);
    view_core_propose(v, view_next_ended(v));
    return true;
}

/* Nobody else holds what `id` holds (or, as an heir, what its former life held): silence cannot make it gone. */
static bool only_holder(const struct view_core *v, uint64_t id, uint64_t *ret_listed)
{
    uint64_t of;
    *ret_listed = view_change_heir(v, id, &of) ? of : id;
    return *ret_listed != id || (view_server_find(v->base, id) && view_holds_shards(v->base, id));
}

static void silence(struct view_core *v, const uint64_t *ids, uint32_t n)
{
    bool anew = false;
    v->due_us = v->now_us + v->cfg.report_ms * 1000ull;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t listed;
        if (ids[i] == v->cfg.self)
            continue;
        log_warn("report_silent", "id=%llu round=%llu", (unsigned long long)ids[i], (unsigned long long)v->round);
        if (only_holder(v, ids[i], &listed)) {
            view_nodes_away_add(v, listed, false);
            if (view_change_overdue(v, listed))
                return;
            prepare_send(v, ids[i]);
        } else {
            view_nodes_away_add(v, ids[i], true);
            anew = true;
        }
    }
    if (anew)
        view_change_attempt(v);
}

void view_change_run(struct view_core *v)
{
    if (round_void(v)) {
        view_change_attempt(v);
        return;
    }
    uint64_t *ids = mem_alloc((v->base->nservers + v->prepare->nheirs + v->base->nmembers + 1) * sizeof *ids);
    uint32_t n = awaited(v, ids);
    if (!n)
        view_core_propose(v, view_next_commit(v));
    else if (v->now_us >= v->due_us)
        silence(v, ids, n);
    mem_free(ids);
}
