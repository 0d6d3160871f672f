#include "worker/client_impl.h"

#include <stdio.h>
#include <string.h>

/* ---- pushes: one number for all chunks of a push; unacknowledged ones are kept in order ---- */

static void push_chunk(struct client_core *c, const struct client_op *op, uint32_t chunk)
{
    const struct client_tensor *t = op->t;
    struct frame_header h = {
        .type = FRAME_PUSH,
        .dtype = (uint8_t)t->spec.dtype,
        .len = client_chunk_bytes(c, t, chunk),
        .tensor = t->spec.id,
        .step = op->step,
        .chunk = chunk,
        .seq = op->seq,
        .weight = op->weight,
    };
    client_send(c, client_serves(c, t, chunk), &h, op->in + (size_t)chunk * t->stride, false);
}

static void pull_add(struct client_core *c, struct client_op *op)
{
    struct client_tensor *t = op->t;
    op->step = c->step;
    op->seq = ++c->requests;
    op->sync = c->mode == MODE_SYNC;
    c->sync_pulls += op->sync;
    client_list_add(&c->pulls, op);
    *(t->pull_tail ? &t->pull_tail->sibling : &t->pull_head) = op;
    t->pull_tail = op;
    c->stats.pulls += op->nslots;
}

static void push_add(struct client_core *c, struct client_op *op)
{
    struct client_tensor *t = op->t;
    op->step = c->step;
    op->seq = ++t->seq;
    client_list_add(&c->apushes, op);
    *(t->apush_tail ? &t->apush_tail->sibling : &t->apush_head) = op;
    t->apush_tail = op;
    c->stats.pushes += op->nslots;
}

/* A push_pull sends the pull of a chunk right behind its push: the value then holds it. */
void client_async_push(struct client_core *c, struct client_op *op)
{
    struct client_op *pull = NULL;
    if (!op->in && op->out) {
        op->kind = CLIENT_PULL;
        client_pull(c, op);
        return;
    }
    if (!op->in) {
        client_op_done(c, op, KS_OK, NULL);
        return;
    }
    push_add(c, op);
    if (op->out) {
        pull = client_op_twin(c, op);
        client_op_arena(pull);
        pull_add(c, pull);
    }
    bool sends = pull && op->t->pull_head == pull;
    for (uint32_t i = 0; i < op->nslots; i++) {
        push_chunk(c, op, i);
        if (sends)
            client_pull_chunk(c, pull, i);
    }
}

static void count_ack(struct client_core *c, struct client_op *op, const struct frame_header *h)
{
    int64_t late = h->step > op->step ? h->step - op->step : 0;
    if (!h->status)
        op->t->staleness[late < CLIENT_STALENESS ? late : CLIENT_STALENESS - 1]++;
    c->stats.acked += !h->status;
    c->stats.late += h->status == KS_ELATE;
    c->stats.stale += h->status == KS_ESTALE;
    c->stats.not_finite += h->status == KS_ENOTFINITE;
}

static void acked(struct client_core *c, struct client_op *op, const struct frame_header *h)
{
    if (op->slot[h->chunk].flags & SLOT_GOT)
        return;
    op->slot[h->chunk].flags |= SLOT_GOT;
    op->left--;
    if (h->status < op->status)
        op->status = h->status;
    count_ack(c, op, h);
}

/* Pushes of a chunk are applied in order: the acknowledgement of one speaks for those before it. */
void client_ack(struct client_core *c, const struct frame_header *h)
{
    struct client_tensor *t = client_tensor_get(c, h->tensor);
    if (!t || h->chunk >= t->nchunks || h->seq > t->seq)
        return;
    struct frame_header before = *h;
    before.status = KS_OK;
    for (struct client_op *op = t->apush_head; op && op->seq <= h->seq; op = op->sibling)
        acked(c, op, op->seq == h->seq ? h : &before);
    while (t->apush_head && !t->apush_head->left) {
        struct client_op *op = t->apush_head;
        t->apush_head = op->sibling;
        if (!t->apush_head)
            t->apush_tail = NULL;
        client_list_remove(&c->apushes, op);
        client_op_done(c, op, op->status, NULL);
    }
}

/* ---- clocks ---- */

void client_clock_send(struct client_core *c, struct client_loop *l, bool all_settings)
{
    if (!l->up)
        return;
    const struct setting *s = all_settings ? c->life : c->settings;
    uint32_t n = all_settings ? c->nlife : c->nsettings;
    size_t size = done_size(0, n);
    uint8_t *payload = mem_alloc(size);
    done_encode(NULL, 0, s, n, payload);
    struct frame_header h = {.type = FRAME_CLOCK, .step = c->step, .len = size};
    client_send(c, l, &h, payload, true);
}

void client_clock_send_all(struct client_core *c, bool all_settings)
{
    for (uint32_t i = 0; i < c->nloops; i++)
        client_clock_send(c, c->loops[i], all_settings);
}

void client_async_end(struct client_core *c, struct client_op *op)
{
    c->step++;
    c->stats.steps++;
    for (uint32_t i = 0; i < c->nsettings; i++) {
        c->settings[i].from_step = c->step;
        client_setting_put(&c->life, &c->nlife, &c->life_cap, &c->settings[i]);
    }
    client_clock_send_all(c, false);
    c->nsettings = 0;
    client_emit(c, CLIENT_STEP)->step = c->step;
    client_op_done(c, op, KS_OK, NULL);
    c->mode = view_mode_at(c->view, c->step).kind;
    if (c->mode == MODE_SYNC)
        client_sync_read(c, c->step - 1);
}

/* Servers must know the clock of every live member, also while a synchronous step is about to begin: a shard that is
 * behind enters the synchronous steps by clocks, and who joins there waits for it. */
bool client_clock_counts(const struct client_core *c)
{
    if (c->phase == PHASE_READ)
        return c->view->nmodes > 1 || c->view->mode[0].kind != MODE_SYNC;
    return (c->phase == PHASE_STEP || c->phase == PHASE_LEAVING) && c->mode != MODE_SYNC;
}

static void push_again(struct client_core *c, const struct client_op *op, const struct client_loop *l,
                       bool tenured_only)
{
    for (uint32_t i = 0; i < op->nslots; i++) {
        const struct client_shard *sh = &c->shard[client_shard_of(c, op->t, i)];
        if (sh->serve != l || (op->slot[i].flags & SLOT_GOT) || (tenured_only && !sh->tenured) ||
            (MUTANT(33) && sh->tenured))
            continue;
        push_chunk(c, op, i);
        c->stats.resent++;
    }
}

/* Pushes before the clock: the clock says that everything older was sent. */
void client_async_resend(struct client_core *c, struct client_loop *l, bool tenured_only)
{
    bool early = MUTANT(34);
    if (!l->up)
        return;
    if (early && client_clock_counts(c))
        client_clock_send(c, l, true);
    for (const struct client_op *op = c->apushes.head; op; op = op->next)
        push_again(c, op, l, tenured_only);
    if (!early && client_clock_counts(c))
        client_clock_send(c, l, true);
}

/* ---- pulls: one at a time on the wire for each tensor, since a newer one replaces an older one at the server ---- */

void client_pull_chunk(struct client_core *c, const struct client_op *op, uint32_t chunk)
{
    struct frame_header h = {
        .type = FRAME_PULL,
        .dtype = (uint8_t)op->t->spec.dtype,
        .tensor = op->t->spec.id,
        .step = op->step,
        .chunk = chunk,
        .seq = op->seq,
    };
    client_send(c, client_serves(c, op->t, chunk), &h, NULL, false);
}

static void pull_start(struct client_core *c, const struct client_op *op)
{
    for (uint32_t i = 0; i < op->nslots; i++)
        client_pull_chunk(c, op, i);
}

void client_pull(struct client_core *c, struct client_op *op)
{
    char text[400];
    if (c->mode == MODE_SYNC && op->t->spec.kind == TENSOR_REDUCE) {
        snprintf(text, sizeof text,
                 "tensor '%.120s' is a sum: it has no value to pull in sync mode; use push_pull or make it a parameter",
                 op->t->spec.name);
        client_op_done(c, op, KS_ESTATE, text);
        return;
    }
    pull_add(c, op);
    if (op->t->pull_head == op)
        pull_start(c, op);
}

void client_pull_resend(struct client_core *c, struct client_loop *l, bool tenured_only)
{
    if (!l->up)
        return;
    for (const struct client_op *op = c->pulls.head; op; op = op->next) {
        if (op->t->pull_head != op)
            continue;
        for (uint32_t i = 0; i < op->nslots; i++) {
            const struct client_shard *sh = &c->shard[client_shard_of(c, op->t, i)];
            if (sh->serve != l || (op->slot[i].flags & SLOT_GOT) || (tenured_only && !sh->tenured))
                continue;
            client_pull_chunk(c, op, i);
            c->stats.resent++;
        }
    }
}

/* The pull that a VALUE answers, or NULL: it has been answered, or is none of ours. */
static struct client_op *value_op(const struct client_core *c, const struct frame_header *h)
{
    const struct client_tensor *t = client_tensor_get(c, h->tensor);
    struct client_op *op = t ? t->pull_head : NULL;
    if (!op || op->seq != h->seq || h->chunk >= op->nslots || (op->slot[h->chunk].flags & SLOT_GOT))
        return NULL;
    return op;
}

void *client_pull_sink(struct client_core *c, struct client_loop *l, const struct frame_header *h)
{
    client_sink_drop(c, l);
    struct client_op *op = value_op(c, h);
    if (!op || (op->slot[h->chunk].flags & SLOT_SINK) || !h->len || h->len != client_chunk_bytes(c, op->t, h->chunk))
        return NULL;
    op->slot[h->chunk].flags |= SLOT_SINK;
    l->sink = op;
    l->sink_chunk = h->chunk;
    return client_op_place(op, h->chunk);
}

static bool value_placed(struct client_core *c, struct client_loop *l, struct client_op *op,
                         const struct frame_header *h, const void *payload)
{
    struct client_slot *slot = &op->slot[h->chunk];
    if (client_sink_take(l, op, h->chunk)) {
        slot->flags |= SLOT_DATA;
        return true;
    }
    if (slot->flags & SLOT_SINK)
        return false;
    uint32_t bytes = client_chunk_bytes(c, op->t, h->chunk);
    if (!h->len)
        return h->status || !bytes;
    if (!payload || h->len != bytes)
        return false;
    memcpy(client_op_place(op, h->chunk), payload, h->len);
    slot->flags |= SLOT_DATA;
    return true;
}

static void pull_finish(struct client_core *c, struct client_op *op)
{
    struct client_tensor *t = op->t;
    t->pull_head = op->sibling;
    if (!t->pull_head)
        t->pull_tail = NULL;
    c->sync_pulls -= op->sync;
    client_list_remove(&c->pulls, op);
    client_op_done(c, op, op->status, NULL);
    if (t->pull_head)
        pull_start(c, t->pull_head);
}

void client_value(struct client_core *c, struct client_loop *l, const struct frame_header *h, const void *payload)
{
    struct client_op *op = value_op(c, h);
    if (!op) {
        client_sink_drop(c, l);
        return;
    }
    if (!value_placed(c, l, op, h, payload))
        return;
    op->slot[h->chunk].flags |= SLOT_GOT;
    if (h->status < op->status)
        op->status = h->status;
    if (--op->left == 0)
        pull_finish(c, op);
}
