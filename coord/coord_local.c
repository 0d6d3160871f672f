#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/coord_event.h"
#include "coord/local_files.h"
#include "coord/local_store.h"

enum {
    TIMEOUT_MS = 2000,
    LOCK_RETRY_US = 200,       /* while a request waits for the writer lock */
    LOCK_PROBE_US = 50 * 1000, /* while nobody gets it */
    POLL_US = 50 * 1000,       /* without inotify */
    SWEEP_AGAIN_US = 2000,     /* a dying process's lock outlives the event of its close by a moment: */
    SWEEP_AGAIN = 5,           /* look again after 2, 8, 32, 128 and 512 ms */
};

struct own_lease {
    int64_t id;
    int fd;
    uint32_t ttl_ms;
    uint64_t touch_us;
};
struct waiting {
    struct coord_request *request;
    uint64_t deadline_us;
    struct waiting *next;
};

/* `inbox` is where the owner's thread leaves things, under `lock`; everything below belongs to the service thread. */
struct local {
    struct coord base;
    struct coord_queue queue;
    char *job;
    uint64_t timeout_us;
    struct local_files files;
    struct local_store *store;
    int event_fd;
    pthread_t thread;

    pthread_mutex_t lock;
    struct {
        struct waiting *first, **last;
        bool watch, closing;
        char prefix[COORD_KEY_MAX];
        int64_t revision;
    } inbox;

    struct waiting *first, **last;
    bool watching;
    char prefix[COORD_KEY_MAX];
    int64_t watched;
    struct own_lease *lease;
    size_t nleases, lease_cap;
    int64_t lease_changes;
    uint64_t sweep_us; /* when to look at everybody's leases */
    unsigned sweep_again;
    bool unreachable;
    uint64_t probe_us;
};

static uint64_t soonest(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void event_set(int fd)
{
    uint64_t one = 1;
    CHECK(write(fd, &one, sizeof one) == sizeof one || errno == EAGAIN);
}

static void reachable_set(struct local *l, bool reachable)
{
    if (reachable == !l->unreachable)
        return;
    l->unreachable = !reachable;
    l->probe_us = clock_now_us() + LOCK_PROBE_US;
    struct coord_event e = {.kind = COORD_REACHABLE, .status = reachable ? 0 : KS_EUNAVAIL};
    if (!reachable)
        snprintf(e.text, sizeof e.text,
                 "local store %.120s: another process keeps the writer lock; is one stopped, or the disk stuck?",
                 l->files.dir);
    log_warn("coord_reachable", "store=local dir=\"%s\" reachable=%d", l->files.dir, reachable);
    coord_queue_push(&l->queue, &e);
}

static void own_lease_drop(struct local *l, size_t i)
{
    close(l->lease[i].fd);
    l->lease[i] = l->lease[--l->nleases];
}

static bool own_lease_find(const struct local *l, int64_t lease, size_t *ret_i)
{
    for (size_t i = 0; i < l->nleases; i++) {
        if (l->lease[i].id != lease)
            continue;
        *ret_i = i;
        return true;
    }
    return false;
}

static bool listed(const struct local_lease *lease, size_t n, int64_t id)
{
    for (size_t i = 0; i < n; i++)
        if (lease[i].id == id)
            return true;
    return false;
}

/* Somebody ended leases of ours while this process was stopped, or by a revoke. */
static void own_leases_check(struct local *l, const struct local_lease *lease, size_t n)
{
    for (size_t i = 0; i < l->nleases;) {
        if (listed(lease, n, l->lease[i].id)) {
            i++;
            continue;
        }
        struct coord_event e = {.kind = COORD_LEASE_LOST, .lease = l->lease[i].id};
        log_warn("coord_lease_lost", "store=local lease=%lld", (long long)e.lease);
        local_lease_remove(&l->files, e.lease);
        own_lease_drop(l, i);
        coord_queue_push(&l->queue, &e);
    }
}

static uint64_t own_leases_touch(struct local *l)
{
    uint64_t now = clock_now_us(), next = UINT64_MAX;
    for (size_t i = 0; i < l->nleases; i++) {
        struct own_lease *o = &l->lease[i];
        if (now >= o->touch_us) {
            local_lease_touch(o->fd, now);
            o->touch_us = now + (uint64_t)o->ttl_ms * 1000 / 3;
        }
        next = soonest(next, o->touch_us);
    }
    return next;
}

/* Ends one lease unless its owner turns out to live. false: the writer lock is taken. */
static bool sweep_lease(struct local *l, const struct local_lease *lease)
{
    uint64_t until;
    int64_t revision;
    if (!local_writer_try(&l->files))
        return false;
    if (!local_lease_alive(&l->files, lease->id, lease->ttl_ms, clock_now_us(), &until)) {
        int status = local_store_lease_end(l->store, lease->id, &revision);
        if (status == 0) {
            log_info("coord_lease_over", "store=local lease=%lld", (long long)lease->id);
            local_notify(&l->files, revision);
        }
        if (status == 0 || status == KS_ENOENT)
            local_lease_remove(&l->files, lease->id);
    }
    local_writer_release(&l->files);
    return true;
}

/* Looks at every lease of the directory and ends those whose owners are dead or stopped. */
static void sweep(struct local *l)
{
    uint64_t now = clock_now_us(), next = UINT64_MAX, until;
    struct local_lease *lease;
    size_t n;
    if (local_store_leases(l->store, &lease, &n)) {
        l->sweep_us = now + LOCK_PROBE_US;
        return;
    }
    own_leases_check(l, lease, n);
    for (size_t i = 0; i < n; i++) {
        size_t own;
        if (own_lease_find(l, lease[i].id, &own))
            continue;
        if (local_lease_alive(&l->files, lease[i].id, lease[i].ttl_ms, now, &until))
            next = soonest(next, until);
        else if (!sweep_lease(l, &lease[i]))
            next = soonest(next, now + SWEEP_AGAIN_US);
    }
    mem_free(lease);
    if (l->sweep_again)
        next = soonest(next, now + (SWEEP_AGAIN_US << 2 * (SWEEP_AGAIN - l->sweep_again--)));
    l->sweep_us = next;
}

static int grant_prepare(void *arg, int64_t lease, uint32_t ttl_ms)
{
    struct local *l = arg;
    uint64_t now = clock_now_us();
    int fd = local_lease_create(&l->files, lease, now);
    if (fd < 0)
        return fd;
    ARRAY_ROOM(l->lease, l->nleases, l->lease_cap);
    l->lease[l->nleases++] = (struct own_lease){lease, fd, ttl_ms, now + (uint64_t)ttl_ms * 1000 / 3};
    return 0;
}

static void do_grant(struct local *l, const struct coord_request *r, struct coord_event *ret)
{
    struct local_grant g = {grant_prepare, l};
    size_t before = l->nleases;
    local_store_grant(l->store, r, &g, ret);
    if (ret->status && l->nleases > before)
        own_lease_drop(l, before);
}

static void do_revoke(struct local *l, const struct coord_request *r, struct coord_event *ret)
{
    size_t own;
    int64_t revision = 0;
    int status = local_store_lease_end(l->store, r->lease, &revision);
    if (status == 0 || status == KS_ENOENT)
        local_lease_remove(&l->files, r->lease);
    if (own_lease_find(l, r->lease, &own))
        own_lease_drop(l, own);
    coord_event_answer(ret, r, status, status ? "revoke: lease %lld cannot be ended or is over" : NULL,
                       (long long)r->lease);
    ret->revision = revision;
}

/* With the writer lock. */
static void do_write(struct local *l, const struct coord_request *r)
{
    struct coord_event e;
    if (r->kind == COORD_TXN)
        local_store_txn(l->store, l->job, r, &e);
    else if (r->kind == COORD_LEASE_GRANT)
        do_grant(l, r, &e);
    else
        do_revoke(l, r, &e);
    if (e.status == KS_EUNKNOWN || (e.status == 0 && (r->kind != COORD_TXN || e.succeeded)))
        local_notify(&l->files, e.revision);
    local_writer_release(&l->files);
    coord_queue_push(&l->queue, &e);
}

static void request_drop(struct local *l)
{
    struct waiting *w = l->first;
    l->first = w->next;
    if (!l->first)
        l->last = &l->first;
    coord_request_free(w->request);
    mem_free(w);
}

/* The first request in turn. false: it waits for the writer lock. */
static bool request_do(struct local *l)
{
    const struct coord_request *r = l->first->request;
    struct coord_event e;
    if (r->kind == COORD_RANGE) {
        local_store_range(l->store, l->job, r, &e);
        coord_queue_push(&l->queue, &e);
    } else if (local_writer_try(&l->files)) {
        reachable_set(l, true);
        do_write(l, r);
    } else if (clock_now_us() < l->first->deadline_us) {
        return false;
    } else {
        coord_event_answer(&e, r, KS_EUNAVAIL, "local store %.120s: the writer lock was not free in %llu ms",
                           l->files.dir, (unsigned long long)l->timeout_us / 1000);
        coord_queue_push(&l->queue, &e);
        reachable_set(l, false);
    }
    request_drop(l);
    return true;
}

static void watch_read(struct local *l)
{
    int64_t revision = l->watched;
    int status = local_store_changes(l->store, l->job, l->prefix, l->watched, &l->queue, &revision);
    l->watched = revision;
    if (status != KS_ENOENT)
        return;
    struct coord_event e = {.kind = COORD_RESYNC, .revision = revision};
    l->watching = false;
    coord_queue_push(&l->queue, &e);
}

/* Under the lock, so that nothing of this watch comes after the owner has replaced it. */
static void watch_run(struct local *l)
{
    pthread_mutex_lock(&l->lock);
    if (l->watching && !l->inbox.watch)
        watch_read(l);
    pthread_mutex_unlock(&l->lock);
}

/* Takes what the owner's thread left. false: the handle is being closed. */
static bool inbox_take(struct local *l)
{
    pthread_mutex_lock(&l->lock);
    bool closing = l->inbox.closing;
    if (l->inbox.first) {
        *l->last = l->inbox.first;
        l->last = l->inbox.last;
        l->inbox.first = NULL;
        l->inbox.last = &l->inbox.first;
    }
    if (l->inbox.watch) {
        memcpy(l->prefix, l->inbox.prefix, sizeof l->prefix);
        l->watched = l->inbox.revision;
        l->watching = true;
        l->inbox.watch = false;
    }
    pthread_mutex_unlock(&l->lock);
    return !closing;
}

static void leases_changed_check(struct local *l)
{
    struct local_state s;
    if (local_store_state(l->store, &s) || s.lease_changes == l->lease_changes)
        return;
    l->lease_changes = s.lease_changes;
    l->sweep_us = 0;
}

static void files_check(struct local *l)
{
    bool changed, died;
    local_files_drain(&l->files, &changed, &died);
    if (changed)
        leases_changed_check(l);
    if (!died)
        return;
    local_store_check_readers(l->store);
    l->sweep_us = 0;
    l->sweep_again = l->files.inotify_fd < 0 ? 0 : SWEEP_AGAIN;
}

static void probe(struct local *l)
{
    uint64_t now = clock_now_us();
    if (!l->unreachable || now < l->probe_us)
        return;
    l->probe_us = now + LOCK_PROBE_US;
    if (!local_writer_try(&l->files))
        return;
    local_writer_release(&l->files);
    reachable_set(l, true);
}

static void sleep_until(struct local *l, uint64_t due)
{
    uint64_t now = clock_now_us(), us = due > now ? due - now : 0, dump;
    struct pollfd p[] = {{l->event_fd, POLLIN, 0}, {l->files.inotify_fd, POLLIN, 0}};
    struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
    ppoll(p, 2, due == UINT64_MAX ? NULL : &t, NULL);
    if (p[0].revents && read(l->event_fd, &dump, sizeof dump) < 0)
        CHECK(errno == EAGAIN);
}

static void *service(void *arg)
{
    struct local *l = arg;
    while (inbox_take(l)) {
        files_check(l);
        if (clock_now_us() >= l->sweep_us)
            sweep(l);
        uint64_t due = own_leases_touch(l);
        bool blocked = l->first && !request_do(l);
        watch_run(l);
        probe(l);
        due = soonest(due, l->sweep_us);
        due = soonest(due, l->unreachable ? l->probe_us : UINT64_MAX);
        due = soonest(due, l->files.inotify_fd < 0 ? clock_now_us() + POLL_US : UINT64_MAX);
        due = soonest(due, blocked ? clock_now_us() + LOCK_RETRY_US : UINT64_MAX);
        if (!l->first || blocked)
            sleep_until(l, due);
    }
    return NULL;
}

static void local_submit(struct coord *coord, const struct coord_request *r)
{
    struct local *l = (struct local *)coord;
    char err[COORD_ERR_TEXT];
    if (coord_request_check(r, err)) {
        struct coord_event e;
        coord_event_answer(&e, r, KS_EINVAL, "%s", err);
        coord_queue_push(&l->queue, &e);
        return;
    }
    struct waiting *w = mem_alloc(sizeof *w);
    w->request = coord_request_copy(r);
    w->deadline_us = clock_now_us() + l->timeout_us;
    pthread_mutex_lock(&l->lock);
    *l->inbox.last = w;
    l->inbox.last = &w->next;
    pthread_mutex_unlock(&l->lock);
    event_set(l->event_fd);
}

static void local_watch(struct coord *coord, const char *prefix, int64_t revision)
{
    struct local *l = (struct local *)coord;
    pthread_mutex_lock(&l->lock);
    CHECK(str_copy(l->inbox.prefix, sizeof l->inbox.prefix, prefix) == 0);
    l->inbox.revision = revision;
    l->inbox.watch = true;
    coord_queue_drop_changes(&l->queue);
    pthread_mutex_unlock(&l->lock);
    event_set(l->event_fd);
}

static bool local_next(struct coord *coord, struct coord_event *ret)
{
    return coord_queue_pop(&((struct local *)coord)->queue, ret);
}

static void local_free(struct local *l)
{
    while (l->first)
        request_drop(l);
    while (l->nleases)
        own_lease_drop(l, 0);
    mem_free(l->lease);
    if (l->store)
        local_store_close(l->store);
    local_files_close(&l->files);
    if (l->event_fd >= 0)
        close(l->event_fd);
    coord_queue_done(&l->queue);
    pthread_mutex_destroy(&l->lock);
    mem_free(l->job);
    mem_free(l);
}

static void local_close(struct coord *coord)
{
    struct local *l = (struct local *)coord;
    pthread_mutex_lock(&l->lock);
    l->inbox.closing = true;
    pthread_mutex_unlock(&l->lock);
    event_set(l->event_fd);
    pthread_join(l->thread, NULL);
    inbox_take(l);
    local_free(l);
}

/* For the making of the store, before the thread runs. */
static int writer_wait(void *arg, char *err)
{
    struct local *l = arg;
    uint64_t end = clock_now_us() + l->timeout_us;
    while (!local_writer_try(&l->files)) {
        if (clock_now_us() >= end) {
            snprintf(err, COORD_ERR_TEXT, "local store %.120s: another process keeps the writer lock; is one stopped?",
                     l->files.dir);
            return KS_EUNAVAIL;
        }
        nanosleep(&(struct timespec){.tv_nsec = LOCK_RETRY_US * 1000}, NULL);
    }
    return 0;
}

static void writer_done(void *arg)
{
    local_writer_release(&((struct local *)arg)->files);
}

/* What earlier owners left: leases to end (the first sweep does), files of grants that were never committed. */
static void leftovers_clean(struct local *l)
{
    struct local_lease *lease;
    size_t n;
    if (!local_writer_try(&l->files))
        return;
    if (local_store_leases(l->store, &lease, &n) == 0) {
        local_lease_clean(&l->files, lease, n);
        mem_free(lease);
    }
    local_writer_release(&l->files);
}

static const struct coord_ops local_ops = {local_submit, local_watch, local_next, local_close};

static struct local *local_new(const struct coord_config *c)
{
    struct local *l = mem_alloc(sizeof *l);
    l->base.ops = &local_ops;
    l->job = mem_strdup(c->job);
    l->timeout_us = (uint64_t)(c->timeout_ms ? c->timeout_ms : TIMEOUT_MS) * 1000;
    l->last = &l->first;
    l->inbox.last = &l->inbox.first;
    l->files = (struct local_files){.writer_fd = -1, .notify_fd = -1, .inotify_fd = -1};
    l->event_fd = -1;
    pthread_mutex_init(&l->lock, NULL);
    coord_queue_init(&l->queue, c);
    return l;
}

int coord_local_open(const struct coord_config *c, const char *dir, struct coord **ret, char *err)
{
    int status = coord_job_check(c->job, err);
    if (status)
        return status;
    struct local *l = local_new(c);
    struct local_writer writer = {writer_wait, writer_done, l};
    status = local_files_open(dir, &l->files, err);
    if (!status)
        status = local_store_open(dir, &writer, &l->store, err);
    if (status)
        goto free_handle;
    l->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    leftovers_clean(l);
    if (l->event_fd < 0 || coord_thread_start(&l->thread, service, l)) {
        snprintf(err, COORD_ERR_TEXT, "local store %.120s: no thread or descriptor to be had: %s", dir,
                 strerror(errno));
        status = KS_EIO;
        goto free_handle;
    }
    *ret = &l->base;
    return 0;
free_handle:
    local_free(l);
    return status;
}
