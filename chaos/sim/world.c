/* world.c - virtual time and the course of a run: start, faults, calm, the end and its checks. */
#include "chaos/sim/sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/check.h"
#include "base/mem.h"

enum {
    CALM_LIMIT_MS = 60000,     /* I6: everybody must be through by then */
    LOST_AFTER_MS = 5000,
    SETTLE_MS = 600,           /* after everybody is: what is still under way arrives */
    EVENTS_MAX = 3000000,
    SILENCE_MS = 60,
};

struct event {
    uint64_t at, seq;
    struct proc *who;
    event_fn *fn;
    void *arg;
    uint64_t n;
};

static bool event_before(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->seq < b->seq;
}

static void heap_add(struct world *w, struct event e)
{
    ARRAY_ROOM(w->heap, w->nheap, w->heap_cap);
    uint32_t i = w->nheap++;
    while (i && event_before(&e, &w->heap[(i - 1) / 2])) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = e;
}

static struct event heap_pop(struct world *w)
{
    struct event top = w->heap[0], last = w->heap[--w->nheap];
    uint32_t i = 0, child;
    while ((child = 2 * i + 1) < w->nheap) {
        if (child + 1 < w->nheap && event_before(&w->heap[child + 1], &w->heap[child]))
            child++;
        if (!event_before(&w->heap[child], &last))
            break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return top;
}

void world_at(struct world *w, uint64_t at, struct proc *who, event_fn *fn, void *arg, uint64_t n)
{
    struct event e = { at > w->now ? at : w->now, w->seq++, who, fn, arg, n };
    heap_add(w, e);
}

static void world_print(const struct world *w, const char *mark, const char *text)
{
    printf("%10.3f %s%s\n", (double)w->now / 1e3, mark, text);
}

void world_fail(struct world *w, const char *format, ...)
{
    if (w->failed)
        return;
    w->failed = true;
    va_list a;
    va_start(a, format);
    vsnprintf(w->why, sizeof w->why, format, a);
    va_end(a);
    if (w->opt.verbose)
        world_print(w, "VIOLATION ", w->why);
}

void world_note(struct world *w, const char *format, ...)
{
    if (!w->opt.verbose)
        return;
    char text[800];
    va_list a;
    va_start(a, format);
    vsnprintf(text, sizeof text, format, a);
    va_end(a);
    world_print(w, "", text);
}

struct proc *world_proc(const struct world *w, uint64_t id)
{
    for (uint32_t i = w->nprocs; i-- > 0;)
        if (w->proc[i]->id == id)
            return w->proc[i];
    return NULL;
}

struct proc *proc_new(struct world *w, enum proc_kind kind, const char *name)
{
    if (w->nprocs == SIM_PROCS_MAX) {
        world_fail(w, "I6 more than %d lives: something restarts for ever", SIM_PROCS_MAX);
        return NULL;
    }
    struct proc *p = mem_alloc(sizeof *p);
    p->index = w->nprocs;
    p->kind = kind;
    p->id = kind == PROC_STORE ? 1 : ++w->next_id;
    p->alive = true;
    snprintf(p->name, sizeof p->name, "%s", name);
    w->proc[w->nprocs++] = p;
    return p;
}

static void resumed(struct world *w, void *arg, uint64_t n)
{
    (void)n;
    struct proc *p = arg;
    world_note(w, "%s goes on", p->name);
    store_owner_back(w, p);
}

void proc_pause(struct world *w, struct proc *p, uint64_t duration)
{
    if (!p->alive || p->paused_until >= w->now + duration)
        return;
    p->paused_until = w->now + duration;
    p->faulted = true;
    w->stats.pauses++;
    world_note(w, "%s stops for %.1f ms", p->name, (double)duration / 1e3);
    if (duration > SILENCE_MS * SIM_MS)
        links_break_later(w, p, SILENCE_MS * SIM_MS + rng_below(&w->rng, SILENCE_MS * SIM_MS));
    store_owner_unreachable(w, p);
    world_at(w, p->paused_until, p, resumed, p, 0);
}

void proc_resume(struct world *w, struct proc *p)
{
    if (!p->alive || p->paused_until <= w->now)
        return;
    p->paused_until = w->now;
    world_at(w, w->now, p, resumed, p, 0);
}

/* Paused: later. Re-keyed with the same number, so that the order of what waited stays. */
static void event_defer(struct world *w, struct event e)
{
    e.at = e.who->paused_until;
    heap_add(w, e);
}

bool world_step(struct world *w)
{
    if (!w->nheap || w->failed)
        return false;
    struct event e = heap_pop(w);
    if (e.at > w->now)
        w->now = e.at;
    if (++w->stats.events > EVENTS_MAX) {
        world_fail(w, "I6 more than %d events: something runs in circles", EVENTS_MAX);
        return false;
    }
    if (e.who && !e.who->alive)
        return true;
    if (e.who && e.who->paused_until > w->now)
        event_defer(w, e);
    else
        e.fn(w, e.arg, e.n);
    return !w->failed;
}

/* ---- the end ---- */

/* A server that is drained may be listed until it is empty. */
static bool machines_up(const struct world *w)
{
    for (uint32_t i = 0; i < w->nmachines; i++)
        if (!w->machine[i].proc && !w->machine[i].gone)
            return false;
    return true;
}

static bool member_through(const struct world *w, const struct proc *p)
{
    const struct member *m = p->member;
    return m->phase == APP_IDLE && m->step >= w->target && m->nops == 0;
}

/* I6: the dead are removed, also when nobody happens to wait for them. */
static bool view_lists_the_dead(const struct world *w)
{
    for (uint32_t i = 0; w->view && i < w->view->nmembers; i++)
        if (w->view->member[i].live && !world_proc(w, w->view->member[i].id)->alive)
            return true;
    for (uint32_t i = 0; w->view && i < w->view->nservers; i++)
        if (!world_proc(w, w->view->server[i].id)->alive)
            return true;
    return false;
}

bool world_idle(const struct world *w)
{
    uint32_t members = 0;
    for (uint32_t i = 0; i < w->nprocs; i++) {
        const struct proc *p = w->proc[i];
        if (!p->alive || p->kind != PROC_MEMBER)
            continue;
        members++;
        if (!member_through(w, p))
            return false;
    }
    return members > 0 && machines_up(w) && !view_lists_the_dead(w) && replicas_restored(w);
}

static void who_waits(struct world *w, char *out, size_t size)
{
    size_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < w->nprocs && used + 120 < size; i++) {
        struct proc *p = w->proc[i];
        if (!p->alive)
            continue;
        char line[200] = "";
        if (p->kind == PROC_MEMBER && !member_through(w, p)) {
            client_core_waiting(p->member->core, w->now, line, sizeof line);
            used += (size_t)snprintf(out + used, size - used, " [%s phase %d step %ld: %.*s]", p->name,
                                     (int)p->member->phase, (long)client_core_step_now(p->member->core), 90, line);
        } else if (p->kind == PROC_SERVER && ctl_core_controller(p->server->ctl)) {
            view_core_describe(ctl_core_controller(p->server->ctl), w->now, line, sizeof line);
            used += (size_t)snprintf(out + used, size - used, " [leader %s: %.*s]", p->name, 90, line);
        }
        if (used >= size)
            return;
    }
    if (used < size && view_lists_the_dead(w))
        used += (size_t)snprintf(out + used, size - used, " [view %lu lists the dead]", (unsigned long)w->view->epoch);
    if (used < size && !replicas_restored(w))
        snprintf(out + used, size - used, " [too few backups]");
}

static void heal_server(struct world *w, struct machine *m)
{
    if (!w->view)
        m->gone = m->draining = false;     /* a job that has not begun waits for so many */
    if (!m->proc && !m->restart_pending && !m->gone)
        server_restart_later(w, m, 1 + rng_below(&w->rng, 20 * SIM_MS));
}

/* Applications go on for a few steps after everything healed, then stop at the same step. */
static void target_set(struct world *w)
{
    int64_t top = 3;
    uint32_t members = 0;
    for (uint32_t i = 0; i < w->nprocs; i++) {
        struct proc *p = w->proc[i];
        if (p->kind != PROC_MEMBER || !p->alive)
            continue;
        members += !p->member->want_leave;
        if (p->member->step > top)
            top = p->member->step;
    }
    if (top < w->history.finished)
        top = w->history.finished;
    w->target = top + 3 < SIM_STEP_LAST ? top + 3 : SIM_STEP_LAST;
    while (members++ < w->job.members_min)   /* a job that has not begun waits for so many */
        member_start(w);
}

static void poke_all(struct world *w)
{
    for (uint32_t i = 0; i < w->nprocs; i++)
        if (w->proc[i]->alive && w->proc[i]->kind == PROC_MEMBER)
            app_poke(w, w->proc[i]);
}

void world_target_raise(struct world *w)
{
    for (uint32_t i = 0; w->calm && w->view && i < w->view->nmembers; i++)
        if (w->view->member[i].live && w->view->member[i].join > w->target && w->view->member[i].join < SIM_STEPS_MAX) {
            w->target = w->view->member[i].join;
            poke_all(w);
        }
}

void world_calm(struct world *w)
{
    world_note(w, "---- faults stop ----");
    w->calm = true;
    w->calm_at = w->now;
    w->npartitions = 0;
    w->store_down_until = w->disk_slow_until = w->now;
    w->delay_next_cas = w->lose_next_cas_answer = false;
    for (struct link *l = w->links; l; l = l->next)
        l->stalled_to_connector = l->stalled_to_listener = 0;
    for (uint32_t i = 0; i < w->nprocs; i++) {
        struct proc *p = w->proc[i];
        if (!p->alive || p->kind == PROC_STORE)
            continue;
        p->store_cut_until = w->now;
        if (p->paused_until > w->now)
            proc_resume(w, p);
        else
            store_owner_back(w, p);
    }
    for (uint32_t i = 0; i < w->nmachines; i++)
        heal_server(w, &w->machine[i]);
    target_set(w);
    world_target_raise(w);
    poke_all(w);
}

void world_end(struct world *w)
{
    for (uint32_t i = 0; i < w->nprocs && !w->failed; i++) {
        struct proc *p = w->proc[i];
        if (!p->alive)
            continue;
        if (p->kind == PROC_SERVER)
            server_kill(w, p, NULL);
        else if (p->kind == PROC_MEMBER)
            member_kill(w, p, NULL);
    }
}

static void calm_event(struct world *w, void *arg, uint64_t n)
{
    (void)arg, (void)n;
    world_calm(w);
}

static uint64_t faults_end(const struct world *w)
{
    uint64_t end = w->cfg.faults_from;
    for (uint32_t i = 0; i < w->nfaults; i++)
        if (!w->opt.muted[i] && w->fault[i].at > end)
            end = w->fault[i].at;
    return end;
}

/* A shard that only lost servers held is waited for, for ever. */
static bool stuck(struct world *w)
{
    uint64_t waited = w->now - w->calm_at;
    if (waited > LOST_AFTER_MS * SIM_MS && shard_lost(w, false)) {
        w->lost = true;
        w->stats.lost++;
        world_note(w, "some shard is lost");
        return true;
    }
    if (waited <= CALM_LIMIT_MS * SIM_MS)
        return false;
    if (shard_lost(w, true)) {
        w->lost = true;
        w->stats.lost_suspected++;
        world_note(w, "some shard is lost, or its holders were taken for dead");
        return true;
    }
    char text[SIM_WHY - 40];
    who_waits(w, text, sizeof text);
    world_fail(w, "I6 no end after calm:%s", text);
    return true;
}

void world_run_out(struct world *w)
{
    while (world_step(w)) {
        if (!w->calm)
            continue;
        if (!world_idle(w)) {
            w->quiet_since = 0;
            if (stuck(w))
                break;
        } else if (!w->quiet_since) {
            w->quiet_since = w->now;
        } else if (w->now > w->quiet_since + SETTLE_MS * SIM_MS) {
            break;
        }
    }
    if (!w->failed && !w->lost)
        check_final(w);
    if (!w->failed)
        world_end(w);
    w->digest = hash_mix(w->digest ^ rng_next(&w->rng));
}

void world_run(struct world *w)
{
    faults_start(w);
    world_at(w, faults_end(w) + 300 * SIM_MS, NULL, calm_event, NULL, 0);
    world_run_out(w);
}

/* ---- life of a world ---- */

struct world *world_create(const struct sim_options *o)
{
    struct world *w = mem_alloc(sizeof *w);
    w->opt = *o;
    w->rng.state = hash_mix(o->seed * 0x9e3779b97f4a7c15ull + 1);
    w->next_id = 100;
    w->target = INT64_MAX;
    w->history.finished = w->history.known = w->history.references = -1;
    config_draw(w);
    faults_draw(w);
    w->coord = coord_model_create();
    w->store_proc = proc_new(w, PROC_STORE, "store");
    for (uint32_t i = 0; i < w->cfg.nservers; i++) {
        struct machine *m = machine_new(w);
        server_restart_later(w, m, 1 + rng_below(&w->rng, 5 * SIM_MS));
    }
    for (uint32_t i = 0; i < w->cfg.nmembers; i++)
        member_start(w);
    return w;
}

static void proc_free(struct world *w, struct proc *p)
{
    pipe_clear(w, &p->coord_answers);
    pipe_clear(w, &p->coord_watch);
    if (p->member)
        app_free(w, p);
    mem_free(p->member);
    mem_free(p->server);
    mem_free(p->links);
    mem_free(p);
}

static void history_free(struct history *h)
{
    for (int k = 0; k < SIM_STEPS_MAX; k++)
        mem_free(h->reference[k]);
    for (int m = 0; m < SIM_MEMBERS_MAX; m++) {
        for (int t = 0; t < SIM_TENSORS_MAX; t++)
            mem_free(h->member[m].stamp[t]);
        for (int c = 0; c < SIM_CHUNKS_MAX; c++)
            mem_free(h->member[m].sum[c]);
    }
}

/* After a failed run cores may be half-way through a step: they, and what they hold, are left alone. */
void world_free(struct world *w)
{
    for (uint32_t i = 0; i < w->nheap; i++)
        if (w->heap[i].fn == store_request_arrived)
            store_request_free(w->heap[i].arg);
    while (w->links) {
        struct link *l = w->links;
        w->links = l->next;
        if (!w->failed) {
            pipe_clear(w, &l->to_connector);
            pipe_clear(w, &l->to_listener);
        }
        mem_free(l);
    }
    for (uint32_t i = 0; i < w->nprocs && !w->failed; i++)
        proc_free(w, w->proc[i]);
    for (uint32_t i = 0; i < w->nmachines && !w->failed; i++)
        for (uint32_t k = 0; k < w->machine[i].nloops; k++)
            store_model_disk_free(w->machine[i].disk[k]);
    if (w->failed)
        pools_forget();
    else
        coord_model_free(w->coord);
    while (w->msg_free) {
        struct msg *m = w->msg_free;
        w->msg_free = m->next;
        mem_free(m);
    }
    history_free(&w->history);
    for (int c = 0; c < SIM_CHUNKS_MAX; c++)
        mem_free(w->seen[c]);
    view_free(w->view);
    mem_free(w->heap);
    mem_free(w);
}

static struct world *running;
static jmp_buf check_exit;

static void on_check_failed(const char *text, const char *file, int line)
{
    world_fail(running, "CHECK(%s) at %s:%d", text, file, line);
    longjmp(check_exit, 1);
}

void sim_run(const struct sim_options *o, struct sim_stats *ret_stats, struct sim_result *ret)
{
    struct world *w = running = world_create(o);
    check_hook_set(on_check_failed);
    if (setjmp(check_exit) == 0)
        world_run(w);
    w = running;
    check_hook_set(NULL);
    memset(ret, 0, sizeof *ret);
    ret->failed = w->failed;
    memcpy(ret->why, w->why, sizeof ret->why);
    ret->at_us = w->now;
    ret->digest = w->digest;
    ret->nfaults = w->nfaults;
    *ret_stats = w->stats;
    world_free(w);
}
