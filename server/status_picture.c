#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "server/status.h"

/* ---- reading JSON; what is missing is 0 ---- */

static double number(const cJSON *o, const char *key)
{
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(o, key);
    return cJSON_IsNumber(n) ? n->valuedouble : 0;
}

static uint64_t count(const cJSON *o, const char *key)
{
    double d = number(o, key);
    return d > 0 && d < 1.8e19 ? (uint64_t)d : 0;
}

static const char *text(const cJSON *o, const char *key)
{
    const cJSON *s = cJSON_GetObjectItemCaseSensitive(o, key);
    return cJSON_IsString(s) ? s->valuestring : "";
}

static uint64_t id_of(const char *digits)
{
    return strtoull(digits, NULL, 10);
}

static const cJSON *loops_of(const struct server_row *s)
{
    return cJSON_GetObjectItemCaseSensitive(s->doc, "loops");
}

/* ---- servers ---- */

static struct server_row *server_add(struct picture *p, const struct view_server *who)
{
    for (uint32_t i = 0; i < p->nservers; i++)
        if (p->server[i].who.id == who->id)
            return &p->server[i];
    struct server_row *s = &p->server[p->nservers++];
    s->who = *who;
    s->complete = s->clock = -1;
    s->pushes_rate = s->in_rate = s->out_rate = -1;
    return s;
}

static void servers_list(struct picture *p)
{
    const struct view *v = p->state.view;
    uint32_t nview = v ? v->nservers : 0;
    p->server = mem_alloc((nview + p->state.nservers + 1) * sizeof *p->server);
    for (uint32_t i = 0; i < nview; i++) {
        struct server_row *s = server_add(p, &v->server[i]);
        s->in_view = true;
        for (uint32_t k = 0; k < v->nshards; k++)
            s->shards += v->shard[k].primary == s->who.id;
    }
    for (uint32_t i = 0; i < p->state.nservers; i++)
        server_add(p, &p->state.server[i].server)->registered = true;
}

static void servers_ask(struct picture *p, struct operator *o, uint32_t timeout_ms)
{
    const char **addr = mem_alloc((p->nservers + 1) * sizeof *addr);
    struct operator_answer *a = mem_alloc((p->nservers + 1) * sizeof *a);
    for (uint32_t i = 0; i < p->nservers; i++)
        addr[i] = p->server[i].who.ctl;
    operator_status(o, addr, p->nservers, timeout_ms, a);
    for (uint32_t i = 0; i < p->nservers; i++) {
        struct server_row *s = &p->server[i];
        s->answer = a[i];
        s->doc = a[i].doc ? cJSON_Parse(a[i].doc) : NULL;
        /* A restarted server may have taken the port of the one before. */
        if (s->doc && id_of(text(s->doc, "id")) != s->who.id) {
            cJSON_Delete(s->doc);
            s->doc = NULL;
            snprintf(s->answer.text, sizeof s->answer.text, "another server answers at this address");
        }
    }
    mem_free(addr);
    mem_free(a);
}

static void lowest(int64_t *at, int64_t value)
{
    if (value >= 0 && (*at < 0 || value < *at))
        *at = value;
}

static void server_sum(struct server_row *s)
{
    const cJSON *l;
    cJSON_ArrayForEach(l, loops_of(s))
    {
        s->tensors = count(l, "tensors") > s->tensors ? count(l, "tensors") : s->tensors;
        s->chunks += count(l, "chunks");
        s->memory += count(l, "memory_used");
        s->pushes += count(l, "pushes");
        s->applied += count(l, "applied");
        s->duplicates += count(l, "duplicates");
        s->bytes_in += count(l, "bytes_in");
        s->bytes_out += count(l, "bytes_out");
        if (count(l, "primaries") == 0)
            continue;
        lowest(&s->complete, (int64_t)number(l, "complete"));
        lowest(&s->clock, (int64_t)number(l, "clock"));
    }
}

static void server_rates(struct server_row *s, const struct picture *before, uint64_t now_us)
{
    double seconds = before ? (double)(now_us - before->taken_us) / 1e6 : 0;
    for (uint32_t i = 0; s->doc && seconds > 0 && i < before->nservers; i++) {
        const struct server_row *b = &before->server[i];
        if (b->who.id != s->who.id || !b->doc)
            continue;
        s->pushes_rate = (double)(s->pushes - b->pushes) / seconds;
        s->in_rate = (double)(s->bytes_in - b->bytes_in) / seconds;
        s->out_rate = (double)(s->bytes_out - b->bytes_out) / seconds;
    }
}

/* ---- members ---- */

static struct member_row *member_find(const struct picture *p, uint64_t id)
{
    for (uint32_t i = 0; i < p->nmembers; i++)
        if (p->member[i].who.id == id)
            return &p->member[i];
    return NULL;
}

static void member_sum(struct member_row *m, const cJSON *o)
{
    int64_t clock = (int64_t)number(o, "clock");
    m->clock = clock > m->clock ? clock : m->clock;
    m->pushes += count(o, "pushes");
    m->bytes += count(o, "bytes");
    m->applied += count(o, "applied");
    m->duplicates += count(o, "duplicates");
    m->late += count(o, "late");
    m->stale += count(o, "stale");
    m->not_finite += count(o, "not_finite");
    m->refused += count(o, "refused");
}

static void members_list(struct picture *p)
{
    const struct view *v = p->state.view;
    p->member = mem_alloc(((v ? v->nmembers : 0) + 1) * sizeof *p->member);
    for (uint32_t i = 0; v && i < v->nmembers; i++) {
        struct member_row *m = &p->member[p->nmembers];
        m->who = v->member[i];
        m->rank = view_rank(v, m->who.id);
        m->clock = -1;
        p->nmembers += m->who.live;
    }
}

static void members_sum(struct picture *p)
{
    int64_t most = -1;
    const cJSON *l, *o;
    for (uint32_t i = 0; i < p->nservers; i++) {
        cJSON_ArrayForEach(l, loops_of(&p->server[i]))
        {
            cJSON_ArrayForEach(o, cJSON_GetObjectItemCaseSensitive(l, "members"))
            {
                struct member_row *m = member_find(p, id_of(text(o, "id")));
                if (m)
                    member_sum(m, o);
            }
        }
    }
    for (uint32_t i = 0; i < p->nmembers; i++)
        most = p->member[i].clock > most ? p->member[i].clock : most;
    for (uint32_t i = 0; i < p->nmembers; i++)
        p->member[i].lag = p->member[i].clock < 0 ? -1 : most - p->member[i].clock;
}

/* ---- who waits for whom ---- */

static void whom_add(struct wait_row *w, const char *name)
{
    size_t n = strlen(w->whom);
    if (n + strlen(name) + 3 < sizeof w->whom)
        snprintf(w->whom + n, sizeof w->whom - n, "%s%s", n ? ", " : "", name);
}

static void whom_list(const struct picture *p, const cJSON *list, struct wait_row *w)
{
    const cJSON *id;
    cJSON_ArrayForEach(id, list)
    {
        const struct member_row *m = cJSON_IsString(id) ? member_find(p, id_of(id->valuestring)) : NULL;
        whom_add(w, m ? m->who.name : cJSON_IsString(id) ? id->valuestring : "?");
    }
}

/* Synchronous steps: one row a server, that of the loop which waits longest. */
static void wait_sync(struct picture *p, const struct server_row *s)
{
    struct wait_row *w = &p->wait[p->nwaits];
    const cJSON *l, *longest = NULL;
    cJSON_ArrayForEach(l, loops_of(s))
    {
        bool waits = cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(l, "waiting_for")) > 0;
        if (waits && (!longest || number(l, "quiet_s") > number(longest, "quiet_s")))
            longest = l;
    }
    if (!longest)
        return;
    w->server = s;
    w->step = (int64_t)number(longest, "waiting_step");
    w->seconds = number(longest, "quiet_s");
    whom_list(p, cJSON_GetObjectItemCaseSensitive(longest, "waiting_for"), w);
    p->nwaits++;
}

/* A bound: whoever is more than it ahead of the lowest clock waits for the members that have it. */
static void wait_bound(struct picture *p, uint32_t bound)
{
    struct wait_row *w = &p->wait[p->nwaits];
    int64_t most = -1, lag = 0;
    const cJSON *l;
    for (uint32_t i = 0; i < p->nmembers; i++) {
        most = p->member[i].clock > most ? p->member[i].clock : most;
        lag = p->member[i].lag > lag ? p->member[i].lag : lag;
    }
    if (lag <= (int64_t)bound)
        return;
    for (uint32_t i = 0; i < p->nmembers; i++)
        if (p->member[i].lag == lag)
            whom_add(w, p->member[i].who.name);
    for (uint32_t i = 0; i < p->nservers; i++)
        cJSON_ArrayForEach(l, loops_of(&p->server[i]))
            w->seconds = number(l, "quiet_s") > w->seconds ? number(l, "quiet_s") : w->seconds;
    w->step = most;
    p->nwaits++;
}

static void waits_list(struct picture *p)
{
    p->wait = mem_alloc((p->nservers + 1) * sizeof *p->wait);
    for (uint32_t i = 0; i < p->nservers; i++)
        wait_sync(p, &p->server[i]);
    if (!p->nwaits && p->now.kind == MODE_SSP)
        wait_bound(p, p->now.bound);
}

/* ---- the whole ---- */

/* The mode of the most advanced member's step, and what follows it. */
static void mode_line(struct picture *p)
{
    const struct view *v = p->state.view;
    int64_t step = 0;
    for (uint32_t i = 0; i < p->nmembers; i++)
        step = p->member[i].clock > step ? p->member[i].clock : step;
    if (!v) {
        p->now = p->state.job.mode;
        mode_format(&p->now, p->mode, sizeof p->mode);
        return;
    }
    p->now = view_mode_at(v, step);
    mode_format(&p->now, p->mode, sizeof p->mode);
    for (uint32_t i = 0; i < v->nmodes; i++) {
        size_t n = strlen(p->mode);
        char next[32];
        if (v->mode[i].from <= step)
            continue;
        mode_format(&v->mode[i], next, sizeof next);
        snprintf(p->mode + n, sizeof p->mode - n, ", %s from step %lld", next, (long long)v->mode[i].from);
    }
}

static void controller_line(struct picture *p)
{
    for (uint32_t i = 0; i < p->nservers; i++)
        if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(p->server[i].doc, "leads")))
            snprintf(p->controller, sizeof p->controller, "%s", text(p->server[i].doc, "controller"));
}

static void view_line(struct picture *p)
{
    const struct view *v = p->state.view;
    p->view_age_s = -1;
    for (uint32_t i = 0; v && i < v->nshards; i++)
        p->catching_up += v->shard[i].njoining > 0;
    for (uint32_t i = 0; i < p->nservers; i++) {
        const cJSON *doc = p->server[i].doc;
        double age = number(doc, "view_age_s");
        if (!doc)
            continue;
        p->failovers = count(doc, "failovers") > p->failovers ? count(doc, "failovers") : p->failovers;
        if (v && count(doc, "epoch") == v->epoch && age > p->view_age_s)
            p->view_age_s = age;
    }
}

int picture_take(struct operator *o, uint32_t timeout_ms, const struct picture *before, struct picture *ret, char *err)
{
    struct picture p = {0};
    int r = operator_read(o, timeout_ms, &p.state, err);
    if (r)
        return r;
    servers_list(&p);
    servers_ask(&p, o, timeout_ms);
    p.taken_us = clock_now_us();
    for (uint32_t i = 0; i < p.nservers; i++) {
        server_sum(&p.server[i]);
        server_rates(&p.server[i], before, p.taken_us);
    }
    members_list(&p);
    members_sum(&p);
    mode_line(&p);
    waits_list(&p);
    controller_line(&p);
    view_line(&p);
    *ret = p;
    return 0;
}

void picture_done(struct picture *p)
{
    for (uint32_t i = 0; i < p->nservers; i++) {
        cJSON_Delete(p->server[i].doc);
        mem_free(p->server[i].answer.doc);
    }
    mem_free(p->server);
    mem_free(p->member);
    mem_free(p->wait);
    job_state_done(&p->state);
    *p = (struct picture){0};
}
