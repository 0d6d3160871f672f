/* shard_sync.c - synchronous steps at the primary (docs/PROTOCOL.md).
 *
 * The open step is o = complete + 1. A chunk's result of o is computed once every member of set(o) has contributed or
 * is done; it is released when the required holders have it; when everybody is done and everything is computed, the
 * mark of o follows the results to the holders, and then o is complete. */
#include <string.h>

#include "base/log.h"
#include "server/shard_impl.h"

static int64_t open_step(const struct shard *s)
{
    return s->complete + 1;
}

static bool has_result(const struct chunk *ch)
{
    return ch->cur.step == open_step(ch->s);
}

void sync_facts_clear(struct shard_core *c, struct shard *s)
{
    mset_clear(&s->fact);
    mset_clear(&s->done);
    memset(s->want, 0, c->nslots * sizeof *s->want);
    memset(s->have, 0, c->nslots * sizeof *s->have);
}

/* Whoever is known to have pushed all that it pushes: its fact is known, and all of it is here. */
static void done_update(struct shard *s, uint32_t slot)
{
    bool all = s->have[slot] == s->want[slot] || MUTANT(13);
    if (mset_has(&s->fact, slot) && all)
        mset_add(&s->done, slot);
    else
        mset_del(&s->done, slot);
}

void sync_redo(struct shard_core *c, struct shard *s)
{
    memset(s->have, 0, c->nslots * sizeof *s->have);
    for (uint32_t i = 0; i < s->nchunks; i++) {
        const struct chunk *ch = s->chunk[i];
        for (uint32_t m = 0; m < c->nslots; m++)
            if (mset_has(&ch->acc_mask, m) || (has_result(ch) && mset_has(&ch->mask, m)))
                s->have[m]++;
    }
    for (uint32_t m = 0; m < c->nslots; m++)
        done_update(s, m);
}

void sync_open(struct shard_core *c, struct shard *s)
{
    mset_clear(&s->oset);
    for (uint32_t m = 0; m < c->nslots; m++)
        if (c->slot[m].id && c->slot[m].join <= open_step(s) && open_step(s) <= c->slot[m].last)
            mset_add(&s->oset, m);
}

/* ---- results ---- */

static void result_send(struct shard_core *c, struct chunk *ch, uint32_t slot)
{
    bool rejected = ch->skipped || mset_has(&ch->rejected, slot);
    bool wants = mset_has(&ch->want, slot);
    if (!c->slot[slot].live || (!wants && !rejected))
        return;
    /* Asynchronous pushes of members that are further on may have changed cur since. */
    const struct image *i = ch->has_pre && ch->pre.step == ch->cur.step ? &ch->pre : &ch->cur;
    struct frame_header h = {.type = FRAME_RESULT, .dtype = ch->t->spec.dtype, .tensor = ch->t->spec.id, .chunk = ch->no,
                             .step = i->step, .version = i->version, .status = rejected ? KS_ENOTFINITE : KS_OK};
    struct buf *out = wants ? image_out(c, ch, i) : NULL;
    if (wants && !out) {
        shard_out_of_memory(c);
        return;
    }
    shard_send(c, c->slot[slot].id, &h, out);
    buf_unref(out);
    c->stats.results++;
}

static void release(struct shard_core *c, struct chunk *ch)
{
    if (ch->released)
        return;
    ch->released = true;
    ch->s->unreleased--;
    ch->held_version = ch->cur.version;
    async_acks_flush(c, ch);
    for (uint32_t m = 0; m < c->nslots; m++)
        if (mset_has(&ch->mask, m))
            result_send(c, ch, m);
}

void sync_result_durable(struct shard_core *c, const struct wait *w)
{
    struct chunk *ch = w->chunk;
    /* Only the version that was written counts: the chunk may have been undone and computed again. */
    if (ch->persist_seq != w->seq || !ch->s->primary || !has_result(ch))
        return;
    ch->acks |= DISK_BIT;
    sync_check(c, ch);
}

static bool enough(const struct shard *s, uint8_t acks)
{
    return (acks & s->required) == s->required || (MUTANT(58) && (acks & s->required));
}

void sync_check(struct shard_core *c, struct chunk *ch)
{
    struct shard *s = ch->s;
    if (!s->primary || !s->announced || !has_result(ch) || ch->released || !enough(s, ch->acks))
        return;
    release(c, ch);
    if (!s->unreleased)
        sync_try_shard(c, s);
}

static bool ready(const struct chunk *ch)
{
    const struct shard *s = ch->s;
    return !mset_empty(&ch->acc_mask) && !has_result(ch) && mset_within2(&s->oset, &ch->acc_mask, &s->done);
}

static void adopt_contributors(struct chunk *ch)
{
    ch->mask = ch->acc_mask;
    ch->want = ch->acc_want;
    ch->rejected = ch->acc_rejected;
    ch->skipped = ch->acc_skip;
}

static void compute(struct shard_core *c, struct chunk *ch)
{
    struct shard *s = ch->s;
    struct image next;
    CHECK(mset_within(&ch->acc_mask, &s->oset));   /* I4 */
    struct buf *gradient = NULL;
    if (!acc_finish(c, ch, open_step(s), &next, s->targets ? &gradient : NULL)) {
        shard_out_of_memory(c);
        return;
    }
    next.step = open_step(s);
    next.version = VERSION_OF(c->view->epoch, (uint32_t)next.step);
    next.disk_slot = ch->cur.disk_slot ^ 1;
    image_drop(&ch->pre);
    ch->pre = ch->cur;
    ch->has_pre = true;
    ch->cur = next;
    adopt_contributors(ch);
    acc_clear(c, ch);
    ch->released = false;
    ch->trained = true;
    async_superseded(ch);
    s->unreleased++;
    ch->acks = 0;
    ch->item = ++c->items;
    if (c->cfg.durable) {
        ch->persist_seq = persist_image(c, ch, &ch->cur);
        wait_add(c, (struct wait){.kind = WAIT_RESULT, .seq = ch->persist_seq, .chunk = ch});
    }
    if (s->targets)
        holders_image(c, ch, gradient);
    buf_unref(gradient);
    if (enough(s, ch->acks) || MUTANT(11))
        release(c, ch);
}

/* ---- marks ---- */

static void mark_finish(struct shard_core *c, struct shard *s)
{
    int64_t step = open_step(s);
    struct mset set = s->mark_set;
    s->marking = false;
    sync_facts_clear(c, s);
    sync_complete(c, s, step);
    s->ncset = 0;
    for (uint32_t m = 0; m < c->nslots; m++)
        if (mset_has(&set, m))
            s->cset[s->ncset++] = c->slot[m].id;
    sync_try_shard(c, s);
}

/* `step` is now complete: bookkeeping that is the same for a mark and for the change of mode. */
void sync_complete(struct shard_core *c, struct shard *s, int64_t step)
{
    s->complete = step;
    s->complete_version = VERSION_OF(c->view->epoch, (uint32_t)step);
    s->w = s->w > step + 1 ? s->w : step + 1;
    s->w_held = s->w_held > step + 1 ? s->w_held : step + 1;
    for (uint32_t m = 0; m < c->nslots; m++) {
        if (!c->slot[m].id || c->slot[m].join > step || c->slot[m].last < step)
            continue;
        mset_add(&s->clock_known, m);
        s->clock[m] = s->clock[m] > step + 1 ? s->clock[m] : step + 1;
    }
    c->stats.steps_completed++;
    c->stats.progress_us = c->now_us;
    ARRAY_ROOM(c->completed, c->ncompleted, c->ccompleted);
    c->completed[c->ncompleted].step = step;
    c->completed[c->ncompleted++].shard = (uint16_t)s->no;
    sync_open(c, s);
    sync_serve_pulls(c, s);
}

static bool somebody_waits(const struct shard_core *c, int64_t step)
{
    for (uint32_t m = 0; m < c->nslots; m++)
        if (c->slot[m].id && c->slot[m].live && c->slot[m].join > step)
            return true;
    return false;
}

static void mark_to_holders(struct shard_core *c, struct shard *s)
{
    uint64_t ids[MSET_MAX];
    uint32_t n = 0;
    uint8_t to = s->targets & s->required;
    for (uint32_t m = 0; to && m < c->nslots; m++)
        if (mset_has(&s->mark_set, m))
            ids[n++] = c->slot[m].id;
    holders_mark(c, s, open_step(s), ids, n, s->mark_item, to);
}

static void try_mark(struct shard_core *c, struct shard *s)
{
    int64_t o = open_step(s);
    if (s->marking || !s->announced || (o >= s->cap && !MUTANT(17)) || shard_mode(c, o).kind != MODE_SYNC)
        return;
    if (!mset_within(&s->oset, &s->done) || s->open_acc)
        return;
    /* Batches reach the disk in order, so the mark may follow results that are still on their way there. Of other
     * servers only their acknowledgement says that they have a result. */
    if (s->targets && s->unreleased && !MUTANT(50))
        return;
    if (mset_empty(&s->oset) && !somebody_waits(c, o))
        return;
    s->marking = true;
    s->mark_set = s->oset;
    s->mark_acks = 0;
    s->mark_item = ++c->items;
    if (c->cfg.durable) {
        s->mark_seq = persist_mark(c, s, o, &s->oset);
        wait_add(c, (struct wait){.kind = WAIT_MARK, .seq = s->mark_seq, .shard = s});
    }
    mark_to_holders(c, s);
    if (MUTANT(12))
        mark_finish(c, s);
    else
        sync_mark_check(c, s);
}

void sync_mark_check(struct shard_core *c, struct shard *s)
{
    if (s->primary && s->marking && !s->unreleased && enough(s, s->mark_acks))
        mark_finish(c, s);
}

/* Promoted: the backups have the last mark now, so the step may be announced and the next one computed. */
void sync_announce_check(struct shard_core *c, struct shard *s)
{
    if (!s->primary || s->announced || (!enough(s, s->announce_acks) && !MUTANT(51)))
        return;
    s->announced = true;
    if (s->complete >= 0) {
        ARRAY_ROOM(c->completed, c->ncompleted, c->ccompleted);
        c->completed[c->ncompleted].step = s->complete;
        c->completed[c->ncompleted++].shard = (uint16_t)s->no;
    }
    for (uint32_t i = 0; i < s->nchunks; i++)
        sync_check(c, s->chunk[i]);
    sync_try_shard(c, s);
    async_recompute(c, s);
    sync_serve_pulls(c, s);
}

void sync_mark_durable(struct shard_core *c, const struct wait *w)
{
    struct shard *s = w->shard;
    if (!s->marking || s->mark_seq != w->seq || !s->primary)
        return;
    s->mark_acks |= DISK_BIT;
    sync_mark_check(c, s);
}

void sync_try_shard(struct shard_core *c, struct shard *s)
{
    if (!s->primary || !s->announced || shard_mode(c, open_step(s)).kind != MODE_SYNC)
        return;
    if (open_step(s) >= s->cap && !MUTANT(17))
        return;
    for (uint32_t i = 0; s->open_acc && i < s->nchunks; i++)
        if (ready(s->chunk[i]))
            compute(c, s->chunk[i]);
    try_mark(c, s);
}

/* One COMPLETE a step and member for all shards that completed it in this call. */
void sync_flush_completed(struct shard_core *c)
{
    while (c->ncompleted) {
        int64_t step = c->completed[0].step;
        struct buf *b = pool_get(c->cfg.pool, c->ncompleted * 2);
        uint32_t rest = 0, n = 0;
        if (!b) {
            shard_out_of_memory(c);
            c->ncompleted = 0;
            return;
        }
        for (uint32_t i = 0; i < c->ncompleted; i++) {
            if (c->completed[i].step != step) {
                c->completed[rest++] = c->completed[i];
                continue;
            }
            b->data[2 * n] = (uint8_t)c->completed[i].shard;
            b->data[2 * n + 1] = (uint8_t)(c->completed[i].shard >> 8);
            n++;
        }
        b->len = 2 * n;
        c->ncompleted = rest;
        struct frame_header h = {.type = FRAME_COMPLETE, .step = step};
        /* Whoever joins asynchronous steps reads the last synchronous one too, however far ahead it joins. */
        bool all = shard_mode(c, step + 1).kind != MODE_SYNC;
        for (uint32_t m = 0; m < c->nslots; m++)
            if (c->slot[m].id && c->slot[m].live && (c->slot[m].join <= step + 1 || all))
                shard_send(c, c->slot[m].id, &h, b);
        buf_unref(b);
    }
}

static void complete_send(struct shard_core *c, uint32_t slot, const struct shard *s)
{
    struct frame_header h = {.type = FRAME_COMPLETE, .step = s->complete};
    struct buf *b = pool_get(c->cfg.pool, 2);
    if (!b) {
        shard_out_of_memory(c);
        return;
    }
    b->data[0] = (uint8_t)s->no;
    b->data[1] = (uint8_t)(s->no >> 8);
    shard_send(c, c->slot[slot].id, &h, b);
    buf_unref(b);
}

/* Again, for a member that may have lost them: its results of the last complete step, then COMPLETE. */
void sync_answer(struct shard_core *c, struct shard *s, uint32_t slot)
{
    for (uint32_t i = 0; i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        if (ch->cur.step == s->complete && mset_has(&ch->mask, slot))
            result_send(c, ch, slot);
    }
    complete_send(c, slot, s);
}

/* ---- frames ---- */

static void push_again(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h)
{
    c->slot[slot].stats.duplicates++;
    c->stats.duplicates++;
    if (!mset_has(&ch->mask, slot))
        return;
    if (h->flags & FRAME_WANT)
        mset_add(&ch->want, slot);
    if (ch->released)
        result_send(c, ch, slot);
}

static void push_open(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h,
                      struct buf *payload)
{
    struct shard *s = ch->s;
    if (has_result(ch)) {
        push_again(c, ch, slot, h);
        buf_unref(payload);
        return;
    }
    if (h->flags & FRAME_WANT)
        mset_add(&ch->acc_want, slot);
    if (mset_has(&ch->acc_mask, slot) && !MUTANT(10)) {
        c->slot[slot].stats.duplicates++;
        c->stats.duplicates++;
        buf_unref(payload);
        return;
    }
    bool first = !mset_has(&ch->acc_mask, slot);
    if (!acc_add(c, ch, slot, h->weight, payload)) {
        shard_close(c, c->slot[slot].id, KS_ENOMEM, "out of buffers; connect again");
        return;
    }
    s->have[slot] += first;
    done_update(s, slot);
    if (mset_has(&s->done, slot)) {
        sync_try_shard(c, s);
    } else if (s->announced && (open_step(s) < s->cap || MUTANT(17)) && ready(ch)) {
        compute(c, ch);
        try_mark(c, s);
    }
}

void sync_push(struct shard_core *c, uint32_t slot, const struct frame_header *h, struct buf *payload)
{
    struct chunk *ch = chunk_find(c, h->tensor, h->chunk);
    const struct slot *m = &c->slot[slot];
    int64_t o = open_step(ch->s);
    if (h->step > o) {
        buf_unref(payload);
        shard_close(c, m->id, KS_EPROTO, "push of a step that is not open yet");
        return;
    }
    if (h->step < m->join || h->step > m->last || h->step < ch->s->complete) {
        c->slot[slot].stats.late++;
        buf_unref(payload);
        shard_refuse(c, m->id, h, KS_ELATE);
        return;
    }
    if (h->step == o) {
        push_open(c, ch, slot, h, payload);
        return;
    }
    if (ch->cur.step == h->step)
        push_again(c, ch, slot, h);
    buf_unref(payload);
}

/* Does DONE speak of this shard? One of before this tenure lists the tensors of what was served here then. */
static bool done_concerns(const struct shard *s, const struct frame_header *h)
{
    bool tenure = (int32_t)(h->epoch - (uint32_t)s->since) >= 0 || MUTANT(54);
    return s->primary && open_step(s) == h->step && tenure;
}

/* How many chunks DONE lists at each shard where its step is open. */
static int fact_take(struct shard_core *c, uint32_t slot, const struct frame_header *h, const struct done_head *d)
{
    for (uint32_t i = 0; i < d->ntensors; i++)
        if (!map_get(&c->tensors, done_tensor(d, i)))
            return KS_EPROTO;
    for (uint32_t i = 0; i < c->cfg.nshards; i++)
        if (done_concerns(&c->shard[i], h))
            c->shard[i].want[slot] = 0;
    for (uint32_t i = 0; i < d->ntensors; i++) {
        struct tensor *t = map_get(&c->tensors, done_tensor(d, i));
        for (uint32_t k = 0; k < t->nchunks; k++)
            if (t->chunk[k] && done_concerns(t->chunk[k]->s, h))
                t->chunk[k]->s->want[slot]++;
    }
    return 0;
}

static void need_send(struct shard_core *c, uint32_t slot, const struct done_head *d, const struct frame_header *done)
{
    struct chunk_ref *refs = NULL;
    uint32_t n = 0, cap = 0;
    for (uint32_t i = 0; i < d->ntensors; i++) {
        struct tensor *t = map_get(&c->tensors, done_tensor(d, i));
        for (uint32_t k = 0; k < t->nchunks; k++) {
            struct chunk *ch = t->chunk[k];
            if (!ch || !done_concerns(ch->s, done) || mset_has(&ch->acc_mask, slot) ||
                (has_result(ch) && mset_has(&ch->mask, slot)))
                continue;
            ARRAY_ROOM(refs, n, cap);
            refs[n++] = (struct chunk_ref){.tensor = t->spec.id, .chunk = k};
        }
    }
    struct frame_header h = {.type = FRAME_NEED, .step = done->step};
    struct buf *b = n ? pool_get(c->cfg.pool, chunk_refs_size(n)) : NULL;
    if (b) {
        chunk_refs_encode(refs, n, b->data);
        shard_send(c, c->slot[slot].id, &h, b);
        buf_unref(b);
    }
    mem_free(refs);
}

static void resend_released(struct shard_core *c, struct shard *s, uint32_t slot)
{
    for (uint32_t i = 0; i < s->nchunks; i++)
        if (has_result(s->chunk[i]) && s->chunk[i]->released && mset_has(&s->chunk[i]->mask, slot))
            result_send(c, s->chunk[i], slot);
}

/* DONE at one shard whose open step it is. Returns whether something listed is missing. */
static bool done_open(struct shard_core *c, struct shard *s, uint32_t slot, const struct frame_header *h)
{
    mset_add(&s->fact, slot);
    done_update(s, slot);
    if (h->flags & FRAME_AGAIN)
        resend_released(c, s, slot);
    return s->have[slot] < s->want[slot];
}

static bool done_too_early(const struct shard_core *c, int64_t k)
{
    for (uint32_t i = 0; i < c->cfg.nshards; i++) {
        const struct shard *s = &c->shard[i];
        if (s->primary && k > open_step(s) && shard_mode(c, open_step(s)).kind == MODE_SYNC)
            return true;
    }
    return false;
}

/* A fact about step k of a member of set(k). */
static void done_take(struct shard_core *c, uint32_t slot, const struct frame_header *h, const struct done_head *d)
{
    bool missing = false;
    if (fact_take(c, slot, h, d)) {
        shard_close(c, c->slot[slot].id, KS_EPROTO, "DONE lists a tensor that is not declared here");
        return;
    }
    settings_take(c, c->slot[slot].id, d);
    for (uint32_t i = 0; i < c->cfg.nshards; i++)
        if (done_concerns(&c->shard[i], h))
            missing |= done_open(c, &c->shard[i], slot, h);
    if (missing)
        need_send(c, slot, d, h);
    for (uint32_t i = 0; i < c->cfg.nshards; i++)
        if (done_concerns(&c->shard[i], h))
            sync_try_shard(c, &c->shard[i]);
}

void sync_done(struct shard_core *c, uint32_t slot, const struct frame_header *h, const struct done_head *d)
{
    struct slot *m = &c->slot[slot];
    bool reader = h->flags & FRAME_READER;
    int64_t k = h->step;
    if (!reader && done_too_early(c, k)) {
        shard_close(c, m->id, KS_EPROTO, "DONE of a step that is not open yet");
        return;
    }
    m->stats.clock = k > m->stats.clock ? k : m->stats.clock;
    for (uint32_t i = 0; (h->flags & (FRAME_AGAIN | FRAME_READER)) && i < c->cfg.nshards; i++)
        if (c->shard[i].primary && c->shard[i].announced && k == c->shard[i].complete)
            sync_answer(c, &c->shard[i], slot);
    if (!reader && k >= m->join && k <= m->last && k >= 0 && shard_mode(c, k).kind == MODE_SYNC)
        done_take(c, slot, h, d);
}

/* ---- pulls ---- */

static void value_send(struct shard_core *c, struct chunk *ch, uint64_t member, const struct pull_wait *p)
{
    /* The value after step k - 1: the version before the open step's result, if that is there already. */
    const struct image *i = ch->cur.step >= p->step && ch->has_pre ? &ch->pre : &ch->cur;
    struct frame_header h = {.type = FRAME_VALUE, .dtype = ch->t->spec.dtype, .tensor = ch->t->spec.id, .chunk = ch->no,
                             .step = p->step, .seq = p->seq, .version = i->version};
    struct buf *out = image_out(c, ch, i);
    if (!out) {
        shard_out_of_memory(c);
        return;
    }
    shard_send(c, member, &h, out);
    buf_unref(out);
}

/* A first value that is not held yet is nobody's: another member's might take its place. */
static bool pull_ready(const struct chunk *ch, const struct pull_wait *p)
{
    return ch->s->announced && ch->s->complete >= p->step - 1 && (!ch->flying || MUTANT(55));
}

void sync_pull(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h)
{
    struct pull_wait p = {.member = c->slot[slot].id, .step = h->step, .seq = h->seq, .need = INT64_MIN, .sync = true};
    pulls_drop_member(ch, p.member);
    if (ch->s->complete >= h->step) {
        shard_refuse(c, p.member, h, KS_ESTALE);
        return;
    }
    if (pull_ready(ch, &p)) {
        value_send(c, ch, p.member, &p);
        return;
    }
    ARRAY_ROOM(ch->pull, ch->npull, ch->cpull);
    ch->pull[ch->npull++] = p;
    ch->s->pulls_parked = true;
}

void sync_serve_pulls(struct shard_core *c, struct shard *s)
{
    bool parked = s->pulls_parked;
    s->pulls_parked = false;
    for (uint32_t i = 0; parked && i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        uint32_t n = 0;
        for (uint32_t k = 0; k < ch->npull; k++) {
            struct pull_wait *p = &ch->pull[k];
            if (p->sync && pull_ready(ch, p))
                value_send(c, ch, p->member, p);
            else
                ch->pull[n++] = *p;
        }
        ch->npull = n;
        s->pulls_parked |= n > 0;
    }
}

/* ---- resolve (at adoption) ---- */

/* A member that is listed no more was in the step: views drop it when every shard has left its last step well behind.
 * Here that was in asynchronous steps, and the disk does not say how many. */
static bool reopen_needed(const struct shard_core *c, const struct shard *s)
{
    for (uint32_t i = 0; s->complete >= 0 && i < s->ncset; i++) {
        const struct view_member *m = view_member_find(c->view, s->cset[i]);
        if (m && (m->join > s->complete || s->complete > m->last))
            return true;
    }
    return false;
}

static void undo(struct shard_core *c, struct chunk *ch)
{
    CHECK(ch->has_pre);   /* kept while the step may be undone */
    uint32_t dropped = ch->cur.disk_slot;
    if (!ch->released && ch->s->primary)
        ch->s->unreleased--;
    if (!MUTANT(16)) {
        image_drop(&ch->cur);
        ch->cur = ch->pre;
    } else {
        image_drop(&ch->pre);
        ch->cur.step = -1;
    }
    ch->pre = (struct image){0};
    ch->has_pre = false;
    ch->released = true;
    ch->persist_seq = 0;
    ch->item = 0;
    ch->acks = 0;
    mset_clear(&ch->mask);
    acc_clear(c, ch);
    c->stats.reopened++;
    if (c->cfg.durable && !MUTANT(24))
        persist_delete(c, ch, dropped);
}

static bool undo_foreign(struct shard_core *c, struct shard *s)
{
    bool touched = false;
    for (uint32_t i = 0; i < s->nchunks; i++) {
        struct chunk *ch = s->chunk[i];
        if (has_result(ch) && !mset_within(&ch->mask, &s->oset)) {
            undo(c, ch);
            touched = true;
        } else if (!has_result(ch) && !mset_within(&ch->acc_mask, &s->oset)) {
            acc_clear(c, ch);
            touched = true;
        }
    }
    return touched;
}

void sync_resolve(struct shard_core *c, struct shard *s)
{
    bool reopen = reopen_needed(c, s);
    if (reopen) {
        /* Contributions to the step after would have sealed this one. */
        CHECK(s->open_acc == 0);
        s->complete--;
        s->w = s->w_held = s->complete + 1;
        s->ncset = 0;
        if (!MUTANT(18))
            sync_facts_clear(c, s);
        log_debug("reopen", "shard=%u step=%lld", s->no, (long long)s->complete + 1);
    }
    sync_open(c, s);
    bool touched = undo_foreign(c, s);
    if (touched || reopen || !mset_equal(&s->mark_set, &s->oset))
        s->marking = false;
    for (int i = 0; i < MSET_WORDS; i++)
        s->fact.w[i] &= s->oset.w[i];
    sync_redo(c, s);
    if (reopen && c->cfg.durable)
        persist_shard(c, s);
}
