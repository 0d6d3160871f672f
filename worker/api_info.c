/* Who and where we are: nothing here waits, but for a change of the mode. */
#include <string.h>

#include "worker/host.h"

/* Asking does not change a job; the lock does. */
static struct ks_job *enter(const struct ks_job *job)
{
    if (job_check(job))
        return NULL;
    struct ks_job *j = (struct ks_job *)(uintptr_t)job;
    job_lock(j);
    return j;
}

static const struct view *view_of(const struct ks_job *j)
{
    return j->core && j->listed ? client_core_view(j->core) : NULL;
}

int64_t ks_step(const struct ks_job *job)
{
    struct ks_job *j = enter(job);
    if (!j)
        return -1;
    int64_t step = j->core && client_core_started(j->core) ? client_core_step_now(j->core) : -1;
    job_unlock(j);
    return step;
}

int64_t ks_rank(const struct ks_job *job)
{
    struct ks_job *j = enter(job);
    if (!j)
        return -1;
    int64_t rank = job_rank(j);
    job_unlock(j);
    return rank;
}

int64_t ks_size(const struct ks_job *job)
{
    struct ks_job *j = enter(job);
    if (!j)
        return 0;
    const struct view *v = view_of(j);
    int64_t size = v ? view_size(v) : 0;
    job_unlock(j);
    return size;
}

uint64_t ks_epoch(const struct ks_job *job)
{
    struct ks_job *j = enter(job);
    if (!j)
        return 0;
    const struct view *v = view_of(j);
    uint64_t epoch = v ? v->epoch : 0;
    job_unlock(j);
    return epoch;
}

uint64_t ks_member_id(const struct ks_job *job)
{
    struct ks_job *j = enter(job);
    if (!j)
        return 0;
    uint64_t id = j->id;
    job_unlock(j);
    return id;
}

int64_t ks_members(const struct ks_job *job, struct ks_member *ret, size_t max)
{
    struct ks_job *j = ret || !max ? enter(job) : NULL;
    if (!j)
        return ret || !max ? 0 : job_error(KS_EINVAL, "ks_members: ret is NULL");
    const struct view *v = view_of(j);
    int64_t rank = 0;
    size_t n = 0;
    for (uint32_t i = 0; v && i < v->nmembers; i++) {
        const struct view_member *m = &v->member[i];
        if (!m->live)
            continue;
        if (n < max) {
            struct ks_member *o = &ret[n];
            *o = (struct ks_member){.id = m->id, .join = m->join, .rank = rank, .local_size = m->local_size};
            (void)memcpy(o->name, m->name, sizeof o->name);
        }
        rank += m->local_size;
        n++;
    }
    job_unlock(j);
    return (int64_t)n;
}

enum ks_mode_kind ks_mode(const struct ks_job *job, uint32_t *ret_bound)
{
    struct mode mode = {.kind = MODE_SYNC};
    struct ks_job *j = enter(job);
    if (j) {
        const struct view *v = view_of(j);
        if (v)
            mode = view_mode_at(v, client_core_step_now(j->core));
        job_unlock(j);
    }
    if (ret_bound)
        *ret_bound = mode.bound;
    return (enum ks_mode_kind)mode.kind;
}

/* The first step from `want->from` on at which the view has this mode; -1: none yet. */
static int64_t mode_from(const struct view *v, const struct mode *want)
{
    struct mode at = view_mode_at(v, want->from);
    if (at.kind == want->kind && at.bound == want->bound)
        return want->from;
    for (uint32_t i = 0; i < v->nmodes; i++) {
        const struct mode *m = &v->mode[i];
        if (m->from >= want->from && m->kind == want->kind && m->bound == want->bound)
            return m->from;
    }
    return -1;
}

static int mode_set(struct ks_job *j, const struct mode *mode, int64_t *ret_from)
{
    struct waiter w;
    int rc = waiter_init(&w, j, -1);
    for (;;) {
        if (!rc)
            rc = job_until_running(j, &w);
        if (rc)
            break;
        int64_t from = j->view ? mode_from(j->view, mode) : -1;
        if (from >= 0) {
            if (ret_from)
                *ret_from = from;
            break;
        }
        if (!j->mode_wanted) {
            j->mode = *mode;
            j->mode_us = 0;
            j->mode_wanted = true;
            host_wake(j);
        }
        if (job_in_loop(j))
            rc = job_error(KS_ESTATE, "a callback must not wait");
        else if (!waiter_wait(&w, j))
            rc = job_error(KS_ETIMEOUT, "waiting for server %s to change the mode", j->leader.server.name);
    }
    j->mode_wanted = false;
    return rc;
}

int ks_mode_set(struct ks_job *job, enum ks_mode_kind kind, uint32_t bound, int64_t from, int64_t *ret_from)
{
    int rc = job_check(job);
    if (rc)
        return rc;
    if (kind < KS_SYNC || kind > KS_ASYNC)
        return job_error(KS_EINVAL, "ks_mode_set: kind is %d: wanted is KS_SYNC, KS_SSP or KS_ASYNC", (int)kind);
    if (kind != KS_SSP && bound)
        return job_error(KS_EINVAL, "ks_mode_set: bound is %u: only KS_SSP has one", bound);
    if (from < 0)
        return job_error(KS_EINVAL, "ks_mode_set: from is %lld: wanted is a step, 0 or more", (long long)from);
    struct mode mode = {.from = from, .kind = (enum mode_kind)kind, .bound = bound};
    job_lock(job);
    /* One at a time: the requests of two threads would hide each other. */
    if (job->mode_wanted)
        rc = job_error(KS_EBUSY, "ks_mode_set: another thread's change is under way");
    else
        rc = mode_set(job, &mode, ret_from);
    job_unlock(job);
    return rc;
}

void ks_stats(const struct ks_job *job, struct ks_stats *ret)
{
    struct ks_job *j = ret ? enter(job) : NULL;
    if (!j)
        return;
    *ret = j->stats;
    if (j->core) {
        struct client_stats c;
        struct net_stats n;
        client_core_stats(j->core, &c);
        net_stats(j->data, &n);
        ret->pushes += c.pushes;
        ret->pulls += c.pulls;
        ret->steps += c.steps;
        ret->resent += c.resent;
        ret->acked += c.acked;
        ret->late += c.late;
        ret->stale += c.stale;
        ret->not_finite += c.not_finite;
        ret->views += c.views;
        ret->bytes_in += n.bytes_in;
        ret->bytes_out += n.bytes_out;
    }
    job_unlock(j);
}

void ks_staleness(const struct ks_tensor *t, uint64_t ret[KS_STALENESS_BUCKETS])
{
    if (!t || !ret)
        return;
    memset(ret, 0, KS_STALENESS_BUCKETS * sizeof *ret);
    struct ks_job *j = enter(t->job);
    if (!j)
        return;
    const uint64_t *s = j->core && t->ready ? client_core_staleness(j->core, t->index) : NULL;
    if (s)
        memcpy(ret, s, KS_STALENESS_BUCKETS * sizeof *ret);
    job_unlock(j);
}

size_t ks_waiting(const struct ks_job *job, char *out, size_t size)
{
    if (!out || !size)
        return 0;
    out[0] = 0;
    struct ks_job *j = enter(job);
    if (!j)
        return 0;
    size_t n = job_waiting(j, out, size);
    job_unlock(j);
    return n;
}
