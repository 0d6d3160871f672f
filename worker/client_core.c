#include "worker/client_impl.h"

#include <stdio.h>
#include <string.h>

struct client_core *client_core_create(const struct client_config *config)
{
    struct client_core *c = mem_alloc(sizeof *c);
    c->config = *config;
    c->shard = mem_alloc(config->nshards * sizeof *c->shard);
    map_init(&c->peers);
    map_init(&c->tensor_by_id);
    return c;
}

static void list_drop(struct client_core *c, struct client_list *l)
{
    while (l->head) {
        struct client_op *op = l->head;
        client_list_remove(l, op);
        if (op->kind == CLIENT_PUSH && op->mate && !op->mate->left)
            client_op_free(c, op->mate);
        client_op_free(c, op);
    }
}

void client_core_free(struct client_core *c)
{
    if (!c)
        return;
    list_drop(c, &c->queue);
    list_drop(c, &c->pushes);
    list_drop(c, &c->apushes);
    list_drop(c, &c->pulls);
    list_drop(c, &c->inits);
    for (uint32_t i = 0; i < c->ntensors; i++) {
        list_drop(c, &c->tensor[i]->declares);
        client_tensor_spare_free(c->tensor[i]);
        mem_free(c->tensor[i]);
    }
    client_ops_free(c->spare);
    mem_free(c->step_op);
    mem_free(c->leave_op);
    client_peers_free(c);
    map_done(&c->peers);
    map_done(&c->tensor_by_id);
    view_free(c->view);
    mem_free(c->tensor);
    mem_free(c->loops);
    mem_free(c->shard);
    mem_free(c->settings);
    mem_free(c->life);
    mem_free(c);
}

void client_outbox_done(struct client_outbox *o)
{
    mem_free(o->effect);
    *o = (struct client_outbox){0};
}

/* For what never became an operation. */
static void refuse(struct client_core *c, const struct client_event *e, int status, const char *text)
{
    if (!e->op)
        return;
    struct client_effect *f = client_emit(c, CLIENT_DONE);
    f->op = e->op;
    f->status = status;
    f->tensor = e->tensor;
    snprintf(f->text, sizeof f->text, "%s", text);
}

struct client_tensor *client_tensor_get(const struct client_core *c, uint64_t id)
{
    return map_get(&c->tensor_by_id, id);
}

/* ---- the end of a life ---- */

static void list_over(struct client_core *c, struct client_list *l, int status, const char *text)
{
    while (l->head) {
        struct client_op *op = l->head;
        client_list_remove(l, op);
        client_op_done(c, op, status, text);
    }
}

static void one_over(struct client_core *c, struct client_op **op, int status, const char *text)
{
    if (*op)
        client_op_done(c, *op, status, text);
    *op = NULL;
}

/* Pushes before pulls: the pull of a push_pull speaks for both. */
static void ops_over(struct client_core *c, int status, const char *text)
{
    c->phase = PHASE_OVER;
    c->over_status = status;
    one_over(c, &c->step_op, status, text);
    list_over(c, &c->pushes, status, text);
    list_over(c, &c->apushes, status, text);
    list_over(c, &c->pulls, status, text);
    list_over(c, &c->inits, status, text);
    for (uint32_t i = 0; i < c->ntensors; i++) {
        struct client_tensor *t = c->tensor[i];
        list_over(c, &t->declares, status, text);
        t->init = t->push = t->apush_head = t->apush_tail = t->pull_head = t->pull_tail = NULL;
    }
    list_over(c, &c->queue, status, text);
}

void client_over(struct client_core *c, int status, enum client_effect_kind last, const char *text)
{
    ops_over(c, status, text);
    one_over(c, &c->leave_op, status, text);
    snprintf(client_emit(c, last)->text, sizeof c->out->effect->text, "%s", text);
}

void client_leave_over(struct client_core *c)
{
    ops_over(c, KS_ECLOSED, "this member has left the job");
    one_over(c, &c->leave_op, KS_OK, NULL);
}

static void leave(struct client_core *c, struct client_op *op)
{
    bool never_in = c->phase == PHASE_NEW;
    c->phase = PHASE_LEAVING;
    c->phase_us = c->now_us;
    c->leave_op = op;
    if (never_in)
        client_leave_over(c);
}

static void leave_send(struct client_core *c)
{
    if (c->phase != PHASE_LEAVING || c->apushes.n)
        return;
    if (c->leave_sent && c->now_us - c->leave_us < CLIENT_RETRY_US)
        return;
    c->leave_sent = true;
    c->leave_us = c->now_us;
    client_emit(c, CLIENT_SEND_LEAVE)->step = c->step - 1;
}

/* ---- from step to step ---- */

static void open_step(struct client_core *c)
{
    c->phase = PHASE_STEP;
    c->phase_us = c->now_us;
    if (!c->started) {
        c->started = true;
        client_emit(c, CLIENT_STARTED)->step = c->step;
    }
}

/* c->step is new and what was before it is finished or read. */
void client_begin(struct client_core *c)
{
    c->mode = view_mode_at(c->view, c->step).kind;
    open_step(c);
    if (c->mode != MODE_SYNC)
        client_clock_send_all(c, true);
}

static void op_run(struct client_core *c, struct client_op *op)
{
    bool sync = c->mode == MODE_SYNC;
    switch (op->kind) {
    case CLIENT_PUSH:
        sync ? client_sync_push(c, op) : client_async_push(c, op);
        break;
    case CLIENT_PULL:
        client_pull(c, op);
        break;
    case CLIENT_STEP_END:
        sync ? client_sync_end(c, op) : client_async_end(c, op);
        break;
    case CLIENT_OPTION:
        client_setting_put(&c->settings, &c->nsettings, &c->settings_cap, &op->setting);
        client_op_done(c, op, KS_OK, NULL);
        break;
    default:
        leave(c, op);
    }
}

/* While the mode is being changed no step begins: sync waits between the steps, else the end of the step waits. */
static bool op_may_run(const struct client_core *c, const struct client_op *op)
{
    if (op->kind == CLIENT_LEAVE)
        return c->phase != PHASE_ENDED;
    if (op->kind == CLIENT_STEP_END && c->hold && c->mode != MODE_SYNC)
        return false;
    return c->phase == PHASE_STEP;
}

static bool queue_run(struct client_core *c)
{
    bool ran = false;
    while (c->queue.head && c->phase < PHASE_LEAVING && op_may_run(c, c->queue.head)) {
        struct client_op *op = c->queue.head;
        client_list_remove(&c->queue, op);
        op_run(c, op);
        ran = true;
    }
    return ran;
}

static void settle(struct client_core *c)
{
    bool more = true;
    while (more) {
        more = client_sync_finish(c);
        if (c->phase == PHASE_HELD && !c->hold) {
            client_begin(c);
            more = true;
        }
        more |= queue_run(c);
    }
    if (c->phase == PHASE_LEAVING && c->queue.head)
        list_over(c, &c->queue, KS_ECLOSED, "this member is leaving the job");
    client_sync_lacking(c);
    leave_send(c);
}

/* ---- events ---- */

static const char *over_text(int status)
{
    switch (status) {
    case KS_EFENCED:
        return "this life was removed from the job";
    case KS_EJOB:
        return "the job has ended";
    default:
        return "this member has left the job";
    }
}

static void submit(struct client_core *c, const struct client_event *e)
{
    bool data = e->kind == CLIENT_PUSH || e->kind == CLIENT_PULL || e->kind == CLIENT_INIT;
    struct client_tensor *t = data && e->tensor < c->ntensors ? c->tensor[e->tensor] : NULL;
    if (c->phase == PHASE_OVER)
        refuse(c, e, c->over_status, over_text(c->over_status));
    else if (c->phase == PHASE_LEAVING)
        refuse(c, e, KS_ECLOSED, "this member is leaving the job");
    else if (data && (!t || t->state == TENSOR_FAILED))
        refuse(c, e, KS_ENOENT, "no such tensor is declared");
    else if (e->kind == CLIENT_DECLARE)
        client_declare(c, e);
    else if (e->kind == CLIENT_INIT)
        client_init(c, e);
    else
        client_list_add(&c->queue, client_op_create(c, e, t));
}

static void fenced(struct client_core *c, const struct frame_header *h)
{
    const struct view_member *m = c->view ? view_member_find(c->view, c->config.self) : NULL;
    uint32_t mine = client_epoch(c);
    if (!m || epoch_newer(mine, h->epoch) || (h->epoch == mine && m->live))
        return;
    if (c->leave_sent)
        client_leave_over(c);
    else
        client_over(c, KS_EFENCED, CLIENT_FENCED, "this life was removed from the job");
}

static void frame(struct client_core *c, const struct client_event *e)
{
    const struct frame_header *h = &e->header;
    struct client_loop *l = client_loop_find(c, e->from, e->loop);
    if (!l || !c->view)
        return;
    if (h->type == FRAME_FENCED) {
        fenced(c, h);
        return;
    }
    client_saw_epoch(c, h->epoch);
    if (!epoch_newer(h->epoch, client_epoch(c)) && !view_server_find(c->view, e->from)) {
        client_sink_drop(c, l);
        return;
    }
    switch (h->type) {
    case FRAME_RESULT:
        client_result(c, l, h, e->payload);
        break;
    case FRAME_VALUE:
        client_value(c, l, h, e->payload);
        break;
    case FRAME_COMPLETE:
        client_complete(c, h, e->payload);
        break;
    case FRAME_NEED:
        client_need(c, h, e->payload);
        break;
    case FRAME_ACK:
        client_ack(c, h);
        break;
    case FRAME_DECLARED:
        client_declared(c, l, h, e->payload);
        break;
    case FRAME_INITED:
        client_inited(c, l, h);
        break;
    case FRAME_REFUSED:
        client_refused(c, l, h);
        break;
    default:
        break;
    }
}

void client_core_step(struct client_core *c, const struct client_event *e, struct client_outbox *out)
{
    out->n = 0;
    c->out = out;
    c->now_us = e->now_us;
    if (c->phase == PHASE_OVER && (e->kind < CLIENT_DECLARE || e->kind == CLIENT_TICK))
        return;
    switch (e->kind) {
    case CLIENT_ADOPT:
        client_adopt(c, e->view);
        break;
    case CLIENT_PREPARE:
        client_prepare(c, e->prepare);
        break;
    case CLIENT_PEER_UP:
        client_peer_up(c, e->from, e->loop);
        break;
    case CLIENT_PEER_DOWN:
        client_peer_down(c, e->from, e->loop);
        break;
    case CLIENT_FRAME:
        frame(c, e);
        break;
    case CLIENT_TICK:
        client_tick(c);
        break;
    default:
        submit(c, e);
    }
    if (c->phase != PHASE_OVER)
        settle(c);
}

void *client_core_sink(struct client_core *c, uint64_t from, uint32_t loop, const struct frame_header *h)
{
    struct client_loop *l = client_loop_find(c, from, loop);
    if (!l || !c->view || c->phase == PHASE_OVER)
        return NULL;
    if (!epoch_newer(h->epoch, client_epoch(c)) && !view_server_find(c->view, from))
        return NULL;
    if (h->type == FRAME_RESULT)
        return client_sync_sink(c, l, h);
    return h->type == FRAME_VALUE ? client_pull_sink(c, l, h) : NULL;
}

/* ---- what can be asked ---- */

const struct view *client_core_view(const struct client_core *c)
{
    return c->view;
}

const struct tensor_spec *client_core_tensor(const struct client_core *c, uint32_t index)
{
    return index < c->ntensors ? &c->tensor[index]->spec : NULL;
}

int64_t client_core_step_now(const struct client_core *c)
{
    return c->step;
}

bool client_core_started(const struct client_core *c)
{
    return c->started;
}

bool client_core_step_ended(const struct client_core *c)
{
    /* Pushes of asynchronous steps before are acknowledged without it. */
    if (c->phase == PHASE_ENDED || (c->started && c->mode != MODE_SYNC) || c->apushes.head)
        return true;
    for (const struct client_op *op = c->queue.head; op; op = op->next)
        if (op->kind == CLIENT_STEP_END)
            return true;
    return false;
}

void client_core_stats(const struct client_core *c, struct client_stats *ret)
{
    *ret = c->stats;
}

const uint64_t *client_core_staleness(const struct client_core *c, uint32_t tensor)
{
    return tensor < c->ntensors ? c->tensor[tensor]->staleness : NULL;
}
