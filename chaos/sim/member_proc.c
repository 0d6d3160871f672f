/* member_proc.c - a member's host: finds the leader, joins, keeps connections to the servers of its view. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"

enum { POLL_MS = 60, EFFECTS_MAX = 20000, UNLISTED_MS = 3000 };

/* ---- effects ---- */

static void send(struct world *w, struct proc *p, struct client_effect *e)
{
    struct msg *m = msg_new(w, e->kind == CLIENT_SEND_SPEC ? MSG_SPEC : MSG_FRAME);
    m->header = e->header;
    if (e->kind == CLIENT_SEND_SPEC)
        m->spec = doc_spec(w, e->spec);
    else if (e->header.len)
        m->bytes = mem_dup(e->payload, e->header.len);
    if (e->owned)
        mem_free((void *)e->payload);
    if (w->opt.verbose > 1)
        world_note(w, "  %s -> %lu/%u %s step %ld tensor %04lx.%u seq %u e%u%s%s%s%s", p->name, (unsigned long)e->to,
                   e->loop, frame_type_name(m->header.type), (long)m->header.step,
                   (unsigned long)(m->header.tensor & 0xffff), m->header.chunk, m->header.seq, m->header.epoch,
                   m->header.flags & FRAME_WANT ? " want" : "", m->header.flags & FRAME_AGAIN ? " again" : "",
                   m->header.flags & FRAME_READER ? " reader" : "", m->header.len ? "" : " empty");
    if (e->kind == CLIENT_SEND)
        doc_header(w, &m->header);
    link_send(w, link_find(p, e->to, false, e->loop), p, m);
}

static struct msg *control_message(struct world *w, struct proc *p, enum ctl_event_kind kind)
{
    struct msg *m = msg_new(w, MSG_CTL);
    m->ctl_kind = kind;
    m->from = p->id;
    return m;
}

static void send_leave(struct world *w, struct proc *p)
{
    struct msg *m = control_message(w, p, CTL_LEAVE);
    m->step = p->member->leave_step;
    link_send(w, p->member->control, p, m);
}

static void send_join(struct world *w, struct proc *p)
{
    struct msg *m = control_message(w, p, CTL_JOIN);
    struct join_doc j = { .id = p->id, .local_size = 1 };
    snprintf(j.name, sizeof j.name, "%s", p->name);
    m->join = doc_join(w, &j);
    link_send(w, p->member->control, p, m);
}

static void effect(struct world *w, struct proc *p, struct client_effect *e)
{
    struct member *m = p->member;
    struct msg *out;
    switch (e->kind) {
    case CLIENT_SEND:
    case CLIENT_SEND_SPEC: send(w, p, e); break;
    case CLIENT_DONE: app_done(w, p, e); break;
    case CLIENT_STARTED:
        world_note(w, "%s is able to begin step %ld", p->name, (long)e->step);
        m->started = true;
        check_sync_read(w, p, e->step);
        app_begin(w, p);
        break;
    case CLIENT_STEP: break;
    case CLIENT_SEND_REPORT:
        out = control_message(w, p, CTL_REPORT);
        out->report = doc_report(w, e->report);
        link_send(w, m->control, p, out);
        break;
    case CLIENT_SEND_LEAVE:
        m->leave_sent = true;
        m->leave_step = e->step;
        send_leave(w, p);
        break;
    case CLIENT_FENCED:
        world_note(w, "%s is fenced: %s", p->name, e->text);
        w->stats.member_fenced++;
        m->exit_why = "fenced";
        break;
    case CLIENT_ENDED: world_fail(w, "I6 %s is told that the job ended: %s", p->name, e->text); break;
    case CLIENT_WANT_VIEW: break;   /* the poll fetches it */
    }
}

static void replace_later(struct world *w);

void member_event(struct world *w, struct proc *p, struct client_event *e)
{
    struct member *m = p->member;
    if (m->exit_why)
        return;
    e->now_us = w->now;
    m->out.n = 0;
    client_core_step(m->core, e, &m->out);
    if (m->out.n > EFFECTS_MAX)
        world_fail(w, "I11 the client core of %s emits %u effects at once", p->name, m->out.n);
    for (uint32_t i = 0; i < m->out.n && !w->failed; i++)
        effect(w, p, &m->out.effect[i]);
    if (!m->exit_why || w->failed)
        return;
    bool fenced = strcmp(m->exit_why, "fenced") == 0;
    member_kill(w, p, m->exit_why);
    if (fenced && (w->calm || rng_chance(&w->rng, 800)))
        replace_later(w);
}

/* ---- views and connections ---- */

static bool serves(const struct view *v, uint64_t server)
{
    for (uint32_t i = 0; i < v->nshards; i++)
        if (v->shard[i].primary == server)
            return true;
    return false;
}

static void link_give_up(struct world *w, struct proc *p, struct link *l)
{
    bool up = l->connector_up;
    link_close(w, l, p);
    struct client_event e = { .kind = CLIENT_PEER_DOWN, .from = l->listener->id, .loop = l->loop };
    if (up)
        member_event(w, p, &e);
}

static void connections_follow(struct world *w, struct proc *p)
{
    const struct view *v = client_core_view(p->member->core);
    if (!v || !p->alive)
        return;
    for (uint32_t i = p->nlinks; i-- > 0;) {
        struct link *l = p->links[i];
        if (!l->control && l->wanted && !serves(v, l->listener->id))
            link_give_up(w, p, l);
        if (!p->alive || w->failed)
            return;
    }
    for (uint32_t i = 0; p->alive && !w->failed && i < v->nservers; i++) {
        struct proc *s = world_proc(w, v->server[i].id);
        if (!serves(v, v->server[i].id))
            continue;
        for (uint32_t k = 0; s->alive && k < v->server[i].nloops; k++)
            link_want(w, p, s, false, k);
    }
}

/* Views that do not list this life yet say nothing to it; once listed, every view counts. */
static void adopt(struct world *w, struct proc *p, const struct view *v)
{
    struct member *m = p->member;
    const struct view *mine = client_core_view(m->core);
    const struct view_member *self = view_member_find(v, p->id);
    if (!m->listed && !(self && self->live))
        return;
    if (!m->listed && w->stats.faults && !w->calm)
        w->stats.joined_under_fault++;
    m->listed = true;
    if (!mine || v->epoch > mine->epoch)
        world_note(w, "%s adopts view %lu", p->name, (unsigned long)v->epoch);
    struct client_event e = { .kind = CLIENT_ADOPT, .view = v };
    member_event(w, p, &e);
    if (p->alive && !w->failed)
        connections_follow(w, p);
}

static void leader_follow(struct world *w, struct proc *p)
{
    struct member *m = p->member;
    struct proc *leader = w->leader ? world_proc(w, w->leader) : NULL;
    if (!leader || !leader->alive || (m->control && m->control->listener == leader && m->control->wanted))
        return;
    if (m->control)
        link_close(w, m->control, p);
    m->control = link_want(w, p, leader, true, 0);
}

static void poll(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    struct member *m = p->member;
    world_at(w, w->now + 1 * SIM_MS + rng_below(&w->rng, POLL_MS * SIM_MS), p, poll, p, n);
    struct client_event e = { .kind = CLIENT_TICK };
    member_event(w, p, &e);
    if (!p->alive || w->failed || !store_reachable(w, p))
        return;
    leader_follow(w, p);
    if (w->view) {
        struct view *v = doc_view(w, w->view);
        adopt(w, p, v);
        view_free(v);
    }
    if (!p->alive || w->failed)
        return;
    if (!m->listed)
        send_join(w, p);
    else if (m->leave_sent)
        send_leave(w, p);
    /* A life that was removed before it ever saw a view that lists it: the host gives up on it. */
    int known = member_index(w, p->id);
    if (!m->listed && known >= 0 && w->history.member[known].gone_epoch) {
        member_kill(w, p, "removed before it saw a view");
        replace_later(w);
    }
}

void member_control(struct world *w, struct proc *p, struct msg *m)
{
    if (m->ctl_kind == CTL_VIEW) {
        adopt(w, p, m->view);
    } else if (m->ctl_kind == CTL_PREPARE) {
        struct client_event e = { .kind = CLIENT_PREPARE, .prepare = m->prepare };
        member_event(w, p, &e);
        if (p->alive && !w->failed)
            connections_follow(w, p);
    } else {
        world_fail(w, "I12 %s is sent a control frame of kind %d", p->name, (int)m->ctl_kind);
    }
}

/* ---- frames ---- */

static bool lands_in_user_memory(const struct frame_header *h)
{
    return h->type == FRAME_RESULT || h->type == FRAME_VALUE;
}

bool member_frame(struct world *w, struct proc *p, struct link *l, struct msg *m)
{
    if (m->kind == MSG_CTL) {
        member_control(w, p, m);
        return false;
    }
    const uint8_t *payload = m->bytes ? m->bytes : m->buf ? m->buf->data + m->offset : NULL;
    struct client_event e = { .kind = CLIENT_FRAME, .from = m->from, .loop = l->loop, .header = m->header,
                              .payload = payload };
    if (lands_in_user_memory(&m->header) && m->header.len) {
        if (!m->half) {
            m->sink = client_core_sink(p->member->core, m->from, l->loop, &m->header);
            if (rng_chance(&w->rng, 150))
                return true;
        }
        if (m->sink)
            memcpy(m->sink, payload, m->header.len);
        m->sink = NULL;
        e.payload = NULL;
    }
    member_event(w, p, &e);
    return false;
}

void member_link_up(struct world *w, struct proc *p, struct link *l)
{
    struct member *m = p->member;
    if (!l->control) {
        struct client_event e = { .kind = CLIENT_PEER_UP, .from = l->listener->id, .loop = l->loop };
        member_event(w, p, &e);
    } else if (!m->listed) {
        send_join(w, p);
    } else if (m->leave_sent) {
        send_leave(w, p);
    }
}

void member_link_down(struct world *w, struct proc *p, struct link *l)
{
    struct client_event e = { .kind = CLIENT_PEER_DOWN, .from = l->listener->id, .loop = l->loop };
    if (!l->control)
        member_event(w, p, &e);
}

/* ---- life ---- */

struct proc *member_start(struct world *w)
{
    if (w->nmembers == SIM_MEMBERS_MAX) {
        world_note(w, "no more lives for members");
        return NULL;
    }
    char name[24];
    snprintf(name, sizeof name, "m%u", w->nmembers);
    struct proc *p = proc_new(w, PROC_MEMBER, name);
    if (!p)
        return NULL;
    static const uint32_t speeds[] = { 4, 1, 1, 3 };
    struct member *m = p->member = mem_alloc(sizeof *m);
    m->index = w->nmembers++;
    m->speed_us = 200 + w->cfg.compute_us * speeds[rng_below(&w->rng, 4)] / 2;
    w->history.member[m->index].id = p->id;
    w->history.member[m->index].ended = -1;
    struct client_config c = { .self = p->id, .chunk_bytes = SIM_CHUNK_BYTES, .nshards = w->cfg.nshards };
    m->core = client_core_create(&c);
    world_note(w, "%s wants to join as life %lu", p->name, (unsigned long)p->id);
    world_at(w, w->now + 1 + rng_below(&w->rng, 10 * SIM_MS), p, poll, p, 0);
    return p;
}

static void replace(struct world *w, void *arg, uint64_t n)
{
    (void)arg, (void)n;
    member_start(w);
}

static void replace_later(struct world *w)
{
    world_at(w, w->now + rng_below(&w->rng, 30 * SIM_MS), NULL, replace, NULL, 0);
}

/* why NULL: the run is over. */
void member_kill(struct world *w, struct proc *p, const char *why)
{
    if (why)
        world_note(w, "%s ends (%s)", p->name, why);
    links_kill(w, p);
    p->alive = false;
    client_core_free(p->member->core);
    client_outbox_done(&p->member->out);
    app_free(w, p);
}
