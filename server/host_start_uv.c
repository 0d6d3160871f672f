/* host_start_uv.c - before a server serves: the job's settings, its data directory, whose heir it is. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/host_impl.h"

/* One request at the start, answered before anything else runs. The caller frees the event. */
static int ask(struct host *h, const struct coord_request *r, struct coord_event *ret, char *err)
{
    uint64_t wait = h->cfg->start_timeout_ms ? h->cfg->start_timeout_ms : 10000;
    uint64_t deadline = clock_now_us() + wait * 1000;
    char last[COORD_ERR_TEXT] = "no answer";
    h->coord->ops->submit(h->coord, r);
    while (clock_now_us() < deadline) {
        struct coord_event e;
        if (!h->coord->ops->next(h->coord, &e)) {
            uv_run(&h->uv, UV_RUN_ONCE);
            continue;
        }
        bool mine = e.kind == COORD_ANSWER && e.tag == r->tag;
        if (mine && e.status == 0) {
            *ret = e;
            return 0;
        }
        if (e.text[0])
            snprintf(last, sizeof last, "%s", e.text);
        int status = e.status;
        coord_event_done(&e);
        if (!mine)
            continue;
        if (status == KS_EAUTH || status == KS_EINVAL) {
            snprintf(err, HOST_TEXT, "the coordination store %.60s refused: %.160s", h->cfg->coord, last);
            return status;
        }
        h->coord->ops->submit(h->coord, r);
    }
    snprintf(err, HOST_TEXT, "the coordination store %.60s did not answer within %llu s: %.120s", h->cfg->coord,
             (unsigned long long)wait / 1000, last);
    return KS_EUNAVAIL;
}

static const struct coord_kv *kv_find(const struct coord_event *e, const char *key)
{
    for (uint32_t i = 0; i < e->nkv; i++)
        if (!strcmp(e->kv[i].key, key))
            return &e->kv[i];
    return NULL;
}

#define DIFFERS(field, bit, flag)                                                                                      \
    if (h->cfg->job_set & (bit) && have->field != want->field) {                                                       \
        snprintf(err, HOST_TEXT, "job '%s' was created with %s %u, not %u: give the same, or use "             \
                 "another job name", have->job, flag, (unsigned)have->field, (unsigned)want->field);                   \
        return KS_EEXIST;                                                                                              \
    }

static int job_agrees(const struct host *h, const struct job_doc *have, char *err)
{
    const struct job_doc *want = &h->cfg->job;
    DIFFERS(nshards, JOB_SHARDS, "--shards")
    DIFFERS(chunk_bytes, JOB_CHUNK, "--chunk-bytes")
    DIFFERS(servers_min, JOB_SERVERS, "--servers")
    DIFFERS(deterministic, JOB_DETERMINISTIC, "--deterministic")
    DIFFERS(replicas, JOB_REPLICAS, "--replicas")
    DIFFERS(replicas_min, JOB_REPLICAS_MIN, "--min-replicas")
    if (h->cfg->job_set & JOB_DURABILITY && strcmp(have->durability, want->durability)) {
        snprintf(err, HOST_TEXT, "job '%s' was created with --durability %s, not %s: give the same, or use "
                 "another job name", have->job, have->durability, want->durability);
        return KS_EEXIST;
    }
    return 0;
}

/* Our name in the view: the life before ours, and whether it is the only one that holds some shard. */
static void former_life(const struct view *v, const char *name, uint64_t *ret_id, bool *ret_alone)
{
    *ret_id = 0;
    *ret_alone = false;
    for (uint32_t i = 0; i < v->nservers; i++)
        if (!strcmp(v->server[i].name, name))
            *ret_id = v->server[i].id;
    for (uint32_t i = 0; *ret_id && i < v->nshards; i++)
        *ret_alone |= v->shard[i].primary == *ret_id && !v->shard[i].nbackups;
}

/* A directory remembers its newest lives only. */
static bool lived_here(const struct datadir *d, uint64_t id)
{
    bool found = id == d->life || d->nformer == DATADIR_FORMER_MAX;
    for (uint32_t i = 0; i < d->nformer; i++)
        found |= d->former[i] == id;
    return found && d->life;
}

static int view_check(struct host *h, const struct coord_kv *kv, char *err)
{
    struct view *v;
    bool alone;
    char text[ERR_TEXT];
    if (view_decode(kv->value, kv->value_size, &v, text)) {
        snprintf(err, HOST_TEXT, "the view of job '%s' in the store cannot be read: %.150s", h->job.job, text);
        return KS_ECORRUPT;
    }
    int r = 0;
    former_life(v, h->name, &h->heir_of, &alone);
    if (v->ended[0]) {
        snprintf(err, HOST_TEXT, "job '%s' has ended (%.100s): use another name, or forget it with 'keepstep stop "
                 "--purge'", h->job.job, v->ended);
        r = KS_EJOB;
    } else if (alone && !h->has_dir) {
        snprintf(err, HOST_TEXT, "server '%s' of job '%s' held shards in memory only (--durability none); they are "
                 "lost with it", h->name, h->job.job);
        r = KS_ESTATE;
    } else if (alone && !lived_here(&h->dir, h->heir_of)) {
        snprintf(err, HOST_TEXT, "server '%s' of job '%s' keeps its shards in another data directory than %.80s: start "
                 "it there, or give this one another --name", h->name, h->job.job, h->dir.dir);
        r = KS_ENOENT;
    }
    if (!h->has_dir || !lived_here(&h->dir, h->heir_of))
        h->heir_of = 0;
    view_free(v);
    return r;
}

static int job_create(struct host *h, char *err)
{
    struct coord_request r = {.kind = COORD_TXN, .tag = 2, .nguards = 1, .nops = 1};
    struct coord_event e;
    struct job_doc job = h->cfg->job;
    job.created = h->id;
    char *doc = job_encode(&job);
    r.guard[0] = (struct coord_guard){.kind = GUARD_ABSENT, .key = "job"};
    r.op[0] = (struct coord_op){.key = "job", .value = doc};
    int s = ask(h, &r, &e, err);
    mem_free(doc);
    if (s == 0)
        coord_event_done(&e);
    return s;
}

static int job_take(struct host *h, const struct coord_kv *kv, char *err)
{
    char text[ERR_TEXT];
    if (job_decode(kv->value, kv->value_size, &h->job, text)) {
        snprintf(err, HOST_TEXT, "the settings of job '%s' in the store cannot be read: %.150s", h->cfg->job.job, text);
        return KS_ECORRUPT;
    }
    return job_agrees(h, &h->job, err);
}

static void name_choose(struct host *h)
{
    char host[40] = "server";
    if (h->cfg->name) {
        snprintf(h->name, sizeof h->name, "%s", h->cfg->name);
        return;
    }
    (void)gethostname(host, sizeof host - 1);
    snprintf(h->name, sizeof h->name, "%s:%d", host, (int)getpid());
}

static int data_given(const struct host *h, const struct job_doc *job, char *err)
{
    if (h->cfg->data || !strcmp(job->durability, "none"))
        return 0;
    snprintf(err, HOST_TEXT, "job '%s' has durability=%s: give --data DIR, where this server keeps its shards", job->job,
             job->durability);
    return KS_EINVAL;
}

int host_data_open(struct host *h, char *err)
{
    struct datadir_config d = {.dir = h->cfg->data, .create = 1, .job = h->job.job, .created = h->job.created, .loops = h->cfg->loops,
                               .nshards = h->job.nshards, .chunk_bytes = h->job.chunk_bytes};
    name_choose(h);
    if (!strcmp(h->job.durability, "none"))
        return 0;
    if (data_given(h, &h->job, err))
        return KS_EINVAL;
    /* What is recorded wins over what we would choose; a new directory needs a choice. */
    d.name = h->cfg->name;
    int r = datadir_open(&d, &h->dir, err);
    if (r == KS_EINVAL) {
        d.name = h->name;
        d.loops = d.loops ? d.loops : h->nloops;
        r = datadir_open(&d, &h->dir, err);
    }
    if (r)
        return r;
    h->has_dir = true;
    h->nloops = h->dir.loops;
    snprintf(h->name, sizeof h->name, "%.63s", h->dir.name);
    return 0;
}

int host_job_find(struct host *h, char *err)
{
    struct coord_request range = {.kind = COORD_RANGE, .tag = 1};
    struct coord_event e;
    const struct coord_kv *job, *view;
    int r = ask(h, &range, &e, err);
    if (r)
        return r;
    job = kv_find(&e, "job");
    if (!job) {
        coord_event_done(&e);
        r = data_given(h, &h->cfg->job, err);
        r = r ? r : job_create(h, err);
        if (r || (r = ask(h, &range, &e, err)))
            return r;
        job = kv_find(&e, "job");
    }
    if (!job) {
        snprintf(err, HOST_TEXT, "job '%s' was removed from the store while this server started", h->cfg->job.job);
        r = KS_EUNAVAIL;
    }
    if (!r)
        r = job_take(h, job, err);
    if (!r)
        r = host_data_open(h, err);
    view = kv_find(&e, "view");
    if (!r && view)
        r = view_check(h, view, err);
    coord_event_done(&e);
    return r;
}
