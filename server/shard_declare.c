/* shard_declare.c - tensors: declared once under a name, initialised once in the life of a job. */
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "server/shard_impl.h"

enum { CHUNKS_MAX = 1 << 24 };   /* of one tensor: 16 TiB at the default size */

static void chunk_add(struct shard_core *c, struct tensor *t, uint32_t no)
{
    struct shard *s = &c->shard[shard_of(t->spec.id, no, c->cfg.nshards)];
    struct chunk *ch = mem_alloc(sizeof *ch);
    ch->t = t;
    ch->s = s;
    ch->no = no;
    ch->bytes = tensor_chunk_bytes(&t->spec, no, c->cfg.chunk_bytes);
    ch->n = ch->bytes / (uint32_t)dtype_size(t->spec.dtype);
    ch->cur.step = -1;
    ch->released = true;
    ch->need_served = s->w_held > 0 ? s->w_held : 0;
    t->chunk[no] = ch;
    ARRAY_ROOM(s->chunk, s->nchunks, s->cchunks);
    s->chunk[s->nchunks++] = ch;
    s->declared += ch->n * dtype_size(dtype_acc(t->spec.dtype));
}

struct tensor *tensor_add(struct shard_core *c, const struct tensor_spec *spec, const struct optim *optim)
{
    struct tensor *t = mem_alloc(sizeof *t);
    t->spec = *spec;
    t->optim = *optim;
    t->now = *optim;
    t->group = hash_bytes(spec->group, strlen(spec->group));
    t->slots = spec->kind == TENSOR_PARAM ? optim_slots(optim) : 0;
    t->nchunks = tensor_chunks(spec, c->cfg.chunk_bytes);
    t->chunk = mem_alloc(t->nchunks * sizeof(struct chunk *));
    for (uint32_t i = 0; i < t->nchunks; i++)
        if (shard_is_mine(c, shard_of(spec->id, i, c->cfg.nshards)))
            chunk_add(c, t, i);
    t->home = t->chunk[0] != NULL;
    map_put(&c->tensors, spec->id, t);
    c->stats.value_bytes += tensor_bytes(spec);
    return t;
}

static void chunk_free(struct chunk *ch)
{
    image_drop(&ch->cur);
    image_drop(&ch->pre);
    buf_unref(ch->acc);
    for (struct contrib *k = ch->contribs, *next; k; k = next) {
        next = k->next;
        buf_unref(k->buf);
        mem_free(k);
    }
    buf_unref(ch->held_out);
    buf_unref(ch->flying_out);
    mem_free(ch->applied);
    mem_free(ch->ack);
    mem_free(ch->pull);
    mem_free(ch);
}

void tensor_free(struct tensor *t)
{
    for (uint32_t i = 0; i < t->nchunks; i++)
        if (t->chunk[i])
            chunk_free(t->chunk[i]);
    mem_free(t->chunk);
    mem_free(t->waiting);
    mem_free(t);
}

/* ---- declare ---- */

static void declared_send(struct shard_core *c, uint64_t to, uint64_t tensor, uint64_t request, int status,
                          const char *text)
{
    const struct tensor *t = map_get(&c->tensors, tensor);
    struct frame_header h = {.type = FRAME_DECLARED, .tensor = tensor, .version = request, .status = (int16_t)status,
                             .flags = t && t->home && t->initialised ? FRAME_INITIALISED : 0};
    struct buf *b = text ? pool_get(c->cfg.pool, strlen(text) + 1) : NULL;
    if (b) {
        memcpy(b->data, text, strlen(text) + 1);
        b->len = (uint32_t)strlen(text);
    }
    shard_send(c, to, &h, b);
    buf_unref(b);
}

static uint64_t declared_here(const struct shard_core *c)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->cfg.nshards; i++)
        sum += c->shard[i].primary ? c->shard[i].declared : 0;
    return sum;
}

/* Values alone, without optimizer state: what does not fit even so would only fail later, and cost everybody else. */
static int size_check(const struct shard_core *c, const struct tensor_spec *spec, char *err)
{
    uint32_t chunks = tensor_chunks(spec, c->cfg.chunk_bytes);
    uint64_t have = declared_here(c), more = 0;
    if (chunks > CHUNKS_MAX) {
        snprintf(err, 768, "tensor '%s' has more than %u chunks of %u bytes: use a larger --chunk-bytes", spec->name,
                 CHUNKS_MAX, c->cfg.chunk_bytes);
        return KS_EINVAL;
    }
    for (uint32_t i = 0; i < chunks; i++)
        if (c->shard[shard_of(spec->id, i, c->cfg.nshards)].primary)
            more += tensor_chunk_bytes(spec, i, c->cfg.chunk_bytes);
    more *= dtype_size(dtype_acc(spec->dtype)) / dtype_size(spec->dtype);
    if (!c->cfg.declared_max || have + more <= c->cfg.declared_max)
        return 0;
    snprintf(err, 768, "tensor '%.60s' takes %llu MiB of one loop, which has %llu MiB and holds %llu: raise --memory or use more "
             "servers", spec->name, (unsigned long long)more >> 20, (unsigned long long)c->cfg.declared_max >> 20,
             (unsigned long long)have >> 20);
    return KS_ENOMEM;
}

static int spec_check(const struct shard_core *c, const struct tensor_spec *spec, struct optim *ret, char *err)
{
    const struct tensor *t = map_get(&c->tensors, spec->id);
    *ret = (struct optim){.kind = OPTIM_ADD};
    if (t && !tensor_same(&t->spec, spec)) {
        char have[160], got[160];
        tensor_describe(&t->spec, have, sizeof have);
        tensor_describe(spec, got, sizeof got);
        snprintf(err, 768, "tensor '%s' is declared as %s; refused: %s", t->spec.name, have, got);
        return KS_EEXIST;
    }
    int r = t ? 0 : size_check(c, spec, err);
    if (r || spec->kind != TENSOR_PARAM)
        return r;
    r = optim_parse(spec->optimizer[0] ? spec->optimizer : "add", ret, err);
    if (!r && !optim_allows(ret->kind, spec->dtype)) {
        snprintf(err, 768, "tensor '%s': optimizer '%s' does not work on dtype %s", spec->name, spec->optimizer,
                 dtype_name(spec->dtype));
        r = KS_EINVAL;
    }
    return r;
}

void shard_on_declare(struct shard_core *c, uint64_t from, const struct frame_header *h, const struct tensor_spec *spec)
{
    char err[768] = "";
    struct optim optim;
    int r = spec_check(c, spec, &optim, err);
    if (r) {
        declared_send(c, from, spec->id, h->version, r, err);
        return;
    }
    struct tensor *t = map_get(&c->tensors, spec->id);
    if (t) {
        declared_send(c, from, spec->id, h->version, 0, NULL);
        return;
    }
    t = tensor_add(c, spec, &optim);
    if (!c->cfg.durable) {
        declared_send(c, from, spec->id, h->version, 0, NULL);
        return;
    }
    uint64_t seq = persist_tensor(c, t);
    wait_add(c, (struct wait){.kind = WAIT_DECLARE, .seq = seq, .tensor = t, .member = from, .version = h->version});
}

void declare_durable(struct shard_core *c, const struct wait *w)
{
    declared_send(c, w->member, w->tensor->spec.id, w->version, 0, NULL);
}

/* ---- the first value ---- */

static void inited_send(struct shard_core *c, uint64_t to, const struct tensor *t, uint32_t chunk, int status,
                        uint64_t version)
{
    struct frame_header h = {.type = FRAME_INITED, .tensor = t->spec.id, .chunk = chunk, .status = (int16_t)status,
                             .version = version};
    shard_send(c, to, &h, NULL);
}

static void claim_grant(struct shard_core *c, struct tensor *t, uint64_t member)
{
    uint32_t n = (uint32_t)t->claim_version + 1;
    if (t->claim_version >> 32 != c->view->epoch)
        n = 1;
    t->claim = member;
    t->claim_version = VERSION_OF(c->view->epoch, n);
    inited_send(c, member, t, ~0u, KS_OK, t->claim_version);
}

static void claim(struct shard_core *c, struct tensor *t, uint64_t from)
{
    if (t->initialised) {
        inited_send(c, from, t, ~0u, KS_EEXIST, 0);
        return;
    }
    if (!t->claim || t->claim == from) {
        claim_grant(c, t, from);
        return;
    }
    for (uint32_t i = 0; i < t->nwaiting; i++)
        if (t->waiting[i] == from)
            return;
    ARRAY_ROOM(t->waiting, t->nwaiting, t->cwaiting);
    t->waiting[t->nwaiting++] = from;
}

static void initialised(struct shard_core *c, struct tensor *t)
{
    t->initialised = true;
    t->finishing = false;
    if (t->claim)
        inited_send(c, t->claim, t, ~0u, KS_OK, 0);
    t->claim = 0;
    for (uint32_t i = 0; i < t->nwaiting; i++)
        inited_send(c, t->waiting[i], t, ~0u, KS_EEXIST, 0);
    t->nwaiting = 0;
}

static void init_finish(struct shard_core *c, struct tensor *t, uint64_t from, const struct frame_header *h)
{
    if (t->initialised) {
        /* The winner asks again after a lost answer; for anybody else the value is there already. */
        inited_send(c, from, t, ~0u, h->version == t->claim_version ? KS_OK : KS_EEXIST, 0);
        return;
    }
    if (t->claim != from || h->version != t->claim_version) {
        claim(c, t, from);
        return;
    }
    t->finishing = true;
    async_changed(c, t->chunk[0]);
    async_ack_when_held(c, t->chunk[0], (struct ack_wait){.kind = ACK_INITIALISED, .member = from});
}

static bool chunk_trained(const struct chunk *ch)
{
    return ch->trained || !mset_empty(&ch->acc_mask);
}

static void init_chunk(struct shard_core *c, struct chunk *ch, uint64_t from, const struct frame_header *h,
                       struct buf *payload)
{
    enum dtype t = ch->t->spec.dtype;
    if (chunk_trained(ch) || h->version < ch->init_version || ch->t->spec.kind != TENSOR_PARAM) {
        buf_unref(payload);
        inited_send(c, from, ch->t, ch->no, KS_EEXIST, h->version);
        return;
    }
    struct image next = {.step = -1, .out = payload, .disk_slot = ch->cur.disk_slot, .version = ch->cur.version};
    if (dtype_acc(t) == t) {
        next.value = buf_ref(payload);
    } else {
        next.value = pool_get(c->cfg.pool, ch->n * dtype_size(dtype_acc(t)));
        if (!next.value) {
            buf_unref(payload);
            shard_out_of_memory(c);
            return;
        }
        dtype_widen(t, next.value->data, payload->data, ch->n);
    }
    image_drop(&ch->cur);
    ch->cur = next;
    ch->init_version = h->version;
    async_changed(c, ch);
    async_ack_when_held(c, ch, (struct ack_wait){.kind = ACK_INIT, .member = from, .grant = h->version});
}

void init_answer(struct shard_core *c, struct chunk *ch, const struct ack_wait *a)
{
    if (a->kind == ACK_INIT)
        inited_send(c, a->member, ch->t, ch->no, KS_OK, a->grant);
    else if (!ch->t->initialised)
        initialised(c, ch->t);
}

void shard_on_init(struct shard_core *c, uint64_t from, const struct frame_header *h, struct buf *payload)
{
    struct tensor *t = map_get(&c->tensors, h->tensor);
    struct chunk *ch = chunk_find(c, h->tensor, h->chunk);
    bool whole = h->chunk == ~0u;
    const struct chunk *at = whole && t ? t->chunk[0] : ch;
    if (!t || !at || (!whole && !payload)) {
        buf_unref(payload);
        shard_close(c, from, KS_EPROTO, "INIT of a tensor that is not declared here");
    } else if (!at->s->primary) {
        buf_unref(payload);
        shard_refuse(c, from, h, KS_EAGAIN);
    } else if (!whole) {
        init_chunk(c, ch, from, h, payload);
    } else {
        buf_unref(payload);
        if (h->flags & FRAME_INITIALISED)
            init_finish(c, t, from, h);
        else
            claim(c, t, from);
    }
}

/* After a view: a claim whose holder is gone passes to the next who waits and is still there. */
void shard_claims_recheck(struct shard_core *c)
{
    uint32_t i = 0;
    void *v;
    while (map_next(&c->tensors, &i, NULL, &v)) {
        struct tensor *t = v;
        uint32_t n = 0;
        for (uint32_t k = 0; k < t->nwaiting; k++)
            if (view_lists(c->view, t->waiting[k]))
                t->waiting[n++] = t->waiting[k];
        t->nwaiting = n;
        if (!t->claim || view_lists(c->view, t->claim))
            continue;
        t->claim = 0;
        if (t->nwaiting) {
            uint64_t next = t->waiting[0];
            memmove(t->waiting, t->waiting + 1, --t->nwaiting * sizeof *t->waiting);
            claim_grant(c, t, next);
        }
    }
}
