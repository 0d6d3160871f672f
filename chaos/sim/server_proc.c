/* server_proc.c - a server process: its control core, what that core asks for, start and death. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"

enum { TICKS_HERE_MAX = 200, THREAD_DELAY_US = 40 };

/* ---- events into the control core ---- */

static void timer(struct world *w, void *arg, uint64_t n);

static void timer_arm(struct world *w, struct proc *p)
{
    struct server *s = p->server;
    uint64_t at = ctl_core_deadline(s->ctl);
    if (at == UINT64_MAX || (s->timer_at > w->now && s->timer_at <= at))
        return;
    s->timer_at = at > w->now ? at : w->now + 1;
    world_at(w, s->timer_at, p, timer, p, s->timer_at);
}

static void timer(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    struct server *s = p->server;
    if (n != s->timer_at)
        return;
    s->timer_at = 0;
    uint64_t due = ctl_core_deadline(s->ctl);
    if (due > w->now) {
        timer_arm(w, p);
        return;
    }
    s->ticks_here = w->now - s->ticked_at < 1000 ? s->ticks_here + 1 : 0;
    s->ticked_at = w->now;
    if (s->ticks_here > TICKS_HERE_MAX) {
        world_fail(w, "I6 the control core of %s asks for ticks in the past again and again", p->name);
        return;
    }
    struct ctl_event e = { .kind = CTL_TICK };
    server_event(w, p, &e);
}

static struct msg *control_message(struct world *w, struct proc *p, const struct ctl_effect *e, enum ctl_event_kind kind)
{
    struct msg *m = msg_new(w, MSG_CTL);
    m->ctl_kind = kind;
    m->from = p->id;
    m->id = e->id;
    m->shard = e->shard;
    m->is_server = true;
    m->step = e->step;
    m->mode = e->mode;
    m->prepare = e->prepare ? doc_prepare(w, e->prepare) : NULL;
    m->report = e->report ? doc_report(w, e->report) : NULL;
    m->view = e->view ? doc_view(w, e->view) : NULL;
    m->join = e->join ? doc_join(w, e->join) : NULL;
    return m;
}

static void send(struct world *w, struct proc *p, const struct ctl_effect *e, enum ctl_event_kind kind)
{
    struct msg *m = control_message(w, p, e, kind);
    if (kind == CTL_PREPARE)
        w->stats.prepares++;
    if (w->opt.verbose > 1)
        world_note(w, "  %s -> %lu control %d", p->name, (unsigned long)e->to, (int)kind);
    if (e->to == p->id)
        pipe_push(w, &p->server->to_ctl, m, THREAD_DELAY_US);
    else
        link_send(w, link_find(p, e->to, true, 0), p, m);
}

static void loops_tell(struct world *w, struct proc *p, const struct ctl_effect *e)
{
    for (uint32_t i = 0; i < p->server->machine->nloops; i++) {
        struct msg *m = msg_new(w, e->kind == CTL_LOOPS_PREPARE ? MSG_LOOP_PREPARE : MSG_LOOP_ADOPT);
        if (e->prepare) {
            m->prepare = mem_alloc(sizeof *m->prepare);
            prepare_copy(m->prepare, e->prepare);
        }
        m->view = e->view ? view_copy(e->view) : NULL;
        pipe_push(w, &p->server->loop[i].in, m, 1 + rng_below(&w->rng, 10 * THREAD_DELAY_US));
    }
}

static void heir_of_another(struct world *w, struct proc *p, uint64_t id)
{
    world_note(w, "%s is the heir of %lu", p->name, (unsigned long)id);
    w->stats.heirs++;
    for (uint32_t i = 0; i < p->server->machine->nloops; i++) {
        struct msg *m = msg_new(w, MSG_LOOP_HEIR);
        m->id = id;
        pipe_push(w, &p->server->loop[i].in, m, 1 + rng_below(&w->rng, 10 * THREAD_DELAY_US));
    }
}

static void connect_to(struct world *w, struct proc *p, uint64_t id)
{
    struct proc *peer = world_proc(w, id);
    if (!peer || !peer->alive || peer == p)
        return;
    link_want(w, p, peer, true, 0);
}

static void note_prepare(struct world *w, struct proc *p, const struct prepare *q)
{
    char gone[100] = "", joins[100] = "";
    for (uint32_t i = 0, n = 0; i < q->ngone && n < 80; i++)
        n += (uint32_t)snprintf(gone + n, sizeof gone - n, " %lu", (unsigned long)q->gone[i]);
    for (uint32_t i = 0, n = 0; i < q->njoins && n < 80; i++)
        n += (uint32_t)snprintf(joins + n, sizeof joins - n, " %lu", (unsigned long)q->joins[i].id);
    world_note(w, "%s is asked to prepare %lu.%lu on view %lu: gone%s, joins%s, %u heirs%s", p->name,
               (unsigned long)q->ballot.term, (unsigned long)q->ballot.round, (unsigned long)q->base->epoch, gone, joins,
               q->nheirs, q->mode_change ? ", mode" : "");
}

static void effect(struct world *w, struct proc *p, struct ctl_effect *e)
{
    struct server *s = p->server;
    switch (e->kind) {
    case CTL_DO_COORD: store_submit(w, p, e->request); break;
    case CTL_DO_WATCH: store_watch(w, p, e->revision); break;
    case CTL_LOOPS_PREPARE:
        note_prepare(w, p, e->prepare);
        loops_tell(w, p, e);
        fault_trigger(w, TRIGGER_PREPARE, p);
        break;
    case CTL_LOOPS_ADOPT:
        loops_tell(w, p, e);
        fault_trigger(w, TRIGGER_ADOPT, p);
        break;
    case CTL_CONNECT: connect_to(w, p, e->to ? e->to : e->id); break;
    case CTL_DISCONNECT:
        world_note(w, "%s disconnects %lu: %s", p->name, (unsigned long)e->to, e->text);
        links_close_between(w, p, e->to);
        break;
    case CTL_SEND_PREPARE: send(w, p, e, CTL_PREPARE); break;
    case CTL_SEND_REPORT: send(w, p, e, CTL_REPORT); break;
    case CTL_SEND_VIEW: send(w, p, e, CTL_VIEW); break;
    case CTL_SEND_JOIN: send(w, p, e, CTL_JOIN); break;
    case CTL_SEND_LEAVE: send(w, p, e, CTL_LEAVE); break;
    case CTL_SEND_SUSPECT: send(w, p, e, CTL_SUSPECT); break;
    case CTL_SEND_MODE: send(w, p, e, CTL_MODE); break;
    case CTL_SEND_END: send(w, p, e, CTL_END); break;
    case CTL_SEND_DRAIN: send(w, p, e, CTL_DRAIN); break;
    case CTL_SEND_SYNCED: send(w, p, e, CTL_SYNCED); break;
    case CTL_DRAINED:
        world_note(w, "%s is drained: %s", p->name, e->text);
        s->exit_why = "drained";
        break;
    case CTL_ADOPTED:
        world_note(w, "%s runs under view %lu", p->name, (unsigned long)(e->view ? e->view->epoch : 0));
        break;
    case CTL_HEIR_OF: heir_of_another(w, p, e->id); break;
    case CTL_FENCED:
        world_note(w, "%s is fenced: %s", p->name, e->text);
        w->stats.server_fenced++;
        s->exit_why = "fenced";
        break;
    case CTL_ENDED: world_fail(w, "I6 the job ended by itself: %s", e->text); break;
    }
}

void server_event(struct world *w, struct proc *p, struct ctl_event *e)
{
    struct server *s = p->server;
    e->now_us = w->now;
    if (s->exit_why)
        return;
    s->out.n = 0;
    ctl_core_step(s->ctl, e, &s->out);
    if (s->out.n > 1000)
        world_fail(w, "I11 the control core of %s emits %u effects at once", p->name, s->out.n);
    for (uint32_t i = 0; i < s->out.n && !w->failed; i++)
        effect(w, p, &s->out.effect[i]);
    if (s->exit_why && !w->failed) {
        server_end(w, p, s->exit_why, strcmp(s->exit_why, "drained") == 0 ? END_FOR_GOOD : END_RETURNS);
        return;
    }
    if (p->alive && !w->failed)
        timer_arm(w, p);
}

/* Frames on control connections, and what the loops tell the control thread. */
void server_message(struct world *w, struct proc *p, struct msg *m)
{
    struct ctl_event e = { .kind = m->ctl_kind, .from = m->from, .prepare = m->prepare, .report = m->report, .view = m->view,
                           .join = m->join, .id = m->id, .shard = m->shard, .is_server = m->is_server, .step = m->step, .mode = m->mode,
                           .loop = m->loop, .text = "" };
    server_event(w, p, &e);
}

static bool to_ctl_deliver(struct world *w, struct pipe *pipe, struct msg *m)
{
    server_message(w, pipe->to, m);
    return false;
}

/* ---- connections ---- */

void server_link_up(struct world *w, struct proc *p, struct link *l)
{
    struct proc *peer = l->connector == p ? l->listener : l->connector;
    if (!l->control) {
        loop_link_up(w, p, l);
        return;
    }
    struct ctl_event e = { .kind = CTL_PEER_UP, .from = peer->id, .is_server = peer->kind == PROC_SERVER, .text = "" };
    server_event(w, p, &e);
}

void server_link_down(struct world *w, struct proc *p, struct link *l)
{
    struct proc *peer = l->connector == p ? l->listener : l->connector;
    struct ctl_event e = { .kind = l->control ? CTL_PEER_DOWN : CTL_LOOP_PEER_DOWN, .from = peer->id, .loop = link_loop(l, p),
                           .is_server = peer->kind == PROC_SERVER, .text = "connection closed" };
    if (w->opt.verbose > 1)
        world_note(w, "  %s sees %s go (%s)", p->name, peer->name, l->control ? "control" : "data");
    if (!l->between)
        server_event(w, p, &e);
}

/* ---- start and death ---- */

static void describe(const struct proc *p, struct server_doc *ret)
{
    struct view_server *v = &ret->server;
    v->id = p->id;
    v->nloops = p->server->machine->nloops;
    snprintf(v->name, sizeof v->name, "s%u-%u", p->server->machine->index, p->server->machine->disks);
    snprintf(v->ctl, sizeof v->ctl, "%s:0", p->name);
    for (uint32_t i = 0; i < v->nloops; i++)
        snprintf(v->loop[i], sizeof v->loop[i], "%s:%u", p->name, i + 1);
}

static void formers(const struct machine *m, struct ctl_config *c)
{
    c->self.heir_of = m->nlives ? m->life[m->nlives - 1] : 0;
    c->nformer = m->nlives < CTL_FORMER_MAX ? m->nlives : CTL_FORMER_MAX;
    for (uint32_t i = 0; i < c->nformer; i++)
        c->former[i] = m->life[m->nlives - c->nformer + i];
}

void server_start(struct world *w, struct machine *m)
{
    char name[24];
    snprintf(name, sizeof name, "s%u.%u", m->index, ++m->starts);
    struct proc *p = proc_new(w, PROC_SERVER, name);
    if (!p)
        return;
    struct server *s = p->server = mem_alloc(sizeof *s);
    m->proc = p;
    s->machine = m;
    struct ctl_config c = { .job = w->job, .nloops = m->nloops, .lease_ms = w->cfg.lease_ms,
                            .suspect_ms = w->cfg.suspect_ms };
    c.view.batch_ms = w->cfg.batch_ms;
    c.view.report_ms = w->cfg.report_ms;
    formers(m, &c);
    m->life[m->nlives++] = p->id;
    describe(p, &c.self);
    world_note(w, "%s starts as life %lu, heir of %lu", p->name, (unsigned long)p->id, (unsigned long)c.self.heir_of);
    pipe_init(&s->to_ctl, p, p, to_ctl_deliver);
    for (uint32_t i = 0; i < m->nloops && !w->failed; i++)
        loop_open(w, p, i, c.self.heir_of);
    s->ctl = ctl_core_create(&c);
    struct ctl_event e = { .kind = CTL_START };
    server_event(w, p, &e);
}

static void restart(struct world *w, void *arg, uint64_t n)
{
    (void)n;
    struct machine *m = arg;
    m->restart_pending = false;
    if (m->proc)
        return;
    if (m->starts)
        w->stats.restarts++;
    server_start(w, m);
}

void server_restart_later(struct world *w, struct machine *m, uint64_t delay)
{
    m->restart_pending = true;
    world_at(w, w->now + delay, NULL, restart, m, 0);
}

static void close_all(struct world *w, struct proc *p)
{
    struct server *s = p->server;
    links_kill(w, p);
    p->alive = false;
    p->watching = false;
    pipe_clear(w, &s->to_ctl);
    pipe_clear(w, &p->coord_answers);
    pipe_clear(w, &p->coord_watch);
    for (uint32_t i = 0; i < s->machine->nloops; i++)
        loop_close(w, p, i);
    ctl_core_free(s->ctl);
    ctl_outbox_done(&s->out);
    s->machine->proc = NULL;
}

/* What comes next on this machine is nobody's heir, and has another name. */
static void disks_empty(struct world *w, struct machine *m)
{
    for (uint32_t i = 0; i < m->nlives; i++)
        world_proc(w, m->life[i])->lost = true;
    for (uint32_t i = 0; i < m->nloops; i++) {
        store_model_disk_free(m->disk[i]);
        m->disk[i] = store_model_disk_create();
    }
    m->nlives = 0;
    m->disks++;
}

void server_end(struct world *w, struct proc *p, const char *why, enum server_end how)
{
    struct machine *m = p->server->machine;
    if (how == END_OF_RUN) {
        close_all(w, p);
        return;
    }
    world_note(w, "%s dies (%s)%s", p->name, why,
               how == END_FOR_GOOD ? " for good" : how == END_EMPTY ? ", and what it had" : "");
    close_all(w, p);
    p->faulted = true;
    if (how != END_RETURNS || !w->cfg.durable)
        disks_empty(w, m);
    store_owner_unreachable(w, p);
    m->gone = how == END_FOR_GOOD;
    if (m->gone)
        return;
    uint64_t delay = rng_chance(&w->rng, 500) ? rng_below(&w->rng, 10 * SIM_MS) : rng_below(&w->rng, 400 * SIM_MS);
    server_restart_later(w, m, 1 + delay);
}

/* why NULL: the run is over, nothing follows. */
void server_kill(struct world *w, struct proc *p, const char *why)
{
    server_end(w, p, why, why ? END_RETURNS : END_OF_RUN);
}

struct machine *machine_new(struct world *w)
{
    if (w->nmachines == SIM_MACHINES_MAX)
        return NULL;
    struct machine *m = &w->machine[w->nmachines];
    m->index = w->nmachines++;
    m->nloops = w->cfg.mixed_loops ? 1 + (uint32_t)rng_below(&w->rng, SIM_LOOPS_MAX) : w->cfg.nloops;
    for (uint32_t k = 0; k < m->nloops; k++)
        m->disk[k] = store_model_disk_create();
    return m;
}
