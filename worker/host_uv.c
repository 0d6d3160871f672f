#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <uv.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "worker/host.h"

/* Who runs the loop: a thread of the application while it waits (it then gets its result from the socket itself, without
 * another thread in between), else the job's own thread. `turn` is held by whoever runs it. */
struct host_loop {
    uv_loop_t uv;
    uv_async_t wake;
    uv_timer_t tick, until;
    pthread_mutex_t turn;
    pthread_cond_t resume;   /* with the job's mutex: the job's thread goes on */
    bool taken;              /* an application thread runs the loop, or wants to */
    bool over;               /* nothing is left to run */
    uint64_t leave_us;       /* the job's thread stays away until then: the next wait comes soon */
    uint64_t stay_us;        /* it sleeps until then; 0: it does not */
};

struct uv_loop_s *host_uv(struct ks_job *j)
{
    return &j->loop->uv;
}

static void wake(void *arg)
{
    struct ks_job *j = arg;
    uv_async_send(&j->loop->wake);
}

void host_wake(struct ks_job *j)
{
    struct host_loop *l = j->loop;
    if (!l)
        return;
    wake(j);
    if (l->leave_us) {
        l->leave_us = 0;
        pthread_cond_signal(&l->resume);
    }
}

/* Callbacks are the application's: without the lock. */
static void calls_run(struct ks_job *j)
{
    while (j->calls) {
        struct ks_handle *h = j->calls;
        j->calls = h->call_next;
        if (h->status == KS_EFENCED)
            j->lost = false;
        job_unlock(j);
        h->fn(h->arg, h->status);
        job_lock(j);
        handle_free(h);
    }
}

static void shut(struct ks_job *j)
{
    struct host_loop *l = j->loop;
    life_end(j);
    j->coord->ops->close(j->coord);
    j->coord = NULL;
    uv_close((uv_handle_t *)&l->wake, NULL);
    uv_close((uv_handle_t *)&l->tick, NULL);
    uv_close((uv_handle_t *)&l->until, NULL);
}

static void on_wake(uv_async_t *a)
{
    struct ks_job *j = a->data;
    job_lock(j);
    if (j->stop) {
        shut(j);
    } else {
        follow_events(j);
        if (j->fenced)
            life_tick(j);
        calls_run(j);
    }
    job_unlock(j);
}

static void on_tick(uv_timer_t *t)
{
    struct ks_job *j = t->data;
    job_lock(j);
    follow_tick(j);
    life_tick(j);
    job_unlock(j);
}

static void stay_until(struct ks_job *j, uint64_t at_us)
{
    struct timespec at = {.tv_sec = (time_t)(at_us / 1000000), .tv_nsec = (long)(at_us % 1000000) * 1000};
    j->loop->stay_us = at_us;
    (void)pthread_cond_timedwait(&j->loop->resume, &j->mutex, &at);
    j->loop->stay_us = 0;
}

/* The job's thread leaves the loop to threads of the application that wait, and for a moment after: a program that waits
 * again and again has no second thread woken in each round. Lock held. */
static void stay_away(struct ks_job *j)
{
    struct host_loop *l = j->loop;
    while (!j->stop && (l->taken || l->leave_us)) {
        uint64_t now = clock_now_us();
        if (l->taken) {
            stay_until(j, now + STAY_US);
        } else if (now < l->leave_us) {
            stay_until(j, l->leave_us);
        } else {
            l->leave_us = 0;
        }
    }
}

static void *run(void *arg)
{
    struct ks_job *j = arg;
    struct host_loop *l = j->loop;
    /* The application's signals are the application's threads' business. */
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (bool more = true; more;) {
        pthread_mutex_lock(&l->turn);
        job_lock(j);
        j->driver = pthread_self();
        job_unlock(j);
        more = uv_run(&l->uv, UV_RUN_ONCE) != 0;
        pthread_mutex_unlock(&l->turn);
        job_lock(j);
        l->over = !more;
        stay_away(j);
        job_unlock(j);
    }
    return NULL;
}

static void on_until(uv_timer_t *t)
{
    (void)t;
}

bool host_drive(struct ks_job *j, uint64_t until_us)
{
    struct host_loop *l = j->loop;
    if (!l || l->taken || l->over || j->stop)
        return false;
    bool resting = l->leave_us != 0;
    l->taken = true;
    l->leave_us = 0;
    job_unlock(j);
    if (!resting)
        wake(j);
    pthread_mutex_lock(&l->turn);
    job_lock(j);
    pthread_t before = j->driver;
    j->driver = pthread_self();
    uint64_t now = clock_now_us();
    uv_update_time(&l->uv);
    uv_timer_start(&l->until, on_until, until_us > now ? (until_us - now + 999) / 1000 : 0, 0);
    job_unlock(j);
    bool over = uv_run(&l->uv, UV_RUN_ONCE) == 0;
    job_lock(j);
    l->over = over;
    if (!over)
        uv_timer_stop(&l->until);
    j->driver = before;
    pthread_mutex_unlock(&l->turn);
    l->taken = false;
    /* Whoever else waits must not wait for our next call. */
    l->leave_us = j->stop || j->nwaiting > 1 ? 0 : clock_now_us() + LEAVE_US;
    if (l->stay_us > l->leave_us)
        pthread_cond_signal(&l->resume);
    return true;
}

static void loop_free(struct ks_job *j)
{
    CHECK(uv_loop_close(&j->loop->uv) == 0);
    pthread_mutex_destroy(&j->loop->turn);
    pthread_cond_destroy(&j->loop->resume);
    mem_free(j->loop);
    j->loop = NULL;
}

static void cond_init(pthread_cond_t *c)
{
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(c, &a);
    pthread_condattr_destroy(&a);
}

/* Fails when the application has used up its descriptors. */
static int loop_init(struct host_loop *l, char *err)
{
    int r = uv_loop_init(&l->uv);
    bool inited = r == 0;
    if (inited)
        r = uv_async_init(&l->uv, &l->wake, on_wake);
    if (r && inited)
        CHECK(uv_loop_close(&l->uv) == 0);
    if (r) {
        snprintf(err, ERR_TEXT, "cannot start the library's event loop: %s", uv_strerror(r));
        return KS_EIO;
    }
    CHECK(uv_timer_init(&l->uv, &l->tick) == 0);
    CHECK(uv_timer_init(&l->uv, &l->until) == 0);
    return 0;
}

int host_start(struct ks_job *j, char *err)
{
    struct host_loop *l = mem_alloc(sizeof *l);
    struct coord_config config = {.url = j->set.coord, .job = j->set.job, .wake = wake, .wake_arg = j};
    int rc = loop_init(l, err);
    if (rc) {
        mem_free(l);
        return rc;
    }
    j->loop = l;
    pthread_mutex_init(&l->turn, NULL);
    cond_init(&l->resume);
    l->wake.data = l->tick.data = j;
    rc = coord_open(&config, &j->coord, err);
    if (!rc) {
        uv_timer_start(&l->tick, on_tick, 0, TICK_MS);
        /* Held while the thread starts: nobody sees the job before it knows its thread. */
        job_lock(j);
        int e = pthread_create(&j->thread, NULL, run, j);
        job_unlock(j);
        if (!e)
            return 0;
        snprintf(err, ERR_TEXT, "cannot start a thread: %s", strerror(e));
        j->coord->ops->close(j->coord);
        j->coord = NULL;
        rc = KS_ENOMEM;
    }
    uv_close((uv_handle_t *)&l->wake, NULL);
    uv_close((uv_handle_t *)&l->tick, NULL);
    uv_close((uv_handle_t *)&l->until, NULL);
    uv_run(&l->uv, UV_RUN_DEFAULT);
    loop_free(j);
    return rc;
}

void host_stop(struct ks_job *j)
{
    if (!j->loop)
        return;
    job_lock(j);
    j->stop = true;
    host_wake(j);
    job_unlock(j);
    pthread_join(j->thread, NULL);
    for (uint32_t i = 0; i < j->ndying; i++)
        net_free(j->dying[i]);
    mem_free(j->dying);
    loop_free(j);
}
