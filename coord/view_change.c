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

/* ---- reports ---- */

static void answers_clear(struct view_core *v)
{
    for (uint32_t i = 0; i < v->nanswers; i++)
        mem_free(v->answer[i].shard);
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

static bool leads_shards(const struct view *b, uint64_t id)
{
    for (uint32_t h = 0; h < b->nshards; h++)
        if (b->shard[h].primary == id)
            return true;
    return false;
}

bool view_change_awaits(const struct view_core *v, uint64_t id)
{
    uint64_t of;
    if (v->phase != PHASE_PREPARE || view_change_gone(v, id) || view_change_answer(v, id))
        return false;
    if (MUTANT(45) && view_server_find(v->base, id) && !leads_shards(v->base, id))
        return false;
    if (view_change_heir(v, id, &of) || view_server_find(v->base, id))
        return true;
    return v->prepare->mode_change && view_lists(v->base, id);
}

static struct answer answer_of(const struct report *r, uint32_t nshards)
{
    struct answer a = {.id = r->from, .clock = r->clock, .join_max = -1, .join_min = INT64_MAX};
    a.shard = mem_alloc(nshards * sizeof *a.shard);
    for (uint32_t i = 0; i < r->nshards; i++) {
        const struct shard_report *s = &r->shard[i];
        if (s->shard >= nshards || s->complete < -1)
            continue;
        a.shard[s->shard] = *s;
        if (s->role == HOLDER_JOINER && !s->full && !MUTANT(41))
            continue;
        a.join_max = s->join > a.join_max ? s->join : a.join_max;
        a.join_min = s->join < a.join_min ? s->join : a.join_min;
    }
    return a;
}

/* Of whatever it holds, or is asked for as an heir: without a word about a shard that it is to serve there is no L. */
static bool answer_whole(const struct view_core *v, const struct answer *a)
{
    uint64_t of = 0;
    bool heir = view_change_heir(v, a->id, &of);
    for (uint32_t h = 0; h < v->base->nshards; h++) {
        const struct view_shard *s = &v->base->shard[h];
        bool asked = view_holds(s, a->id) || (heir && view_holds(s, of) && view_holders_orphan(v, h));
        if (asked && !a->shard[h].role)
            return false;
    }
    return true;
}

static void joiners_note(struct view_core *v, const struct answer *a)
{
    for (uint32_t h = 0; h < v->base->nshards; h++)
        if (view_joining(&v->base->shard[h], a->id) && a->shard[h].role == HOLDER_JOINER)
            view_holders_note(v, h, a->id, a->shard[h].full, false);
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
        mem_free(a.shard);
        return;
    }
    ARRAY_ROOM(v->answer, v->nanswers, v->answers_cap);
    v->answer[v->nanswers++] = a;
    view_nodes_return(v, r->from);
    joiners_note(v, &a);
}

/* ---- PREPARE ---- */

const struct view_server *view_change_missing(const struct view_core *v)
{
    for (uint32_t i = 0; i < v->base->nservers; i++) {
        const struct view_server *s = &v->base->server[i];
        if (view_nodes_suspects(v, s->id) && view_holders_standing(v, s->id, false) == STANDING_ALONE)
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

/* A registered heir proves that the life before it is dead. */
static void heirs_prove(struct view_core *v)
{
    for (uint32_t i = 0; i < v->base->nservers; i++)
        if (view_nodes_heir(v, v->base->server[i].id))
            view_nodes_away_add(v, v->base->server[i].id, true);
}

/* Is the disk of life `of` asked for? Only for shards that no living server can go on with. */
static bool heir_needed(const struct view_core *v, uint64_t of)
{
    for (uint32_t h = 0; h < v->base->nshards; h++)
        if (view_holds(&v->base->shard[h], of) && (view_holders_orphan(v, h) || MUTANT(46)))
            return true;
    return false;
}

static void prepare_heirs(const struct view_core *v, struct prepare *p)
{
    const struct view *b = v->base;
    p->heir = mem_alloc((b->nservers + 1) * sizeof *p->heir);
    p->heir_of = mem_alloc((b->nservers + 1) * sizeof *p->heir_of);
    for (uint32_t i = 0; i < b->nservers; i++) {
        uint64_t id = b->server[i].id, heir = view_nodes_heir(v, id);
        if (!heir || !heir_needed(v, id))
            continue;
        p->heir[p->nheirs] = heir;
        p->heir_of[p->nheirs++] = id;
    }
}

/* Suspects go, unless it must be asked first who has what they held: whoever is named once cannot come back. */
static void prepare_gone(struct view_core *v, struct prepare *p)
{
    p->gone = mem_alloc((v->naway + 1) * sizeof *p->gone);
    for (uint32_t i = 0; i < v->naway && p->ngone < PREPARE_NODES_MAX; i++) {
        struct away *a = &v->away[i];
        if (!a->suspect || (!a->named && view_holders_standing(v, a->id, false) != STANDING_OTHERS))
            continue;
        a->named = true;
        p->gone[p->ngone++] = a->id;
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
    heirs_prove(v);
    const struct view_server *missing = view_change_missing(v);
    if (missing && view_nodes_take_back(v))
        missing = view_change_missing(v);
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
    prepare_heirs(v, p);
    prepare_gone(v, p);
    if (view_nodes_joins_ready(v)) {
        uint32_t njoins = v->njoins < view_nodes_room(v) ? v->njoins : view_nodes_room(v);
        p->joins = mem_dup(v->join, njoins * sizeof *v->join);
        p->njoins = njoins;
    }
    v->prepare = p;
    view_place_moves(v, p);
    v->phase = PHASE_PREPARE;
    v->due_us = v->now_us + v->cfg.report_ms * 1000ull;
    view_log_prepare(v);
    prepare_send_all(v);
}

void view_change_again(struct view_core *v, uint64_t id)
{
    if (view_change_awaits(v, id))
        prepare_send(v, id);
}

/* ---- while reports are awaited ---- */

/* A suspect that is not named: is it known by now whether it may go? */
static bool suspect_settled(const struct view_core *v, uint64_t id)
{
    return view_nodes_suspects(v, id) && view_holders_standing(v, id, false) != STANDING_MAYBE;
}

/* A disk that is back since the round began: it may be the one that answers. */
static bool heir_unasked(const struct view_core *v, uint64_t of)
{
    uint64_t heir = view_nodes_heir(v, of), asked;
    return heir && !view_change_heir(v, heir, &asked) && heir_needed(v, of);
}

/* Somebody who was asked has died, or another life holds its disk: the set that was cut off is too small. */
static bool round_void(const struct view_core *v)
{
    const struct prepare *p = v->prepare;
    for (uint32_t i = 0; i < v->base->nservers; i++) {
        uint64_t id = v->base->server[i].id;
        if (!view_change_gone(v, id) && (view_nodes_heir(v, id) || suspect_settled(v, id)))
            return true;
    }
    for (uint32_t i = 0; i < p->nheirs; i++)
        if (view_nodes_heir(v, p->heir_of[i]) != p->heir[i])
            return true;
    for (uint32_t i = 0; i < v->base->nservers; i++)
        if (heir_unasked(v, v->base->server[i].id))
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
    if (!a || !wait_us || v->now_us < a->since_us + wait_us || v->now_us < v->grace_us)
        return false;
    char name[128];
    view_text_server(v->base, id, name, sizeof name);
    snprintf(v->end, sizeof v->end, "%s did not return within %llu s", name,
             (unsigned long long)(wait_us + 999999) / 1000000);
    view_core_propose(v, view_next_ended(v));
    return true;
}

/* An heir that says nothing and is not the only one cannot hold up the others; it may register again. */
static void heir_drop(struct view_core *v, uint64_t id)
{
    struct registered *r = view_nodes_find(v, id);
    if (r)
        r->down = true;
}

/* Nobody else who has answered holds what `id` holds: silence cannot make it gone. */
static void silent_alone(struct view_core *v, uint64_t id, uint64_t listed)
{
    view_nodes_away_add(v, listed, false);
    if (!view_change_overdue(v, listed))
        prepare_send(v, id);
}

static void silence(struct view_core *v, const uint64_t *ids, uint32_t n)
{
    bool anew = false;
    v->due_us = v->now_us + v->cfg.report_ms * 1000ull;
    for (uint32_t i = 0; i < n && v->phase == PHASE_PREPARE; i++) {
        uint64_t id = ids[i], of = 0;
        bool heir = view_change_heir(v, id, &of);
        if (id == v->cfg.self)
            continue;
        log_warn("report_silent", "id=%llu round=%llu", (unsigned long long)id, (unsigned long long)v->round);
        if (view_holders_standing(v, id, true) != STANDING_OTHERS) {
            silent_alone(v, id, heir ? of : id);
            continue;
        }
        if (heir)
            heir_drop(v, id);
        if (view_lists(v->base, id))
            view_nodes_away_add(v, id, true);
        anew = true;
    }
    if (anew && v->phase == PHASE_PREPARE)
        view_change_attempt(v);
}

/* Everybody has reported, yet nobody can go on with some shard: asked anew, but not without a pause. */
static void commit(struct view_core *v)
{
    struct view *next = view_next_commit(v);
    if (next) {
        view_log_reports(v);
        view_core_propose(v, next);
        return;
    }
    if (v->now_us < v->due_us)
        return;
    log_error("shard_without_holder", "epoch=%llu round=%llu", (unsigned long long)v->base->epoch,
              (unsigned long long)v->round);
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
        commit(v);
    else if (v->now_us >= v->due_us && v->now_us >= v->grace_us)
        silence(v, ids, n);
    mem_free(ids);
}
