#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <uv.h>

#include "base/check.h"
#include "base/mem.h"
#include "worker/host.h"

struct host_loop {
    uv_loop_t uv;
    uv_async_t wake;
    uv_timer_t tick;
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
    if (j->loop)
        wake(j);
}

/* Callbacks are the application's: without the lock. */
static void calls_run(struct ks_job *j)
{
    while (j->calls) {
        struct ks_handle *h = j->calls;
        j->calls = h->call_next;
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

static void *run(void *arg)
{
    struct ks_job *j = arg;
    /* The application's signals are the application's threads' business. */
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    uv_run(&j->loop->uv, UV_RUN_DEFAULT);
    return NULL;
}

static void loop_free(struct ks_job *j)
{
    CHECK(uv_loop_close(&j->loop->uv) == 0);
    mem_free(j->loop);
    j->loop = NULL;
}

int host_start(struct ks_job *j, char *err)
{
    struct host_loop *l = mem_alloc(sizeof *l);
    struct coord_config config = {.url = j->set.coord, .job = j->set.job, .wake = wake, .wake_arg = j};
    j->loop = l;
    CHECK(uv_loop_init(&l->uv) == 0);
    CHECK(uv_async_init(&l->uv, &l->wake, on_wake) == 0);
    CHECK(uv_timer_init(&l->uv, &l->tick) == 0);
    l->wake.data = l->tick.data = j;
    int rc = coord_open(&config, &j->coord, err);
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
    job_unlock(j);
    host_wake(j);
    pthread_join(j->thread, NULL);
    for (uint32_t i = 0; i < j->ndying; i++)
        net_free(j->dying[i]);
    mem_free(j->dying);
    loop_free(j);
}
