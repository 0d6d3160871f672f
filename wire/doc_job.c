#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "wire/doc_json.h"
#include "wire/frame.h"

static const char *const mode_words[] = {"sync", "ssp", "async"};
static const char *const durability_words[] = {"none", "write"};

/* ---- modes ---- */

void doc_put_mode(struct doc_writer *w, const char *key, const struct mode *m)
{
    doc_put_open(w, key, '{');
    doc_put_step(w, "from", m->from);
    doc_put_word(w, "kind", mode_words, 3, (uint32_t)m->kind - MODE_SYNC);
    doc_put_number(w, "bound", m->bound);
    doc_put_close(w, '}');
}

void doc_get_mode(const struct doc_node *n, struct mode *m)
{
    m->from = doc_get_step(n, "from", 0, STEP_MAX);
    m->kind = (enum mode_kind)(MODE_SYNC + doc_get_word(n, "kind", mode_words, 3));
    m->bound = doc_get_number(n, "bound", 0, m->kind == MODE_SSP ? BOUND_MAX : 0);
}

char *mode_encode(const struct mode *m)
{
    struct doc_writer w = {0};
    doc_put_mode(&w, NULL, m);
    return doc_put_done(&w);
}

int mode_decode(const char *text, size_t size, struct mode *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    struct mode m = {0};
    doc_open(&r, "mode", text, size, DOC_SMALL_MAX, err, &n);
    doc_get_mode(&n, &m);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = m;
    return rc;
}

int mode_parse(const char *text, struct mode *ret)
{
    struct mode m = {.kind = MODE_SYNC};
    if (strcmp(text, "async") == 0)
        m.kind = MODE_ASYNC;
    const char *number = strncmp(text, "ssp:", 4) == 0          ? text + 4
                         : strncmp(text, "staleness:", 10) == 0 ? text + 10
                                                                : NULL;
    if (!number) {
        if (m.kind == MODE_SYNC && strcmp(text, "sync") != 0)
            return KS_EINVAL;
        *ret = m;
        return 0;
    }
    size_t digits = strspn(number, "0123456789");
    if (digits == 0 || digits > 7 || number[digits])
        return KS_EINVAL;
    m.kind = MODE_SSP;
    m.bound = (uint32_t)strtoul(number, NULL, 10);
    if (m.bound > BOUND_MAX)
        return KS_EINVAL;
    *ret = m;
    return 0;
}

void mode_format(const struct mode *m, char *out, size_t size)
{
    if (m->kind == MODE_SSP)
        snprintf(out, size, "ssp:%u", m->bound);
    else
        snprintf(out, size, "%s", m->kind == MODE_ASYNC ? "async" : "sync");
}

/* ---- job ---- */

char *job_encode(const struct job_doc *j)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    doc_put_text(&w, "job", j->job);
    doc_put_id(&w, "created", j->created);
    doc_put_number(&w, "nshards", j->nshards);
    doc_put_number(&w, "chunk_bytes", j->chunk_bytes);
    doc_put_number(&w, "servers_min", j->servers_min);
    doc_put_number(&w, "members_min", j->members_min);
    doc_put_number(&w, "replicas", j->replicas);
    doc_put_number(&w, "replicas_min", j->replicas_min);
    doc_put_bool(&w, "deterministic", j->deterministic);
    doc_put_text(&w, "durability", j->durability);
    doc_put_mode(&w, "mode", &j->mode);
    doc_put_number(&w, "wait_for_server_s", j->wait_for_server_s);
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

int job_decode(const char *text, size_t size, struct job_doc *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n, mode;
    struct job_doc j = {0};
    doc_open(&r, "job", text, size, DOC_SMALL_MAX, err, &n);
    doc_get_text(&n, "job", j.job, sizeof j.job, 1);
    j.created = doc_get_id(&n, "created", 0, UINT64_MAX);
    j.nshards = doc_get_number(&n, "nshards", 1, SHARDS_MAX);
    j.chunk_bytes = doc_get_number(&n, "chunk_bytes", CHUNK_BYTES_MIN, CHUNK_BYTES_MAX);
    if (j.chunk_bytes % 8)
        doc_fail(&n, "chunk_bytes", "%u is not a multiple of 8", j.chunk_bytes);
    j.servers_min = doc_get_number(&n, "servers_min", 1, SERVERS_MAX);
    j.members_min = doc_get_number(&n, "members_min", 0, MEMBERS_MAX);
    j.replicas = doc_get_number(&n, "replicas", 0, BACKUPS_MAX);
    if (doc_has(&n, "replicas_min"))
        j.replicas_min = doc_get_number(&n, "replicas_min", 0, j.replicas);
    j.deterministic = doc_get_bool(&n, "deterministic");
    uint32_t word = doc_get_word(&n, "durability", durability_words, 2);
    str_copy(j.durability, sizeof j.durability, durability_words[word]);
    doc_get_object(&n, "mode", &mode);
    doc_get_mode(&mode, &j.mode);
    if (j.mode.from != 0)
        doc_fail(&mode, "from", "the first mode starts at step 0");
    j.wait_for_server_s = doc_get_number(&n, "wait_for_server_s", 0, UINT32_MAX);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = j;
    return rc;
}

/* ---- servers ---- */

void doc_put_server(struct doc_writer *w, const struct view_server *s)
{
    doc_put_id(w, "id", s->id);
    doc_put_text(w, "name", s->name);
    doc_put_text(w, "ctl", s->ctl);
    doc_put_open(w, "loop", '[');
    for (uint32_t i = 0; i < s->nloops; i++)
        doc_put_text(w, NULL, s->loop[i]);
    doc_put_close(w, ']');
}

void doc_get_server(const struct doc_node *n, struct view_server *s)
{
    struct doc_list loops;
    struct doc_node loop;
    s->id = doc_get_id(n, "id", 1, UINT64_MAX);
    doc_get_text(n, "name", s->name, sizeof s->name, 1);
    doc_get_text(n, "ctl", s->ctl, sizeof s->ctl, 1);
    s->nloops = doc_get_list(n, "loop", 1, LOOPS_MAX, &loops);
    for (uint32_t i = 0; i < s->nloops; i++) {
        doc_list_next(&loops, &loop);
        doc_get_text(&loop, NULL, s->loop[i], sizeof s->loop[i], 1);
    }
}

char *server_encode(const struct server_doc *s)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    doc_put_server(&w, &s->server);
    doc_put_id(&w, "heir_of", s->heir_of);
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

int server_decode(const char *text, size_t size, struct server_doc *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    struct server_doc s = {0};
    doc_open(&r, "server", text, size, DOC_SMALL_MAX, err, &n);
    doc_get_server(&n, &s.server);
    s.heir_of = doc_get_id(&n, "heir_of", 0, UINT64_MAX);
    if (s.heir_of && s.heir_of == s.server.id)
        doc_fail(&n, "heir_of", "a life cannot be its own heir");
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = s;
    return rc;
}
