/* host_status.c - the JSON that `keepstep status` shows: this server, its view, its loops. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "server/host_impl.h"

static void add_id(cJSON *o, const char *key, uint64_t id)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)id);
    cJSON_AddStringToObject(o, key, text);
}

static cJSON *members_json(const struct view *v)
{
    cJSON *list = cJSON_CreateArray();
    for (uint32_t i = 0; i < v->nmembers; i++) {
        const struct view_member *m = &v->member[i];
        cJSON *o = cJSON_CreateObject();
        add_id(o, "id", m->id);
        cJSON_AddStringToObject(o, "name", m->name);
        cJSON_AddNumberToObject(o, "join", (double)m->join);
        if (m->last != STEP_NONE)
            cJSON_AddNumberToObject(o, "last", (double)m->last);
        cJSON_AddBoolToObject(o, "live", m->live);
        cJSON_AddNumberToObject(o, "local_size", m->local_size);
        cJSON_AddNumberToObject(o, "rank", (double)view_rank(v, m->id));
        cJSON_AddItemToArray(list, o);
    }
    return list;
}

static cJSON *servers_json(const struct view *v)
{
    cJSON *list = cJSON_CreateArray();
    for (uint32_t i = 0; i < v->nservers; i++) {
        uint32_t shards = 0;
        cJSON *o = cJSON_CreateObject();
        for (uint32_t k = 0; k < v->nshards; k++)
            shards += v->shard[k].primary == v->server[i].id;
        add_id(o, "id", v->server[i].id);
        cJSON_AddStringToObject(o, "name", v->server[i].name);
        cJSON_AddStringToObject(o, "control", v->server[i].ctl);
        cJSON_AddNumberToObject(o, "loops", v->server[i].nloops);
        cJSON_AddNumberToObject(o, "shards", shards);
        cJSON_AddItemToArray(list, o);
    }
    return list;
}

void host_status_view(struct host *h, const struct view *v)
{
    struct view *before = h->under;
    bool failover = false;
    for (uint32_t i = 0; before && i < v->nshards; i++) {
        uint64_t from = before->shard[i].primary;
        failover |= from != v->shard[i].primary && !view_server_find(v, from);
    }
    h->failovers += failover;
    h->view_us = clock_now_us();
    h->under = view_copy(v);
    view_free(before);
}

static uint32_t catching_up(const struct view *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->nshards; i++)
        n += v->shard[i].njoining > 0;
    return n;
}

static void view_json(cJSON *root, const struct view *v)
{
    char mode[64];
    cJSON *modes = cJSON_AddArrayToObject(root, "modes");
    cJSON_AddNumberToObject(root, "epoch", (double)v->epoch);
    cJSON_AddNumberToObject(root, "shards", v->nshards);
    for (uint32_t i = 0; i < v->nmodes; i++) {
        cJSON *o = cJSON_CreateObject();
        mode_format(&v->mode[i], mode, sizeof mode);
        cJSON_AddNumberToObject(o, "from", (double)v->mode[i].from);
        cJSON_AddStringToObject(o, "mode", mode);
        cJSON_AddItemToArray(modes, o);
    }
    cJSON_AddItemToObject(root, "servers", servers_json(v));
    cJSON_AddItemToObject(root, "members", members_json(v));
}

static cJSON *loop_member_json(const struct shard_member_stats *m)
{
    cJSON *o = cJSON_CreateObject();
    add_id(o, "id", m->id);
    cJSON_AddNumberToObject(o, "clock", (double)m->clock);
    cJSON_AddNumberToObject(o, "pushes", (double)m->pushes);
    cJSON_AddNumberToObject(o, "bytes", (double)m->bytes);
    cJSON_AddNumberToObject(o, "applied", (double)m->applied);
    cJSON_AddNumberToObject(o, "duplicates", (double)m->duplicates);
    cJSON_AddNumberToObject(o, "late", (double)m->late);
    cJSON_AddNumberToObject(o, "stale", (double)m->stale);
    cJSON_AddNumberToObject(o, "not_finite", (double)m->not_finite);
    cJSON_AddNumberToObject(o, "refused", (double)m->refused);
    return o;
}

static cJSON *loop_json(const struct host *h, const struct loop_stats *s)
{
    const struct shard_stats *t = &s->shard;
    cJSON *o = cJSON_CreateObject();
    uint64_t since = t->progress_us > h->started_us ? t->progress_us : h->started_us;
    const struct { const char *key; double value; } field[] = {
        {"tensors", t->tensors}, {"chunks", t->chunks}, {"primaries", t->primaries},
        {"complete", (double)t->complete_min}, {"clock", (double)t->clock_min}, {"pushes", (double)t->pushes},
        {"pulls", (double)t->pulls}, {"results", (double)t->results}, {"applied", (double)t->applied},
        {"acked", (double)t->acked}, {"duplicates", (double)t->duplicates}, {"reopened", (double)t->reopened},
        {"persists", (double)t->persists}, {"bytes_in", (double)t->bytes_in}, {"bytes_out", (double)t->bytes_out},
        {"memory_used", (double)s->pool_used}, {"memory_held", (double)s->pool_held},
        {"waiting_step", (double)s->waiting_step}, {"quiet_s", (double)(clock_now_us() - since) / 1e6},
    };
    for (size_t i = 0; i < sizeof field / sizeof field[0]; i++)
        cJSON_AddNumberToObject(o, field[i].key, field[i].value);
    cJSON *waiting = cJSON_AddArrayToObject(o, "waiting_for");
    for (uint32_t i = 0; i < s->nwaiting; i++) {
        char id[24];
        snprintf(id, sizeof id, "%llu", (unsigned long long)s->waiting[i]);
        cJSON_AddItemToArray(waiting, cJSON_CreateString(id));
    }
    cJSON *members = cJSON_AddArrayToObject(o, "members");
    for (uint32_t i = 0; i < s->nmembers; i++)
        cJSON_AddItemToArray(members, loop_member_json(&s->member[i]));
    return o;
}

static char *status_json(struct host *h, const struct asking *a)
{
    char text[256] = "";
    cJSON *root = cJSON_CreateObject();
    const struct view *v = ctl_core_view(h->ctl);
    const struct view_core *controller = ctl_core_controller(h->ctl);
    uint64_t since = 0, now = clock_now_us(), waiting = 0;
    add_id(root, "id", h->id);
    cJSON_AddStringToObject(root, "job", h->job.job);
    cJSON_AddStringToObject(root, "name", h->name);
    cJSON_AddStringToObject(root, "durability", h->job.durability);
    cJSON_AddNumberToObject(root, "uptime_s", (double)(now - h->started_us) / 1e6);
    add_id(root, "leader", ctl_core_leader(h->ctl));
    cJSON_AddBoolToObject(root, "leads", ctl_core_leads(h->ctl));
    if (controller) {
        view_core_describe(controller, now, text, sizeof text);
        waiting = view_core_waiting_for(controller, &since);
    }
    cJSON_AddStringToObject(root, "controller", text);
    add_id(root, "waiting_for_server", waiting);
    cJSON_AddNumberToObject(root, "waiting_s", waiting ? (double)(now - since) / 1e6 : 0);
    if (v)
        view_json(root, v);
    cJSON_AddNumberToObject(root, "failovers", (double)h->failovers);
    cJSON_AddNumberToObject(root, "view_age_s", h->view_us ? (double)(now - h->view_us) / 1e6 : 0);
    cJSON_AddNumberToObject(root, "catching_up", v ? catching_up(v) : 0);
    cJSON *loops = cJSON_AddArrayToObject(root, "loops");
    for (uint32_t i = 0; i < h->nloops; i++)
        if (a->loop[i])
            cJSON_AddItemToArray(loops, loop_json(h, a->loop[i]));
    char *out = cJSON_PrintUnformatted(root), *copy = mem_strdup(out ? out : "{}");
    cJSON_free(out);
    cJSON_Delete(root);
    return copy;
}

static void asking_free(struct asking *a, uint32_t nloops)
{
    for (uint32_t i = 0; i < nloops; i++)
        mem_free(a->loop[i]);
    mem_free(a);
}

static void release_text(void *text)
{
    mem_free(text);
}

static void answer(struct host *h, struct asking *a)
{
    if (!a->conn)
        return;
    char *doc = status_json(h, a);
    struct frame_header f = {.type = FRAME_STATUS_REPLY, .version = a->request, .len = strlen(doc)};
    (void)net_send(a->conn, &f, doc, release_text, doc);
}

void host_status_ask(struct host *h, struct net_conn *c, uint64_t request)
{
    struct asking *a = mem_alloc(sizeof *a);
    a->conn = c;
    a->request = request;
    a->seq = ++h->asked;
    a->missing = h->nloops;
    a->next = h->asking;
    h->asking = a;
    for (uint32_t i = 0; i < h->nloops; i++) {
        struct mail *m = mem_alloc(sizeof *m);
        m->kind = MAIL_STATS;
        m->seq = a->seq;
        loop_post(h->loop[i], m);
    }
}

void host_status_loop(struct host *h, struct mail *m)
{
    for (struct asking **at = &h->asking; *at; at = &(*at)->next) {
        struct asking *a = *at;
        if (a->seq != m->seq)
            continue;
        a->loop[m->loop] = m->stats;
        m->stats = NULL;
        if (--a->missing == 0) {
            *at = a->next;
            answer(h, a);
            asking_free(a, h->nloops);
        }
        return;
    }
}

void host_status_forget(struct host *h, struct net_conn *c)
{
    for (struct asking *a = h->asking; c && a; a = a->next)
        if (a->conn == c)
            a->conn = NULL;
    while (!c && h->asking) {
        struct asking *next = h->asking->next;
        asking_free(h->asking, h->nloops);
        h->asking = next;
    }
}
