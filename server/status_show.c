#include <cjson/cJSON.h>
#include <string.h>

#include "base/mem.h"
#include "server/status.h"

/* ---- text ---- */

/* "1.5M", "930", in units of 1024 when bytes, else of 1000. */
static const char *short_number(double n, bool bytes, char *out, size_t size)
{
    static const char units[] = " KMGTP";
    double base = bytes ? 1024 : 1000;
    size_t u = 0;
    if (n < 0) {
        snprintf(out, size, "-");
        return out;
    }
    while (n >= base * 0.9995 && u + 2 < sizeof units) {
        n /= base;
        u++;
    }
    if (u)
        snprintf(out, size, n < 10 ? "%.2f%c" : n < 100 ? "%.1f%c" : "%.0f%c", n, units[u]);
    else
        snprintf(out, size, "%.0f", n);
    return out;
}

static void print_head(const struct picture *p, FILE *to)
{
    const struct job_state *s = &p->state;
    const struct view *v = s->view;
    fprintf(to, "job %s  epoch %llu  mode %s  durability %s  shards %u  leader %s\n", s->job.job,
            v ? (unsigned long long)v->epoch : 0ull, p->mode, s->job.durability, s->job.nshards,
            s->has_leader ? s->leader.server.name : "none");
    if (v && !v->ended[0] && p->view_age_s >= 0)
        fprintf(to, "view of %.1f s ago  failovers %llu  catching up %u of %u shards\n", p->view_age_s,
                (unsigned long long)p->failovers, p->catching_up, v->nshards);
    if (v && v->ended[0])
        fprintf(to, "ENDED: %s\n", v->ended);
    else if (!v)
        fprintf(to, "no view yet: %u of %u servers are registered\n", s->nservers, s->job.servers_min);
    if (s->damaged[0])
        fprintf(to, "damaged: %s\n", s->damaged);
    if (p->controller[0] && strcmp(p->controller, "idle"))
        fprintf(to, "view change: %s\n", p->controller);
}

static const char *server_state(const struct server_row *s)
{
    if (!s->doc)
        return s->answer.text[0] ? s->answer.text : "answers in another format";
    return !s->in_view ? "not in the view yet" : "ok";
}

static void print_server(const struct server_row *s, bool ended, FILE *to)
{
    char memory[16], rate[16], in[16], out[16];
    if (!s->doc && ended && !s->registered) {
        fprintf(to, "%-14s %-21s %5u %6u  exited\n", s->who.name, s->who.ctl, s->who.nloops, s->shards);
        return;
    }
    if (!s->doc) {
        fprintf(to, "%-14s %-21s %5u %6u  UNREACHABLE: %s%s\n", s->who.name, s->who.ctl, s->who.nloops, s->shards,
                server_state(s), s->registered ? "" : " (not registered)");
        return;
    }
    fprintf(to, "%-14s %-21s %5u %6u %7llu %7llu %7s %8s %8s %8s  %-4s  %llu\n", s->who.name, s->who.ctl,
            s->who.nloops, s->shards, (unsigned long long)s->tensors, (unsigned long long)s->chunks,
            short_number((double)s->memory, true, memory, sizeof memory),
            short_number(s->pushes_rate, false, rate, sizeof rate), short_number(s->in_rate, true, in, sizeof in),
            short_number(s->out_rate, true, out, sizeof out), server_state(s), (unsigned long long)s->who.id);
}

static void print_member(const struct member_row *m, FILE *to)
{
    char pushes[16], bytes[16], clock[24] = "-", lag[24] = "-";
    if (m->clock >= 0) {
        snprintf(clock, sizeof clock, "%lld", (long long)m->clock);
        snprintf(lag, sizeof lag, "%lld", (long long)m->lag);
    }
    fprintf(to, "%-14s %5lld %8s %5s %8s %8s %6llu %6llu %6llu %6llu  %llu\n", m->who.name, (long long)m->rank, clock, lag,
            short_number((double)m->pushes, false, pushes, sizeof pushes),
            short_number((double)m->bytes, true, bytes, sizeof bytes), (unsigned long long)m->duplicates,
            (unsigned long long)m->late, (unsigned long long)m->stale, (unsigned long long)m->not_finite,
            (unsigned long long)m->who.id);
}

static void print_waits(const struct picture *p, FILE *to)
{
    for (uint32_t i = 0; i < p->nwaits; i++) {
        const struct wait_row *w = &p->wait[i];
        fprintf(to, "%s%sstep %lld waits for %s (%.1f s)\n", w->server ? w->server->who.name : "",
                w->server ? ": " : "", (long long)w->step, w->whom, w->seconds);
    }
}

void picture_print(const struct picture *p, FILE *to)
{
    print_head(p, to);
    fprintf(to, "\n%-14s %-21s %5s %6s %7s %7s %7s %8s %8s %8s  %-4s  %s\n", "SERVER", "CONTROL", "LOOPS", "SHARDS",
            "TENSORS", "CHUNKS", "MEMORY", "PUSH/s", "IN/s", "OUT/s", "", "ID");
    for (uint32_t i = 0; i < p->nservers; i++)
        print_server(&p->server[i], p->state.view && p->state.view->ended[0], to);
    fprintf(to, "\n%-14s %5s %8s %5s %8s %8s %6s %6s %6s %6s  %s\n", "MEMBER", "RANK", "CLOCK", "LAG", "PUSHES", "BYTES",
            "DUPL", "LATE", "STALE", "NAN", "ID");
    for (uint32_t i = 0; i < p->nmembers; i++)
        print_member(&p->member[i], to);
    if (p->nwaits)
        fputc('\n', to);
    print_waits(p, to);
}

/* ---- JSON ---- */

static void add_id(cJSON *o, const char *key, uint64_t id)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)id);
    cJSON_AddStringToObject(o, key, digits);
}

static void add_number(cJSON *o, const char *key, double n)
{
    cJSON_AddNumberToObject(o, key, n);
}

static cJSON *server_json(const struct server_row *s)
{
    cJSON *o = cJSON_CreateObject();
    add_id(o, "id", s->who.id);
    cJSON_AddStringToObject(o, "name", s->who.name);
    cJSON_AddStringToObject(o, "control", s->who.ctl);
    cJSON_AddBoolToObject(o, "in_view", s->in_view);
    cJSON_AddBoolToObject(o, "registered", s->registered);
    cJSON_AddBoolToObject(o, "reachable", s->doc != NULL);
    add_number(o, "loops", s->who.nloops);
    add_number(o, "shards", s->shards);
    if (!s->doc) {
        cJSON_AddStringToObject(o, "error", server_state(s));
        return o;
    }
    add_number(o, "tensors", (double)s->tensors);
    add_number(o, "chunks", (double)s->chunks);
    add_number(o, "memory", (double)s->memory);
    add_number(o, "pushes", (double)s->pushes);
    add_number(o, "applied", (double)s->applied);
    add_number(o, "duplicates", (double)s->duplicates);
    add_number(o, "bytes_in", (double)s->bytes_in);
    add_number(o, "bytes_out", (double)s->bytes_out);
    add_number(o, "complete", (double)s->complete);
    cJSON_AddItemToObject(o, "status", cJSON_Duplicate(s->doc, true));
    return o;
}

static cJSON *member_json(const struct member_row *m)
{
    cJSON *o = cJSON_CreateObject();
    add_id(o, "id", m->who.id);
    cJSON_AddStringToObject(o, "name", m->who.name);
    add_number(o, "rank", (double)m->rank);
    add_number(o, "local_size", m->who.local_size);
    add_number(o, "join", (double)m->who.join);
    add_number(o, "clock", (double)m->clock);
    add_number(o, "lag", (double)m->lag);
    add_number(o, "pushes", (double)m->pushes);
    add_number(o, "bytes", (double)m->bytes);
    add_number(o, "applied", (double)m->applied);
    add_number(o, "duplicates", (double)m->duplicates);
    add_number(o, "late", (double)m->late);
    add_number(o, "stale", (double)m->stale);
    add_number(o, "not_finite", (double)m->not_finite);
    add_number(o, "refused", (double)m->refused);
    return o;
}

static cJSON *wait_json(const struct wait_row *w)
{
    cJSON *o = cJSON_CreateObject();
    if (w->server)
        cJSON_AddStringToObject(o, "server", w->server->who.name);
    add_number(o, "step", (double)w->step);
    cJSON_AddStringToObject(o, "for", w->whom);
    add_number(o, "seconds", w->seconds);
    return o;
}

static void head_json(cJSON *root, const struct picture *p)
{
    const struct job_state *s = &p->state;
    cJSON_AddStringToObject(root, "job", s->job.job);
    add_number(root, "epoch", s->view ? (double)s->view->epoch : 0);
    cJSON_AddStringToObject(root, "mode", p->mode);
    cJSON_AddStringToObject(root, "durability", s->job.durability);
    add_number(root, "shards", s->job.nshards);
    add_number(root, "chunk_bytes", s->job.chunk_bytes);
    cJSON_AddBoolToObject(root, "deterministic", s->job.deterministic);
    cJSON_AddStringToObject(root, "ended", s->view ? s->view->ended : "");
    cJSON_AddStringToObject(root, "leader", s->has_leader ? s->leader.server.name : "");
    cJSON_AddStringToObject(root, "controller", p->controller);
    add_number(root, "failovers", (double)p->failovers);
    add_number(root, "catching_up", p->catching_up);
    if (p->view_age_s >= 0)
        add_number(root, "view_age_s", p->view_age_s);
    cJSON_AddStringToObject(root, "damaged", s->damaged);
}

char *picture_json(const struct picture *p)
{
    cJSON *root = cJSON_CreateObject();
    head_json(root, p);
    cJSON *servers = cJSON_AddArrayToObject(root, "servers"), *members = cJSON_AddArrayToObject(root, "members"),
          *waits = cJSON_AddArrayToObject(root, "waiting");
    for (uint32_t i = 0; i < p->nservers; i++)
        cJSON_AddItemToArray(servers, server_json(&p->server[i]));
    for (uint32_t i = 0; i < p->nmembers; i++)
        cJSON_AddItemToArray(members, member_json(&p->member[i]));
    for (uint32_t i = 0; i < p->nwaits; i++)
        cJSON_AddItemToArray(waits, wait_json(&p->wait[i]));
    char *out = cJSON_PrintUnformatted(root), *copy = mem_strdup(out ? out : "{}");
    cJSON_free(out);
    cJSON_Delete(root);
    return copy;
}
