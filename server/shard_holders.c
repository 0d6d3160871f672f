/* shard_holders.c - replication, the primary's side.
 *
 * Everything that must be safe before it counts is an item with a number: a chunk's result or image, a mark, W. Backups and
 * joiners that were told SYNC_END are required, and so is our disk with durability=write. In synchronous steps backups are
 * sent the reduced gradient and apply it themselves: the same code makes the same bits, for a third of the traffic. A joiner
 * catches up by whole images, a bounded number of bytes at a time, while steps go on. */
#include <string.h>

#include "base/log.h"
#include "server/shard_impl.h"
#include "wire/bytes.h"

enum { HAVE_ENTRY = 28, TRAILER_TAIL = 20 };

static struct holder *holder_find(struct shard *s, uint64_t id, uint8_t *ret_bit)
{
    for (int i = 0; i < HOLDERS_MAX; i++) {
        if (s->holder[i].id != id)
            continue;
        *ret_bit = (uint8_t)(1u << i);
        return &s->holder[i];
    }
    return NULL;
}

static void masks_update(struct shard_core *c, struct shard *s)
{
    s->required = c->cfg.durable ? DISK_BIT : 0;
    s->targets = 0;
    for (int i = 0; i < HOLDERS_MAX; i++) {
        const struct holder *h = &s->holder[i];
        if (h->id && h->required)
            s->required |= (uint8_t)(1u << i);
        if (h->id && (h->required || h->catching))
            s->targets |= (uint8_t)(1u << i);
    }
}

/* ---- sending ---- */

static struct link *link_get(struct shard_core *c, uint64_t id, uint32_t loop)
{
    for (uint32_t i = 0; i < c->nlinks; i++)
        if (c->link[i].id == id && c->link[i].loop == loop)
            return &c->link[i];
    ARRAY_ROOM(c->link, c->nlinks, c->clinks);
    struct link *l = &c->link[c->nlinks++];
    *l = (struct link){.id = id, .loop = loop};
    map_init(&l->told);
    return l;
}

static struct shard_effect *server_send(struct shard_core *c, const struct holder *h, struct frame_header f, struct buf *payload)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_SEND);
    f.epoch = (uint32_t)c->view->epoch;
    f.len = payload ? payload->len : 0;
    e->to = h->id;
    e->loop = h->loop;
    e->is_server = true;
    e->header = f;
    e->payload = payload ? buf_ref(payload) : NULL;
    return e;
}

/* A holder knows a tensor before it gets an image of it. */
static bool tell_tensor(struct shard_core *c, const struct holder *h, struct tensor *t)
{
    struct link *l = link_get(c, h->id, h->loop);
    if (map_get(&l->told, t->spec.id))
        return true;
    char *text = tensor_encode(&t->spec);
    size_t n = strlen(text);
    struct buf *b = pool_get(c->cfg.pool, n);
    if (b) {
        memcpy(b->data, text, n);
        server_send(c, h, (struct frame_header){.type = FRAME_DECLARE, .tensor = t->spec.id}, b);
        buf_unref(b);
        map_put(&l->told, t->spec.id, t);
    } else {
        shard_out_of_memory(c);
    }
    mem_free(text);
    return b != NULL;
}

/* Behind the bytes: the record's head, the version that a gradient applies to, and how long all that is. */
static struct buf *trailer_make(struct shard_core *c, struct chunk *ch, const struct image *i, const struct image *base)
{
    struct buf *head = image_record(c, ch, i);
    struct buf *b = head ? pool_get(c->cfg.pool, head->len + TRAILER_TAIL) : NULL;
    if (b) {
        memcpy(b->data, head->data, head->len);
        put_u64(b->data + head->len, (uint64_t)(base ? base->step : -1));
        put_u64(b->data + head->len + 8, base ? base->version : 0);
        put_u32(b->data + head->len + 16, head->len);
    } else {
        shard_out_of_memory(c);
    }
    buf_unref(head);
    return b;
}

static void image_send(struct shard_core *c, struct chunk *ch, const struct holder *h, const struct image *i, uint8_t flags,
                       struct buf *gradient)
{
    if (!tell_tensor(c, h, ch->t))
        return;
    struct buf *trailer = trailer_make(c, ch, i, gradient ? &ch->pre : NULL);
    if (!trailer)
        return;
    struct frame_header f = {.type = FRAME_IMAGE, .flags = (uint8_t)(flags | (gradient ? FRAME_GRADIENT : 0)),
                             .dtype = ch->t->spec.dtype, .tensor = ch->t->spec.id, .chunk = ch->no, .step = i->step,
                             .seq = ch->item, .version = i->version};
    struct shard_effect *e = server_send(c, h, f, gradient ? gradient : image_bytes(i));
    if (!gradient && i->state) {
        e->more[0] = buf_ref(i->state);
        e->header.len += i->state->len;
    }
    e->more[1] = trailer;
    e->header.len += trailer->len;
    c->stats.bytes_out += e->header.len;
}

/* All of a chunk, whatever the holder has: the version before, while it may be needed, then the current one. */
static void whole_send(struct shard_core *c, struct chunk *ch, const struct holder *h, uint8_t bit)
{
    if (ch->has_pre)
        image_send(c, ch, h, &ch->pre, FRAME_BEFORE, NULL);
    image_send(c, ch, h, &ch->cur, FRAME_AGAIN, NULL);
    ch->sent |= bit;
}

void holders_image(struct shard_core *c, struct chunk *ch, struct buf *gradient)
{
    struct shard *s = ch->s;
    for (int i = 0; i < HOLDERS_MAX; i++) {
        const struct holder *h = &s->holder[i];
        uint8_t bit = (uint8_t)(1u << i);
        if (!(s->targets & bit))
            continue;
        bool asynchronous = ch->flying;
        if (h->required && gradient)
            image_send(c, ch, h, &ch->cur, 0, gradient);
        else if (h->required && asynchronous)
            image_send(c, ch, h, &ch->cur, 0, NULL);
        else if (h->required || (ch->sent & bit))
            whole_send(c, ch, h, bit);
    }
}

void holders_mark(struct shard_core *c, struct shard *s, int64_t complete, const uint64_t *ids, uint32_t n, uint32_t item,
                  uint8_t to)
{
    struct buf *record = to ? shard_record(c, s, complete, ids, n) : NULL;
    struct buf *settings = record && c->nsetting ? settings_record(c) : NULL;
    for (int i = 0; record && i < HOLDERS_MAX; i++) {
        if (!(to & (1u << i)))
            continue;
        struct frame_header f = {.type = FRAME_MARK, .tensor = s->no, .step = complete, .seq = item,
                                 .version = record->len};
        struct shard_effect *e = server_send(c, &s->holder[i], f, record);
        if (settings) {
            e->more[0] = buf_ref(settings);
            e->header.len += settings->len;
        }
    }
    buf_unref(record);
    buf_unref(settings);
}

static void mark_again(struct shard_core *c, struct shard *s, uint8_t bit)
{
    uint64_t ids[MSET_MAX];
    uint32_t n = 0;
    if (!s->announced && s->announce_item && !(s->announce_acks & bit))
        holders_mark(c, s, s->complete, s->cset, s->ncset, s->announce_item, bit);
    if (s->w_item && !(s->w_acks & bit))
        holders_mark(c, s, s->complete, s->cset, s->ncset, s->w_item, bit);
    if (!s->marking || (s->mark_acks & bit))
        return;
    for (uint32_t m = 0; m < c->nslots; m++)
        if (mset_has(&s->mark_set, m))
            ids[n++] = c->slot[m].id;
    holders_mark(c, s, s->complete + 1, ids, n, s->mark_item, bit);
}

static bool unsafe(const struct chunk *ch)
{
    return ch->flying || (!ch->released && ch->cur.step == ch->s->complete + 1);
}

static void resend_to(struct shard_core *c, struct shard *s, const struct holder *h, uint8_t bit)
{
    /* Of the last asynchronous step nobody has acknowledged the mark. A pending one may be there already. */
    if (s->announced && !s->marking && !s->w_item)
        holders_mark(c, s, s->complete, s->cset, s->ncset, 0, bit);
    for (uint32_t i = 0; i < s->nchunks; i++)
        if (unsafe(s->chunk[i]) && !(s->chunk[i]->acks & bit))
            whole_send(c, s->chunk[i], h, bit);
    mark_again(c, s, bit);
}

void holders_resend(struct shard_core *c, struct shard *s)
{
    for (int i = 0; i < HOLDERS_MAX; i++)
        if (s->holder[i].id && s->holder[i].required)
            resend_to(c, s, &s->holder[i], (uint8_t)(1u << i));
}

/* ---- catching up ---- */

static uint64_t image_size(const struct chunk *ch)
{
    const struct buf *b = image_bytes(&ch->cur);
    return (b ? b->len : 0) + (ch->cur.state ? ch->cur.state->len : 0) + 1;
}

static bool has_data(const struct chunk *ch)
{
    return ch->cur.version || ch->cur.step >= 0 || ch->cur.out;
}

/* The joiner has everything that the primary has: from here on it is waited for, like a backup. */
static void sync_end(struct shard_core *c, struct shard *s, struct holder *h, uint8_t bit)
{
    /* It may have, and have acknowledged, a pending mark already: the one of `complete` would take that back. */
    if (s->marking)
        s->mark_acks &= (uint8_t)~bit;
    else
        holders_mark(c, s, s->complete, s->cset, s->ncset, 0, bit);
    h->required = !MUTANT(57);
    masks_update(c, s);
    mark_again(c, s, bit);
    server_send(c, h, (struct frame_header){.type = FRAME_SYNC_END, .tensor = s->no}, NULL);
}

static void catch_up(struct shard_core *c, struct shard *s, struct holder *h, uint8_t bit)
{
    if (!h->catching)
        return;
    while (h->cursor < s->nchunks && h->flying < CATCH_UP_BYTES) {
        struct chunk *ch = s->chunk[h->cursor++];
        if (ch->sent & bit)
            continue;
        ch->sent |= bit;
        if (!has_data(ch))
            continue;
        whole_send(c, ch, h, bit);
        h->flying += image_size(ch);
        c->log.catch_bytes += image_size(ch);
    }
    if (h->cursor < s->nchunks || h->flying > 0)
        return;
    h->catching = false;
    sync_end(c, s, h, bit);
}

static void forget_bit(struct shard *s, uint8_t bit)
{
    for (uint32_t i = 0; i < s->nchunks; i++) {
        s->chunk[i]->acks &= (uint8_t)~bit;
        s->chunk[i]->sent &= (uint8_t)~bit;
    }
    s->mark_acks &= (uint8_t)~bit;
    s->announce_acks &= (uint8_t)~bit;
    s->w_acks &= (uint8_t)~bit;
}

static void sent_all(struct shard *s, uint8_t bit)
{
    for (uint32_t i = 0; i < s->nchunks; i++)
        s->chunk[i]->sent |= bit;
}

static void on_have(struct shard_core *c, struct shard *s, struct holder *h, uint8_t bit, const struct buf *payload)
{
    uint32_t n = payload ? payload->len / HAVE_ENTRY : 0;
    for (uint32_t i = 0; i < s->nchunks; i++)
        s->chunk[i]->sent &= (uint8_t)~bit;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *p = payload->data + i * HAVE_ENTRY;
        struct chunk *ch = chunk_find(c, get_u64(p), get_u32(p + 8));
        /* What may still be undone is sent with the version before it. */
        if (ch && ch->s == s && !ch->has_pre && ch->cur.step == (int64_t)get_u64(p + 12) &&
            (ch->cur.version == get_u64(p + 20) || MUTANT(59)) && !unsafe(ch))
            ch->sent |= bit;
    }
    shard_log_catch_up(c, h->id);
    h->catching = true;
    h->cursor = 0;
    h->flying = 0;
    masks_update(c, s);
    catch_up(c, s, h, bit);
}

/* ---- answers of holders ---- */

static void on_image_ack(struct shard_core *c, const struct shard_event *e)
{
    const struct frame_header *f = &e->header;
    struct chunk *ch = chunk_find(c, f->tensor, f->chunk);
    uint8_t bit;
    struct holder *h = ch && ch->s->primary ? holder_find(ch->s, e->from, &bit) : NULL;
    if (!h)
        return;
    if (f->status) {
        whole_send(c, ch, h, bit);
        return;
    }
    if (h->catching && (f->flags & FRAME_AGAIN))
        h->flying -= h->flying < image_size(ch) ? h->flying : image_size(ch);
    if (f->seq && (f->seq == ch->item || MUTANT(65))) {
        ch->acks |= bit;
        if (ch->flying)
            async_check(c, ch);
        else
            sync_check(c, ch);
    }
    catch_up(c, ch->s, h, bit);
}

static void on_mark_ack(struct shard_core *c, struct shard *s, uint8_t bit, uint32_t item)
{
    if (s->marking && item == s->mark_item) {
        s->mark_acks |= bit;
        sync_mark_check(c, s);
    } else if (s->w_item && item == s->w_item) {
        s->w_acks |= bit;
        async_w_check(c, s);
    } else if (!s->announced && item == s->announce_item) {
        s->announce_acks |= bit;
        sync_announce_check(c, s);
    }
}

static void on_sync_ok(struct shard_core *c, const struct shard *s, struct holder *h)
{
    struct shard_effect *e = h->synced || h->backup ? NULL : shard_effect_add(c, SHARD_SYNCED);
    h->synced = true;
    if (!e)
        return;
    shard_log_synced(c, h->id);
    e->to = h->id;
    e->seq = s->no;
}

void holders_frame(struct shard_core *c, const struct shard_event *e)
{
    const struct frame_header *f = &e->header;
    uint8_t bit;
    if (f->type == FRAME_IMAGE_ACK) {
        on_image_ack(c, e);
        return;
    }
    struct shard *s = f->tensor < c->cfg.nshards ? &c->shard[f->tensor] : NULL;
    struct holder *h = s && s->primary ? holder_find(s, e->from, &bit) : NULL;
    if (!h)
        return;
    if (f->type == FRAME_MARK_ACK)
        on_mark_ack(c, s, bit, f->seq);
    else if (f->type == FRAME_HAVE && !h->backup)
        on_have(c, s, h, bit, e->payload);
    else if (f->type == FRAME_SYNC_OK && h->required)
        on_sync_ok(c, s, h);
}

/* ---- connections and views ---- */

void holders_peer_up(struct shard_core *c, uint64_t id, uint32_t loop)
{
    struct link *l = link_get(c, id, loop);
    map_done(&l->told);
    map_init(&l->told);
    for (uint32_t k = 0; k < c->cfg.nshards; k++) {
        struct shard *s = &c->shard[k];
        uint8_t bit;
        struct holder *h = s->primary ? holder_find(s, id, &bit) : NULL;
        if (!h || h->loop != loop)
            continue;
        if (h->required && !MUTANT(69)) {
            resend_to(c, s, h, bit);
        } else {
            h->catching = false;     /* it says again what it has */
            masks_update(c, s);
        }
    }
}

static bool view_names(const struct view_shard *vs, uint64_t id)
{
    for (uint32_t i = 0; i < vs->nbackups; i++)
        if (vs->backup[i] == id)
            return true;
    for (uint32_t i = 0; i < vs->njoining; i++)
        if (vs->joining[i] == id)
            return true;
    return false;
}

static struct holder *holder_add(struct shard_core *c, struct shard *s, uint64_t id, uint8_t *ret_bit)
{
    struct holder *h = holder_find(s, id, ret_bit);
    if (!h) {
        h = holder_find(s, 0, ret_bit);
        CHECK(h);      /* a view names at most HOLDERS_MAX */
        *h = (struct holder){.id = id};
        forget_bit(s, *ret_bit);
    }
    h->loop = server_loop(c, id, s->no);
    return h;
}

void holders_adopt(struct shard_core *c, struct shard *s, const struct view_shard *vs, bool promoted)
{
    uint8_t bit;
    for (int i = 0; i < HOLDERS_MAX; i++)
        if (s->holder[i].id && (promoted || !view_names(vs, s->holder[i].id)))
            s->holder[i] = (struct holder){0};
    for (uint32_t i = 0; i < vs->nbackups; i++) {
        struct holder *h = holder_add(c, s, vs->backup[i], &bit);
        /* A backup that was not a joiner of ours has what the primary before us had. */
        if (!h->required)
            sent_all(s, bit);
        h->backup = h->required = true;
        h->catching = h->synced = false;
    }
    for (uint32_t i = 0; i < vs->njoining; i++)
        holder_add(c, s, vs->joining[i], &bit)->backup = false;
    masks_update(c, s);
}

void holders_clear(struct shard_core *c, struct shard *s)
{
    memset(s->holder, 0, sizeof s->holder);
    masks_update(c, s);
}
