#include "worker/client_impl.h"

#include <stdio.h>
#include <string.h>

enum { INIT_WHOLE = -1 }; /* chunk number of claims and of the end */

/* ---- which loop knows which tensor ---- */

static bool declared_at(const struct client_loop *l, uint32_t index)
{
    return index < l->ndeclared && l->declared[index / 64] >> index % 64 & 1;
}

static void declared_set(struct client_loop *l, uint32_t index)
{
    if (index >= l->ndeclared) {
        uint32_t n = (index / 64 + 1) * 2;
        l->declared = mem_resize(l->declared, n * sizeof *l->declared);
        for (uint32_t w = l->ndeclared / 64; w < n; w++)
            l->declared[w] = 0;
        l->ndeclared = n * 64;
    }
    l->declared[index / 64] |= 1ull << index % 64;
}

void client_declare_forget(struct client_loop *l, uint32_t index)
{
    if (index < l->ndeclared)
        l->declared[index / 64] &= ~(1ull << index % 64);
}

/* The request number says which tenure was asked, so that an answer of an older one does not count. */
static uint64_t request_number(const struct client_loop *l, uint32_t index)
{
    return (uint64_t)l->generation << 32 | index;
}

static void declare_send(struct client_core *c, const struct client_loop *l, const struct client_tensor *t)
{
    if (!l || !l->up)
        return;
    struct client_effect *f = client_emit(c, CLIENT_SEND_SPEC);
    f->to = l->server;
    f->loop = l->number;
    f->spec = &t->spec;
    f->header = (struct frame_header){.type = FRAME_DECLARE,
                                      .dtype = (uint8_t)t->spec.dtype,
                                      .tensor = t->spec.id,
                                      .version = request_number(l, t->index),
                                      .epoch = client_epoch(c)};
}

/* The home decides; the others hear of a tensor only after it. */
static bool declare_to(const struct client_core *c, const struct client_loop *l, const struct client_tensor *t)
{
    if (t->state == TENSOR_FAILED || declared_at(l, t->index))
        return false;
    return t->state >= TENSOR_OTHERS || client_serves(c, t, 0) == l;
}

void client_declare_resend(struct client_core *c, struct client_loop *l)
{
    for (uint32_t i = 0; i < c->ntensors && l->up; i++)
        if (declare_to(c, l, c->tensor[i]))
            declare_send(c, l, c->tensor[i]);
}

static void declares_done(struct client_core *c, struct client_tensor *t, int status, const char *text)
{
    while (t->declares.head) {
        struct client_op *op = t->declares.head;
        uint32_t n = c->out->n;
        client_list_remove(&t->declares, op);
        client_op_done(c, op, status, text);
        if (c->out->n == n)
            continue;
        c->out->effect[n].tensor = t->index;
        c->out->effect[n].step = t->initialised;
    }
}

/* Ready when every loop that serves shards has answered. */
void client_declare_settle(struct client_core *c, struct client_tensor *t)
{
    if (t->state != TENSOR_OTHERS || !c->nloops)
        return;
    for (uint32_t i = 0; i < c->nloops; i++)
        if (!declared_at(c->loops[i], t->index))
            return;
    t->state = TENSOR_READY;
    declares_done(c, t, KS_OK, NULL);
}

static struct client_tensor *tensor_add(struct client_core *c, uint64_t id)
{
    struct client_tensor *t = mem_alloc(sizeof *t);
    t->index = c->ntensors;
    ARRAY_ROOM(c->tensor, c->ntensors, c->tensors_cap);
    c->tensor[c->ntensors++] = t;
    map_put(&c->tensor_by_id, id, t);
    return t;
}

static void tensor_set(struct client_core *c, struct client_tensor *t, const struct tensor_spec *spec)
{
    client_tensor_spare_free(t);
    t->spec = *spec;
    t->state = TENSOR_HOME;
    t->bytes = tensor_bytes(spec);
    t->nchunks = tensor_chunks(spec, c->config.chunk_bytes);
    t->stride = tensor_chunk_bytes(spec, 0, c->config.chunk_bytes);
}

static void describe_conflict(const struct client_tensor *t, const struct tensor_spec *spec, char *out, size_t size)
{
    char mine[96], other[96];
    tensor_describe(spec, mine, sizeof mine);
    tensor_describe(&t->spec, other, sizeof other);
    snprintf(out, size, "tensor '%.60s' is declared already as %s; asked for %s", t->spec.name, other, mine);
}

void client_declare(struct client_core *c, const struct client_event *e)
{
    struct client_tensor *t = client_tensor_get(c, e->spec->id);
    struct client_op *op = client_op_create(c, e, NULL);
    char text[300];
    if (t && t->state != TENSOR_FAILED && !tensor_same(&t->spec, e->spec)) {
        describe_conflict(t, e->spec, text, sizeof text);
        client_op_done(c, op, KS_EEXIST, text);
        return;
    }
    bool fresh = !t || t->state == TENSOR_FAILED;
    if (!t)
        t = tensor_add(c, e->spec->id);
    if (fresh)
        tensor_set(c, t, e->spec);
    client_list_add(&t->declares, op);
    if (t->state == TENSOR_READY)
        declares_done(c, t, KS_OK, NULL);
    else if (fresh)
        declare_send(c, client_serves(c, t, 0), t);
}

static void declare_failed(struct client_core *c, struct client_loop *l, struct client_tensor *t,
                           const struct frame_header *h, const void *payload)
{
    char text[200] = "";
    size_t n = payload && h->len < sizeof text ? h->len : payload ? sizeof text - 1 : 0;
    if (n)
        memcpy(text, payload, n);
    if (h->status == KS_EAGAIN) {
        client_refused(c, l, h);
        return;
    }
    if (!t->declares.n)
        return;
    t->state = TENSOR_FAILED;
    declares_done(c, t, h->status, text);
}

void client_declared(struct client_core *c, struct client_loop *l, const struct frame_header *h, const void *payload)
{
    uint32_t index = (uint32_t)h->version;
    struct client_tensor *t = index < c->ntensors ? c->tensor[index] : NULL;
    if (!t || t->spec.id != h->tensor || h->version != request_number(l, index) || t->state == TENSOR_FAILED)
        return;
    bool home = client_serves(c, t, 0) == l;
    if (h->status) {
        declare_failed(c, l, t, h, payload);
        return;
    }
    declared_set(l, index);
    if (home)
        t->initialised = h->flags & FRAME_INITIALISED;
    if (home && t->state == TENSOR_HOME) {
        t->state = TENSOR_OTHERS;
        for (uint32_t i = 0; i < c->nloops; i++)
            if (declare_to(c, c->loops[i], t))
                declare_send(c, c->loops[i], t);
    }
    client_declare_settle(c, t);
}

/* ---- the first value: claim it at the home, send all chunks, say that it is whole ---- */

static void init_whole(struct client_core *c, const struct client_op *op)
{
    struct frame_header h = {
        .type = FRAME_INIT,
        .flags = op->stage == INIT_FINAL ? FRAME_INITIALISED : 0,
        .dtype = (uint8_t)op->t->spec.dtype,
        .tensor = op->t->spec.id,
        .chunk = (uint32_t)INIT_WHOLE,
        .version = op->grant,
    };
    client_send(c, client_serves(c, op->t, 0), &h, NULL, false);
}

static void init_chunk(struct client_core *c, const struct client_op *op, uint32_t chunk)
{
    struct frame_header h = {
        .type = FRAME_INIT,
        .dtype = (uint8_t)op->t->spec.dtype,
        .len = client_chunk_bytes(c, op->t, chunk),
        .tensor = op->t->spec.id,
        .chunk = chunk,
        .version = op->grant,
    };
    client_send(c, client_serves(c, op->t, chunk), &h, op->in + (size_t)chunk * op->t->stride, false);
}

void client_init(struct client_core *c, const struct client_event *e)
{
    struct client_op *op = client_op_create(c, e, c->tensor[e->tensor]);
    client_list_add(&c->inits, op);
    if (op->t->init)
        return;
    op->t->init = op;
    init_whole(c, op);
}

/* A new tenure may have lost what was not whole: a new home is asked again, another loop gets its chunks again. */
static void init_tenure(struct client_core *c, struct client_op *op)
{
    if (c->shard[client_shard_of(c, op->t, 0)].tenured) {
        op->stage = INIT_CLAIM;
        op->grant = 0;
        return;
    }
    for (uint32_t i = 0; i < op->nslots && op->stage != INIT_CLAIM; i++) {
        if (!c->shard[client_shard_of(c, op->t, i)].tenured || !(op->slot[i].flags & SLOT_GOT))
            continue;
        op->slot[i].flags = 0;
        op->left++;
        op->stage = INIT_SEND;
    }
}

void client_init_tenure(struct client_core *c)
{
    for (struct client_op *op = c->inits.head; op; op = op->next)
        if (op->t->init == op)
            init_tenure(c, op);
}

static void init_resend(struct client_core *c, const struct client_op *op, const struct client_loop *l,
                        bool tenured_only)
{
    const struct client_shard *home = &c->shard[client_shard_of(c, op->t, 0)];
    if (op->stage != INIT_SEND) {
        if (home->serve == l && (home->tenured || !tenured_only))
            init_whole(c, op);
        return;
    }
    for (uint32_t i = 0; i < op->nslots; i++) {
        const struct client_shard *sh = &c->shard[client_shard_of(c, op->t, i)];
        if (sh->serve == l && !(op->slot[i].flags & SLOT_GOT) && (sh->tenured || !tenured_only))
            init_chunk(c, op, i);
    }
}

void client_init_resend(struct client_core *c, struct client_loop *l, bool tenured_only)
{
    for (const struct client_op *op = c->inits.head; op && l->up; op = op->next)
        if (op->t->init == op)
            init_resend(c, op, l, tenured_only);
}

/* Everybody in this process who waits for this tensor; only one of them can have won. */
static void init_done(struct client_core *c, struct client_tensor *t, int status)
{
    t->initialised = true;
    for (struct client_op *op = c->inits.head, *next; op; op = next) {
        next = op->next;
        if (op->t != t)
            continue;
        client_list_remove(&c->inits, op);
        client_op_done(c, op, op == t->init ? status : KS_EEXIST, NULL);
    }
    t->init = NULL;
}

/* A grant carries its version, which rises from one to the next; the end of it all carries none. */
static void whole_inited(struct client_core *c, struct client_op *op, const struct frame_header *h)
{
    if (h->status == KS_EEXIST || (!h->version && op->stage == INIT_FINAL)) {
        init_done(c, op->t, h->status);
        return;
    }
    if (h->version <= op->grant)
        return;
    op->stage = INIT_SEND;
    op->grant = h->version;
    op->left = op->nslots;
    memset(op->slot, 0, op->nslots * sizeof op->slot[0]);
    for (uint32_t i = 0; i < op->nslots; i++)
        init_chunk(c, op, i);
}

void client_inited(struct client_core *c, struct client_loop *l, const struct frame_header *h)
{
    struct client_tensor *t = client_tensor_get(c, h->tensor);
    struct client_op *op = t ? t->init : NULL;
    bool whole = h->chunk == (uint32_t)INIT_WHOLE;
    if (!op || (!whole && h->chunk >= op->nslots) || client_serves(c, t, whole ? 0 : h->chunk) != l)
        return;
    if (h->status && h->status != KS_EEXIST) {
        client_refused(c, l, h);
        return;
    }
    if (whole) {
        whole_inited(c, op, h);
        return;
    }
    if (op->stage != INIT_SEND || h->version != op->grant || (op->slot[h->chunk].flags & SLOT_GOT))
        return;
    op->slot[h->chunk].flags |= SLOT_GOT;
    if (--op->left)
        return;
    op->stage = INIT_FINAL;
    init_whole(c, op);
}
