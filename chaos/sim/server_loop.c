/* server_loop.c - a server's loop: one shard core, its pool, its disk. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/keepstep_err.h"
#include "base/mem.h"

enum { POOLS_MAX = 64, POOL_LIMIT = 1 << 20, EFFECTS_MAX = 20000, THREAD_DELAY_US = 40 };

/* Pools take memory in large slabs: they are used again by later lives and later seeds. */
static struct pool *pool_cache[POOLS_MAX];
static uint32_t npools;

static struct pool *pool_take(void)
{
    return npools ? pool_cache[--npools] : pool_create(POOL_LIMIT);
}

static void pool_back(struct world *w, struct proc *p, struct pool *pool)
{
    if (pool_used_bytes(pool) != 0) {
        world_fail(w, "I11 a loop of %s leaks %zu bytes of buffers", p->name, pool_used_bytes(pool));
        return;
    }
    if (npools < POOLS_MAX)
        pool_cache[npools++] = pool;
    else
        pool_free(pool);
}

void pools_drop(void)
{
    while (npools)
        pool_free(pool_cache[--npools]);
}

void pools_forget(void)
{
}

/* ---- the core's effects ---- */

static void ctl_tell(struct world *w, struct proc *p, struct msg *m)
{
    m->kind = MSG_CTL;
    m->from = p->id;
    pipe_push(w, &p->server->to_ctl, m, 1 + rng_below(&w->rng, 10 * THREAD_DELAY_US));
}

static void count(struct world *w, const struct shard_effect *e)
{
    const struct frame_header *h = &e->header;
    w->stats.refused += h->type == FRAME_REFUSED;
    w->stats.images += h->type == FRAME_IMAGE;
    w->stats.gradients += h->type == FRAME_IMAGE && h->flags & FRAME_GRADIENT;
    w->stats.images_again += h->type == FRAME_IMAGE && h->flags & FRAME_AGAIN;
    w->stats.marks += h->type == FRAME_MARK;
    w->stats.haves += h->type == FRAME_HAVE;
    w->stats.sync_ends += h->type == FRAME_SYNC_END;
}

static void send(struct world *w, struct proc *p, uint32_t index, struct shard_effect *e)
{
    struct msg *m = msg_new(w, MSG_FRAME);
    check_released(w, p, index, e);
    m->header = e->header;
    m->buf = e->payload;
    m->offset = e->offset;
    m->more[0] = e->more[0];
    m->more[1] = e->more[1];
    e->payload = e->more[0] = e->more[1] = NULL;
    if (m->buf || m->more[0] || m->more[1]) {
        m->sum = msg_sum(m);
    } else if (e->header.len) {
        world_fail(w, "I12 %s sends %s of %lu bytes without payload", p->name, frame_type_name(e->header.type),
                   (unsigned long)e->header.len);
    }
    count(w, e);
    if (w->opt.verbose > 1)
        world_note(w, "  %s/%u -> %lu/%u %s step %ld tensor %04lx.%u seq %u e%u status %d flags %d version %lu.%lu", p->name, index,
                   (unsigned long)e->to, e->loop, frame_type_name(e->header.type), (long)e->header.step,
                   (unsigned long)(e->header.tensor & 0xffff), e->header.chunk, e->header.seq, e->header.epoch,
                   e->header.status, e->header.flags, (unsigned long)(e->header.version >> 32),
                   (unsigned long)(e->header.version & 0xffffffff));
    doc_header(w, &m->header);
    link_send(w, loop_link_of(p, index, e), p, m);
    if (e->header.type == FRAME_RESULT)
        fault_trigger(w, TRIGGER_RESULT, p);
    else if (e->header.type == FRAME_COMPLETE)
        fault_trigger(w, TRIGGER_COMPLETE, p);
}

static void commit(struct world *w, void *arg, uint64_t n);

static void commit_arm(struct world *w, struct proc *p, uint32_t index)
{
    struct sim_loop *l = &p->server->loop[index];
    if (l->commit_armed || store_model_queued(l->store) == 0)
        return;
    l->commit_armed = true;
    uint64_t delay = 20 + rng_below(&w->rng, w->cfg.disk_us);
    if (w->disk_slow_until > w->now)
        delay += 10 * SIM_MS + rng_below(&w->rng, 60 * SIM_MS);
    world_at(w, w->now + delay, p, commit, p, index);
}

static void held_release(struct sim_loop *l, uint64_t seq)
{
    while (l->held && l->held->seq <= seq) {
        struct held *h = l->held;
        l->held = h->next;
        if (!l->held)
            l->held_tail = &l->held;
        for (int i = 0; i < 4; i++)
            buf_unref(h->buf[i]);
        mem_free(h);
    }
}

static void persist(struct world *w, struct proc *p, uint32_t index, const struct shard_effect *e)
{
    struct sim_loop *l = &p->server->loop[index];
    struct held *h = mem_alloc(sizeof *h);
    h->seq = e->seq;
    for (int i = 0; i < 4; i++)
        h->buf[i] = e->held[i];
    *l->held_tail = h;
    l->held_tail = &h->next;
    l->store->ops->submit(l->store, e->seq, e->ops, e->nops);
    commit_arm(w, p, index);
}

static void report(struct world *w, struct proc *p, uint32_t index, const struct shard_effect *e)
{
    struct msg *m = msg_new(w, MSG_CTL);
    m->ctl_kind = CTL_LOOP_REPORT;
    m->loop = index;
    m->report = mem_alloc(sizeof *m->report);
    m->report->from = p->id;
    m->report->ballot = e->ballot;
    m->report->base_epoch = e->epoch;
    m->report->clock = -1;
    m->report->nshards = e->nreports;
    m->report->shard = e->nreports ? mem_dup(e->reports, e->nreports * sizeof *e->reports) : NULL;
    for (uint32_t i = 0; i < e->nreports; i++)
        world_note(w, "  %s/%u reports shard %u role %d: complete %ld, join %ld", p->name, index, e->reports[i].shard,
                   (int)e->reports[i].role, (long)e->reports[i].complete, (long)e->reports[i].join);
    ctl_tell(w, p, m);
}

static void effect(struct world *w, struct proc *p, uint32_t index, struct shard_effect *e)
{
    struct msg *m;
    switch (e->kind) {
    case SHARD_SEND: send(w, p, index, e); break;
    case SHARD_PERSIST: persist(w, p, index, e); break;
    case SHARD_REPORT: report(w, p, index, e); break;
    case SHARD_WANT_VIEW:
        m = msg_new(w, MSG_CTL);
        m->ctl_kind = CTL_WANT_VIEW;
        m->loop = index;
        ctl_tell(w, p, m);
        break;
    case SHARD_CLOSE:
        w->stats.closed_by_core++;
        world_note(w, "%s/%u closes its connections to %lu: %s", p->name, index, (unsigned long)e->to, e->text);
        loop_links_reset(w, p, index, e->to);
        break;
    case SHARD_SYNCED:
        m = msg_new(w, MSG_CTL);
        m->ctl_kind = CTL_LOOP_SYNCED;
        m->loop = index;
        m->id = e->to;
        m->shard = (uint32_t)e->seq;
        ctl_tell(w, p, m);
        break;
    case SHARD_FATAL: world_fail(w, "I1 %s/%u ends itself: %s", p->name, index, e->text); break;
    }
}

/* ---- events into the core ---- */

void loop_event(struct world *w, struct proc *p, uint32_t index, struct shard_event *e)
{
    struct sim_loop *l = &p->server->loop[index];
    e->now_us = w->now;
    shard_core_step(l->core, e, &l->out);
    if (l->out.n > EFFECTS_MAX)
        world_fail(w, "I11 a loop of %s emits %u effects at once", p->name, l->out.n);
    for (uint32_t i = 0; i < l->out.n && !w->failed; i++)
        effect(w, p, index, &l->out.effect[i]);
}

/* The writer thread tells the loop: a process may die between the commit and the news of it. */
static void durable(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    struct sim_loop *l = &p->server->loop[n];
    uint64_t seq = 0;
    char err[STORE_ERR_TEXT] = "";
    if (l->store->ops->poll(l->store, &seq, err))
        world_fail(w, "I2 a disk of %s failed: %s", p->name, err);
    held_release(l, seq);
    struct shard_event e = { .kind = SHARD_DURABLE, .seq = seq };
    loop_event(w, p, (uint32_t)n, &e);
}

static void commit(struct world *w, void *arg, uint64_t n)
{
    struct proc *p = arg;
    struct sim_loop *l = &p->server->loop[n];
    l->commit_armed = false;
    store_model_commit(l->store, 1 + rng_below(&w->rng, store_model_queued(l->store)));
    w->stats.commits++;
    world_at(w, w->now + 1 + rng_below(&w->rng, 2 * THREAD_DELAY_US), p, durable, p, n);
    fault_trigger(w, TRIGGER_COMMIT, p);
    commit_arm(w, p, (uint32_t)n);
}

void loop_adopt(struct world *w, struct proc *p, uint32_t index, const struct view *v)
{
    struct sim_loop *l = &p->server->loop[index];
    struct shard_event e = { .kind = SHARD_ADOPT, .view = v };
    struct shard_stats s;
    if (!l->view || v->epoch > l->view->epoch) {
        view_free(l->view);
        l->view = view_copy(v);
    }
    loop_event(w, p, index, &e);
    if (w->failed)
        return;
    shard_core_stats(p->server->loop[index].core, &s);
    w->stats.reopened += s.reopened - p->server->loop[index].reopened;
    p->server->loop[index].reopened = s.reopened;
    loop_links_follow(w, p, index);
}

bool loop_deliver(struct world *w, struct pipe *pipe, struct msg *m)
{
    if (m->kind == MSG_LOOP_ADOPT) {
        loop_adopt(w, pipe->to, pipe->loop, m->view);
        return false;
    }
    if (m->kind == MSG_LOOP_HEIR) {
        shard_core_loaded(pipe->to->server->loop[pipe->loop].core, m->id);
        return false;
    }
    struct shard_event e = { .kind = SHARD_PREPARE, .prepare = m->prepare };
    loop_event(w, pipe->to, pipe->loop, &e);
    return false;
}

static void declared(struct world *w, struct proc *p, uint32_t index, struct shard_event *e, const struct msg *m)
{
    struct tensor_spec spec;
    char err[ERR_TEXT] = "";
    uint8_t *text = mem_alloc(m->header.len + 1);
    msg_payload(m, text);
    if (tensor_decode((const char *)text, m->header.len, &spec, err))
        world_fail(w, "I12 the declaration of a tensor between servers cannot be decoded: %s", err);
    mem_free(text);
    e->kind = SHARD_DECLARE;
    e->spec = &spec;
    if (!w->failed)
        loop_event(w, p, index, e);
}

/* In two parts, as from a socket: the header (the core names the memory), later the whole payload. */
bool loop_frame(struct world *w, struct proc *p, const struct link *link, struct msg *m)
{
    uint32_t index = link_loop(link, p);
    struct sim_loop *l = &p->server->loop[index];
    const struct proc *peer = link->connector == p ? link->listener : link->connector;
    struct shard_event e = { .kind = m->kind == MSG_SPEC ? SHARD_DECLARE : SHARD_FRAME, .from = m->from,
                             .header = m->header, .spec = m->spec, .is_server = link->between,
                             .loop = link->between ? link_loop(link, peer) : 0 };
    if (link->between && m->header.type == FRAME_DECLARE) {
        declared(w, p, index, &e, m);
        return false;
    }
    if (m->kind == MSG_FRAME && m->header.len) {
        if (!m->half) {
            m->sunk = shard_core_sink(l->core, m->from, &m->header);
            if (m->sunk && (m->sunk->cap < m->header.len || m->sunk->refs < 1))
                world_fail(w, "I12 %s/%u gives a sink of %u bytes for %lu", p->name, index, m->sunk->cap,
                           (unsigned long)m->header.len);
            if (rng_chance(&w->rng, 150))
                return true;
        }
        e.discarded = !m->sunk;
        if (m->sunk)
            msg_payload(m, m->sunk->data);
        e.payload = m->sunk;
        m->sunk = NULL;
    }
    loop_event(w, p, index, &e);
    return false;
}

/* ---- life ---- */

struct loading {
    struct shard_core *core;
    char *err;
};

static int load_one(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size)
{
    struct loading *l = arg;
    return shard_core_load(l->core, key, key_size, value, size, l->err);
}

void loop_open(struct world *w, struct proc *p, uint32_t index, uint64_t heir_of)
{
    struct sim_loop *l = &p->server->loop[index];
    char err[STORE_ERR_TEXT] = "";
    l->pool = pool_take();
    l->held_tail = &l->held;
    pipe_init(&l->in, p, p, loop_deliver);
    l->in.loop = index;
    struct shard_config c = { .self = p->id, .loop = index, .nloops = p->server->machine->nloops, .nshards = w->cfg.nshards,
                              .chunk_bytes = SIM_CHUNK_BYTES, .deterministic = w->cfg.deterministic,
                              .durable = w->cfg.durable, .pool = l->pool };
    l->core = shard_core_create(&c);
    if (store_model_open(p->server->machine->disk[index], &l->store, err)) {
        world_fail(w, "I2 the disk of %s does not open: %s", p->name, err);
        return;
    }
    struct loading a = { l->core, err };
    if (l->store->ops->load(l->store, load_one, &a, err))
        world_fail(w, "I2 %s cannot load its disk: %s", p->name, err);
    if (heir_of)
        shard_core_loaded(l->core, heir_of);
}

void loop_close(struct world *w, struct proc *p, uint32_t index)
{
    struct sim_loop *l = &p->server->loop[index];
    size_t queued = store_model_queued(l->store);
    size_t kept = queued ? store_model_commit(l->store, rng_below(&w->rng, queued + 1)) : 0;
    w->stats.batches_kept += kept;
    w->stats.batches_lost += queued - kept;
    store_model_crash(l->store);
    pipe_clear(w, &l->in);
    held_release(l, UINT64_MAX);
    shard_core_free(l->core);
    view_free(l->view);
    shard_outbox_done(&l->out);
    pool_back(w, p, l->pool);
    memset(l, 0, sizeof *l);
}
