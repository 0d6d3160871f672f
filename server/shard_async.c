/* shard_async.c - asynchronous and staleness-bounded steps at the primary (docs/PROTOCOL.md).
 *
 * Pushes are applied as they come, once each by sequence number. What is applied is acknowledged, and may be pulled, once
 * the required holders have an image that contains it: one image of a chunk is in flight at a time, a newer one follows when
 * it is there. W, the lowest clock of the live members, opens parked pulls; it never falls. */
#include <string.h>

#include "server/shard_impl.h"

static uint32_t bucket(int64_t staleness)
{
    return staleness < 0 ? 0 : staleness > 63 ? 63 : (uint32_t)staleness;
}

static int64_t clock_max(const struct shard_core *c, const struct shard *s)
{
    int64_t max = 0;
    for (uint32_t m = 0; m < c->nslots; m++)
        if (c->slot[m].id && c->slot[m].live && s->clock[m] > max)
            max = s->clock[m];
    return max;
}

static void ack_send(struct shard_core *c, struct chunk *ch, const struct ack_wait *a)
{
    if (a->kind != ACK_PUSH) {
        init_answer(c, ch, a);
        return;
    }
    struct frame_header h = {.type = FRAME_ACK, .dtype = ch->t->spec.dtype, .tensor = ch->t->spec.id, .chunk = ch->no,
                             .step = a->clock, .seq = a->seq, .version = a->version, .status = (int16_t)a->status};
    shard_send(c, a->member, &h, NULL);
    c->stats.acked += a->status == KS_OK;
}

void async_ack_when_held(struct shard_core *c, struct chunk *ch, struct ack_wait a)
{
    a.version = ch->cur.version;
    if (a.version <= ch->held_version || MUTANT(20)) {
        ack_send(c, ch, &a);
        return;
    }
    ARRAY_ROOM(ch->ack, ch->nack, ch->cack);
    ch->ack[ch->nack++] = a;
}

void async_acks_flush(struct shard_core *c, struct chunk *ch)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < ch->nack; i++) {
        if (ch->ack[i].version <= ch->held_version)
            ack_send(c, ch, &ch->ack[i]);
        else
            ch->ack[n++] = ch->ack[i];
    }
    ch->nack = n;
}

/* ---- holding ---- */

static void held_set(struct shard_core *c, struct chunk *ch, uint64_t version, struct buf *out)
{
    buf_unref(ch->held_out);
    ch->held_out = out;
    ch->held_version = version;
    async_acks_flush(c, ch);
}

/* cur, as it is now, on its way to whoever must have it. */
static void fly(struct shard_core *c, struct chunk *ch)
{
    ch->flying = true;
    ch->flying_version = ch->cur.version;
    buf_unref(ch->flying_out);
    ch->flying_out = ch->cur.out ? buf_ref(ch->cur.out) : NULL;
    ch->acks = 0;
    ch->item = ++c->items;
    if (c->cfg.durable) {
        ch->flying_seq = persist_image(c, ch, &ch->cur);
        wait_add(c, (struct wait){.kind = WAIT_ASYNC, .seq = ch->flying_seq, .chunk = ch});
    }
    if (ch->s->targets)
        holders_image(c, ch, NULL);
}

/* A new version of cur: the next number in this epoch, whatever mode made the one before. */
void async_changed(struct shard_core *c, struct chunk *ch)
{
    uint32_t n = ch->cur.version >> 32 == c->view->epoch ? (uint32_t)ch->cur.version + 1 : 1;
    ch->cur.version = VERSION_OF(c->view->epoch, n);
    if (!c->cfg.durable && !ch->s->targets) {
        held_set(c, ch, ch->cur.version, NULL);
    } else if (!ch->flying) {
        ch->s->async_pending++;
        fly(c, ch);
        async_check(c, ch);
    }
}

static void pulls_serve(struct shard_core *c, struct chunk *ch);

void async_check(struct shard_core *c, struct chunk *ch)
{
    struct shard *s = ch->s;
    while (ch->flying && s->primary && (ch->acks & s->required) == s->required) {
        struct buf *out = ch->flying_out;
        ch->flying = false;
        ch->flying_seq = 0;
        ch->flying_out = NULL;
        held_set(c, ch, ch->flying_version, out);
        if (ch->cur.version > ch->held_version)
            fly(c, ch);
        else
            s->async_pending--;
        pulls_serve(c, ch);
    }
    if (s->primary && s->pulls_parked && !ch->flying)
        sync_serve_pulls(c, s);
    if (s->wants_transition && !s->async_pending)
        async_recompute(c, s);
}

void async_durable(struct shard_core *c, const struct wait *w)
{
    struct chunk *ch = w->chunk;
    if (!ch->flying || ch->flying_seq != w->seq)
        return;
    ch->acks |= DISK_BIT;
    async_check(c, ch);
}

/* ---- pulls ---- */

static bool pull_open(const struct shard_core *c, const struct shard *s, const struct pull_wait *p)
{
    if (p->need == INT64_MIN || MUTANT(21))
        return true;
    if (p->need > s->w || p->need > s->w_held)
        return false;
    /* Every step up to a complete synchronous one is here, whoever has not spoken on this tenure yet. */
    if (p->need <= s->complete + 1)
        return true;
    for (uint32_t m = 0; m < c->nslots && !MUTANT(22); m++)
        if (c->slot[m].id && c->slot[m].live && !mset_has(&s->clock_known, m))
            return false;
    return true;
}

static void value_send(struct shard_core *c, struct chunk *ch, const struct pull_wait *p)
{
    struct frame_header h = {.type = FRAME_VALUE, .dtype = ch->t->spec.dtype, .tensor = ch->t->spec.id, .chunk = ch->no,
                             .step = p->step, .seq = p->seq};
    bool fresh = ch->cur.version <= ch->held_version;
    struct buf *out = fresh ? image_out(c, ch, &ch->cur) : ch->held_out ? buf_ref(ch->held_out) : shard_zeros(c, ch->bytes);
    if (!out) {
        shard_out_of_memory(c);
        return;
    }
    h.version = fresh ? ch->cur.version : ch->held_version;
    if (p->need > ch->need_served)
        ch->need_served = p->need;
    shard_send(c, p->member, &h, out);
    buf_unref(out);
}

/* A pull gets a version that is held and not older than what was current when its bound was met, so that it cannot be
 * outrun by pushes. */
static bool pull_try(struct shard_core *c, struct chunk *ch, struct pull_wait *p)
{
    if (!ch->s->announced || !pull_open(c, ch->s, p))
        return false;
    if (!p->open)
        p->version_min = ch->cur.version;
    p->open = true;
    if (ch->cur.version > ch->held_version && ch->held_version < p->version_min)
        return false;
    value_send(c, ch, p);
    return true;
}

static void pulls_serve(struct shard_core *c, struct chunk *ch)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < ch->npull; i++) {
        struct pull_wait *p = &ch->pull[i];
        if (p->sync || !pull_try(c, ch, p))
            ch->pull[n++] = *p;
    }
    ch->npull = n;
}

void pulls_drop_member(struct chunk *ch, uint64_t member)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < ch->npull; i++)
        if (ch->pull[i].member != member)
            ch->pull[n++] = ch->pull[i];
    ch->npull = n;
}

/* Is there a step from `step` on whose pulls wait for W? */
static bool bound_ahead(const struct shard_core *c, int64_t step)
{
    for (uint32_t i = 0; i < c->view->nmodes; i++) {
        bool over = i + 1 < c->view->nmodes && c->view->mode[i + 1].from <= step;
        if (c->view->mode[i].kind == MODE_SSP && !over)
            return true;
    }
    return false;
}

/* Writes W to the holders when a parked pull needs more than they have. */
static void w_hold(struct shard_core *c, struct shard *s)
{
    if (!c->cfg.durable && !s->targets) {
        s->w_held = s->w;
        return;
    }
    if (shard_mode(c, s->w).kind == MODE_ASYNC && !s->wants_transition && !bound_ahead(c, s->w)) {
        /* Nothing waits for W without a bound; after a restart an older one does as well. */
        s->w_held = s->w;
        return;
    }
    if (s->w <= s->w_held || s->w_item)
        return;
    /* W says that every push below it is held: on the disk it must not come before them. */
    for (uint32_t i = 0; i < s->nchunks; i++)
        if (s->chunk[i]->flying && s->chunk[i]->cur.version > s->chunk[i]->flying_version)
            fly(c, s->chunk[i]);
    s->w_writing = s->w;
    s->w_acks = 0;
    s->w_item = ++c->items;
    if (c->cfg.durable) {
        s->w_seq = persist_shard(c, s);
        wait_add(c, (struct wait){.kind = WAIT_W, .seq = s->w_seq, .shard = s});
    }
    holders_mark(c, s, s->complete, s->cset, s->ncset, s->w_item, s->targets & s->required);
}

static bool w_landed(struct shard *s)
{
    if (!s->w_item || (s->w_acks & s->required) != s->required)
        return false;
    s->w_item = 0;
    if (s->w_writing > s->w_held)
        s->w_held = s->w_writing;
    return true;
}

void async_w_check(struct shard_core *c, struct shard *s)
{
    if (s->primary && w_landed(s))
        async_recompute(c, s);
}

void async_w_durable(struct shard_core *c, const struct wait *w)
{
    struct shard *s = w->shard;
    if (!s->w_item || s->w_seq != w->seq)
        return;
    s->w_acks |= DISK_BIT;
    async_w_check(c, s);
}

void async_pull(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h)
{
    struct mode mode = shard_mode(c, h->step);
    struct pull_wait p = {.member = c->slot[slot].id, .step = h->step, .seq = h->seq, .need = INT64_MIN};
    if (mode.kind == MODE_SSP)
        p.need = h->step > mode.bound ? h->step - mode.bound : 0;
    pulls_drop_member(ch, p.member);
    if (pull_try(c, ch, &p))
        return;
    ARRAY_ROOM(ch->pull, ch->npull, ch->cpull);
    ch->pull[ch->npull++] = p;
    ch->s->pulls_parked = true;
}

/* ---- clocks ---- */

/* The first synchronous step that is not behind this shard and not beyond W; -1: none. */
static int64_t entered(const struct shard_core *c, const struct shard *s)
{
    for (uint32_t i = 0; i < c->view->nmodes; i++) {
        const struct mode *m = &c->view->mode[i];
        if (m->kind == MODE_SYNC && m->from > s->complete + 1 && m->from <= s->w)
            return m->from;
    }
    return -1;
}

/* Entering synchronous step K: once everybody has ended K - 1 and all of it is held, K - 1 is complete. W may be beyond
 * K: when everybody left and the next member joins later. */
static void transition_try(struct shard_core *c, struct shard *s)
{
    bool may = s->announced && s->w > s->complete + 1 && !s->marking && s->w <= s->w_cap;
    int64_t step = may ? entered(c, s) : -1;
    s->wants_transition = step >= 0;
    if (step < 0 || s->async_pending || s->w_held < s->w)
        return;
    s->wants_transition = false;
    s->ncset = 0;
    sync_facts_clear(c, s);
    sync_complete(c, s, step - 1);
    if (c->cfg.durable)
        persist_shard(c, s);
    /* Nothing waits for them to have it, since W says the same; but results of the next step must find it there. */
    if (!MUTANT(67))
        holders_mark(c, s, s->complete, NULL, 0, 0, s->targets & s->required);
    sync_try_shard(c, s);
}

static void pulls_serve_all(struct shard_core *c, struct shard *s)
{
    for (uint32_t i = 0; s->pulls_parked && i < s->nchunks; i++)
        if (s->chunk[i]->npull)
            pulls_serve(c, s->chunk[i]);
}

/* Promoted in between: W was held by everybody, so members may know already that the last asynchronous step is over, and be
 * in the synchronous one after it. */
void async_seal(struct shard_core *c, struct shard *s)
{
    int64_t step = s->w > s->complete + 1 ? entered(c, s) : -1;
    if (step < 0 || MUTANT(64))
        return;
    s->complete = step - 1;
    s->complete_version = VERSION_OF(c->view->epoch, (uint32_t)s->complete);
    s->ncset = 0;
}

static int64_t lowest_clock(const struct shard_core *c, const struct shard *s, bool *ret_known)
{
    int64_t low = INT64_MAX;
    *ret_known = true;
    for (uint32_t m = 0; m < c->nslots; m++) {
        if (!c->slot[m].id || !c->slot[m].live)
            continue;
        if (mset_has(&s->clock_known, m))
            low = s->clock[m] < low ? s->clock[m] : low;
        else
            *ret_known = false;
    }
    return low;
}

void async_recompute(struct shard_core *c, struct shard *s)
{
    bool known;
    if (!s->primary || shard_mode(c, s->w < 0 ? 0 : s->w).kind == MODE_SYNC) {
        if (s->primary && s->w > s->complete + 1) {
            w_hold(c, s);
            transition_try(c, s);
        }
        /* Nothing else looks at the bound in synchronous steps: what was pulled under one is answered here. */
        if (s->primary)
            pulls_serve_all(c, s);
        return;
    }
    int64_t low = lowest_clock(c, s, &known);
    if (low > s->w_cap)
        low = s->w_cap;
    if ((known || MUTANT(22)) && low != INT64_MAX && low != STEP_NONE && (low > s->w || MUTANT(23))) {
        s->w = low;
        c->stats.progress_us = c->now_us;
    }
    w_hold(c, s);
    pulls_serve_all(c, s);
    transition_try(c, s);
}

void async_clock(struct shard_core *c, uint32_t slot, const struct frame_header *h, const struct done_head *d)
{
    struct slot *m = &c->slot[slot];
    settings_take(c, m->id, d);
    m->stats.clock = h->step > m->stats.clock ? h->step : m->stats.clock;
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        struct shard *s = &c->shard[i];
        if (!s->primary || ((int32_t)(h->epoch - (uint32_t)s->since) < 0 && !MUTANT(25)))
            continue;
        mset_add(&s->clock_known, slot);
        s->clock[slot] = h->step > s->clock[slot] ? h->step : s->clock[slot];
        async_recompute(c, s);
    }
}

void async_promoted(struct shard_core *c, struct shard *s)
{
    mset_clear(&s->clock_known);
    memset(s->clock, 0, s->nslots * sizeof *s->clock);
    s->w_item = 0;
    s->async_pending = 0;
    for (uint32_t i = 0; i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        ch->flying = false;
        ch->nack = ch->npull = 0;
        ch->held_version = ch->cur.version;
        ch->need_served = s->w_held;
    }
    bool sync = s->w <= s->complete + 1 && shard_mode(c, s->w).kind == MODE_SYNC;
    /* The other backups may have another version than this one: everything once more, under this tenure. In synchronous
     * steps first values; results have steps that say who has them. */
    for (uint32_t i = 0; s->targets && i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        if (!ch->cur.version || (sync && ch->cur.step >= 0))
            continue;
        ch->held_version = 0;
        async_changed(c, ch);
    }
}

void async_superseded(struct chunk *ch)
{
    if (!ch->flying)
        return;
    ch->flying = false;
    ch->s->async_pending--;
}

/* ---- pushes ---- */

static uint32_t *applied_of(struct chunk *ch, uint32_t slot)
{
    if (slot >= ch->capplied) {
        uint32_t cap = slot + 8 < MSET_MAX ? slot + 8 : MSET_MAX;
        ch->applied = mem_resize(ch->applied, cap * sizeof *ch->applied);
        memset(ch->applied + ch->capplied, 0, (cap - ch->capplied) * sizeof *ch->applied);
        ch->capplied = cap;
    }
    return &ch->applied[slot];
}

void async_slot_gone(struct shard_core *c, uint32_t slot)
{
    uint32_t i = 0;
    void *v;
    while (map_next(&c->tensors, &i, NULL, &v)) {
        struct tensor *t = v;
        for (uint32_t k = 0; k < t->nchunks; k++)
            if (t->chunk[k] && slot < t->chunk[k]->capplied)
                t->chunk[k]->applied[slot] = 0;
    }
}

/* Not applied: the push is used up all the same, so that later ones follow it. */
static bool push_unfit(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h,
                       const struct buf *payload, int *ret_status)
{
    const struct tensor_spec *s = &ch->t->spec;
    struct shard_member_stats *stats = &c->slot[slot].stats;
    if (shard_mode(c, h->step).kind == MODE_SSP && h->step < ch->need_served) {
        stats->stale++;
        *ret_status = KS_ESTALE;
        return true;
    }
    if (payload && s->finite != FINITE_APPLY && !dtype_all_finite(s->dtype, payload->data, ch->n)) {
        stats->not_finite++;
        *ret_status = KS_ENOTFINITE;
        return true;
    }
    return false;
}

/* The first push on top of a synchronous result: members that have not finished that step yet still get the result as it
 * was, so it stays as `pre`, in its own place on disk too, until everybody is past it. */
void async_result_keep(struct shard *s, struct chunk *ch)
{
    bool kept = ch->has_pre && ch->pre.step == ch->cur.step;
    if (!kept && ch->cur.step >= 0 && s->w <= ch->cur.step + 1) {
        image_drop(&ch->pre);
        ch->pre = image_ref(&ch->cur);
        ch->has_pre = true;
        ch->cur.disk_slot ^= 1;
    } else if (ch->has_pre && s->w > ch->cur.step + 1) {
        image_drop(&ch->pre);
        ch->has_pre = false;
    }
}

static void push_apply(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h,
                       struct buf *payload)
{
    struct slot *m = &c->slot[slot];
    struct ack_wait a = {.member = m->id, .seq = h->seq, .clock = clock_max(c, ch->s)};
    if (a.clock < h->step)
        a.clock = h->step;
    /* What is held now stays servable while the next version is being written. */
    if (ch->cur.version <= ch->held_version && (c->cfg.durable || ch->s->targets)) {
        buf_unref(ch->held_out);
        ch->held_out = ch->cur.out ? buf_ref(ch->cur.out) : NULL;
    }
    async_result_keep(ch->s, ch);
    ch->trained = true;
    if (push_unfit(c, ch, slot, h, payload, &a.status)) {
        buf_unref(payload);
        *applied_of(ch, slot) = h->seq;
        async_changed(c, ch);
        async_ack_when_held(c, ch, a);
        return;
    }
    if (!payload || !async_apply(c, ch, h->step, payload)) {
        shard_close(c, m->id, payload ? KS_ENOMEM : KS_EPROTO, "push that cannot be applied");
        return;
    }
    *applied_of(ch, slot) = h->seq;
    m->stats.applied++;
    c->stats.applied++;
    c->stats.staleness[bucket(a.clock - h->step)]++;
    async_changed(c, ch);
    async_ack_when_held(c, ch, a);
    if (ch->cur.version <= ch->held_version)
        pulls_serve(c, ch);
}

void async_push(struct shard_core *c, uint32_t slot, const struct frame_header *h, struct buf *payload)
{
    struct chunk *ch = chunk_find(c, h->tensor, h->chunk);
    struct slot *m = &c->slot[slot];
    uint32_t applied = *applied_of(ch, slot);
    if (h->seq <= applied && !MUTANT(19)) {
        struct ack_wait a = {.member = m->id, .seq = h->seq, .clock = h->step};
        m->stats.duplicates++;
        c->stats.duplicates++;
        buf_unref(payload);
        async_ack_when_held(c, ch, a);
        return;
    }
    if (h->seq != applied + 1 && h->seq > applied) {
        buf_unref(payload);
        shard_close(c, m->id, KS_EPROTO, "a push is missing before this one; connect again");
        return;
    }
    push_apply(c, ch, slot, h, payload);
}
