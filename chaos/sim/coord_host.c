/* coord_host.c - the coordination store as processes see it: delays, outages, lost requests and answers, leases that
 * run out, watches. The store itself is coord_model; what is modelled here is everything between. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include <string.h>
#include "base/keepstep_err.h"
#include "base/mem.h"

enum { REQUEST_TIMEOUT_MS = 120, LATE_MS = 400 };

struct store_request {
    struct coord_request request;
    struct proc *from;
    bool answered;             /* its client gave up already: it is done late, or not at all */
};

static struct store_request *request_copy(struct proc *p, const struct coord_request *r)
{
    struct store_request *s = mem_alloc(sizeof *s);
    s->request = *r;
    s->from = p;
    for (uint32_t i = 0; i < r->nops; i++)
        if (r->op[i].value)
            s->request.op[i].value = mem_strdup(r->op[i].value);
    return s;
}

void store_request_free(void *arg)
{
    struct store_request *s = arg;
    for (uint32_t i = 0; i < s->request.nops; i++)
        mem_free((char *)s->request.op[i].value);
    mem_free(s);
}

bool store_reachable(const struct world *w, const struct proc *p)
{
    return w->store_down_until <= w->now && p->store_cut_until <= w->now;
}

static bool coord_deliver(struct world *w, struct pipe *pipe, struct msg *m)
{
    struct ctl_event e = { .kind = CTL_COORD, .coord = m->coord };
    if (w->opt.verbose > 1)
        world_note(w, "  store -> %s event %d request %d status %d revision %ld %s", pipe->to->name, (int)m->coord->kind,
                   (int)m->coord->request, m->coord->status, (long)m->coord->revision, m->coord->nkv ? m->coord->kv[0].key : "");
    server_event(w, pipe->to, &e);
    return false;
}

static void event_send(struct world *w, struct proc *p, struct pipe *pipe, struct coord_event *e, uint64_t delay)
{
    if (!p->alive || p->kind != PROC_SERVER) {
        coord_event_done(e);
        return;
    }
    if (!pipe->deliver)
        pipe_init(pipe, p, p, coord_deliver);
    struct msg *m = msg_new(w, MSG_COORD);
    m->coord = mem_dup(e, sizeof *e);
    pipe_push(w, pipe, m, delay);
}

static uint64_t store_delay(struct world *w)
{
    return 100 + rng_below(&w->rng, 2 * SIM_MS) + (!w->calm && rng_chance(&w->rng, 20) ? rng_below(&w->rng, 80 * SIM_MS) : 0);
}

/* ---- changes: the checkers look at once, watchers with a delay ---- */

static void view_committed(struct world *w, const struct coord_kv *kv)
{
    char err[ERR_TEXT] = "";
    struct view *v = NULL;
    if (!kv->value)
        world_fail(w, "I8 the view was deleted");
    else if (view_decode(kv->value, kv->value_size, &v, err))
        world_fail(w, "I8 the committed view cannot be decoded: %s", err);
    if (!v)
        return;
    check_view(w, v);
    w->stats.views++;
    view_free(w->view);
    w->view = v;
    world_target_raise(w);
}

static void leader_changed(struct world *w, const struct coord_kv *kv)
{
    struct server_doc s;
    char err[ERR_TEXT];
    w->leader = 0;
    if (kv->value && server_decode(kv->value, kv->value_size, &s, err) == 0) {
        w->leader = s.server.id;
        w->stats.elections++;
        world_note(w, "store: %s leads (term %ld)", world_proc(w, w->leader)->name, (long)kv->create_revision);
    } else {
        world_note(w, "store: nobody leads");
    }
}

static void changes_look(struct world *w)
{
    struct coord_event e;
    for (size_t n = 0; !w->failed && coord_model_change(w->coord, w->coord_seen, n, &e); n++) {
        if (strcmp(e.kv[0].key, "view") == 0)
            view_committed(w, &e.kv[0]);
        else if (strcmp(e.kv[0].key, "leader") == 0)
            leader_changed(w, &e.kv[0]);
        coord_event_done(&e);
    }
    w->coord_seen = coord_model_revision(w->coord);
}

static void watcher_tell(struct world *w, struct proc *p)
{
    if (!p->alive || !p->watching)
        return;
    uint64_t until = p->store_cut_until > w->store_down_until ? p->store_cut_until : w->store_down_until;
    uint64_t wait = until > w->now ? until - w->now : 0;
    struct coord_event e;
    for (size_t n = 0; coord_model_change(w->coord, p->watch_revision, n, &e); n++)
        event_send(w, p, &p->coord_watch, &e, wait + store_delay(w));
    p->watch_revision = coord_model_revision(w->coord);
}

static void changes_tell(struct world *w)
{
    changes_look(w);
    for (uint32_t i = 0; i < w->nprocs; i++)
        watcher_tell(w, w->proc[i]);
}

void store_watch(struct world *w, struct proc *p, int64_t revision)
{
    p->watching = true;
    p->watch_revision = revision;
    watcher_tell(w, p);
}

void store_resync(struct world *w, struct proc *p)
{
    if (!p->watching)
        return;
    struct coord_event e = { .kind = COORD_RESYNC, .revision = coord_model_revision(w->coord) };
    w->stats.resyncs++;
    p->watching = false;
    pipe_clear(w, &p->coord_watch);
    event_send(w, p, &p->coord_watch, &e, store_delay(w));
}

/* ---- requests ---- */

static void answer(struct world *w, const struct store_request *s, int status, uint64_t delay)
{
    struct coord_event e = { .kind = COORD_ANSWER, .request = s->request.kind, .tag = s->request.tag, .status = status };
    snprintf(e.text, sizeof e.text, "%s", status == KS_EUNKNOWN ? "the answer was lost" : "the store does not answer");
    event_send(w, s->from, &s->from->coord_answers, &e, delay);
}

static bool writes_view(const struct coord_request *r)
{
    for (uint32_t i = 0; i < r->nops; i++)
        if (r->kind == COORD_TXN && strcmp(r->op[i].key, "view") == 0)
            return true;
    return false;
}

static void lease_granted(struct world *w, const struct store_request *s, const struct coord_event *e)
{
    if (w->nleases == SIM_LEASES_MAX) {
        world_fail(w, "I11 more than %d leases", SIM_LEASES_MAX);
        return;
    }
    struct lease l = { e->lease, s->from, s->request.ttl_ms, true };
    w->lease[w->nleases++] = l;
    if (!s->from->alive)
        store_owner_unreachable(w, s->from);
}

static void request_apply(struct world *w, struct store_request *s, bool lose_answer)
{
    struct coord_event e;
    bool cas = writes_view(&s->request);
    coord_model_apply(w->coord, &s->request, &e);
    if (cas && e.status == 0) {
        w->stats.cas_applied += e.succeeded;
        w->stats.cas_refused += !e.succeeded;
        w->stats.cas_late += s->answered;
    }
    if (s->request.kind == COORD_LEASE_GRANT && e.status == 0)
        lease_granted(w, s, &e);
    bool applied = e.status == 0 && e.succeeded;
    if (w->opt.verbose > 1)
        world_note(w, "  store: request %d of %s: status %d, %s, revision %ld", (int)s->request.kind, s->from->name, e.status,
                   e.succeeded ? "done" : "not done", (long)e.revision);
    if (s->answered) {
        coord_event_done(&e);
    } else if (lose_answer) {
        coord_event_done(&e);
        w->stats.cas_answer_lost += cas && applied;
        answer(w, s, KS_EUNKNOWN, REQUEST_TIMEOUT_MS * SIM_MS);
    } else {
        event_send(w, s->from, &s->from->coord_answers, &e, store_delay(w));
    }
    changes_tell(w);
    if (cas && applied)
        fault_trigger(w, TRIGGER_CAS, s->from);
}

static bool losing(struct world *w, const struct store_request *s)
{
    if (w->lose_next_cas_answer && writes_view(&s->request)) {
        w->lose_next_cas_answer = false;
        return true;
    }
    return !w->calm && !w->opt.quiet_net && rng_chance(&w->rng, 15);
}

/* The client gives up on it, and it is done after that. */
static bool late(struct world *w, const struct store_request *s, bool harsh)
{
    if (w->delay_next_cas && writes_view(&s->request) && !s->answered) {
        w->delay_next_cas = false;
        return true;
    }
    return harsh && s->request.kind == COORD_TXN && rng_chance(&w->rng, 15);
}

void store_request_arrived(struct world *w, void *arg, uint64_t n)
{
    (void)n;
    struct store_request *s = arg;
    bool harsh = !w->calm && !w->opt.quiet_net && !s->answered;
    if (!store_reachable(w, s->from)) {
        bool sure = s->request.kind == COORD_RANGE || rng_chance(&w->rng, 500);
        if (!s->answered)
            answer(w, s, sure ? KS_EUNAVAIL : KS_EUNKNOWN, REQUEST_TIMEOUT_MS * SIM_MS / 2);
    } else if (harsh && rng_chance(&w->rng, 10)) {
        w->stats.cas_request_lost += writes_view(&s->request);
        answer(w, s, s->request.kind == COORD_RANGE ? KS_EUNAVAIL : KS_EUNKNOWN, REQUEST_TIMEOUT_MS * SIM_MS);
    } else if (late(w, s, harsh)) {
        answer(w, s, KS_EUNKNOWN, REQUEST_TIMEOUT_MS * SIM_MS);
        s->answered = true;
        world_at(w, w->now + rng_below(&w->rng, LATE_MS * SIM_MS), NULL, store_request_arrived, s, 0);
        return;
    } else {
        request_apply(w, s, s->request.kind == COORD_TXN && losing(w, s));
    }
    store_request_free(s);
}

/* Requests in flight when their sender dies still arrive, like packets do. */
void store_submit(struct world *w, struct proc *p, const struct coord_request *r)
{
    world_at(w, w->now + store_delay(w), NULL, store_request_arrived, request_copy(p, r), 0);
}

/* ---- reachability and leases ---- */

static void tell_reachable(struct world *w, struct proc *p, bool reachable)
{
    if (p->told_unreachable != reachable || p->kind != PROC_SERVER)
        return;
    p->told_unreachable = !reachable;
    struct coord_event e = { .kind = COORD_REACHABLE, .status = reachable ? 0 : KS_EUNAVAIL };
    event_send(w, p, &p->coord_answers, &e, rng_below(&w->rng, 30 * SIM_MS));
}

static bool keeps_alive(const struct world *w, const struct proc *p)
{
    return p->alive && p->paused_until <= w->now && p->store_cut_until <= w->now;
}

static void leases_expire(struct world *w, struct proc *p)
{
    for (uint32_t i = 0; i < w->nleases; i++) {
        struct lease *l = &w->lease[i];
        if (l->owner != p || !l->live)
            continue;
        l->live = false;
        w->stats.leases_lost++;
        world_note(w, "store: a lease of %s runs out", p->name);
        coord_model_expire(w->coord, l->id);
        struct coord_event e = { .kind = COORD_LEASE_LOST, .lease = l->id };
        uint64_t wait = p->store_cut_until > w->now ? p->store_cut_until - w->now : 0;
        event_send(w, p, &p->coord_answers, &e, wait + store_delay(w));
    }
    changes_tell(w);
}

static uint64_t lease_ttl(const struct world *w, const struct proc *p)
{
    for (uint32_t i = 0; i < w->nleases; i++)
        if (w->lease[i].owner == p && w->lease[i].live)
            return w->lease[i].ttl_ms * SIM_MS;
    return 0;
}

static void lease_check(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    if (n != p->unreachable_count || keeps_alive(w, p))
        return;
    if (w->store_down_until > w->now)   /* a store that comes back gives every lease its full time again */
        world_at(w, w->store_down_until + lease_ttl(w, p), NULL, lease_check, p, n);
    else
        leases_expire(w, p);
}

void store_owner_unreachable(struct world *w, struct proc *p)
{
    uint64_t ttl = lease_ttl(w, p);
    if (ttl)
        world_at(w, w->now + ttl * 2 / 3 + rng_below(&w->rng, ttl), NULL, lease_check, p, p->unreachable_count);
}

void store_owner_back(struct world *w, struct proc *p)
{
    if (keeps_alive(w, p))
        p->unreachable_count++;
    if (p->alive && store_reachable(w, p))
        tell_reachable(w, p, true);
}

static void down_ends(struct world *w, void *arg, uint64_t n)
{
    (void)arg, (void)n;
    for (uint32_t i = 0; i < w->nprocs; i++)
        if (w->proc[i]->alive)
            store_owner_back(w, w->proc[i]);
}

void store_down(struct world *w, uint64_t until)
{
    w->store_down_until = until;
    w->stats.outages++;
    for (uint32_t i = 0; i < w->nprocs; i++)
        if (w->proc[i]->alive)
            tell_reachable(w, w->proc[i], false);
    world_at(w, until, NULL, down_ends, NULL, 0);
}

void store_cut(struct world *w, struct proc *p, uint64_t until)
{
    p->store_cut_until = until;
    w->stats.store_cuts++;
    tell_reachable(w, p, false);
    store_owner_unreachable(w, p);
    world_at(w, until, NULL, down_ends, NULL, 0);
}
