#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "worker/host.h"

enum { TAG_ALL = 1, TAG_VIEW };

static void range(struct ks_job *j, uint64_t tag, const char *prefix)
{
    struct coord_request r = {.kind = COORD_RANGE, .tag = tag};
    snprintf(r.prefix, sizeof r.prefix, "%s", prefix);
    j->range_us = clock_now_us();
    j->ranging = true;
    j->coord->ops->submit(j->coord, &r);
}

void follow_view_wanted(struct ks_job *j)
{
    if (!j->ranging && j->ranged && j->coord && job_in_loop(j))
        range(j, TAG_VIEW, "view");
}

static void job_changed(struct ks_job *j, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    if (j->has_job || !kv->value)
        return;
    if (job_decode(kv->value, kv->value_size, &j->job, err)) {
        job_fail(j, KS_EVERSION, "job \"%s\" in the store %.100s cannot be read: %s", j->set.job, j->set.coord, err);
        return;
    }
    j->has_job = true;
}

static void leader_changed(struct ks_job *j, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    struct server_doc d;
    if (!kv->value) {
        /* Its connection stays until there is another one: it may only have lost its lease. */
        j->has_leader = false;
        return;
    }
    if (server_decode(kv->value, kv->value_size, &d, err)) {
        log_warn("leader_refused", "cause=\"%s\"", err);
        return;
    }
    j->leader = d;
    j->has_leader = true;
    life_leader(j);
}

static void view_changed(struct ks_job *j, const struct coord_kv *kv)
{
    char err[ERR_TEXT];
    struct view *v;
    if (!kv->value)
        return;
    if (view_decode(kv->value, kv->value_size, &v, err))
        log_warn("view_refused", "cause=\"%s\"", err);
    else
        life_view(j, v);
}

static void changed(struct ks_job *j, const struct coord_kv *kv)
{
    if (strcmp(kv->key, "job") == 0)
        job_changed(j, kv);
    else if (strcmp(kv->key, "leader") == 0)
        leader_changed(j, kv);
    else if (strcmp(kv->key, "view") == 0)
        view_changed(j, kv);
    if (j->has_job && !j->core && j->state == JOB_OPENING)
        life_start(j);
}

static void answered(struct ks_job *j, const struct coord_event *e)
{
    j->ranging = false;
    if (e->status == KS_EAUTH || e->status == KS_EINVAL) {
        job_fail(j, e->status, "the coordination store %.100s: %s", j->set.coord, e->text);
        return;
    }
    if (e->status) {
        j->store_away = true;
        snprintf(j->store_text, sizeof j->store_text, "%s", e->text);
        return;
    }
    j->store_away = false;
    bool leads = false;
    for (uint32_t i = 0; i < e->nkv; i++) {
        leads |= strcmp(e->kv[i].key, "leader") == 0;
        changed(j, &e->kv[i]);
    }
    if (e->tag != TAG_ALL)
        return;
    j->ranged = j->watched = true;
    j->has_leader = j->has_leader && leads;
    j->coord->ops->watch(j->coord, "", e->revision);
}

static void event(struct ks_job *j, const struct coord_event *e)
{
    switch (e->kind) {
    case COORD_ANSWER:
        answered(j, e);
        break;
    case COORD_CHANGE:
        for (uint32_t i = 0; i < e->nkv; i++)
            changed(j, &e->kv[i]);
        break;
    case COORD_RESYNC:
        j->watched = false;
        break;
    case COORD_REACHABLE:
        j->store_away = e->status != 0;
        snprintf(j->store_text, sizeof j->store_text, "%s", e->text);
        break;
    case COORD_LEASE_LOST:
        break;
    }
}

void follow_events(struct ks_job *j)
{
    struct coord_event e;
    while (j->coord->ops->next(j->coord, &e)) {
        event(j, &e);
        coord_event_done(&e);
    }
    follow_tick(j);
}

/* Asks for everything until it has an answer and a watch. */
void follow_tick(struct ks_job *j)
{
    if (!j->watched && !j->ranging && (!j->range_us || clock_now_us() - j->range_us >= REPEAT_US / 2))
        range(j, TAG_ALL, "");
}
