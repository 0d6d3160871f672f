/* shard_replica.c - replication, the holder's side.
 *
 * IMAGE, MARK and SYNC_END count only in the epoch of this view, from the shard's primary in it, and not once a PREPARE has
 * named us its next primary. What counts is stored as it comes: the connection is FIFO. It is acknowledged when stored, with
 * durability=write when it is on disk. */
#include <string.h>

#include "base/log.h"
#include "server/shard_impl.h"
#include "wire/bytes.h"

enum { HAVE_ENTRY = 28, TRAILER_TAIL = 20 };

static bool counts(const struct shard_core *c, const struct shard *s, uint64_t from)
{
    bool fenced = s->fenced && !MUTANT(52);
    return (s->backup || s->joining) && !fenced && c->view->shard[s->no].primary == from;
}

static void ack_send(struct shard_core *c, uint64_t to, uint32_t loop, struct frame_header f)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_SEND);
    f.epoch = (uint32_t)c->view->epoch;
    e->to = to;
    e->loop = loop;
    e->is_server = true;
    e->header = f;
}

static struct frame_header image_ack(const struct frame_header *f, int status)
{
    return (struct frame_header){.type = FRAME_IMAGE_ACK, .flags = f->flags & FRAME_AGAIN, .tensor = f->tensor,
                                 .chunk = f->chunk, .seq = f->seq, .status = (int16_t)status};
}

/* ---- images ---- */

struct incoming {
    const struct shard_event *e;
    struct chunk *ch;
    struct image_head head;
    const uint8_t *members;        /* contributors and applied */
    size_t bytes;                  /* before the trailer */
    int64_t base_step;
    uint64_t base_version;
};

static int incoming_take(struct shard_core *c, const struct shard_event *e, struct incoming *ret)
{
    const struct buf *b = e->payload;
    struct incoming in = {.e = e, .ch = chunk_find(c, e->header.tensor, e->header.chunk)};
    if (!in.ch || !b || b->len < TRAILER_TAIL)
        return KS_EPROTO;
    uint32_t n = get_u32(b->data + b->len - 4);
    if (n > b->len - TRAILER_TAIL)
        return KS_EPROTO;
    in.bytes = b->len - TRAILER_TAIL - n;
    in.members = b->data + in.bytes;
    in.base_step = (int64_t)get_u64(b->data + b->len - TRAILER_TAIL);
    in.base_version = get_u64(b->data + b->len - TRAILER_TAIL + 8);
    /* The head counts the bytes of the image; a gradient stands in their place. */
    const uint8_t *peek = in.members;
    uint64_t image = 0;
    if (n >= 72)
        image = get_u64(peek + 48) + get_u64(peek + 56);
    if (image_head_take(&in.members, n + image, &in.head) || !image_sizes_fit(in.ch, &in.head))
        return KS_EPROTO;
    bool gradient = e->header.flags & FRAME_GRADIENT;
    size_t acc = in.ch->n * dtype_size(dtype_acc(in.ch->t->spec.dtype));
    if (in.bytes != (gradient ? acc : image))
        return KS_EPROTO;
    in.head.image.step = e->header.step;
    in.head.image.version = e->header.version;
    *ret = in;
    return 0;
}

static bool is_version(const struct image *i, int64_t step, uint64_t version)
{
    return i->step == step && i->version == version;
}

/* The reduced gradient of a step, applied to the version that the primary applied it to. Returns KS_EAGAIN when that is not
 * here. */
static int gradient_take(struct shard_core *c, const struct incoming *in)
{
    struct chunk *ch = in->ch;
    struct image next;
    if (is_version(&ch->cur, in->head.image.step, in->head.image.version))
        return 0;
    if (!is_version(&ch->cur, in->base_step, in->base_version) && !MUTANT(63)) {
        if (!ch->has_pre || !is_version(&ch->pre, in->base_step, in->base_version))
            return KS_EAGAIN;
        /* Ours is a version of this step that was never released. */
        image_drop(&ch->cur);
        ch->cur = ch->pre;
        ch->pre = (struct image){0};
        ch->has_pre = false;
    }
    in->e->payload->len = (uint32_t)in->bytes;
    if (!gradient_apply(c, ch, &ch->cur, in->head.image.step, in->e->payload, &next)) {
        shard_out_of_memory(c);
        return KS_EAGAIN;
    }
    next.step = in->head.image.step;
    next.version = in->head.image.version;
    next.updates = in->head.image.updates;
    next.disk_slot = ch->cur.disk_slot ^ 1;
    image_drop(&ch->pre);
    ch->pre = ch->cur;
    ch->has_pre = true;
    ch->cur = next;
    return 0;
}

static int whole_take(struct shard_core *c, struct incoming *in)
{
    struct chunk *ch = in->ch;
    uint8_t flags = in->e->header.flags;
    if (image_bytes_take(c, ch, in->e->payload->data, &in->head)) {
        shard_out_of_memory(c);
        return KS_EAGAIN;
    }
    if (flags & FRAME_BEFORE) {
        image_drop(&ch->pre);
        ch->pre = in->head.image;
        ch->pre.disk_slot = 0;
        ch->has_pre = true;
        ch->before_item = in->e->header.seq;
        ch->before = true;
        return 0;
    }
    if (flags & FRAME_AGAIN) {
        if (!ch->before || ch->before_item != in->e->header.seq) {
            image_drop(&ch->pre);
            ch->has_pre = false;
        }
        in->head.image.disk_slot = ch->has_pre ? ch->pre.disk_slot ^ 1 : ch->cur.disk_slot;
    } else {
        async_result_keep(ch->s, ch);
        in->head.image.disk_slot = ch->cur.disk_slot;
    }
    ch->before = false;
    image_drop(&ch->cur);
    ch->cur = in->head.image;
    return 0;
}

static void image_stored(struct shard_core *c, struct incoming *in)
{
    struct chunk *ch = in->ch;
    const struct shard_event *e = in->e;
    const struct image *i = e->header.flags & FRAME_BEFORE ? &ch->pre : &ch->cur;
    if (i == &ch->cur) {
        image_members_take(c, ch, &in->members, &in->head);
        ch->trained |= ch->cur.step >= 0 || ch->cur.updates > 0;
        ch->held_version = ch->cur.version;
        ch->released = false;
    }
    if (in->head.initialised && ch->no == 0)
        ch->t->initialised = true;
    struct wait w = {.kind = WAIT_IMAGE_ACK, .chunk = ch, .member = e->from, .loop = e->loop, .item = e->header.seq,
                     .flags = e->header.flags & FRAME_AGAIN};
    if (c->cfg.durable) {
        w.seq = persist_image(c, ch, i);
        if (i == &ch->cur)
            wait_add(c, w);
    } else if (i == &ch->cur) {
        ack_send(c, e->from, e->loop, image_ack(&e->header, 0));
    }
}

static void on_image(struct shard_core *c, const struct shard_event *e)
{
    struct incoming in;
    struct chunk *ch = chunk_find(c, e->header.tensor, e->header.chunk);
    if (ch && !counts(c, ch->s, e->from))
        return;
    if (incoming_take(c, e, &in)) {
        log_error("image_refused", "from=%llu cause=\"malformed image\"", (unsigned long long)e->from);
        return;
    }
    int r = e->header.flags & FRAME_GRADIENT ? gradient_take(c, &in) : whole_take(c, &in);
    if (r)
        ack_send(c, e->from, e->loop, image_ack(&e->header, r));
    else
        image_stored(c, &in);
}

/* ---- marks ---- */

static void on_mark(struct shard_core *c, const struct shard_event *e)
{
    const struct frame_header *f = &e->header;
    struct shard *s = f->tensor < c->cfg.nshards && shard_is_mine(c, (uint32_t)f->tensor) ? &c->shard[f->tensor] : NULL;
    const struct buf *b = e->payload;
    if (!s || !b || !counts(c, s, e->from))
        return;
    size_t n = f->version;
    if (n > b->len || shard_record_take(s, b->data, n) ||
        (b->len > n && !MUTANT(66) && settings_take_record(c, b->data + n, b->len - n))) {
        log_error("mark_refused", "from=%llu cause=\"malformed mark\"", (unsigned long long)e->from);
        return;
    }
    sync_open(c, s);
    struct frame_header ack = {.type = FRAME_MARK_ACK, .tensor = s->no, .seq = f->seq};
    if (!c->cfg.durable) {
        ack_send(c, e->from, e->loop, ack);
        return;
    }
    uint64_t seq = persist_shard(c, s);
    wait_add(c, (struct wait){.kind = WAIT_MARK_ACK, .seq = seq, .shard = s, .member = e->from, .loop = e->loop,
                              .item = f->seq});
}

void replica_ack_durable(struct shard_core *c, const struct wait *w)
{
    struct frame_header f = {.flags = w->flags, .seq = w->item};
    if (w->kind == WAIT_MARK_ACK) {
        f.type = FRAME_MARK_ACK;
        f.tensor = w->shard->no;
    } else {
        f.type = FRAME_IMAGE_ACK;
        f.tensor = w->chunk->t->spec.id;
        f.chunk = w->chunk->no;
    }
    ack_send(c, w->member, w->loop, f);
}

/* ---- catching up ---- */

static void sync_ok(struct shard_core *c, const struct shard *s)
{
    uint64_t primary = c->view->shard[s->no].primary;
    ack_send(c, primary, server_loop(c, primary, s->no), (struct frame_header){.type = FRAME_SYNC_OK, .tensor = s->no});
}

static void have_send(struct shard_core *c, const struct shard *s)
{
    uint64_t primary = c->view->shard[s->no].primary;
    struct buf *b = s->nchunks ? pool_get(c->cfg.pool, s->nchunks * HAVE_ENTRY) : NULL;
    uint32_t n = 0;
    for (uint32_t i = 0; b && i < s->nchunks; i++) {
        const struct chunk *ch = s->chunk[i];
        uint8_t *p = b->data + n * HAVE_ENTRY;
        if (!ch->cur.version && ch->cur.step < 0)
            continue;
        put_u64(p, ch->t->spec.id);
        put_u32(p + 8, ch->no);
        put_u64(p + 12, (uint64_t)ch->cur.step);
        put_u64(p + 20, ch->cur.version);
        n++;
    }
    struct shard_effect *e = shard_effect_add(c, SHARD_SEND);
    e->to = primary;
    e->loop = server_loop(c, primary, s->no);
    e->is_server = true;
    e->header = (struct frame_header){.type = FRAME_HAVE, .tensor = s->no, .epoch = (uint32_t)c->view->epoch,
                                      .len = n * HAVE_ENTRY};
    if (n) {
        b->len = n * HAVE_ENTRY;
        e->payload = b;
    } else {
        buf_unref(b);
    }
}

void replica_adopt(struct shard_core *c, struct shard *s)
{
    if (s->full)
        sync_ok(c, s);
    else
        have_send(c, s);
}

void replica_peer_up(struct shard_core *c, uint64_t id, uint32_t loop)
{
    for (uint32_t i = 0; c->view && i < c->cfg.nshards; i++) {
        struct shard *s = &c->shard[i];
        if (s->joining && c->view->shard[i].primary == id && server_loop(c, id, i) == loop)
            replica_adopt(c, s);
    }
}

void replica_declare(struct shard_core *c, const struct tensor_spec *spec)
{
    struct optim optim = {.kind = OPTIM_ADD};
    char err[256];
    if (map_get(&c->tensors, spec->id))
        return;
    if (spec->kind == TENSOR_PARAM && optim_parse(spec->optimizer[0] ? spec->optimizer : "add", &optim, err)) {
        log_error("declare_refused", "tensor=%s cause=\"%s\"", spec->name, err);
        return;
    }
    struct tensor *t = tensor_add(c, spec, &optim);
    if (c->cfg.durable)
        persist_tensor(c, t);
}

void replica_frame(struct shard_core *c, const struct shard_event *e)
{
    if (e->header.type == FRAME_IMAGE) {
        on_image(c, e);
    } else if (e->header.type == FRAME_MARK) {
        on_mark(c, e);
    } else if (e->header.type == FRAME_SYNC_END && e->header.tensor < c->cfg.nshards) {
        struct shard *s = &c->shard[e->header.tensor];
        if (!s->joining || !counts(c, s, e->from))
            return;
        s->full = true;
        sync_ok(c, s);
    }
}

/* The shard is served elsewhere now, and this server holds no part of it any more. */
void shard_drop_data(struct shard_core *c, struct shard *s)
{
    for (uint32_t i = 0; i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        bool stored = ch->image_seq > 0;
        acc_clear(c, ch);
        image_drop(&ch->cur);
        image_drop(&ch->pre);
        buf_unref(ch->held_out);
        buf_unref(ch->flying_out);
        ch->held_out = ch->flying_out = NULL;
        ch->cur = (struct image){.step = -1};
        ch->has_pre = ch->trained = ch->flying = false;
        ch->held_version = ch->image_seq = 0;
        ch->persist_seq = ch->flying_seq = 0;
        ch->item = 0;
        mset_clear(&ch->mask);
        if (ch->capplied)
            memset(ch->applied, 0, ch->capplied * sizeof *ch->applied);
        for (uint32_t k = 0; c->cfg.durable && stored && k < 2; k++)
            persist_delete(c, ch, k);
    }
    s->complete = -1;
    s->ncset = 0;
    s->w = s->w_held = 0;
    s->held = s->full = false;
    if (c->cfg.durable)
        persist_shard(c, s);
}
