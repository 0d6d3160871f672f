#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "worker/host.h"

static _Thread_local char last_error[JOB_TEXT];
static unsigned forks;
static pthread_once_t process_once = PTHREAD_ONCE_INIT;

static void on_fork(void)
{
    forks++;
}

static void process_init(void)
{
    log_init("client");
    (void)pthread_atfork(NULL, NULL, on_fork);
}

unsigned job_forks(void)
{
    (void)pthread_once(&process_once, process_init);
    return forks;
}

void job_lock(void *job)
{
    pthread_mutex_lock(&((struct ks_job *)job)->mutex);
}

void job_unlock(void *job)
{
    pthread_mutex_unlock(&((struct ks_job *)job)->mutex);
}

int job_error(int status, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vsnprintf(last_error, sizeof last_error, format, ap);
    va_end(ap);
    return status;
}

const char *job_error_text(void)
{
    return last_error;
}

int job_check(const struct ks_job *j)
{
    if (!j)
        return job_error(KS_EINVAL, "the job is NULL");
    if (j->forks != forks)
        return job_error(KS_ESTATE,
                         "this process was forked from the one that opened the job; it has to open one itself");
    return 0;
}

bool job_in_loop(const struct ks_job *j)
{
    return pthread_equal(pthread_self(), j->driver);
}

void job_notify(struct ks_job *j)
{
    if (j->nwaiting)
        pthread_cond_broadcast(&j->cond);
}

void job_fail(struct ks_job *j, int status, const char *format, ...)
{
    if (j->state != JOB_OPENING)
        return;
    va_list ap;
    va_start(ap, format);
    vsnprintf(j->text, sizeof j->text, format, ap);
    va_end(ap);
    j->state = JOB_FAILED;
    j->error = status;
    job_notify(j);
}

void job_end(struct ks_job *j, const char *text)
{
    if (j->state == JOB_ENDED || j->state == JOB_LEFT || j->state == JOB_CLOSED)
        return;
    log_info("job_ended", "job=%s cause=\"%s\"", j->set.job, text);
    j->state = JOB_ENDED;
    snprintf(j->text, sizeof j->text, "the job has ended: %s", text);
    job_notify(j);
}

int64_t job_rank(const struct ks_job *j)
{
    const struct view *v = j->core && j->listed ? client_core_view(j->core) : NULL;
    return v ? view_rank(v, j->id) : -1;
}

/* ---- what is waited for ---- */

static uint32_t live_members(const struct view *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; v && i < v->nmembers; i++)
        n += v->member[i].live;
    return n;
}

static void waiting_to_be_listed(const struct ks_job *j, char *out, size_t size)
{
    uint32_t n = live_members(j->view);
    if (!j->has_leader)
        snprintf(out, size, "waiting for a server of job \"%s\" to lead it: none does at the moment", j->set.job);
    else if (!j->leader_conn || !net_is_open(j->leader_conn))
        snprintf(out, size, "waiting for server %s at %s: %s", j->leader.server.name, j->leader.server.ctl,
                 *j->leader_text ? j->leader_text : "connecting");
    else if (n < j->job.members_min)
        snprintf(out, size, "waiting for members: %u of %u are in the view, and this one wants in", n,
                 j->job.members_min);
    else
        snprintf(out, size, "waiting for server %s to put this member into the view (epoch %llu)",
                 j->leader.server.name, (unsigned long long)(j->view ? j->view->epoch : 0));
}

size_t job_waiting(const struct ks_job *j, char *out, size_t size)
{
    out[0] = 0;
    if (j->state == JOB_OPENING || j->state == JOB_REJOINING) {
        if (j->store_away && !j->listed)
            snprintf(out, size, "waiting for the coordination store %.100s: %s", j->set.coord, j->store_text);
        else if (!j->ranged)
            snprintf(out, size, "waiting for the coordination store %.100s: no answer yet", j->set.coord);
        else if (!j->has_job)
            snprintf(out, size, "waiting for job \"%s\": no server of it is known to the store %.100s", j->set.job,
                     j->set.coord);
        else if (!j->listed)
            waiting_to_be_listed(j, out, size);
    }
    if (!out[0] && j->core)
        (void)client_core_waiting(j->core, clock_now_us(), out, size);
    return strlen(out);
}

/* ---- waiting ---- */

int waiter_init(struct waiter *w, const struct ks_job *j, int64_t timeout_ms)
{
    if (timeout_ms < -1)
        return job_error(KS_EINVAL, "timeout_ms is %lld: wanted is -1 (the job's default) or more",
                         (long long)timeout_ms);
    if (timeout_ms == -1)
        timeout_ms = j->set.timeout_ms;
    w->start_us = clock_now_us();
    w->deadline_us = timeout_ms < INT64_MAX / 2000 ? w->start_us + (uint64_t)timeout_ms * 1000 : UINT64_MAX;
    w->log_us = w->start_us + WAIT_LOG_US;
    return 0;
}

bool waiter_wait(struct waiter *w, struct ks_job *j)
{
    uint64_t now = clock_now_us();
    if (now >= w->deadline_us)
        return false;
    if (now >= w->log_us) {
        char text[JOB_TEXT];
        w->log_us = now + WAIT_LOG_AGAIN_US;
        if (job_waiting(j, text, sizeof text))
            log_warn("waiting", "job=%s seconds=%llu cause=\"%s\"", j->set.job,
                     (unsigned long long)((now - w->start_us) / 1000000), text);
    }
    uint64_t until = w->deadline_us < w->log_us ? w->deadline_us : w->log_us;
    struct timespec at = {.tv_sec = (time_t)(until / 1000000), .tv_nsec = (long)(until % 1000000) * 1000};
    j->nwaiting++;
    if (!host_drive(j, until))
        (void)pthread_cond_timedwait(&j->cond, &j->mutex, &at);
    j->nwaiting--;
    if (j->state == JOB_CLOSED && j->nwaiting == 0)
        pthread_cond_broadcast(&j->cond);
    return true;
}

int job_lost(struct ks_job *j)
{
    if (!j->lost)
        return 0;
    j->lost = false;
    return job_error(KS_EFENCED,
                     "this member was cut off and removed from the job: the step that was under way is lost; pull "
                     "the parameters and go on as a new member");
}

int job_until_running(struct ks_job *j, struct waiter *w)
{
    char text[JOB_TEXT];
    for (;;) {
        switch (j->state) {
        case JOB_RUNNING:
            return 0;
        case JOB_FAILED:
            return job_error(j->error, "%s", j->text);
        case JOB_ENDED:
            return job_error(KS_EJOB, "%s", j->text);
        case JOB_LEFT:
            return job_error(KS_ESTATE, "this member has left the job");
        case JOB_CLOSED:
            return job_error(KS_ECLOSED, "the job is closed");
        default:
            break;
        }
        if (job_in_loop(j))
            return job_error(KS_ESTATE, "this member is joining again, and a callback must not wait");
        if (waiter_wait(w, j))
            continue;
        (void)job_waiting(j, text, sizeof text);
        return job_error(KS_ETIMEOUT, "%s", *text ? text : "waiting to join the job");
    }
}
