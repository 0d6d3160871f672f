#include "worker/client_impl.h"

#include <stdio.h>
#include <string.h>

void client_ops_free(struct client_op *op)
{
    while (op) {
        struct client_op *next = op->next;
        mem_free(op);
        op = next;
    }
}

static void arenas_free(struct client_arena *a)
{
    while (a) {
        struct client_arena *next = a->next;
        mem_free(a);
        a = next;
    }
}

void client_tensor_spare_free(struct client_tensor *t)
{
    client_ops_free(t->spare);
    arenas_free(t->spare_arena);
    t->spare = NULL;
    t->spare_arena = NULL;
}

void client_op_free(struct client_core *c, struct client_op *op)
{
    if (op->arena) {
        op->arena->next = op->t->spare_arena;
        op->t->spare_arena = op->arena;
    }
    struct client_op **spare = op->nslots ? &op->t->spare : &c->spare;
    op->next = *spare;
    *spare = op;
}

/* The text is left as it is but for its first byte: most effects have none, and there are many. */
struct client_effect *client_emit(struct client_core *c, enum client_effect_kind kind)
{
    struct client_outbox *o = c->out;
    ARRAY_ROOM(o->effect, o->n, o->cap);
    struct client_effect *f = &o->effect[o->n++];
    memset(f, 0, offsetof(struct client_effect, text));
    f->text[0] = 0;
    f->kind = kind;
    return f;
}

void client_send(struct client_core *c, const struct client_loop *l, const struct frame_header *h, const void *payload,
                 bool owned)
{
    if (!l || !l->up) {
        if (owned)
            mem_free((void *)payload);
        return;
    }
    struct client_effect *f = client_emit(c, CLIENT_SEND);
    f->to = l->server;
    f->loop = l->number;
    f->header = *h;
    f->header.epoch = client_epoch(c);
    f->payload = payload;
    f->owned = owned;
}

void client_list_add(struct client_list *l, struct client_op *op)
{
    op->next = NULL;
    op->prev = l->tail;
    *(l->tail ? &l->tail->next : &l->head) = op;
    l->tail = op;
    l->n++;
}

void client_list_remove(struct client_list *l, struct client_op *op)
{
    *(op->prev ? &op->prev->next : &l->head) = op->next;
    *(op->next ? &op->next->prev : &l->tail) = op->prev;
    op->next = op->prev = NULL;
    l->n--;
}

static struct client_op *op_take(struct client_core *c, struct client_tensor *t)
{
    uint32_t nslots = t ? t->nchunks : 0;
    struct client_op **spare = t ? &t->spare : &c->spare;
    struct client_op *op = *spare;
    size_t size = sizeof *op + nslots * sizeof op->slot[0];
    if (!op)
        op = mem_alloc(size);
    else
        *spare = op->next;
    memset(op, 0, size);
    op->nslots = nslots;
    op->t = t;
    return op;
}

struct client_op *client_op_create(struct client_core *c, const struct client_event *e, struct client_tensor *t)
{
    struct client_op *op = op_take(c, t);
    op->kind = e->kind;
    op->id = e->op;
    op->since_us = c->now_us;
    op->in = e->in;
    op->out = e->out;
    op->weight = (float)e->weight;
    op->setting = e->setting;
    op->left = op->nslots;
    return op;
}

struct client_op *client_op_twin(struct client_core *c, struct client_op *op)
{
    struct client_op *pull = op_take(c, op->t);
    pull->kind = CLIENT_PULL;
    pull->id = op->id;
    pull->since_us = op->since_us;
    pull->in = op->in;
    pull->out = op->out;
    pull->left = pull->nslots;
    pull->mate = op;
    op->mate = pull;
    return pull;
}

/* In place, `in` is needed until nobody can ask for it again: results wait in an arena. */
void client_op_arena(struct client_op *op)
{
    struct client_tensor *t = op->t;
    if (!op->in || !op->out || op->in + t->bytes <= op->out || op->out + t->bytes <= op->in)
        return;
    op->arena = t->spare_arena;
    if (op->arena)
        t->spare_arena = op->arena->next;
    else
        op->arena = mem_alloc(sizeof *op->arena + t->bytes);
}

uint8_t *client_op_place(const struct client_op *op, uint32_t chunk)
{
    return (op->arena ? op->arena->data : op->out) + (size_t)chunk * op->t->stride;
}

static void hand_over(const struct client_core *c, const struct client_op *op)
{
    for (uint32_t i = 0; op->arena && i < op->nslots; i++)
        if (op->slot[i].flags & SLOT_DATA)
            memcpy(op->out + (size_t)i * op->t->stride, client_op_place(op, i), client_chunk_bytes(c, op->t, i));
}

/* op is in no list any more. The two records of an asynchronous push_pull end together, with the worse status. */
void client_op_done(struct client_core *c, struct client_op *op, int status, const char *text)
{
    if (status < op->status)
        op->status = status;
    struct client_op *mate = op->mate;
    if (mate && op->kind == CLIENT_PULL)
        return;
    if (mate) {
        mate->mate = NULL;
        bool over = !mate->left;
        status = op->status;
        client_op_free(c, op);
        if (over)
            client_op_done(c, mate, status, text);
        else if (status < mate->status)
            mate->status = status;
        return;
    }
    if (c->phase != PHASE_OVER)
        hand_over(c, op);
    if (op->id) {
        struct client_effect *f = client_emit(c, CLIENT_DONE);
        f->op = op->id;
        f->status = op->status;
        f->tensor = op->t ? op->t->index : 0;
        if (text)
            snprintf(f->text, sizeof f->text, "%s", text);
    }
    client_op_free(c, op);
}
