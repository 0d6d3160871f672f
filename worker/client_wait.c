#include "worker/client_impl.h"

#include <stdarg.h>
#include <stdio.h>

struct line {
    const struct client_core *c;
    uint64_t now_us;
    char *out;
    size_t size, n;
};

__attribute__((format(printf, 2, 3))) static void add(struct line *l, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(l->out + l->n, l->size - l->n, format, args);
    va_end(args);
    if (n > 0)
        l->n = l->n + (size_t)n < l->size ? l->n + (size_t)n : l->size - 1;
}

static void add_head(struct line *l, uint64_t since_us)
{
    uint64_t s = l->now_us > since_us ? (l->now_us - since_us) / 1000000 : 0;
    add(l, "step %lld: waiting %llu s ", (long long)l->c->step, (unsigned long long)s);
}

static const char *status_text(int status)
{
    switch (status) {
#define WAIT_TEXT(name, value, text)                                                                                   \
    case value:                                                                                                        \
        return text;
        KS_ERROR_TABLE(WAIT_TEXT)
#undef WAIT_TEXT
    default:
        return "unknown error";
    }
}

static void add_server(struct line *l, const struct client_loop *loop)
{
    const struct view_server *s = view_server_find(l->c->view, loop->server);
    add(l, "for server %s", s ? s->name : "?");
}

/* A loop that cannot answer: not connected, or it refused something. True when that is what is waited for. */
static bool add_trouble(struct line *l, const struct client_loop *loop, uint32_t shard, uint64_t since_us)
{
    if (loop && loop->up && !loop->retry)
        return false;
    add_head(l, since_us);
    if (!loop) {
        add(l, "for a server of shard %u", shard);
        return true;
    }
    add_server(l, loop);
    if (!loop->up)
        add(l, " (no connection)");
    else
        add(l, " (it refused: %s)", status_text(loop->refused_status));
    return true;
}

static void add_shards(struct line *l, const char *what)
{
    const struct client_core *c = l->c;
    uint32_t shown = 0;
    for (uint32_t i = 0; i < c->config.nshards; i++)
        if (!c->shard[i].counted && add_trouble(l, c->shard[i].serve, i, c->phase_us))
            return;
    add_head(l, c->phase_us);
    add(l, "%s", what);
    for (uint32_t i = 0; i < c->config.nshards && shown < 9; i++) {
        if (c->shard[i].counted)
            continue;
        shown++;
        if (shown == 9)
            add(l, ", ...");
        else
            add(l, "%s%u", shown == 1 ? " (shards " : ", ", i);
    }
    if (shown)
        add(l, ")");
}

static void add_op(struct line *l, const struct client_op *op, const char *what)
{
    const struct client_core *c = l->c;
    for (uint32_t i = 0; i < op->nslots; i++)
        if (!(op->slot[i].flags & SLOT_GOT) &&
            add_trouble(l, client_serves(c, op->t, i), client_shard_of(c, op->t, i), op->since_us))
            return;
    add_head(l, op->since_us);
    add(l, what, op->t->spec.name);
}

static const struct client_tensor *oldest_declare(const struct client_core *c)
{
    const struct client_tensor *oldest = NULL;
    for (uint32_t i = 0; i < c->ntensors; i++) {
        const struct client_op *op = c->tensor[i]->declares.head;
        if (op && (!oldest || op->since_us < oldest->declares.head->since_us))
            oldest = c->tensor[i];
    }
    return oldest;
}

static void add_declare(struct line *l, const struct client_tensor *t)
{
    const struct client_core *c = l->c;
    uint64_t since_us = t->declares.head->since_us;
    for (uint32_t i = 0; i < c->nloops; i++)
        if (add_trouble(l, c->loops[i], 0, since_us))
            return;
    add_head(l, since_us);
    add(l, "for servers to declare tensor '%s'", t->spec.name);
}

static void add_pull(struct line *l, const struct client_op *op)
{
    if (l->c->mode != MODE_SSP) {
        add_op(l, op, "for the value of tensor '%s'");
        return;
    }
    add_op(l, op, "within the staleness bound (tensor '%s')");
}

static void add_ops(struct line *l)
{
    const struct client_core *c = l->c;
    const struct client_tensor *declared = oldest_declare(c);
    if (declared)
        add_declare(l, declared);
    else if (c->inits.head)
        add_op(l, c->inits.head, "for the first value of tensor '%s'");
    else if (c->pulls.head)
        add_pull(l, c->pulls.head);
    else if (c->apushes.head)
        add_op(l, c->apushes.head, "for servers to acknowledge tensor '%s'");
    else if (c->queue.head && c->hold) {
        add_head(l, c->queue.head->since_us);
        add(l, "for the change of the mode");
    }
}

static void add_leaving(struct line *l)
{
    const struct client_core *c = l->c;
    if (c->apushes.head) {
        add_op(l, c->apushes.head, "for servers to acknowledge tensor '%s'");
        return;
    }
    add_head(l, c->phase_us);
    add(l, "for a view without this member");
}

size_t client_core_waiting(const struct client_core *c, uint64_t now_us, char *out, size_t size)
{
    struct line l = {.c = c, .now_us = now_us, .out = out, .size = size};
    char what[64];
    if (!size)
        return 0;
    out[0] = 0;
    switch (c->phase) {
    case PHASE_NEW:
        add(&l, "waiting for a view that lists this member");
        break;
    case PHASE_READ:
        snprintf(what, sizeof what, "for step %lld to be complete", (long long)c->read);
        add_shards(&l, what);
        break;
    case PHASE_ENDED:
        if (c->done_held)
            add_ops(&l);
        else
            add_shards(&l, "for members to end the step");
        break;
    case PHASE_HELD:
        add_head(&l, c->phase_us);
        add(&l, "for the change of the mode");
        break;
    case PHASE_STEP:
        add_ops(&l);
        break;
    case PHASE_LEAVING:
        add_leaving(&l);
        break;
    case PHASE_OVER:
        break;
    }
    return l.n;
}
