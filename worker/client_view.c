#include "worker/client_impl.h"

/* ---- loops ---- */

static struct client_loop *loop_get(struct client_core *c, uint64_t server, uint32_t number)
{
    struct client_peer *p = map_get(&c->peers, server);
    if (!p) {
        p = mem_alloc(sizeof *p);
        p->id = server;
        map_put(&c->peers, server, p);
    }
    struct client_loop *l = p->loop[number];
    if (!l) {
        l = p->loop[number] = mem_alloc(sizeof *l);
        l->server = server;
        l->number = number;
        l->down_us = c->now_us;
    }
    return l;
}

struct client_loop *client_loop_find(const struct client_core *c, uint64_t server, uint32_t number)
{
    const struct client_peer *p = map_get(&c->peers, server);
    return p && number < LOOPS_MAX ? p->loop[number] : NULL;
}

static void peer_free(struct client_peer *p)
{
    for (uint32_t i = 0; i < LOOPS_MAX; i++) {
        if (!p->loop[i])
            continue;
        mem_free(p->loop[i]->declared);
        mem_free(p->loop[i]->done);
        mem_free(p->loop[i]);
    }
    mem_free(p);
}

void client_peers_free(struct client_core *c)
{
    uint64_t id;
    void *p;
    for (uint32_t i = 0; map_next(&c->peers, &i, &id, &p);)
        peer_free(p);
}

/* Lives that are neither listed nor connected do not come back. */
static void peers_prune(struct client_core *c)
{
    uint64_t id;
    void *value;
    for (uint32_t i = 0; map_next(&c->peers, &i, &id, &value);) {
        struct client_peer *p = value;
        bool used = p->listed;
        for (uint32_t n = 0; n < LOOPS_MAX; n++)
            used |= p->loop[n] && (p->loop[n]->up || p->loop[n]->sink);
        if (used)
            continue;
        map_remove(&c->peers, id);
        peer_free(p);
        i = 0;
    }
}

static void loops_list(struct client_core *c)
{
    uint64_t id;
    void *value;
    for (uint32_t i = 0; map_next(&c->peers, &i, &id, &value);) {
        struct client_peer *p = value;
        p->listed = false;
        for (uint32_t n = 0; n < LOOPS_MAX; n++)
            if (p->loop[n])
                p->loop[n]->serves = 0;
    }
    for (uint32_t i = 0; i < c->view->nservers; i++) {
        const struct view_server *s = &c->view->server[i];
        for (uint32_t n = 0; n < s->nloops && n < LOOPS_MAX; n++) {
            struct client_loop *l = loop_get(c, s->id, n);
            l->tenured = l->again_sent = l->lacks = false;
        }
        struct client_peer *p = map_get(&c->peers, s->id);
        if (p)
            p->listed = true;
    }
}

static void shards_place(struct client_core *c, uint64_t old_epoch)
{
    for (uint32_t i = 0; i < c->config.nshards; i++) {
        struct client_shard *sh = &c->shard[i];
        const struct view_shard *v = &c->view->shard[i];
        const struct view_server *s = view_server_find(c->view, v->primary);
        sh->serve = s && s->nloops ? client_loop_find(c, s->id, loop_of(i, s->nloops)) : NULL;
        sh->tenured = v->since > old_epoch;
        if (!sh->serve)
            continue;
        sh->serve->serves++;
        sh->serve->tenured |= sh->tenured;
    }
}

/* Places every shard. A loop with a new tenure knows nothing: its tensors are declared again. */
static void loops_rebuild(struct client_core *c, uint64_t old_epoch)
{
    loops_list(c);
    shards_place(c, old_epoch);
    peers_prune(c);
    c->nloops = 0;
    for (uint32_t i = 0; i < c->view->nservers; i++) {
        const struct view_server *s = &c->view->server[i];
        for (uint32_t n = 0; n < s->nloops && n < LOOPS_MAX; n++) {
            struct client_loop *l = client_loop_find(c, s->id, n);
            if (!l->serves)
                continue;
            ARRAY_ROOM(c->loops, c->nloops, c->loops_cap);
            c->loops[c->nloops++] = l;
            if (!l->tenured)
                continue;
            l->generation++;
            for (uint32_t w = 0; w < l->ndeclared / 64; w++)
                l->declared[w] = 0;
        }
    }
}

/* ---- sending again ---- */

static void resend_all(struct client_core *c, struct client_loop *l)
{
    client_declare_resend(c, l);
    client_init_resend(c, l, false);
    client_sync_resend(c, l, false);
    client_async_resend(c, l, false);
    client_sync_done(c, l);
    client_pull_resend(c, l, false);
}

/* After a view. A new tenure lacks what its shards were told; a changed set takes back every result. */
static void resend_view(struct client_core *c, struct client_loop *l, bool changed)
{
    if (l->tenured) {
        client_declare_resend(c, l);
        client_init_resend(c, l, true);
        client_sync_resend(c, l, true);
        client_async_resend(c, l, true);
    }
    if (changed || l->tenured || l->lacks)
        client_sync_done(c, l);
    l->lacks = false;
    if (changed || l->tenured)
        client_pull_resend(c, l, !changed);
}

/* ---- views ---- */

static bool sets_equal(const struct view *a, const struct view *b, int64_t step)
{
    uint32_t i = 0, j = 0;
    for (;;) {
        while (i < a->nmembers && !view_member_in(&a->member[i], step))
            i++;
        while (j < b->nmembers && !view_member_in(&b->member[j], step))
            j++;
        if (i == a->nmembers || j == b->nmembers)
            return i == a->nmembers && j == b->nmembers;
        if (a->member[i++].id != b->member[j++].id)
            return false;
    }
}

/* The step that must be complete before a member can join at `step`, or -1. A synchronous step may still be open when
 * asynchronous ones after it are joined already: nobody may push to what it has not sealed. */
static int64_t step_to_read(const struct view *v, int64_t step)
{
    if (view_mode_at(v, step).kind == MODE_SYNC)
        return step - 1;
    int64_t end = step;
    for (uint32_t i = v->nmodes; i-- > 0;) {
        const struct mode *m = &v->mode[i];
        if (m->from >= step)
            continue;
        if (m->kind == MODE_SYNC)
            return end - 1;
        end = m->from;
    }
    return -1;
}

static void start_life(struct client_core *c, const struct view_member *m)
{
    c->step = m->join;
    c->setver = client_epoch(c);
    for (uint32_t i = 0; i < c->nloops; i++) {
        client_declare_resend(c, c->loops[i]);
        client_init_resend(c, c->loops[i], false);
    }
    int64_t read = step_to_read(c->view, c->step);
    if (read < 0) {
        client_begin(c);
        return;
    }
    client_sync_read(c, read);
    if (client_clock_counts(c))
        client_clock_send_all(c, true);
}

static bool in_sync_step(const struct client_core *c)
{
    return c->phase == PHASE_READ || ((c->phase == PHASE_STEP || c->phase == PHASE_ENDED) && c->mode == MODE_SYNC);
}

static void next_view(struct client_core *c, const struct view *old)
{
    int64_t step = c->phase == PHASE_READ ? c->read : c->step;
    bool skipped = c->view->epoch > old->epoch + 1 && c->view->mchg > old->epoch;
    bool changed = in_sync_step(c) && (skipped || !sets_equal(old, c->view, step));
    if (changed)
        c->setver = client_epoch(c);
    client_init_tenure(c);
    if (in_sync_step(c))
        client_sync_recount(c);
    for (uint32_t i = 0; i < c->nloops; i++) {
        c->loops[i]->again |= changed;
        resend_view(c, c->loops[i], changed);
    }
    for (uint32_t i = 0; i < c->ntensors; i++)
        client_declare_settle(c, c->tensor[i]);
}

static bool ballot_before(const struct ballot *a, const struct ballot *b)
{
    return a->term != b->term ? a->term < b->term : a->round < b->round;
}

static void not_listed(struct client_core *c)
{
    if (c->leave_sent)
        client_leave_over(c);
    else
        client_over(c, KS_EFENCED, CLIENT_FENCED, "this life was removed from the job");
}

void client_adopt(struct client_core *c, const struct view *v)
{
    if (v->nshards != c->config.nshards || (c->view && v->epoch <= c->view->epoch))
        return;
    if (v->ended[0]) {
        client_over(c, KS_EJOB, CLIENT_ENDED, v->ended);
        return;
    }
    const struct view_member *m = view_member_find(v, c->config.self);
    if (!m && !c->view)
        return;
    if (!m || !m->live) {
        not_listed(c);
        return;
    }
    struct view *old = c->view;
    c->view = view_copy(v);
    c->stats.views++;
    c->hold = false;
    c->want_view = c->want_view && epoch_newer(c->want_epoch, client_epoch(c));
    struct ballot floor = {.term = v->term};
    if (ballot_before(&c->promised, &floor))
        c->promised = floor;
    loops_rebuild(c, old ? old->epoch : 0);
    if (old)
        next_view(c, old);
    else
        start_life(c, m);
    view_free(old);
}

void client_prepare(struct client_core *c, const struct prepare *p)
{
    for (uint32_t i = 0; i < p->ngone; i++)
        if (p->gone[i] == c->config.self)
            return;
    if (c->view && p->base->epoch < c->view->epoch)
        return;
    client_adopt(c, p->base);
    if (c->phase == PHASE_OVER || !c->view || ballot_before(&p->ballot, &c->promised))
        return;
    c->promised = p->ballot;
    c->hold = p->mode_change;
    if (!p->mode_change)
        return;
    c->report =
        (struct report){.from = c->config.self, .ballot = p->ballot, .base_epoch = p->base->epoch, .clock = c->step};
    client_emit(c, CLIENT_SEND_REPORT)->report = &c->report;
}

/* ---- connections ---- */

/* The frame that was coming in from l did not arrive or is not wanted. If the chunk is served elsewhere now, its answer
 * may have been refused meanwhile, since two must not write to the same place. */
void client_sink_drop(struct client_core *c, struct client_loop *l)
{
    struct client_op *op = l->sink;
    if (!op)
        return;
    uint32_t chunk = l->sink_chunk;
    l->sink = NULL;
    op->slot[chunk].flags &= (uint8_t)~SLOT_SINK;
    struct client_loop *now = client_serves(c, op->t, chunk);
    if (!now || now == l)
        return;
    if (op->kind == CLIENT_PULL) {
        client_pull_chunk(c, op, chunk);
        return;
    }
    now->again = true;
    client_sync_done(c, now);
}

bool client_sink_take(struct client_loop *l, const struct client_op *op, uint32_t chunk)
{
    if (!l->sink || l->sink != op || l->sink_chunk != chunk)
        return false;
    l->sink->slot[chunk].flags &= (uint8_t)~SLOT_SINK;
    l->sink = NULL;
    return true;
}

void client_peer_up(struct client_core *c, uint64_t server, uint32_t number)
{
    if (number >= LOOPS_MAX)
        return;
    struct client_loop *l = loop_get(c, server, number);
    client_sink_drop(c, l);
    l->up = true;
    l->again_sent = l->lacks = l->retry = false;
    if (c->view && l->serves)
        resend_all(c, l);
}

void client_peer_down(struct client_core *c, uint64_t server, uint32_t number)
{
    struct client_loop *l = client_loop_find(c, server, number);
    if (!l || !l->up)
        return;
    l->up = false;
    l->down_us = c->now_us;
    client_sink_drop(c, l);
}

/* Tried again after a pause: the server may not have known the tensor. EAGAIN of a newer epoch is over sooner: the view
 * says what to send again. What is late or stale was sent twice, and the first one has been answered. */
void client_refused(struct client_core *c, struct client_loop *l, const struct frame_header *h)
{
    const struct client_tensor *t = client_tensor_get(c, h->tensor);
    if (h->status == KS_ELATE || h->status == KS_ESTALE)
        return;
    if (h->status == KS_EAGAIN && epoch_newer(h->epoch, client_epoch(c)))
        return;
    if (t && h->status == KS_ENOENT)
        client_declare_forget(l, t->index);
    l->refused_status = h->status;
    if (l->retry)
        return;
    l->retry = true;
    l->retry_us = c->now_us;
}

void client_saw_epoch(struct client_core *c, uint32_t epoch)
{
    if (!epoch_newer(epoch, client_epoch(c)) || (c->want_view && !epoch_newer(epoch, c->want_epoch)))
        return;
    c->want_view = true;
    c->want_epoch = epoch;
    c->want_us = c->now_us;
    client_emit(c, CLIENT_WANT_VIEW);
}

/* COMPLETE comes by itself to members that join right after that step. Who joins later has to ask. */
static void read_again(struct client_core *c)
{
    if (c->phase != PHASE_READ || c->read == c->step - 1 || c->now_us - c->read_us < CLIENT_RETRY_US)
        return;
    c->read_us = c->now_us;
    for (uint32_t i = 0; i < c->nloops; i++)
        client_sync_done(c, c->loops[i]);
}

void client_tick(struct client_core *c)
{
    read_again(c);
    if (c->want_view && c->now_us - c->want_us >= CLIENT_RETRY_US) {
        c->want_us = c->now_us;
        client_emit(c, CLIENT_WANT_VIEW);
    }
    for (uint32_t i = 0; i < c->nloops; i++) {
        struct client_loop *l = c->loops[i];
        if (!l->retry || c->now_us - l->retry_us < CLIENT_RETRY_US)
            continue;
        l->retry = false;
        if (l->up)
            resend_all(c, l);
    }
}
