#include "worker/client_impl.h"

#include <stdio.h>
#include <string.h>

/* The step that COMPLETE, RESULT and DONE are about. */
static int64_t open_step(const struct client_core *c)
{
    return c->phase == PHASE_READ ? c->read : c->step;
}

static bool in_step(const struct client_core *c)
{
    return c->mode == MODE_SYNC && (c->phase == PHASE_STEP || c->phase == PHASE_ENDED);
}

/* ---- pushing ---- */

static void push_chunk(struct client_core *c, const struct client_op *op, uint32_t chunk)
{
    const struct client_tensor *t = op->t;
    struct frame_header h = {
        .type = FRAME_PUSH,
        .flags = op->out ? FRAME_WANT : 0,
        .dtype = (uint8_t)t->spec.dtype,
        .len = op->in ? client_chunk_bytes(c, t, chunk) : 0,
        .tensor = t->spec.id,
        .step = op->step,
        .chunk = chunk,
        .weight = op->weight,
    };
    client_send(c, client_serves(c, t, chunk), &h, h.len ? op->in + (size_t)chunk * t->stride : NULL, false);
}

void client_sync_push(struct client_core *c, struct client_op *op)
{
    struct client_tensor *t = op->t;
    char text[400];
    if (t->push) {
        snprintf(
            text, sizeof text,
            "tensor '%.200s' was already pushed in step %lld: sync mode takes one push a step; call ks_step_end first",
            t->spec.name, (long long)c->step);
        client_op_done(c, op, KS_ESTATE, text);
        return;
    }
    if (!op->in && !op->out) {
        client_op_done(c, op, KS_OK, NULL);
        return;
    }
    t->push = op;
    op->step = c->step;
    client_op_arena(op);
    client_list_add(&c->pushes, op);
    for (uint32_t i = 0; i < op->nslots; i++) {
        struct client_shard *sh = &c->shard[client_shard_of(c, t, i)];
        sh->pushed++;
        sh->want += op->out != NULL;
        push_chunk(c, op, i);
    }
    c->stats.pushes += op->in ? op->nslots : 0;
}

static void push_again(struct client_core *c, const struct client_op *op, const struct client_loop *l,
                       bool tenured_only)
{
    for (uint32_t i = 0; i < op->nslots; i++) {
        const struct client_shard *sh = &c->shard[client_shard_of(c, op->t, i)];
        if (sh->serve != l || (op->slot[i].flags & SLOT_GOT) || sh->counted || (tenured_only && !sh->tenured) ||
            (MUTANT(33) && sh->tenured))
            continue;
        push_chunk(c, op, i);
        c->stats.resent++;
    }
}

void client_sync_resend(struct client_core *c, struct client_loop *l, bool tenured_only)
{
    if (!in_step(c) || !l->up)
        return;
    for (const struct client_op *op = c->pushes.head; op; op = op->next)
        push_again(c, op, l, tenured_only);
}

void client_need(struct client_core *c, const struct frame_header *h, const void *payload)
{
    int64_t n = payload ? chunk_refs_count(h->len) : 0;
    if (!in_step(c) || h->step != c->step)
        return;
    for (int64_t i = 0; i < n; i++) {
        struct chunk_ref ref;
        chunk_ref_decode(payload, (size_t)i, &ref);
        const struct client_tensor *t = client_tensor_get(c, ref.tensor);
        if (!t || !t->push || ref.chunk >= t->nchunks)
            continue;
        push_chunk(c, t->push, ref.chunk);
        c->stats.resent++;
    }
}

/* ---- ending ---- */

/* Newest wins: one entry for an option of a group. */
void client_setting_put(struct setting **list, uint32_t *n, uint32_t *cap, const struct setting *s)
{
    for (uint32_t i = 0; i < *n; i++) {
        struct setting *old = &(*list)[i];
        if (old->group == s->group && old->option == s->option) {
            *old = *s;
            return;
        }
    }
    ARRAY_ROOM(*list, *n, *cap);
    (*list)[(*n)++] = *s;
}

/* Names in each loop (or one) the tensors of this step that have chunks there. */
static void done_collect(struct client_core *c, const struct client_loop *only)
{
    for (uint32_t i = 0; i < c->nloops; i++)
        c->loops[i]->ndone = 0;
    for (const struct client_op *op = c->pushes.head; op && c->phase == PHASE_ENDED; op = op->next)
        for (uint32_t i = 0; i < op->nslots; i++) {
            struct client_loop *l = client_serves(c, op->t, i);
            uint64_t id = op->t->spec.id;
            if (!l || (only && l != only) || (l->ndone && l->done[l->ndone - 1] == id))
                continue;
            ARRAY_ROOM(l->done, l->ndone, l->done_cap);
            l->done[l->ndone++] = id;
        }
}

static bool loop_open(const struct client_core *c, const struct client_loop *l)
{
    for (uint32_t i = 0; i < c->config.nshards; i++)
        if (c->shard[i].serve == l && !c->shard[i].counted)
            return true;
    return false;
}

static void done_send(struct client_core *c, struct client_loop *l)
{
    bool reads = c->phase == PHASE_READ;
    if (!l->up)
        return;
    uint32_t nsettings = reads ? 0 : c->nsettings;
    size_t size = done_size(l->ndone, nsettings);
    uint8_t *payload = mem_alloc(size);
    done_encode(l->done, l->ndone, c->settings, nsettings, payload);
    struct frame_header h = {.type = FRAME_DONE, .step = open_step(c), .len = size};
    h.flags = (uint8_t)((reads ? FRAME_READER : 0) | (l->again ? FRAME_AGAIN : 0));
    l->again = false;
    client_send(c, l, &h, payload, true);
}

/* Again, to one loop, which answers with what is there; nothing while the step is not ended or when this loop is
 * through. */
void client_sync_done(struct client_core *c, struct client_loop *l)
{
    if ((c->phase != PHASE_ENDED && c->phase != PHASE_READ) || c->done_held || !l->up || !loop_open(c, l))
        return;
    done_collect(c, l);
    l->again = true;
    done_send(c, l);
    c->stats.resent++;
}

static void done_send_all(struct client_core *c)
{
    done_collect(c, NULL);
    for (uint32_t i = 0; i < c->nloops; i++)
        done_send(c, c->loops[i]);
}

void client_sync_end(struct client_core *c, struct client_op *op)
{
    c->step_op = op;
    c->phase = PHASE_ENDED;
    c->phase_us = c->now_us;
    for (uint32_t i = 0; i < c->nsettings; i++)
        c->settings[i].from_step = c->step + 1;
    c->done_held = c->sync_pulls;
    if (!c->done_held)
        done_send_all(c);
}

static void shards_clear(struct client_core *c)
{
    c->ncomplete = 0;
    for (uint32_t i = 0; i < c->config.nshards; i++) {
        struct client_shard *sh = &c->shard[i];
        sh->want = sh->pushed = 0;
        sh->complete = sh->counted = false;
    }
    for (uint32_t i = 0; i < c->nloops; i++)
        c->loops[i]->again = c->loops[i]->again_sent = c->loops[i]->lacks = false;
}

/* What that step left behind must be complete everywhere before c->step can begin. */
void client_sync_read(struct client_core *c, int64_t step)
{
    c->phase = PHASE_READ;
    c->read = step;
    c->read_us = c->now_us;
    c->phase_us = c->now_us;
    shards_clear(c);
    done_send_all(c);
}

/* ---- answers ---- */

static bool slot_counts(const struct client_core *c, const struct client_slot *s)
{
    return (s->flags & SLOT_GOT) && !epoch_newer(s->epoch, client_epoch(c));
}

/* The slot that a RESULT is for, or NULL: not of this step, too old, or not asked for. */
static struct client_slot *result_slot(const struct client_core *c, const struct frame_header *h,
                                       struct client_op **ret_op)
{
    struct client_tensor *t = client_tensor_get(c, h->tensor);
    if (!t || !t->push || !in_step(c) || h->step != c->step || h->chunk >= t->nchunks)
        return NULL;
    if (epoch_newer(c->setver, h->epoch) && !MUTANT(30))
        return NULL;
    *ret_op = t->push;
    return &t->push->slot[h->chunk];
}

void *client_sync_sink(struct client_core *c, struct client_loop *l, const struct frame_header *h)
{
    struct client_op *op;
    const struct client_slot *slot = result_slot(c, h, &op);
    client_sink_drop(c, l);
    if (!slot || !op->out || (slot->flags & (SLOT_DATA | SLOT_SINK)) || !h->len ||
        h->len != client_chunk_bytes(c, op->t, h->chunk))
        return NULL;
    op->slot[h->chunk].flags |= SLOT_SINK;
    l->sink = op;
    l->sink_chunk = h->chunk;
    return client_op_place(op, h->chunk);
}

/* Nobody added anything: a sum is zero, a parameter stays what it is. */
static void result_empty(struct client_core *c, struct client_op *op, uint32_t chunk)
{
    if (!op->out || op->t->spec.kind != TENSOR_REDUCE)
        return;
    memset(client_op_place(op, chunk), 0, client_chunk_bytes(c, op->t, chunk));
    op->slot[chunk].flags |= SLOT_DATA;
}

/* Is the payload, if there is one, in its place? */
static bool result_placed(struct client_core *c, struct client_loop *l, struct client_op *op,
                          const struct frame_header *h, const void *payload)
{
    struct client_slot *slot = &op->slot[h->chunk];
    if (client_sink_take(l, op, h->chunk)) {
        slot->flags |= SLOT_DATA;
        return true;
    }
    if (slot->flags & SLOT_SINK)
        return false;
    if (!h->len)
        return true;
    if (!payload || !op->out || (slot->flags & SLOT_DATA) || h->len != client_chunk_bytes(c, op->t, h->chunk))
        return false;
    memcpy(client_op_place(op, h->chunk), payload, h->len);
    slot->flags |= SLOT_DATA;
    return true;
}

void client_result(struct client_core *c, struct client_loop *l, const struct frame_header *h, const void *payload)
{
    struct client_op *op;
    struct client_slot *slot = result_slot(c, h, &op);
    if (!slot) {
        client_sink_drop(c, l);
        return;
    }
    if (!result_placed(c, l, op, h, payload) || slot_counts(c, slot))
        return;
    if (!h->len && !h->status)
        result_empty(c, op, h->chunk);
    slot->flags |= SLOT_GOT;
    slot->epoch = h->epoch;
    slot->status = h->status;
    if (slot_counts(c, slot) && op->out)
        c->shard[client_shard_of(c, op->t, h->chunk)].want--;
}

static void complete_count(struct client_core *c, struct client_shard *sh)
{
    if (sh->counted || epoch_newer(sh->complete_epoch, client_epoch(c)))
        return;
    if (sh->want) {
        sh->complete = false;
        if (sh->serve)
            sh->serve->lacks = c->lacks = true;
        return;
    }
    sh->counted = true;
    c->ncomplete++;
}

void client_complete(struct client_core *c, const struct frame_header *h, const void *payload)
{
    bool waits = c->phase == PHASE_ENDED || c->phase == PHASE_READ;
    if (!waits || h->step != open_step(c) || epoch_newer(c->setver, h->epoch))
        return;
    const uint8_t *p = payload;
    for (uint64_t i = 0; p && i + 2 <= h->len; i += 2) {
        uint32_t n = p[i] | (uint32_t)p[i + 1] << 8;
        if (n >= c->config.nshards || c->shard[n].counted)
            continue;
        c->shard[n].complete = true;
        c->shard[n].complete_epoch = h->epoch;
        complete_count(c, &c->shard[n]);
    }
}

/* A shard is through and a result is lacking here: it was lost. The second time for the same connection and view wait
 * first, so that two who disagree do not keep each other busy. */
void client_sync_lacking(struct client_core *c)
{
    for (uint32_t i = 0; c->lacks && i < c->nloops; i++) {
        struct client_loop *l = c->loops[i];
        if (!l->lacks)
            continue;
        l->lacks = false;
        if (!l->again_sent)
            client_sync_done(c, l);
        else if (!l->retry)
            l->retry_us = c->now_us;
        l->retry |= l->again_sent;
        l->again_sent = true;
    }
    c->lacks = false;
}

/* After a view: what is older than the newest change of the set is taken back, what came early counts now. */
static void slots_recount(struct client_core *c, struct client_op *op)
{
    for (uint32_t i = 0; i < op->nslots; i++) {
        struct client_slot *s = &op->slot[i];
        if ((s->flags & SLOT_GOT) && epoch_newer(c->setver, s->epoch) && !MUTANT(32)) {
            s->flags &= SLOT_SINK;
            s->status = 0;
        }
        c->shard[client_shard_of(c, op->t, i)].want += op->out && !slot_counts(c, s);
    }
}

void client_sync_recount(struct client_core *c)
{
    for (uint32_t i = 0; i < c->config.nshards; i++)
        c->shard[i].want = 0;
    for (struct client_op *op = c->pushes.head; op; op = op->next)
        slots_recount(c, op);
    c->ncomplete = 0;
    for (uint32_t i = 0; i < c->config.nshards; i++) {
        struct client_shard *sh = &c->shard[i];
        sh->counted = false;
        if (sh->complete && epoch_newer(c->setver, sh->complete_epoch) && !MUTANT(32))
            sh->complete = false;
        if (sh->complete)
            complete_count(c, sh);
    }
}

/* ---- finishing ---- */

static bool finished(const struct client_core *c)
{
    if (MUTANT(31)) {
        for (uint32_t i = 0; i < c->config.nshards; i++)
            if (!c->shard[i].counted && c->shard[i].pushed)
                return false;
        return !c->done_held;
    }
    return c->ncomplete == c->config.nshards && !c->done_held;
}

static void count_outcomes(struct client_core *c, const struct client_op *op)
{
    for (uint32_t i = 0; i < op->nslots; i++) {
        int status = op->slot[i].status;
        c->stats.acked += !status && op->in;
        c->stats.late += status == KS_ELATE;
        c->stats.stale += status == KS_ESTALE;
        c->stats.not_finite += status == KS_ENOTFINITE;
    }
}

static void push_finish(struct client_core *c, struct client_op *op)
{
    int status = KS_OK;
    for (uint32_t i = 0; i < op->nslots; i++)
        if (op->slot[i].status < status)
            status = op->slot[i].status;
    count_outcomes(c, op);
    op->t->push = NULL;
    client_list_remove(&c->pushes, op);
    client_op_done(c, op, status, NULL);
}

static void finish_step(struct client_core *c)
{
    c->step++;
    c->stats.steps++;
    c->nsettings = 0;
    client_emit(c, CLIENT_STEP)->step = c->step;
    while (c->pushes.head)
        push_finish(c, c->pushes.head);
    struct client_op *op = c->step_op;
    c->step_op = NULL;
    client_op_done(c, op, KS_OK, NULL);
    shards_clear(c);
    c->phase_us = c->now_us;
    c->phase = PHASE_HELD;
}

/* Nothing of a step is shown before every shard says that it is complete. True when something ended.
 *
 * The step cannot complete before DONE, and then the value from before it, which pulls ask for, may be gone. */
bool client_sync_finish(struct client_core *c)
{
    if (c->phase == PHASE_ENDED && c->done_held && !c->sync_pulls) {
        c->done_held = false;
        done_send_all(c);
    }
    if ((c->phase != PHASE_ENDED && c->phase != PHASE_READ) || !finished(c))
        return false;
    if (c->phase == PHASE_READ) {
        shards_clear(c);
        client_begin(c);
    } else {
        finish_step(c);
    }
    return true;
}
