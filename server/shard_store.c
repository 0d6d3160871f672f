/* shard_store.c - the records of a loop: tensors, chunk images, shards, settings.
 *
 *   key                              value (little endian)
 *   'a' tensor(8)                    u8 initialised, then the spec's JSON
 *   'b' tensor(8) chunk(4) slot(1)   struct image_head, contributors, applied, value bytes, state bytes
 *   'c' shard(2)                     struct shard_head, ids of the set that completed it
 *   'd'                              settings
 *
 * Keys are big endian, so that loading meets tensors first. A synchronous result goes to the slot that does not hold the
 * version before, so that an unsealed step can be undone after a restart too; of two images the higher `image_seq` is the
 * newer. */
#include <stdio.h>
#include <string.h>

#include "server/shard_impl.h"

enum { RECORD_VERSION = 1, IMAGE_HEAD = 72, CONTRIBUTOR = 9, APPLIED = 12, SHARD_HEAD = 40, SETTING_ENTRY = 8 + SETTING_SIZE };

static void put(uint8_t **p, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        *(*p)++ = (uint8_t)(v >> (8 * i));
}

static uint64_t take(const uint8_t **p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v |= (uint64_t) * (*p)++ << (8 * i);
    return v;
}

static void key_put(struct store_op *op, uint64_t v, int bytes)
{
    while (bytes--)
        op->key[op->key_size++] = (uint8_t)(v >> (8 * bytes));
}

static void key_start(struct store_op *op, char kind)
{
    memset(op, 0, sizeof *op);
    op->key[op->key_size++] = (uint8_t)kind;
}

static void image_key(struct store_op *op, const struct chunk *ch, uint32_t disk_slot)
{
    key_start(op, 'b');
    key_put(op, ch->t->spec.id, 8);
    key_put(op, ch->no, 4);
    key_put(op, disk_slot, 1);
}

static void segment_add(struct store_op *op, const struct buf *b)
{
    if (b && b->len)
        op->segment[op->nsegments++] = (struct store_segment){b->data, b->len};
}

static struct shard_effect *persist_effect(struct shard_core *c, uint32_t nops)
{
    struct shard_effect *e = shard_effect_add(c, SHARD_PERSIST);
    e->seq = ++c->seq;
    e->nops = nops;
    e->ops = shard_ops(c, nops);
    c->stats.persists++;
    return e;
}

static struct buf *record_get(struct shard_core *c, size_t size)
{
    struct buf *b = pool_get(c->cfg.pool, size);
    if (!b)
        shard_out_of_memory(c);
    return b;
}

/* ---- images ---- */

static uint32_t count_applied(const struct chunk *ch)
{
    uint32_t n = 0;
    for (uint32_t m = 0; m < ch->capplied; m++)
        n += ch->applied[m] != 0;
    return n;
}

static uint32_t count_mask(const struct shard_core *c, const struct chunk *ch)
{
    uint32_t n = 0;
    for (uint32_t m = 0; m < c->nslots; m++)
        n += mset_has(&ch->mask, m) && c->slot[m].id;
    return n;
}

struct buf *image_bytes(const struct image *i)
{
    /* A reduce tensor's synchronous result has no value in the accumulator type: its wire bytes are kept. */
    return i->value ? i->value : i->out;
}

struct buf *image_record(struct shard_core *c, struct chunk *ch, const struct image *i)
{
    uint32_t nmask = count_mask(c, ch), napplied = count_applied(ch);
    const struct buf *bytes = image_bytes(i);
    bool initialised = ch->no == 0 && (ch->t->initialised || ch->t->finishing);
    struct buf *b = record_get(c, IMAGE_HEAD + nmask * CONTRIBUTOR + napplied * APPLIED);
    if (!b)
        return NULL;
    uint8_t *p = b->data;
    put(&p, RECORD_VERSION, 4);
    put(&p, nmask, 4);
    put(&p, napplied, 4);
    put(&p, (i->value != NULL) | initialised << 1, 4);
    put(&p, (uint64_t)i->step, 8);
    put(&p, i->version, 8);
    put(&p, i->updates, 8);
    put(&p, ++ch->image_seq, 8);
    put(&p, bytes ? bytes->len : 0, 8);
    put(&p, i->state ? i->state->len : 0, 8);
    put(&p, ch->skipped, 8);
    for (uint32_t m = 0; m < c->nslots; m++) {
        if (!mset_has(&ch->mask, m) || !c->slot[m].id)
            continue;
        put(&p, c->slot[m].id, 8);
        put(&p, mset_has(&ch->rejected, m), 1);
    }
    for (uint32_t m = 0; m < ch->capplied; m++) {
        if (!ch->applied[m])
            continue;
        put(&p, c->slot[m].id, 8);
        put(&p, ch->applied[m], 4);
    }
    CHECK(p == b->data + b->len);
    return b;
}

uint64_t persist_image(struct shard_core *c, struct chunk *ch, const struct image *i)
{
    struct buf *head = image_record(c, ch, i), *bytes = image_bytes(i);
    struct shard_effect *e = persist_effect(c, head ? 1 : 0);
    if (!head)
        return e->seq;
    image_key(e->ops, ch, i->disk_slot);
    segment_add(e->ops, head);
    segment_add(e->ops, bytes);
    segment_add(e->ops, i->state);
    e->held[0] = head;
    e->held[1] = bytes ? buf_ref(bytes) : NULL;
    e->held[2] = i->state ? buf_ref(i->state) : NULL;
    return e->seq;
}

void persist_delete(struct shard_core *c, struct chunk *ch, uint32_t disk_slot)
{
    struct shard_effect *e = persist_effect(c, 1);
    image_key(e->ops, ch, disk_slot);
}

/* ---- shards and settings ---- */

/* The W that a record may say: every push below it is, or is on its way there before it. */
static int64_t record_w(const struct shard *s)
{
    if (MUTANT(56))
        return s->w;
    return s->w_item && s->w_writing > s->w_held ? s->w_writing : s->w_held;
}

struct buf *shard_record(struct shard_core *c, const struct shard *s, int64_t complete, const uint64_t *ids, uint32_t n)
{
    struct buf *b = record_get(c, SHARD_HEAD + 8 * n);
    if (!b)
        return NULL;
    uint8_t *p = b->data;
    put(&p, RECORD_VERSION, 4);
    put(&p, n, 4);
    put(&p, (uint64_t)complete, 8);
    put(&p, VERSION_OF(c->view->epoch, (uint32_t)complete), 8);
    put(&p, (uint64_t)record_w(s), 8);
    put(&p, s->since, 8);
    for (uint32_t i = 0; i < n; i++)
        put(&p, ids[i], 8);
    return b;
}

struct buf *settings_record(struct shard_core *c)
{
    struct buf *b = record_get(c, 8 + c->nsetting * SETTING_ENTRY);
    if (!b)
        return NULL;
    uint8_t *p = b->data;
    put(&p, RECORD_VERSION, 4);
    put(&p, c->nsetting, 4);
    for (uint32_t i = 0; i < c->nsetting; i++) {
        const struct setting_entry *e = &c->setting[i];
        uint64_t value;
        memcpy(&value, &e->s.value, sizeof value);
        put(&p, e->member, 8);
        put(&p, (uint64_t)e->s.from_step, 8);
        put(&p, e->s.group, 8);
        put(&p, value, 8);
        put(&p, e->s.option, 4);
        put(&p, 0, 4);
    }
    return b;
}

static void record_op(struct store_op *op, struct buf **ret_held, struct buf *b)
{
    segment_add(op, b);
    *ret_held = b;
}

static uint64_t persist_shard_as(struct shard_core *c, struct shard *s, int64_t complete, const uint64_t *ids, uint32_t n)
{
    bool settings = c->settings_dirty;
    struct shard_effect *e = persist_effect(c, settings ? 2 : 1);
    key_start(&e->ops[0], 'c');
    key_put(&e->ops[0], s->no, 2);
    record_op(&e->ops[0], &e->held[0], shard_record(c, s, complete, ids, n));
    if (settings) {
        key_start(&e->ops[1], 'd');
        record_op(&e->ops[1], &e->held[1], settings_record(c));
        c->settings_dirty = false;
    }
    return e->seq;
}

uint64_t persist_mark(struct shard_core *c, struct shard *s, int64_t complete, const struct mset *set)
{
    uint64_t ids[MSET_MAX];
    uint32_t n = 0;
    for (uint32_t m = 0; m < c->nslots; m++)
        if (mset_has(set, m))
            ids[n++] = c->slot[m].id;
    return persist_shard_as(c, s, complete, ids, n);
}

uint64_t persist_shard(struct shard_core *c, struct shard *s)
{
    return persist_shard_as(c, s, s->complete, s->cset, s->ncset);
}

uint64_t persist_tensor(struct shard_core *c, struct tensor *t)
{
    char *text = tensor_encode(&t->spec);
    size_t n = strlen(text);
    struct buf *b = record_get(c, n + 1);
    struct shard_effect *e = persist_effect(c, b ? 1 : 0);
    if (b) {
        b->data[0] = t->initialised;
        memcpy(b->data + 1, text, n);
        key_start(e->ops, 'a');
        key_put(e->ops, t->spec.id, 8);
        segment_add(e->ops, b);
        e->held[0] = b;
    }
    mem_free(text);
    return e->seq;
}

/* ---- loading ---- */

static int corrupt(char *err, const char *what)
{
    snprintf(err, 256, "%s in the data directory is damaged", what);
    return KS_ECORRUPT;
}

static int load_tensor(struct shard_core *c, const uint8_t *value, size_t size, char *err)
{
    struct tensor_spec spec;
    struct optim optim = {.kind = OPTIM_ADD};
    char text[ERR_TEXT];
    if (size < 2 || tensor_decode((const char *)value + 1, size - 1, &spec, text))
        return corrupt(err, "a tensor record");
    if (spec.kind == TENSOR_PARAM && optim_parse(spec.optimizer[0] ? spec.optimizer : "add", &optim, text))
        return corrupt(err, "a tensor's optimizer");
    if (map_get(&c->tensors, spec.id))
        return corrupt(err, "the list of tensors");
    tensor_add(c, &spec, &optim)->initialised = value[0] != 0;
    return 0;
}

/* The slot of an id met on disk: the life is known again once a view lists it. */
static uint32_t slot_for_load(struct shard_core *c, uint64_t id)
{
    uint32_t m = slot_find(c, id);
    for (uint32_t i = 0; m == SLOT_NONE && i < MSET_MAX; i++)
        if (!c->slot[i].id)
            m = i;
    if (m == SLOT_NONE)
        return m;
    if (!c->slot[m].id) {
        c->slot[m] = (struct slot){.id = id, .join = STEP_NONE, .last = -1};
        map_put(&c->slot_of, id, &c->slot[m]);
        c->nslots = m + 1 > c->nslots ? m + 1 : c->nslots;
    }
    return m;
}

int image_head_take(const uint8_t **p, size_t size, struct image_head *ret)
{
    const uint8_t *q = *p;
    if (size < IMAGE_HEAD)
        return KS_ECORRUPT;
    if (take(&q, 4) != RECORD_VERSION)
        return KS_EVERSION;
    struct image_head h = {0};
    h.nmask = (uint32_t)take(&q, 4);
    h.napplied = (uint32_t)take(&q, 4);
    h.has_value = take(&q, 4);
    h.initialised = h.has_value >> 1 & 1;
    h.has_value &= 1;
    h.image.step = (int64_t)take(&q, 8);
    h.image.version = take(&q, 8);
    h.image.updates = take(&q, 8);
    h.image_seq = take(&q, 8);
    h.bytes = take(&q, 8);
    h.state = take(&q, 8);
    h.skipped = take(&q, 8);
    if (h.nmask > MSET_MAX || h.napplied > MSET_MAX || h.bytes > UINT32_MAX || h.state > UINT32_MAX ||
        IMAGE_HEAD + (uint64_t)h.nmask * CONTRIBUTOR + (uint64_t)h.napplied * APPLIED + h.bytes + h.state != size)
        return KS_ECORRUPT;
    *p = q;
    *ret = h;
    return 0;
}

bool image_sizes_fit(const struct chunk *ch, const struct image_head *h)
{
    size_t acc = ch->n * dtype_size(dtype_acc(ch->t->spec.dtype));
    size_t want = !h->bytes ? 0 : h->has_value ? acc : ch->bytes;
    return h->bytes == want && (h->state == 0 || h->state == acc * ch->t->slots);
}

static struct buf *load_bytes(struct shard_core *c, const uint8_t *p, size_t n)
{
    struct buf *b = n ? pool_get(c->cfg.pool, n) : NULL;
    if (b)
        memcpy(b->data, p, n);
    return b;
}

int image_bytes_take(struct shard_core *c, struct chunk *ch, const uint8_t *p, struct image_head *h)
{
    enum dtype t = ch->t->spec.dtype;
    struct buf *bytes = load_bytes(c, p, h->bytes);
    h->image.state = load_bytes(c, p + h->bytes, h->state);
    if ((h->bytes && !bytes) || (h->state && !h->image.state))
        return KS_ENOMEM;
    if (!h->has_value || dtype_acc(t) == t) {
        h->image.out = bytes;
        h->image.value = h->has_value && bytes ? buf_ref(bytes) : NULL;
        return 0;
    }
    h->image.value = bytes;
    h->image.out = pool_get(c->cfg.pool, ch->bytes);
    if (!h->image.out)
        return KS_ENOMEM;
    dtype_narrow(t, h->image.out->data, bytes->data, ch->n);
    return 0;
}

void image_members_take(struct shard_core *c, struct chunk *ch, const uint8_t **p, const struct image_head *h)
{
    mset_clear(&ch->mask);
    mset_clear(&ch->rejected);
    if (ch->capplied)
        memset(ch->applied, 0, ch->capplied * sizeof *ch->applied);
    ch->skipped = h->skipped != 0;
    for (uint32_t i = 0; i < h->nmask; i++) {
        uint32_t m = slot_for_load(c, take(p, 8));
        bool rejected = take(p, 1) != 0;
        if (m == SLOT_NONE)
            continue;
        mset_add(&ch->mask, m);
        if (rejected)
            mset_add(&ch->rejected, m);
    }
    for (uint32_t i = 0; i < h->napplied; i++) {
        uint32_t m = slot_for_load(c, take(p, 8)), seq = (uint32_t)take(p, 4);
        if (m == SLOT_NONE)
            continue;
        if (m >= ch->capplied) {
            ch->applied = mem_resize(ch->applied, MSET_MAX * sizeof *ch->applied);
            memset(ch->applied + ch->capplied, 0, (MSET_MAX - ch->capplied) * sizeof *ch->applied);
            ch->capplied = MSET_MAX;
        }
        ch->applied[m] = seq;
    }
}

static int load_image(struct shard_core *c, const uint8_t *key, const uint8_t *value, size_t size, char *err)
{
    uint64_t tensor = 0, no = 0;
    struct image_head h;
    for (int i = 0; i < 8; i++)
        tensor = tensor << 8 | key[1 + i];
    for (int i = 0; i < 4; i++)
        no = no << 8 | key[9 + i];
    struct chunk *ch = chunk_find(c, tensor, (uint32_t)no);
    const uint8_t *p = value;
    int r = ch ? image_head_take(&p, size, &h) : KS_ECORRUPT;
    if (r == KS_EVERSION) {
        snprintf(err, 256, "a chunk record was written by another version of keepstep");
        return r;
    }
    if (r || !image_sizes_fit(ch, &h) || key[13] > 1)
        return corrupt(err, "a chunk record");
    h.image.disk_slot = key[13];
    bool newer = !ch->image_seq || h.image_seq > ch->image_seq;
    const uint8_t *bytes = value + size - h.bytes - h.state;
    if (newer)
        image_members_take(c, ch, &p, &h);
    if (image_bytes_take(c, ch, bytes, &h)) {
        snprintf(err, 256, "the memory limit is too small for the tensors on disk: raise --memory");
        return KS_ENOMEM;
    }
    if (newer && ch->image_seq) {
        ch->pre = ch->cur;
        ch->has_pre = true;
    }
    if (h.initialised && ch->no == 0)
        ch->t->initialised = true;
    if (newer) {
        ch->trained = h.image.step >= 0 || h.image.updates > 0;
        ch->cur = h.image;
        ch->image_seq = h.image_seq;
        ch->held_version = h.image.version;
    } else {
        ch->pre = h.image;
        ch->has_pre = true;
    }
    return 0;
}

int shard_record_take(struct shard *s, const uint8_t *value, size_t size)
{
    const uint8_t *p = value;
    if (size < SHARD_HEAD || take(&p, 4) != RECORD_VERSION)
        return KS_ECORRUPT;
    uint32_t n = (uint32_t)take(&p, 4);
    if (n > MSET_MAX || size != SHARD_HEAD + 8 * (size_t)n)
        return KS_ECORRUPT;
    s->complete = (int64_t)take(&p, 8);
    s->complete_version = take(&p, 8);
    s->w = (int64_t)take(&p, 8);
    s->w = s->w_held = s->w > s->complete + 1 ? s->w : s->complete + 1;
    s->since = take(&p, 8);
    s->ncset = n;
    for (uint32_t i = 0; i < n; i++)
        s->cset[i] = take(&p, 8);
    return 0;
}

static int load_shard(struct shard_core *c, const uint8_t *key, const uint8_t *value, size_t size, char *err)
{
    uint32_t no = (uint32_t)key[1] << 8 | key[2];
    if (no >= c->cfg.nshards || !shard_is_mine(c, no) || shard_record_take(&c->shard[no], value, size))
        return corrupt(err, "a shard record");
    return 0;
}

int settings_take_record(struct shard_core *c, const uint8_t *value, size_t size)
{
    const uint8_t *p = value;
    if (size < 8 || take(&p, 4) != RECORD_VERSION)
        return KS_ECORRUPT;
    uint32_t n = (uint32_t)take(&p, 4);
    if (n > SETTINGS_MAX || size != 8 + (size_t)n * SETTING_ENTRY)
        return KS_ECORRUPT;
    for (uint32_t i = 0; i < n; i++) {
        struct setting_entry e;
        e.member = take(&p, 8);
        e.s.from_step = (int64_t)take(&p, 8);
        e.s.group = take(&p, 8);
        uint64_t v = take(&p, 8);
        memcpy(&e.s.value, &v, sizeof v);
        e.s.option = (uint32_t)take(&p, 4);
        take(&p, 4);
        if (e.s.option >= OPT_MAX)
            return KS_ECORRUPT;
        setting_put(c, e.member, &e.s);
    }
    return 0;
}

static int load_settings(struct shard_core *c, const uint8_t *value, size_t size, char *err)
{
    return settings_take_record(c, value, size) ? corrupt(err, "the settings record") : 0;
}

int shard_core_load(struct shard_core *c, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size, char *err)
{
    if (key_size == 9 && key[0] == 'a')
        return load_tensor(c, value, size, err);
    if (key_size == 14 && key[0] == 'b')
        return load_image(c, key, value, size, err);
    if (key_size == 3 && key[0] == 'c')
        return load_shard(c, key, value, size, err);
    if (key_size == 1 && key[0] == 'd')
        return load_settings(c, value, size, err);
    if (key_size == 6 && !memcmp(key, "format", 6))
        return 0;
    return corrupt(err, "a key");
}

void shard_core_loaded(struct shard_core *c, uint64_t heir_of)
{
    c->heir_of = heir_of;
    c->ballot = (struct ballot){0};   /* what was answered as another's heir does not stand */
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        struct shard *s = &c->shard[i];
        s->held = shard_is_mine(c, i);
        for (uint32_t k = 0; k < s->nchunks; k++) {
            struct chunk *ch = s->chunk[k];
            /* The very first image, however often it was written, has the initial value before it. Where the one before was
             * dropped, it is not asked for again. */
            if (!ch->has_pre && ch->image_seq && ch->cur.step >= 0) {
                ch->pre = (struct image){.step = -1};
                ch->has_pre = true;
            }
            ch->released = false;
        }
    }
}
