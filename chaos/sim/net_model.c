/* net_model.c - pipes and links: delays, order, breaks, partitions. */
#include "chaos/sim/sim.h"

#include <stdlib.h>
#include <string.h>
#include "base/mem.h"

enum { BACKOFF_US = 30000, SILENCE_US = 60000 };

struct msg *msg_new(struct world *w, enum msg_kind kind)
{
    struct msg *m = w->msg_free;
    if (m)
        w->msg_free = m->next;
    else
        m = mem_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    m->kind = kind;
    return m;
}

void msg_free(struct world *w, struct msg *m)
{
    buf_unref(m->buf);
    buf_unref(m->more[0]);
    buf_unref(m->more[1]);
    buf_unref(m->sunk);
    mem_free(m->bytes);
    view_free(m->view);
    if (m->prepare) {
        prepare_done(m->prepare);
        mem_free(m->prepare);
    }
    if (m->report) {
        report_done(m->report);
        mem_free(m->report);
    }
    if (m->coord) {
        coord_event_done(m->coord);
        mem_free(m->coord);
    }
    mem_free(m->join);
    mem_free(m->spec);
    m->next = w->msg_free;
    w->msg_free = m;
}

static size_t part_size(const struct msg *m, int i)
{
    size_t more0 = m->more[0] ? m->more[0]->len : 0, more1 = m->more[1] ? m->more[1]->len : 0;
    return i == 0 ? m->header.len - more0 - more1 : i == 1 ? more0 : more1;
}

static const uint8_t *part_data(const struct msg *m, int i)
{
    const struct buf *b = i == 0 ? m->buf : m->more[i - 1];
    return b ? b->data + (i == 0 ? m->offset : 0) : NULL;
}

uint64_t msg_sum(const struct msg *m)
{
    uint64_t sum = 0;
    for (int i = 0; i < 3; i++)
        if (part_size(m, i))
            sum = hash_mix(sum ^ hash_bytes(part_data(m, i), part_size(m, i)));
    return sum;
}

void msg_payload(const struct msg *m, uint8_t *out)
{
    if (m->bytes) {
        memcpy(out, m->bytes, m->header.len);
        return;
    }
    for (int i = 0; i < 3; i++) {
        if (part_size(m, i))
            memcpy(out, part_data(m, i), part_size(m, i));
        out += part_size(m, i);
    }
}

static bool in_buffers(const struct msg *m)
{
    return m->buf || m->more[0] || m->more[1];
}

void msg_detach(struct msg *m)
{
    if (!in_buffers(m))
        return;
    uint8_t *bytes = mem_alloc(m->header.len + 1);
    msg_payload(m, bytes);
    m->bytes = bytes;
    buf_unref(m->buf);
    buf_unref(m->more[0]);
    buf_unref(m->more[1]);
    m->buf = m->more[0] = m->more[1] = NULL;
}

/* ---- pipes ---- */

void pipe_init(struct pipe *p, struct proc *to, void *owner,
               bool (*deliver)(struct world *, struct pipe *, struct msg *))
{
    memset(p, 0, sizeof *p);
    p->to = to;
    p->owner = owner;
    p->deliver = deliver;
}

static void pipe_run(struct world *w, void *arg, uint64_t n);

static void pipe_arm(struct world *w, struct pipe *p)
{
    struct msg *m = p->half ? p->half : p->head;
    if (!m || p->armed)
        return;
    p->armed = true;
    world_at(w, m->at, p->to, pipe_run, p, 0);
}

static void pipe_run(struct world *w, void *arg, uint64_t n)
{
    (void)n;
    struct pipe *p = arg;
    p->armed = false;
    struct msg *m = p->half ? p->half : p->head;
    if (!m)
        return;
    if (m->at > w->now) {
        pipe_arm(w, p);
        return;
    }
    if (p->half)
        p->half = NULL;
    else if (!(p->head = m->next))
        p->tail = NULL;
    w->digest = hash_mix(w->digest ^ w->now ^ ((uint64_t)m->kind << 32) ^ m->header.type);
    if (p->deliver(w, p, m)) {
        m->half = true;
        m->at = w->now + 1 + rng_below(&w->rng, w->cfg.delay_us);
        p->half = m;
    } else {
        msg_free(w, m);
    }
    pipe_arm(w, p);
}

void pipe_push(struct world *w, struct pipe *p, struct msg *m, uint64_t delay)
{
    m->at = w->now + delay;
    if (m->at < p->last)
        m->at = p->last;
    p->last = m->at;
    m->next = NULL;
    if (p->tail)
        p->tail->next = m;
    else
        p->head = m;
    p->tail = m;
    pipe_arm(w, p);
}

/* The host gives back what it had taken for a payload that will never be whole. */
static void pipe_half_abandon(struct world *w, struct pipe *p)
{
    if (!p->half)
        return;
    if (p->half->sink)
        memset(p->half->sink, 0xa5, p->half->header.len / 2);
    if (p->half->sunk)
        memset(p->half->sunk->data, 0xa5, p->half->header.len / 2);
    w->stats.half_frames++;
    msg_free(w, p->half);
    p->half = NULL;
}

static void pipe_cut(struct world *w, struct pipe *p, uint32_t keep)
{
    struct msg **at = &p->head;
    p->tail = NULL;
    for (; *at && keep; keep--) {
        p->tail = *at;
        at = &(*at)->next;
    }
    while (*at) {
        struct msg *m = *at;
        *at = m->next;
        msg_free(w, m);
    }
}

void pipe_clear(struct world *w, struct pipe *p)
{
    pipe_half_abandon(w, p);
    pipe_cut(w, p, 0);
    p->last = 0;
}

/* ---- partitions ---- */

bool net_blocked(const struct world *w, const struct proc *from, const struct proc *to, uint64_t *ret_until)
{
    bool blocked = false;
    for (uint32_t i = 0; i < w->npartitions; i++) {
        const struct partition *x = &w->partition[i];
        if (x->until <= w->now || x->a != from->id || x->b != to->id)
            continue;
        if (ret_until && (!blocked || x->until > *ret_until))
            *ret_until = x->until;
        blocked = true;
    }
    return blocked;
}

static void partition_add(struct world *w, uint64_t a, uint64_t b, uint64_t until)
{
    struct partition x = { a, b, until };
    for (uint32_t i = 0; i < w->npartitions; i++)
        if (w->partition[i].until <= w->now) {
            w->partition[i] = x;
            return;
        }
    if (w->npartitions < SIM_PARTITIONS_MAX)
        w->partition[w->npartitions++] = x;
}

static void silence(struct world *w, void *arg, uint64_t n)
{
    (void)n;
    struct link *l = arg;
    if (!l->gone && (net_blocked(w, l->connector, l->listener, NULL) || net_blocked(w, l->listener, l->connector, NULL)))
        link_break(w, l);
}

void net_partition(struct world *w, struct proc *a, struct proc *b, bool both, uint64_t until)
{
    partition_add(w, a->id, b->id, until);
    if (both)
        partition_add(w, b->id, a->id, until);
    for (uint32_t i = 0; i < a->nlinks; i++) {
        struct link *l = a->links[i];
        if (l->connector == b || l->listener == b)
            world_at(w, w->now + SILENCE_US + rng_below(&w->rng, SILENCE_US), NULL, silence, l, 0);
    }
    world_note(w, "partition %s -%s %s until %.1f ms", a->name, both ? "x-" : "->", b->name, (double)until / 1e3);
}

uint64_t net_delay(struct world *w)
{
    uint64_t d = 10 + rng_below(&w->rng, w->cfg.delay_us);
    if (!w->calm && !w->opt.quiet_net && rng_chance(&w->rng, 10))
        d += rng_below(&w->rng, 20 * SIM_MS);
    return d;
}

/* ---- links ---- */

static bool link_deliver(struct world *w, struct pipe *p, struct msg *m);

static void proc_link_add(struct proc *p, struct link *l)
{
    ARRAY_ROOM(p->links, p->nlinks, p->links_cap);
    p->links[p->nlinks++] = l;
}

static void proc_link_remove(struct proc *p, const struct link *l)
{
    for (uint32_t i = 0; i < p->nlinks; i++)
        if (p->links[i] == l) {
            memmove(&p->links[i], &p->links[i + 1], (p->nlinks - i - 1) * sizeof *p->links);
            p->nlinks--;
            return;
        }
}

struct link *link_find(struct proc *p, uint64_t peer, bool control, uint32_t loop)
{
    for (uint32_t i = 0; i < p->nlinks; i++) {
        struct link *l = p->links[i];
        if (l->control == control && !l->between && l->loop == loop &&
            (l->connector == p ? l->listener : l->connector)->id == peer)
            return l;
    }
    return NULL;
}

static void link_connect(struct world *w, void *arg, uint64_t n);

static void link_connect_later(struct world *w, struct link *l, uint64_t delay)
{
    world_at(w, w->now + delay, l->connector, link_connect, l, 0);
}

static void link_drop(struct link *l)
{
    if (l->gone)
        return;
    l->gone = true;
    l->wanted = false;
    proc_link_remove(l->connector, l);
    proc_link_remove(l->listener, l);
}

static void link_connect(struct world *w, void *arg, uint64_t n)
{
    (void)n;
    struct link *l = arg;
    if (l->gone || !l->wanted || l->connector_up || !l->broken)
        return;
    if (!l->listener->alive) {
        link_drop(l);
        return;
    }
    if (l->listener->paused_until > w->now || net_blocked(w, l->connector, l->listener, NULL) ||
        net_blocked(w, l->listener, l->connector, NULL)) {
        link_connect_later(w, l, BACKOFF_US + rng_below(&w->rng, BACKOFF_US));
        return;
    }
    l->broken = false;
    pipe_push(w, &l->to_listener, msg_new(w, MSG_UP), 2 * net_delay(w));
}

static struct link *link_new(struct world *w, struct proc *connector, struct proc *listener, bool control, uint32_t loop)
{
    struct link *l = mem_alloc(sizeof *l);
    l->next = w->links;
    w->links = l;
    l->connector = connector;
    l->listener = listener;
    l->control = control;
    l->loop = loop;
    l->broken = true;
    pipe_init(&l->to_connector, connector, l, link_deliver);
    pipe_init(&l->to_listener, listener, l, link_deliver);
    proc_link_add(connector, l);
    proc_link_add(listener, l);
    return l;
}

static struct link *link_wanted(struct world *w, struct link *l)
{
    if (!l->wanted) {
        l->wanted = true;
        link_connect_later(w, l, 1);
    }
    return l;
}

struct link *link_want(struct world *w, struct proc *connector, struct proc *listener, bool control, uint32_t loop)
{
    struct link *l = link_find(connector, listener->id, control, loop);
    return link_wanted(w, l ? l : link_new(w, connector, listener, control, loop));
}

struct link *link_find_between(struct proc *p, uint32_t own, uint64_t peer, uint32_t loop, bool outgoing)
{
    for (uint32_t i = 0; i < p->nlinks; i++) {
        struct link *l = p->links[i];
        struct proc *other = outgoing ? l->listener : l->connector;
        if (l->between && other != p && other->id == peer && link_loop(l, p) == own && link_loop(l, other) == loop)
            return l;
    }
    return NULL;
}

struct link *link_want_between(struct world *w, struct proc *p, uint32_t own, struct proc *peer, uint32_t loop)
{
    struct link *l = link_find_between(p, own, peer->id, loop, true);
    if (!l) {
        l = link_new(w, p, peer, false, loop);
        l->between = true;
        l->connector_loop = own;
    }
    return link_wanted(w, l);
}

void link_send(struct world *w, struct link *l, struct proc *from, struct msg *m)
{
    bool up = l && (from == l->connector ? l->connector_up : l->listener_up);
    if (!up || l->broken) {
        msg_free(w, m);
        return;
    }
    struct pipe *p = from == l->connector ? &l->to_listener : &l->to_connector;
    uint64_t until, delay = net_delay(w);
    if (net_blocked(w, from, p->to, &until))
        delay += until - w->now;
    until = from == l->connector ? l->stalled_to_listener : l->stalled_to_connector;
    if (until > w->now)
        delay += until - w->now;
    m->from = from->id;
    w->stats.frames++;
    pipe_push(w, p, m, delay);
}

/* What is under way and what is sent from now on, one way, waits; the connection stays open (a switch's queue, a slow
 * receiver). */
void link_stall(struct world *w, struct link *l, bool to_connector, uint64_t until)
{
    struct pipe *p = to_connector ? &l->to_connector : &l->to_listener;
    for (struct msg *m = p->head; m; m = m->next)
        m->at = m->at > until ? m->at : until;
    p->last = p->head && p->last < until ? until : p->last;
    world_note(w, "%s -> %s (%s) stalls until %.1f ms", (to_connector ? l->listener : l->connector)->name,
               (to_connector ? l->connector : l->listener)->name, l->control ? "control" : "data", (double)until / 1e3);
    if (to_connector)
        l->stalled_to_connector = until;
    else
        l->stalled_to_listener = until;
    w->stats.stalls++;
}

static uint32_t pipe_length(const struct pipe *p)
{
    uint32_t n = 0;
    for (const struct msg *m = p->head; m; m = m->next)
        n++;
    return n;
}

/* A random prefix of what is under way arrives, then the receiver sees the connection close. */
static void direction_break(struct world *w, struct pipe *p)
{
    uint32_t n = pipe_length(p), keep = 0;
    uint64_t how = rng_below(&w->rng, 3);
    if (how == 1)
        keep = n;
    else if (how == 2)
        keep = (uint32_t)rng_below(&w->rng, n + 1);
    if (keep == 0 && rng_chance(&w->rng, 500))
        pipe_half_abandon(w, p);
    pipe_cut(w, p, keep);
    pipe_push(w, p, msg_new(w, MSG_DOWN), rng_below(&w->rng, w->cfg.delay_us));
}

void link_break(struct world *w, struct link *l)
{
    if (l->broken || l->gone)
        return;
    l->broken = true;
    direction_break(w, &l->to_listener);
    direction_break(w, &l->to_connector);
}

void link_close(struct world *w, struct link *l, struct proc *by)
{
    bool connector = by == l->connector;
    if (connector)
        l->wanted = false;
    if (!l->broken) {
        l->broken = true;
        pipe_clear(w, connector ? &l->to_connector : &l->to_listener);
        pipe_push(w, connector ? &l->to_listener : &l->to_connector, msg_new(w, MSG_DOWN), net_delay(w));
    } else {
        pipe_clear(w, connector ? &l->to_connector : &l->to_listener);
    }
    if (connector)
        l->connector_up = false;
    else
        l->listener_up = false;
}

void links_close_between(struct world *w, struct proc *by, uint64_t peer)
{
    for (uint32_t i = 0; i < by->nlinks; i++) {
        struct link *l = by->links[i];
        if ((l->connector == by ? l->listener : l->connector)->id == peer)
            link_close(w, l, by);
    }
}

void links_kill(struct world *w, struct proc *p)
{
    for (uint32_t i = 0; i < p->nlinks; i++) {
        struct link *l = p->links[i];
        bool connector = l->connector == p;
        struct pipe *out = connector ? &l->to_listener : &l->to_connector;
        if (!l->broken) {
            l->broken = true;
            direction_break(w, out);
        }
        for (struct msg *m = out->head; m; m = m->next)
            msg_detach(m);
        if (out->half)
            msg_detach(out->half);
        pipe_clear(w, connector ? &l->to_connector : &l->to_listener);
        l->connector_up = connector ? false : l->connector_up;
        l->listener_up = connector ? l->listener_up : false;
        if (connector)
            l->wanted = false;
    }
}

static void silence_of(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    if (!p->alive || p->paused_until <= w->now || p->paused_until != n)
        return;
    for (uint32_t i = 0; i < p->nlinks; i++)
        link_break(w, p->links[i]);
}

void links_break_later(struct world *w, struct proc *p, uint64_t delay)
{
    world_at(w, w->now + delay, NULL, silence_of, p, p->paused_until);
}

static void end_up(struct world *w, struct proc *p, struct link *l)
{
    if (p->kind == PROC_SERVER)
        server_link_up(w, p, l);
    else
        member_link_up(w, p, l);
}

static void end_down(struct world *w, struct proc *p, struct link *l)
{
    if (p->kind == PROC_SERVER)
        server_link_down(w, p, l);
    else
        member_link_down(w, p, l);
}

static void link_opened(struct world *w, struct pipe *p, struct link *l)
{
    if (p == &l->to_listener) {
        l->listener_up = true;
        struct msg *welcome = msg_new(w, MSG_UP);
        if (l->broken)
            msg_free(w, welcome);
        else
            pipe_push(w, &l->to_connector, welcome, net_delay(w));
    } else {
        l->connector_up = true;
    }
    end_up(w, p->to, l);
}

static void link_closed(struct world *w, struct pipe *p, struct link *l)
{
    bool *up = p == &l->to_listener ? &l->listener_up : &l->connector_up;
    if (*up) {
        *up = false;
        end_down(w, p->to, l);
    }
    if (p == &l->to_listener) {
        if (!l->connector->alive)
            link_drop(l);
        return;
    }
    if (l->wanted)
        link_connect_later(w, l, 1 + rng_below(&w->rng, BACKOFF_US));
    else
        link_drop(l);
}

static bool link_deliver(struct world *w, struct pipe *p, struct msg *m)
{
    struct link *l = p->owner;
    if (m->kind == MSG_UP) {
        link_opened(w, p, l);
        return false;
    }
    if (m->kind == MSG_DOWN) {
        link_closed(w, p, l);
        return false;
    }
    if (in_buffers(m) && !m->half && msg_sum(m) != m->sum) {
        world_fail(w, "I1 a buffer of %s was written to while it was being sent (%s)", world_proc(w, m->from)->name,
                   frame_type_name(m->header.type));
        return false;
    }
    if (p->to->kind == PROC_MEMBER)
        return member_frame(w, p->to, l, m);
    if (!l->control)
        return loop_frame(w, p->to, l, m);
    server_message(w, p->to, m);
    return false;
}
