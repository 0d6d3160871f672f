/* shard_compute.c - accumulating contributions and making the next image of a chunk. */
#include <string.h>

#include "server/shard_impl.h"

const struct optim *tensor_optim(struct shard_core *c, struct tensor *t, int64_t step)
{
    if (!c->nsetting)
        return &t->optim;
    if (t->now_generation == c->setting_generation && t->now_step == step)
        return &t->now;
    uint64_t by[OPT_MAX] = {0};
    int64_t from[OPT_MAX];
    char err[256];
    t->now = t->optim;
    for (int i = 0; i < OPT_MAX; i++)
        from[i] = INT64_MIN;
    for (uint32_t i = 0; i < c->nsetting; i++) {
        const struct setting_entry *e = &c->setting[i];
        uint32_t o = e->s.option;
        if (e->s.group != t->group || e->s.from_step > step || !optim_has_option(t->optim.kind, o))
            continue;
        bool wins = e->s.from_step > from[o] || (e->s.from_step == from[o] && e->member > by[o]);
        /* Refused when it would need other optimizer state; every loop decides that alike. */
        if (!wins || optim_option_set(&t->now, o, e->s.value, err))
            continue;
        from[o] = e->s.from_step;
        by[o] = e->member;
    }
    t->now_generation = c->setting_generation;
    t->now_step = step;
    return &t->now;
}

static bool averages(const struct chunk *ch)
{
    return ch->t->spec.op == TENSOR_AVERAGE;
}

/* acc (and the weights so far) += weight * src. Equal weights cancel: then nothing is scaled and the sum is
 * divided by the count at the end. */
static void acc_sum(struct chunk *ch, struct buf *acc, const struct buf *src, double weight)
{
    enum dtype t = ch->t->spec.dtype;
    if (!averages(ch) || (!ch->acc_weighted && weight == ch->acc_first)) {
        dtype_add(t, acc->data, src->data, ch->n);
    } else {
        if (!ch->acc_weighted)
            dtype_scale(dtype_acc(t), acc->data, ch->n, ch->acc_first);
        ch->acc_weighted = true;
        dtype_add_scaled(t, acc->data, src->data, ch->n, weight);
    }
    ch->acc_weight += weight;
    ch->acc_n++;
}

/* The first contribution: the received buffer becomes the accumulator, unless it has to be widened. NULL (and src
 * untouched): the pool is full. */
static struct buf *acc_first(struct shard_core *c, struct chunk *ch, struct buf *src, double weight)
{
    enum dtype t = ch->t->spec.dtype;
    struct buf *acc = src;
    if (dtype_acc(t) != t) {
        acc = pool_get(c->cfg.pool, ch->n * dtype_size(dtype_acc(t)));
        if (!acc)
            return NULL;
        dtype_widen(t, acc->data, src->data, ch->n);
        buf_unref(src);
    }
    ch->acc_first = ch->acc_weight = weight;
    ch->acc_weighted = false;
    ch->acc_n = 1;
    return acc;
}

static void contrib_keep(struct shard_core *c, struct chunk *ch, uint64_t id, float weight, struct buf *src)
{
    struct contrib *k = c->free_contrib;
    if (k)
        c->free_contrib = k->next;
    else
        k = mem_alloc(sizeof *k);
    struct contrib **at = &ch->contribs;
    while (*at && (*at)->id < id)
        at = &(*at)->next;
    *k = (struct contrib){.id = id, .weight = weight, .buf = src, .next = *at};
    *at = k;
    ch->acc_n++;
}

static void contribs_free(struct shard_core *c, struct chunk *ch)
{
    while (ch->contribs) {
        struct contrib *k = ch->contribs;
        ch->contribs = k->next;
        buf_unref(k->buf);
        k->next = c->free_contrib;
        c->free_contrib = k;
    }
}

void acc_clear(struct shard_core *c, struct chunk *ch)
{
    if (!mset_empty(&ch->acc_mask))
        ch->s->open_acc--;
    buf_unref(ch->acc);
    contribs_free(c, ch);
    ch->acc = NULL;
    ch->acc_n = 0;
    ch->acc_skip = ch->acc_weighted = false;
    mset_clear(&ch->acc_mask);
    mset_clear(&ch->acc_want);
    mset_clear(&ch->acc_rejected);
}

/* Drops what the policy does not let through. */
static struct buf *finite_only(struct shard_core *c, struct chunk *ch, uint32_t slot, struct buf *payload)
{
    const struct tensor_spec *s = &ch->t->spec;
    if (!payload || s->finite == FINITE_APPLY || dtype_all_finite(s->dtype, payload->data, ch->n))
        return payload;
    c->slot[slot].stats.not_finite++;
    mset_add(&ch->acc_rejected, slot);
    if (s->finite == FINITE_SKIP)
        ch->acc_skip = true;
    buf_unref(payload);
    return NULL;
}

/* The sender of a step's first contribution ended the step before: that one is sealed and cannot be undone. */
static void pre_drop_sealed(struct chunk *ch)
{
    if (ch->has_pre && ch->cur.step <= ch->s->complete) {
        image_drop(&ch->pre);
        ch->has_pre = false;
    }
}

static bool acc_take(struct shard_core *c, struct chunk *ch, uint32_t slot, float weight, struct buf *payload)
{
    if (c->cfg.deterministic) {
        contrib_keep(c, ch, c->slot[slot].id, weight, payload);
    } else if (!ch->acc) {
        struct buf *acc = acc_first(c, ch, payload, weight);
        if (!acc)
            return false;
        ch->acc = acc;
    } else {
        acc_sum(ch, ch->acc, payload, weight);
        buf_unref(payload);
    }
    c->slot[slot].stats.applied++;
    c->stats.applied++;
    return true;
}

bool acc_add(struct shard_core *c, struct chunk *ch, uint32_t slot, float weight, struct buf *payload)
{
    pre_drop_sealed(ch);
    payload = finite_only(c, ch, slot, payload);
    if (payload && !acc_take(c, ch, slot, weight, payload)) {
        buf_unref(payload);
        return false;
    }
    if (mset_empty(&ch->acc_mask))
        ch->s->open_acc++;
    mset_add(&ch->acc_mask, slot);
    return true;
}

/* deterministic=on: everything in member-id order (I10). */
static void contribs_sum(struct shard_core *c, struct chunk *ch)
{
    struct contrib *k = ch->contribs;
    ch->acc = acc_first(c, ch, buf_ref(k->buf), k->weight);
    if (ch->acc == k->buf) {
        /* Only the list's reference goes away below; the accumulator must be ours alone. */
        k->buf = NULL;
        ch->acc->refs--;
    }
    for (k = k->next; k; k = k->next)
        acc_sum(ch, ch->acc, k->buf, k->weight);
    contribs_free(c, ch);
}

/* The reduced contribution in the accumulator type: sum, or weighted average. */
static void acc_reduce(struct shard_core *c, struct chunk *ch)
{
    if (ch->contribs)
        contribs_sum(c, ch);
    if (!averages(ch) || !ch->acc)
        return;
    enum dtype t = dtype_acc(ch->t->spec.dtype);
    double by = ch->acc_weighted ? ch->acc_weight : ch->acc_n;
    if (by != 1 && by > 0)
        dtype_divide(t, ch->acc->data, ch->n, by);
}

static bool narrow_out(struct shard_core *c, struct chunk *ch, struct image *i)
{
    enum dtype t = ch->t->spec.dtype;
    if (dtype_acc(t) == t) {
        i->out = buf_ref(i->value);
        return true;
    }
    i->out = pool_get(c->cfg.pool, ch->bytes);
    if (!i->out)
        return false;
    dtype_narrow(t, i->out->data, i->value->data, ch->n);
    return true;
}

/* grad (accumulator type) applied to cur; the result goes to `into`, which may be grad itself and passes to the image. */
static bool apply_gradient(struct shard_core *c, struct chunk *ch, int64_t step, const struct buf *grad, struct buf *into,
                           struct image *ret)
{
    const struct optim *o = tensor_optim(c, ch->t, step);
    enum dtype t = dtype_acc(ch->t->spec.dtype);
    struct image next = {.value = into, .updates = ch->cur.updates + 1};
    if (!chunk_materialise(c, ch))
        return false;
    if (ch->t->slots) {
        next.state = pool_get(c->cfg.pool, ch->cur.state->len);
        if (!next.state)
            return false;
    }
    CHECK(into->refs == 1);
    optim_apply(o, t, next.updates, ch->n, ch->cur.value->data, ch->cur.state ? ch->cur.state->data : NULL, grad->data,
                next.value->data, next.state ? next.state->data : NULL);
    if (!narrow_out(c, ch, &next)) {
        buf_unref(next.state);
        return false;
    }
    *ret = next;
    return true;
}

/* A reduce tensor's result of one step. */
static bool reduce_result(struct shard_core *c, struct chunk *ch, struct buf *sum, struct image *ret)
{
    struct image next = {.value = sum, .updates = ch->cur.updates + 1};
    if (!narrow_out(c, ch, &next))
        return false;
    buf_unref(sum);
    next.value = NULL;
    *ret = next;
    return true;
}

/* The sum is sent to holders as well: both are the same bytes, which nobody writes to any more. */
static bool reduce_shared(struct shard_core *c, struct chunk *ch, struct buf *sum, struct image *ret)
{
    if (reduce_result(c, ch, buf_ref(sum), ret))
        return true;
    buf_unref(sum);
    return false;
}

static bool gradient_result(struct shard_core *c, struct chunk *ch, int64_t step, const struct buf *grad, struct image *ret)
{
    struct buf *into = pool_get(c->cfg.pool, grad->len);
    if (!into)
        return false;
    if (ch->t->spec.kind == TENSOR_PARAM ? apply_gradient(c, ch, step, grad, into, ret)
                                         : (memcpy(into->data, grad->data, grad->len), reduce_result(c, ch, into, ret)))
        return true;
    buf_unref(into);
    return false;
}

bool gradient_apply(struct shard_core *c, struct chunk *ch, const struct image *base, int64_t step, struct buf *grad,
                    struct image *ret)
{
    CHECK(base == &ch->cur);
    return gradient_result(c, ch, step, grad, ret);
}

bool acc_finish(struct shard_core *c, struct chunk *ch, int64_t step, struct image *ret, struct buf **ret_gradient)
{
    bool param = ch->t->spec.kind == TENSOR_PARAM;
    if (!ch->acc_skip)
        acc_reduce(c, ch);
    if (ch->acc_skip || !ch->acc) {
        /* Nobody added anything: a parameter stays as it is, a sum is zero. */
        *ret = param ? image_ref(&ch->cur) : (struct image){.updates = ch->cur.updates};
        return true;
    }
    if (ret_gradient) {
        if (param ? !gradient_result(c, ch, step, ch->acc, ret) : !reduce_shared(c, ch, ch->acc, ret))
            return false;
        *ret_gradient = ch->acc;
        ch->acc = NULL;
        return true;
    }
    bool ok = param ? apply_gradient(c, ch, step, ch->acc, ch->acc, ret) : reduce_result(c, ch, ch->acc, ret);
    if (ok)
        ch->acc = NULL;
    return ok;
}

bool async_apply(struct shard_core *c, struct chunk *ch, int64_t stamp, struct buf *payload)
{
    struct image next;
    struct buf *grad = acc_first(c, ch, payload, 1);
    if (!grad)
        return false;
    static const struct optim add = {.kind = OPTIM_ADD};
    if (ch->t->spec.kind == TENSOR_PARAM) {
        if (!apply_gradient(c, ch, stamp, grad, grad, &next)) {
            buf_unref(grad);
            return false;
        }
    } else {
        enum dtype t = dtype_acc(ch->t->spec.dtype);
        next = (struct image){.value = grad, .updates = ch->cur.updates + 1};
        if (!chunk_materialise(c, ch) || (optim_apply(&add, t, 1, ch->n, ch->cur.value->data, NULL, grad->data, grad->data,
                                                      NULL), !narrow_out(c, ch, &next))) {
            buf_unref(grad);
            return false;
        }
    }
    next.step = ch->cur.step;
    next.version = ch->cur.version;   /* the caller counts on from it */
    next.disk_slot = ch->cur.disk_slot;
    image_drop(&ch->cur);
    ch->cur = next;
    ch->acc_n = 0;
    return true;
}
