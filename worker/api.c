/* Opening, leaving, closing. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "worker/host.h"

static void job_free(struct ks_job *j)
{
    for (uint32_t i = 0; i < j->ntensors; i++) {
        CHECK(!j->tensor[i]->sending);
        mem_free(j->tensor[i]->failed_text);
        mem_free(j->tensor[i]);
    }
    mem_free(j->tensor);
    while (j->handles) {
        struct ks_handle *h = j->handles;
        h->done = true;
        handle_free(h);
    }
    while (j->spare_handles) {
        struct ks_handle *h = j->spare_handles;
        j->spare_handles = h->next;
        mem_free(h);
    }
    while (j->spare_ops) {
        struct job_op *op = j->spare_ops;
        j->spare_ops = op->next;
        mem_free(op);
    }
    map_done(&j->tensor_by_id);
    map_done(&j->op_by_id);
    map_done(&j->peer_by_key);
    client_outbox_done(&j->out);
    view_free(j->view);
    settings_done(&j->set);
    pthread_cond_destroy(&j->cond);
    pthread_mutex_destroy(&j->mutex);
    mem_free(j);
}

static struct ks_job *job_create(const struct settings *s)
{
    struct ks_job *j = mem_alloc(sizeof *j);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&j->cond, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&j->mutex, NULL);
    j->set = *s;
    j->forks = job_forks();
    j->state = JOB_OPENING;
    map_init(&j->tensor_by_id);
    map_init(&j->op_by_id);
    map_init(&j->peer_by_key);
    return j;
}

/* Everybody who waits gets KS_ECLOSED. */
static void waiters_out(struct ks_job *j)
{
    job_lock(j);
    j->state = JOB_CLOSED;
    ops_end_all(j, KS_ECLOSED);
    pthread_cond_broadcast(&j->cond);
    while (j->nwaiting)
        pthread_cond_wait(&j->cond, &j->mutex);
    job_unlock(j);
    while (j->calls) {
        struct ks_handle *h = j->calls;
        j->calls = h->call_next;
        h->fn(h->arg, h->status);
    }
}

static void job_close(struct ks_job *j)
{
    host_stop(j);
    waiters_out(j);
    job_free(j);
}

int ks_open(const struct ks_options *options, struct ks_job **ret_job)
{
    struct settings s;
    struct waiter w;
    char err[ERR_TEXT];
    if (!ret_job)
        return job_error(KS_EINVAL, "ks_open: ret_job is NULL");
    int rc = settings_read(options, &s, err);
    if (rc)
        return job_error(rc, "%s", err);
    struct ks_job *j = job_create(&s);
    rc = host_start(j, err);
    if (rc) {
        job_free(j);
        return job_error(rc, "%s", err);
    }
    job_lock(j);
    rc = waiter_init(&w, j, s.join_timeout_ms);
    if (!rc)
        rc = job_until_running(j, &w);
    /* A store that answers and knows no such job: a wrong name, most likely. */
    if (rc == KS_ETIMEOUT && j->ranged && !j->store_away && !j->has_job)
        rc = KS_ENOENT;
    job_unlock(j);
    if (rc) {
        job_close(j);
        return rc;
    }
    *ret_job = j;
    return 0;
}

static int leave(struct ks_job *j, int64_t timeout_ms)
{
    struct waiter w;
    int status;
    int rc = waiter_init(&w, j, timeout_ms);
    if (!rc)
        rc = job_until_running(j, &w);
    if (rc)
        return rc;
    struct ks_handle *h = handle_create(j);
    struct client_event e = {.kind = CLIENT_LEAVE};
    op_submit(j, h, NULL, &e);
    handle_seal(h);
    job_flush(j, true);
    if (handle_wait(h, &w, &status))
        return handle_take(h);
    return status; /* the handle goes with the job */
}

int ks_leave(struct ks_job *job, int64_t timeout_ms)
{
    int rc = job_check(job);
    if (rc)
        return rc;
    job_lock(job);
    rc = job->state == JOB_LEFT ? 0 : leave(job, timeout_ms);
    job_unlock(job);
    return rc;
}

void ks_close(struct ks_job *job)
{
    if (!job || job_check(job))
        return;
    job_lock(job);
    /* Closing runs the callbacks that are left. */
    bool inside = job_in_loop(job) || job->state == JOB_CLOSED;
    job_unlock(job);
    if (inside) {
        log_error("close", "cause=\"ks_close was called from a callback: the job stays open\"");
        return;
    }
    job_lock(job);
    if (job->state == JOB_RUNNING)
        (void)leave(job, CLOSE_LEAVE_MS);
    job_unlock(job);
    job_close(job);
}

const char *ks_strerror(int error)
{
    switch (error) {
#define KS_X(name, value, text)                                                                                        \
    case value:                                                                                                        \
        return text;
        KS_ERROR_TABLE(KS_X)
#undef KS_X
    default:
        return "no such error";
    }
}

const char *ks_last_error(const struct ks_job *job)
{
    (void)job;
    return job_error_text();
}
