#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "worker/host.h"

/* ---- handles ---- */

struct ks_handle *handle_create(struct ks_job *j)
{
    struct ks_handle *h = j->spare_handles;
    if (h)
        j->spare_handles = h->next;
    else
        h = mem_alloc(sizeof *h);
    memset(h, 0, sizeof *h);
    h->job = j;
    h->pending = 1; /* until handle_seal */
    h->next = j->handles;
    if (j->handles)
        j->handles->prev = h;
    j->handles = h;
    return h;
}

void handle_free(struct ks_handle *h)
{
    struct ks_job *j = h->job;
    CHECK(h->done);
    *(h->prev ? &h->prev->next : &j->handles) = h->next;
    if (h->next)
        h->next->prev = h->prev;
    mem_free(h->text);
    mem_free(h->copy);
    h->next = j->spare_handles;
    j->spare_handles = h;
}

static void handle_count(struct ks_handle *h)
{
    struct ks_job *j = h->job;
    if (--h->pending)
        return;
    h->done = true;
    if (h->step) {
        j->step_status = h->status;
        j->steps_done++;
        job_notify(j);
    }
    if (h->forget) {
        handle_free(h);
        return;
    }
    if (h->waiters)
        job_notify(j);
    if (h->fn) {
        h->call_next = NULL;
        struct ks_handle **last = &j->calls;
        while (*last)
            last = &(*last)->call_next;
        *last = h;
        host_wake(j);
    }
}

void handle_seal(struct ks_handle *h)
{
    handle_count(h);
}

/* A text is kept for the worst only. */
static void handle_worse(struct ks_handle *h, int status, const char *text)
{
    if (status >= h->status)
        return;
    h->status = status;
    mem_free(h->text);
    h->text = text && *text ? mem_strdup(text) : NULL;
}

int handle_take(struct ks_handle *h)
{
    int status = h->status;
    if (status == KS_EFENCED)
        h->job->lost = false;
    if (status)
        job_error(status, "%s", h->text ? h->text : ks_strerror(status));
    handle_free(h);
    return status;
}

static bool never_ends(const struct ks_handle *h)
{
    const struct ks_job *j = h->job;
    const struct view *v = j->core ? client_core_view(j->core) : NULL;
    return h->unended && v && j->state == JOB_RUNNING && !client_core_step_ended(j->core) &&
           view_mode_at(v, client_core_step_now(j->core)).kind == MODE_SYNC;
}

bool handle_wait(struct ks_handle *h, struct waiter *w, int *ret_status)
{
    struct ks_job *j = h->job;
    char text[JOB_TEXT];
    while (!h->done) {
        if (never_ends(h)) {
            *ret_status =
                job_error(KS_ESTATE, "ks_step_end was not called in step %lld: what it pushed has no result before",
                          (long long)client_core_step_now(j->core));
            return false;
        }
        if (job_in_loop(j)) {
            *ret_status = job_error(KS_ESTATE, "a callback must not wait");
            return false;
        }
        h->waiters++;
        bool more = waiter_wait(w, j);
        h->waiters--;
        if (more || h->done)
            continue;
        (void)job_waiting(j, text, sizeof text);
        *ret_status = job_error(KS_ETIMEOUT, "%s", *text ? text : ks_strerror(KS_ETIMEOUT));
        return false;
    }
    *ret_status = h->status;
    return true;
}

/* ---- operations ---- */

int tensor_ready(const struct ks_tensor *t)
{
    if (t->failed)
        return job_error(t->failed, "tensor '%s' could not be declared again: %s", t->spec.name,
                         t->failed_text ? t->failed_text : "");
    return t->ready ? 0 : job_error(KS_ESTATE, "tensor '%s' is not registered yet", t->spec.name);
}

void op_submit(struct ks_job *j, struct ks_handle *h, struct ks_tensor *t, struct client_event *e)
{
    struct job_op *op = j->spare_ops;
    if (op)
        j->spare_ops = op->next;
    else
        op = mem_alloc(sizeof *op);
    *op = (struct job_op){.id = ++j->op_last, .handle = h, .tensor = t, .push = e->kind == CLIENT_PUSH};
    if (h) {
        h->pending++;
        h->unended += op->push;
    }
    map_put(&j->op_by_id, op->id, op);
    e->op = op->id;
    if (t && e->kind != CLIENT_DECLARE)
        e->tensor = t->index;
    if (e->kind == CLIENT_LEAVE)
        j->leave_op = op->id;
    job_step(j, e);
}

static void op_free(struct ks_job *j, struct job_op *op)
{
    op->next = j->spare_ops;
    j->spare_ops = op;
}

static void op_over(struct job_op *op, const char *text)
{
    struct ks_handle *h = op->handle;
    handle_worse(h, op->status, text);
    op_free(h->job, op);
    handle_count(h);
}

static void redeclared(struct ks_job *j, struct job_op *op, const struct client_effect *f)
{
    struct ks_tensor *t = op->tensor;
    op_free(j, op);
    if (f->status == KS_EFENCED || f->status == KS_EJOB)
        return;
    if (f->status) {
        log_error("redeclare", "tensor=%s status=%d cause=\"%s\"", t->spec.name, f->status, f->text);
        t->failed = f->status;
        mem_free(t->failed_text);
        t->failed_text = mem_strdup(f->text);
    }
    t->index = f->tensor;
    t->ready = true;
    if (--j->redeclaring || j->state != JOB_REJOINING)
        return;
    j->state = JOB_RUNNING;
    job_notify(j);
}

static void effect_done(struct ks_job *j, const struct client_effect *f)
{
    struct job_op *op = map_remove(&j->op_by_id, f->op);
    CHECK(op);
    struct ks_tensor *t = op->tensor;
    if (!op->handle) {
        redeclared(j, op, f);
        return;
    }
    op->handle->tensor = f->tensor;
    op->handle->unended -= op->push;
    op->status = f->status;
    if (f->op == j->leave_op && !f->status) {
        j->state = JOB_LEFT;
        job_notify(j);
    }
    bool refused = f->status == KS_ESTATE || f->status == KS_EINVAL || f->status == KS_ENOENT;
    if (t && t->sending && !refused) {
        handle_worse(op->handle, f->status, f->text);
        op->next = t->over;
        t->over = op;
        return;
    }
    op_over(op, f->text);
}

/* A send queue has let go of user memory. */
static void released(void *arg)
{
    struct ks_tensor *t = arg;
    CHECK(t->sending);
    t->sending--;
    while (!t->sending && t->over) {
        struct job_op *op = t->over;
        t->over = op->next;
        op_over(op, NULL);
    }
}

void ops_end_all(struct ks_job *j, int status)
{
    uint64_t id;
    void *value;
    for (uint32_t i = 0; map_next(&j->op_by_id, &i, &id, &value);) {
        struct job_op *op = value;
        map_remove(&j->op_by_id, id);
        i = 0;
        op->status = status;
        if (op->handle)
            op_over(op, NULL);
        else
            op_free(j, op);
    }
}

/* ---- effects ---- */

static void effect_send(struct ks_job *j, const struct client_effect *f)
{
    if (f->owned || !f->header.len) {
        peer_send(j, f->to, f->loop, &f->header, f->payload, f->owned ? mem_free : NULL, (void *)(uintptr_t)f->payload);
        return;
    }
    struct ks_tensor *t = map_get(&j->tensor_by_id, f->header.tensor);
    CHECK(t);
    t->sending++;
    peer_send(j, f->to, f->loop, &f->header, f->payload, released, t);
}

static void effect_send_spec(struct ks_job *j, const struct client_effect *f)
{
    char *doc = tensor_encode(f->spec);
    struct frame_header h = f->header;
    h.len = strlen(doc);
    peer_send(j, f->to, f->loop, &h, doc, mem_free, doc);
}

static void effect_started(struct ks_job *j, const struct client_effect *f)
{
    log_info("started", "job=%s id=%llu step=%lld", j->set.job, (unsigned long long)j->id, (long long)f->step);
    if (j->state == JOB_REJOINING && j->ntensors) {
        j->declare_again = true;
        return;
    }
    if (j->state == JOB_OPENING || j->state == JOB_REJOINING)
        j->state = JOB_RUNNING;
    job_notify(j);
}

static void effect_fenced(struct ks_job *j, const struct client_effect *f)
{
    log_warn("fenced", "job=%s id=%llu cause=\"%s\"", j->set.job, (unsigned long long)j->id, f->text);
    /* Also when nothing was under way: the step that the application has in mind is over. */
    j->lost |= j->state == JOB_RUNNING;
    if (j->state == JOB_RUNNING || j->state == JOB_REJOINING)
        j->state = JOB_REJOINING;
    j->fenced = true;
    j->listed = false;
    job_notify(j);
    host_wake(j);
}

static void effect(struct ks_job *j, const struct client_effect *f)
{
    struct frame_header h = {.type = FRAME_REPORT};
    switch (f->kind) {
    case CLIENT_SEND:
        effect_send(j, f);
        break;
    case CLIENT_SEND_SPEC:
        effect_send_spec(j, f);
        break;
    case CLIENT_DONE:
        effect_done(j, f);
        break;
    case CLIENT_STARTED:
        effect_started(j, f);
        break;
    case CLIENT_STEP:
        job_notify(j);
        break;
    case CLIENT_SEND_REPORT:
        (void)life_send(j, &h, report_encode(f->report));
        break;
    case CLIENT_SEND_LEAVE:
        h.type = FRAME_LEAVE;
        h.step = f->step;
        (void)life_send(j, &h, NULL);
        break;
    case CLIENT_FENCED:
        effect_fenced(j, f);
        break;
    case CLIENT_ENDED:
        job_end(j, f->text);
        break;
    case CLIENT_WANT_VIEW:
        follow_view_wanted(j);
        break;
    }
}

/* The core gave up all operations: nothing may be received into user memory, or sent from it, when they are told to
 * their owners. */
static bool life_is_over(const struct ks_job *j)
{
    for (uint32_t i = 0; i < j->out.n; i++) {
        const struct client_effect *f = &j->out.effect[i];
        if (f->kind == CLIENT_FENCED || f->kind == CLIENT_ENDED || (f->kind == CLIENT_DONE && f->op == j->leave_op))
            return true;
    }
    return false;
}

static void declare_again(struct ks_job *j)
{
    j->declare_again = false;
    j->redeclaring = 0;
    for (uint32_t i = 0; i < j->ntensors; i++)
        j->redeclaring += !j->tensor[i]->declaring;
    if (!j->redeclaring) {
        j->state = JOB_RUNNING;
        job_notify(j);
    }
    for (uint32_t i = 0; i < j->ntensors; i++) {
        struct ks_tensor *t = j->tensor[i];
        struct client_event e = {.kind = CLIENT_DECLARE, .spec = &t->spec};
        if (!t->declaring)
            op_submit(j, NULL, t, &e);
    }
}

void job_step(struct ks_job *j, struct client_event *e)
{
    CHECK(!j->stepping);
    j->stepping = true;
    e->now_us = clock_now_us();
    client_core_step(j->core, e, &j->out);
    if (life_is_over(j) && job_in_loop(j))
        peers_drop(j);
    for (uint32_t i = 0; i < j->out.n; i++)
        effect(j, &j->out.effect[i]);
    j->stepping = false;
    if (j->declare_again)
        declare_again(j);
}

void job_flush(struct ks_job *j, bool now)
{
    bool in_loop = job_in_loop(j), wake = false;
    struct peer *p = j->touched;
    j->touched = NULL;
    while (p) {
        struct peer *next = p->touched_next;
        p->touched = false;
        if (in_loop) {
            /* The net writes at the end of the loop's iteration. */
        } else if (now || net_queued(p->conn) >= FLUSH_BYTES) {
            wake |= net_flush(p->conn) > 0;
        } else {
            p->touched = true;
            p->touched_next = j->touched;
            j->touched = p;
        }
        p = next;
    }
    if (wake)
        host_wake(j);
}
