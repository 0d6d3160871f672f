/* shard_core.c - the dispatcher: events in, effects out; sinks, parking, statistics. */
#include <string.h>

#include "base/log.h"
#include "server/shard_impl.h"

struct op_block {
    struct op_block *next;
    uint32_t n;
    struct store_op op[64];
};

struct shard_core *shard_core_create(const struct shard_config *config)
{
    struct shard_core *c = mem_alloc(sizeof *c);
    c->cfg = *config;
    if (!c->cfg.parked_max)
        c->cfg.parked_max = 4096;
    map_init(&c->slot_of);
    map_init(&c->tensors);
    c->shard = mem_alloc(c->cfg.nshards * sizeof *c->shard);
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        struct shard *s = &c->shard[i];
        s->no = i;
        s->complete = -1;
        s->cap = STEP_NONE;
        s->w_cap = STEP_NONE;
        if (!shard_is_mine(c, i))
            continue;
        s->nslots = MSET_MAX;
        s->cset = mem_alloc(MSET_MAX * sizeof *s->cset);
        s->want = mem_alloc(MSET_MAX * sizeof *s->want);
        s->have = mem_alloc(MSET_MAX * sizeof *s->have);
        s->clock = mem_alloc(MSET_MAX * sizeof *s->clock);
    }
    return c;
}

static void shard_done(struct shard *s)
{
    mem_free(s->cset);
    mem_free(s->want);
    mem_free(s->have);
    mem_free(s->clock);
    mem_free(s->chunk);
}

static void parked_done(struct parked *p)
{
    buf_unref(p->payload);
    mem_free(p->spec);
}

void shard_core_free(struct shard_core *c)
{
    if (!c)
        return;
    uint32_t i = 0;
    void *t;
    while (map_next(&c->tensors, &i, NULL, &t))
        tensor_free(t);
    for (uint32_t k = 0; k < c->cfg.nshards; k++)
        shard_done(&c->shard[k]);
    for (uint32_t k = 0; k < c->nparked; k++)
        parked_done(&c->parked[k]);
    for (struct op_block *b = c->op_block, *next; b; b = next) {
        next = b->next;
        mem_free(b);
    }
    for (struct contrib *k = c->free_contrib, *next; k; k = next) {
        next = k->next;
        mem_free(k);
    }
    for (uint32_t k = 0; k < c->nlinks; k++)
        map_done(&c->link[k].told);
    mem_free(c->link);
    map_done(&c->slot_of);
    map_done(&c->tensors);
    view_free(c->view);
    mem_free(c->cut);
    mem_free(c->shard);
    mem_free(c->setting);
    mem_free(c->wait);
    mem_free(c->parked);
    mem_free(c->completed);
    mem_free(c->report);
    mem_free(c);
}

void shard_outbox_done(struct shard_outbox *o)
{
    mem_free(o->effect);
    *o = (struct shard_outbox){0};
}

/* ---- effects ---- */

struct shard_effect *shard_effect_add(struct shard_core *c, enum shard_effect_kind kind)
{
    struct shard_outbox *o = c->out;
    ARRAY_ROOM(o->effect, o->n, o->cap);
    struct shard_effect *e = &o->effect[o->n++];
    memset(e, 0, sizeof *e);
    e->kind = kind;
    return e;
}

void shard_send(struct shard_core *c, uint64_t to, const struct frame_header *h, struct buf *payload)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_SEND);
    e->to = to;
    e->header = *h;
    e->header.epoch = (uint32_t)c->view->epoch;
    e->header.len = payload ? payload->len : 0;
    e->payload = payload ? buf_ref(payload) : NULL;
    c->stats.bytes_out += e->header.len;
}

void shard_close(struct shard_core *c, uint64_t peer, int status, const char *text)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_CLOSE);
    e->to = peer;
    e->status = status;
    (void)str_copy(e->text, sizeof e->text, text);
}

void shard_refuse(struct shard_core *c, uint64_t to, const struct frame_header *h, int status)
{
    struct frame_header r = {.type = FRAME_REFUSED, .tensor = h->tensor, .chunk = h->chunk, .step = h->step,
                             .seq = h->seq, .status = (int16_t)status};
    uint32_t slot = slot_find(c, to);
    if (slot != SLOT_NONE)
        c->slot[slot].stats.refused++;
    shard_send(c, to, &r, NULL);
}

void shard_out_of_memory(struct shard_core *c)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_FATAL);
    e->status = KS_ENOMEM;
    (void)str_copy(e->text, sizeof e->text,
                   "the memory limit is too small for this model and its optimizer state: raise --memory");
}

struct store_op *shard_ops(struct shard_core *c, uint32_t n)
{
    CHECK(n <= 64);
    if (!c->op_now || c->op_now->n + n > 64) {
        struct op_block **at = c->op_now ? &c->op_now->next : &c->op_block;
        if (!*at)
            *at = mem_alloc(sizeof **at);
        c->op_now = *at;
        c->op_now->n = 0;
    }
    struct store_op *op = &c->op_now->op[c->op_now->n];
    c->op_now->n += n;
    return op;
}

/* ---- lookups ---- */

uint32_t slot_find(const struct shard_core *c, uint64_t id)
{
    struct slot *s = map_get(&c->slot_of, id);
    return s ? (uint32_t)(s - c->slot) : SLOT_NONE;
}

struct chunk *chunk_find(const struct shard_core *c, uint64_t tensor, uint32_t chunk)
{
    struct tensor *t = map_get(&c->tensors, tensor);
    return t && chunk < t->nchunks ? t->chunk[chunk] : NULL;
}

struct mode shard_mode(const struct shard_core *c, int64_t step)
{
    return view_mode_at(c->view, step < 0 ? 0 : step);
}

struct buf *shard_zeros(struct shard_core *c, size_t size)
{
    struct buf *b = pool_get(c->cfg.pool, size);
    if (b)
        memset(b->data, 0, size);
    return b;
}

void image_drop(struct image *i)
{
    buf_unref(i->value);
    buf_unref(i->state);
    buf_unref(i->out);
    i->value = i->state = i->out = NULL;
}

struct image image_ref(const struct image *i)
{
    struct image r = *i;
    if (r.value)
        buf_ref(r.value);
    if (r.state)
        buf_ref(r.state);
    if (r.out)
        buf_ref(r.out);
    return r;
}

struct buf *image_out(struct shard_core *c, struct chunk *ch, const struct image *i)
{
    return i->out ? buf_ref(i->out) : shard_zeros(c, ch->bytes);
}

bool chunk_materialise(struct shard_core *c, struct chunk *ch)
{
    enum dtype acc = dtype_acc(ch->t->spec.dtype);
    size_t size = ch->n * dtype_size(acc);
    if (!ch->cur.value && !(ch->cur.value = shard_zeros(c, size)))
        return false;
    if (!ch->cur.state && ch->t->slots) {
        ch->cur.state = pool_get(c->cfg.pool, size * ch->t->slots);
        if (!ch->cur.state)
            return false;
        optim_state_init(&ch->t->optim, acc, ch->cur.state->data, ch->n);
    }
    return true;
}

/* ---- frames ---- */

/* Where an upload goes: the exact bytes of a chunk that is declared here. */
static bool upload_fits(const struct shard_core *c, const struct frame_header *h)
{
    const struct chunk *ch = chunk_find(c, h->tensor, h->chunk);
    return ch && h->len == ch->bytes && h->dtype == ch->t->spec.dtype;
}

struct buf *shard_core_sink(struct shard_core *c, uint64_t from, const struct frame_header *h)
{
    (void)from;
    if (!h->len)
        return NULL;
    if (h->type == FRAME_PUSH || h->type == FRAME_INIT)
        return upload_fits(c, h) ? pool_get(c->cfg.pool, h->len) : NULL;
    if (h->type == FRAME_IMAGE || h->type == FRAME_MARK || h->type == FRAME_HAVE)
        return pool_get(c->cfg.pool, h->len);
    if (h->type == FRAME_DONE || h->type == FRAME_CLOCK)
        return h->len <= FRAME_CONTROL_MAX ? pool_get(c->cfg.pool, h->len) : NULL;
    return NULL;
}

static bool is_cut(const struct shard_core *c, uint64_t id)
{
    for (uint32_t i = 0; i < c->ncut; i++)
        if (c->cut[i] == id)
            return true;
    return false;
}

static void on_push(struct shard_core *c, uint32_t slot, const struct frame_header *h, struct buf *payload)
{
    struct chunk *ch = chunk_find(c, h->tensor, h->chunk);
    uint64_t from = c->slot[slot].id;
    c->slot[slot].stats.pushes++;
    c->stats.pushes++;
    if (!ch || (payload && payload->len != ch->bytes)) {
        buf_unref(payload);
        shard_close(c, from, KS_EPROTO, "push of a chunk that is not declared here, or of another size");
        return;
    }
    if (!ch->s->primary || (int32_t)(h->epoch - (uint32_t)ch->s->since) < 0) {
        if (!ch->s->primary || !MUTANT(25)) {
            buf_unref(payload);
            shard_refuse(c, from, h, KS_EAGAIN);
            return;
        }
    }
    if (payload) {
        c->stats.bytes_in += payload->len;
        c->slot[slot].stats.bytes += payload->len;
    }
    if (shard_mode(c, h->step).kind == MODE_SYNC)
        sync_push(c, slot, h, payload);
    else
        async_push(c, slot, h, payload);
}

static void on_pull(struct shard_core *c, uint32_t slot, const struct frame_header *h)
{
    struct chunk *ch = chunk_find(c, h->tensor, h->chunk);
    uint64_t from = c->slot[slot].id;
    c->stats.pulls++;
    if (!ch) {
        shard_close(c, from, KS_EPROTO, "pull of a chunk that is not declared here");
        return;
    }
    bool tenure = (int32_t)(h->epoch - (uint32_t)ch->s->since) >= 0 || MUTANT(25);
    if (!ch->s->primary || !tenure)
        shard_refuse(c, from, h, KS_EAGAIN);
    else if (shard_mode(c, h->step).kind == MODE_SYNC)
        sync_pull(c, ch, slot, h);
    else
        async_pull(c, ch, slot, h);
}

static void on_done(struct shard_core *c, uint32_t slot, const struct frame_header *h, struct buf *payload)
{
    static const uint8_t nothing[8];
    struct done_head d;
    int r = done_decode(payload ? payload->data : nothing, payload ? payload->len : sizeof nothing, &d);
    if (r)
        shard_close(c, c->slot[slot].id, KS_EPROTO, "malformed DONE or CLOCK");
    else if (h->type == FRAME_DONE)
        sync_done(c, slot, h, &d);
    else
        async_clock(c, slot, h, &d);
}

static void park(struct shard_core *c, const struct shard_event *e)
{
    if (c->nparked >= c->cfg.parked_max) {
        buf_unref(e->payload);
        shard_close(c, e->from, KS_EAGAIN, "too many frames of a newer view; connect again");
        return;
    }
    ARRAY_ROOM(c->parked, c->nparked, c->cparked);
    struct parked *p = &c->parked[c->nparked++];
    *p = (struct parked){.from = e->from, .loop = e->loop, .is_server = e->is_server, .header = e->header, .payload = e->payload, .discarded = e->discarded,
                         .declare = e->kind == SHARD_DECLARE};
    if (e->spec)
        p->spec = mem_dup(e->spec, sizeof *e->spec);
    shard_effect_add(c, SHARD_WANT_VIEW)->epoch = e->header.epoch;
}

/* There was no buffer for it. The member sends it again on its next connection; when nothing at all was taken in between, again
 * and again, the limit is too small for one step. */
static void on_discarded(struct shard_core *c, const struct shard_event *e)
{
    if (e->header.type == FRAME_PUSH && !upload_fits(c, &e->header)) {
        shard_close(c, e->from, KS_EPROTO, "payload does not fit the declared tensor");
        return;
    }
    c->discards = c->stats.applied == c->discards_applied ? c->discards + 1 : 1;
    c->discards_applied = c->stats.applied;
    if (c->discards >= DISCARDS_MAX)
        shard_out_of_memory(c);
    else
        shard_close(c, e->from, KS_ENOMEM, "out of buffers; connect again");
}

static void frame_handle(struct shard_core *c, uint32_t slot, const struct shard_event *e)
{
    const struct frame_header *h = &e->header;
    if (e->discarded) {
        on_discarded(c, e);
        return;
    }
    switch (h->type) {
    case FRAME_PUSH:
        on_push(c, slot, h, e->payload);
        return;
    case FRAME_INIT:
        shard_on_init(c, e->from, h, e->payload);
        return;
    case FRAME_PULL:
        on_pull(c, slot, h);
        break;
    case FRAME_DONE:
    case FRAME_CLOCK:
        on_done(c, slot, h, e->payload);
        break;
    default:
        shard_close(c, e->from, KS_EPROTO, "a member does not send this frame");
    }
    buf_unref(e->payload);
}

/* Data of another server counts only in the epoch of this view, from a server that it lists. */
static void server_frame(struct shard_core *c, const struct shard_event *e)
{
    bool current = e->header.epoch == (uint32_t)c->view->epoch || MUTANT(53);
    if (e->kind == SHARD_DECLARE) {
        replica_declare(c, e->spec);
        return;
    }
    if (e->discarded)
        shard_out_of_memory(c);
    else if (view_server_find(c->view, e->from) && current) {
        if (e->header.type == FRAME_IMAGE || e->header.type == FRAME_MARK || e->header.type == FRAME_SYNC_END)
            replica_frame(c, e);
        else
            holders_frame(c, e);
    }
    buf_unref(e->payload);
}

static void on_frame(struct shard_core *c, const struct shard_event *e)
{
    if (is_cut(c, e->from) && !MUTANT(14)) {
        buf_unref(e->payload);
        return;
    }
    /* A life without a view yet, the heir that a member already knows, waits for its first one. */
    if (!c->view || ((int32_t)(e->header.epoch - (uint32_t)c->view->epoch) > 0 && !MUTANT(15))) {
        park(c, e);
        return;
    }
    if (e->is_server) {
        server_frame(c, e);
        return;
    }
    uint32_t slot = slot_find(c, e->from);
    if (slot == SLOT_NONE || (!c->slot[slot].live && !MUTANT(14))) {
        struct frame_header h = {.type = FRAME_FENCED};
        buf_unref(e->payload);
        shard_send(c, e->from, &h, NULL);
        return;
    }
    if (e->kind == SHARD_DECLARE)
        shard_on_declare(c, e->from, &e->header, e->spec);
    else
        frame_handle(c, slot, e);
}

/* Was this peer's connection closed by an effect from number `first` on? */
static bool closed_since(const struct shard_core *c, uint32_t first, uint64_t peer)
{
    for (uint32_t i = first; i < c->out->n; i++)
        if (c->out->effect[i].kind == SHARD_CLOSE && c->out->effect[i].to == peer)
            return true;
    return false;
}

/* Frames that waited for this view, in their order. What is still too new is parked again. What came behind a frame that
 * closed its connection must not count: the peer sends all of it again. */
static void unpark(struct shard_core *c)
{
    uint32_t first = c->out->n;
    struct parked *list = c->parked;
    uint32_t n = c->nparked;
    c->parked = NULL;
    c->nparked = c->cparked = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (closed_since(c, first, list[i].from) && !MUTANT(68)) {
            parked_done(&list[i]);
            continue;
        }
        struct shard_event e = {.kind = list[i].declare ? SHARD_DECLARE : SHARD_FRAME, .now_us = c->now_us,
                                .from = list[i].from, .loop = list[i].loop, .is_server = list[i].is_server,
                                .header = list[i].header, .payload = list[i].payload,
                                .discarded = list[i].discarded, .spec = list[i].spec};
        on_frame(c, &e);
        mem_free(list[i].spec);
    }
    mem_free(list);
}

/* Frames that a dead connection left behind will come again on the new one. */
static bool travels_out(uint8_t type)
{
    return type == FRAME_IMAGE || type == FRAME_MARK || type == FRAME_SYNC_END || type == FRAME_DECLARE;
}

static void parked_drop(struct shard_core *c, const struct shard_event *e)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->nparked; i++) {
        const struct parked *p = &c->parked[i];
        bool other_way = e->is_server && travels_out(p->header.type) == e->outgoing;
        if (p->from == e->from && p->loop == e->loop && !other_way)
            parked_done(&c->parked[i]);
        else
            c->parked[n++] = c->parked[i];
    }
    c->nparked = n;
}

static void on_durable(struct shard_core *c, uint64_t seq)
{
    CHECK(seq <= c->seq);
    if (seq > c->durable)
        c->durable = seq;
    while (c->nwait && c->wait[c->wait_head].seq <= c->durable) {
        struct wait w = c->wait[c->wait_head];
        c->wait_head = (c->wait_head + 1) % c->cwait;
        c->nwait--;
        switch (w.kind) {
        case WAIT_RESULT:
            sync_result_durable(c, &w);
            break;
        case WAIT_MARK:
            sync_mark_durable(c, &w);
            break;
        case WAIT_ASYNC:
            async_durable(c, &w);
            break;
        case WAIT_W:
            async_w_durable(c, &w);
            break;
        case WAIT_DECLARE:
            declare_durable(c, &w);
            break;
        case WAIT_ANNOUNCE:
            if (w.shard->primary && w.item == w.shard->announce_item) {
                w.shard->announce_acks |= DISK_BIT;
                sync_announce_check(c, w.shard);
            }
            break;
        case WAIT_IMAGE_ACK:
        case WAIT_MARK_ACK:
            replica_ack_durable(c, &w);
            break;
        }
    }
}

void wait_add(struct shard_core *c, struct wait w)
{
    if (c->nwait == c->cwait) {
        uint32_t cap = c->cwait ? c->cwait * 2 : 64;
        struct wait *grown = mem_alloc(cap * sizeof *grown);
        for (uint32_t i = 0; i < c->nwait; i++)
            grown[i] = c->wait[(c->wait_head + i) % c->cwait];
        mem_free(c->wait);
        c->wait = grown;
        c->cwait = cap;
        c->wait_head = 0;
    }
    c->wait[(c->wait_head + c->nwait++) % c->cwait] = w;
}

void shard_core_step(struct shard_core *c, const struct shard_event *e, struct shard_outbox *out)
{
    out->n = 0;
    c->out = out;
    c->now_us = e->now_us;
    c->op_now = c->op_block;
    if (c->op_now)
        c->op_now->n = 0;
    switch (e->kind) {
    case SHARD_FRAME:
    case SHARD_DECLARE:
        on_frame(c, e);
        break;
    case SHARD_PEER_UP:
        parked_drop(c, e);
        if (e->is_server && e->outgoing)
            holders_peer_up(c, e->from, e->loop);
        else if (e->is_server)
            replica_peer_up(c, e->from, e->loop);
        break;
    case SHARD_DURABLE:
        on_durable(c, e->seq);
        break;
    case SHARD_PREPARE:
        shard_on_prepare(c, e->prepare);
        break;
    case SHARD_ADOPT:
        if (!c->view || e->view->epoch > c->view->epoch) {
            shard_on_adopt(c, e->view);
            unpark(c);
        }
        break;
    }
    if (c->view)
        sync_flush_completed(c);
    shard_log_after(c);
    c->out = NULL;
}

/* ---- statistics ---- */

void shard_core_stats(const struct shard_core *c, struct shard_stats *ret)
{
    *ret = c->stats;
    ret->tensors = c->tensors.count;
    ret->complete_min = ret->clock_min = INT64_MAX;
    ret->complete_max = -1;
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        const struct shard *s = &c->shard[i];
        ret->chunks += s->nchunks;
        if (!s->primary)
            continue;
        ret->primaries++;
        ret->complete_min = s->complete < ret->complete_min ? s->complete : ret->complete_min;
        ret->complete_max = s->complete > ret->complete_max ? s->complete : ret->complete_max;
        ret->clock_min = s->w < ret->clock_min ? s->w : ret->clock_min;
    }
    if (!ret->primaries)
        ret->complete_min = ret->clock_min = -1;
}

uint32_t shard_core_member_stats(const struct shard_core *c, struct shard_member_stats *ret, uint32_t max)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->nslots; i++) {
        if (!c->slot[i].id || !c->slot[i].live)
            continue;
        if (n < max) {
            ret[n] = c->slot[i].stats;
            ret[n].id = c->slot[i].id;
        }
        n++;
    }
    return n;
}

uint32_t shard_core_waiting(const struct shard_core *c, uint64_t *ret_ids, uint32_t max, int64_t *ret_step)
{
    struct mset missing = {{0}};
    int64_t step = -1;
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        const struct shard *s = &c->shard[i];
        if (!s->primary || mset_empty(&s->oset) || mset_empty(&s->fact))
            continue;
        step = s->complete + 1;
        for (int k = 0; k < MSET_WORDS; k++)
            missing.w[k] |= s->oset.w[k] & ~s->done.w[k];
    }
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->nslots; i++)
        if (mset_has(&missing, i) && n++ < max)
            ret_ids[n - 1] = c->slot[i].id;
    *ret_step = step;
    return n;
}

bool shard_core_peek(const struct shard_core *c, uint64_t tensor, uint32_t chunk, struct shard_chunk_peek *ret)
{
    const struct chunk *ch = chunk_find(c, tensor, chunk);
    if (!ch)
        return false;
    *ret = (struct shard_chunk_peek){.step = ch->cur.step, .version = ch->cur.version, .value = ch->cur.value,
                                     .result = ch->cur.out, .spec = &ch->t->spec};
    return true;
}

int64_t shard_core_complete(const struct shard_core *c, uint32_t shard)
{
    return shard < c->cfg.nshards ? c->shard[shard].complete : -1;
}

uint32_t shard_core_applied(const struct shard_core *c, uint64_t tensor, uint32_t chunk, uint64_t member)
{
    const struct chunk *ch = chunk_find(c, tensor, chunk);
    uint32_t slot = slot_find(c, member);
    return ch && slot != SLOT_NONE && slot < ch->capplied ? ch->applied[slot] : 0;
}
