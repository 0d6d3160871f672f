#include "base/mem.h"
#include "wire/doc_json.h"

/* ---- join ---- */

static void put_join(struct doc_writer *w, const struct join_doc *j)
{
    doc_put_open(w, NULL, '{');
    doc_put_id(w, "id", j->id);
    doc_put_text(w, "name", j->name);
    doc_put_number(w, "local_size", j->local_size);
    doc_put_close(w, '}');
}

static void get_join(const struct doc_node *n, struct join_doc *j)
{
    j->id = doc_get_id(n, "id", 1, UINT64_MAX);
    doc_get_text(n, "name", j->name, sizeof j->name, 0);
    j->local_size = doc_get_number(n, "local_size", 1, LOCAL_SIZE_MAX);
}

char *join_encode(const struct join_doc *j)
{
    struct doc_writer w = {0};
    put_join(&w, j);
    return doc_put_done(&w);
}

int join_decode(const char *text, size_t size, struct join_doc *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    struct join_doc j = {0};
    doc_open(&r, "join", text, size, DOC_SMALL_MAX, err, &n);
    get_join(&n, &j);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = j;
    return rc;
}

/* ---- prepare ---- */

static void put_ballot(struct doc_writer *w, const struct ballot *b)
{
    doc_put_id(w, "term", b->term);
    doc_put_id(w, "round", b->round);
}

static void get_ballot(const struct doc_node *n, struct ballot *b)
{
    b->term = doc_get_id(n, "term", 0, UINT64_MAX);
    b->round = doc_get_id(n, "round", 0, UINT64_MAX);
}

void prepare_done(struct prepare *p)
{
    view_free(p->base);
    mem_free(p->gone);
    mem_free(p->joins);
    mem_free(p->heir);
    mem_free(p->heir_of);
    mem_free(p->move);
    *p = (struct prepare){0};
}

void prepare_copy(struct prepare *dst, const struct prepare *src)
{
    *dst = *src;
    dst->base = src->base ? view_copy(src->base) : NULL;
    dst->gone = mem_dup(src->gone, src->ngone * sizeof *src->gone);
    dst->joins = mem_dup(src->joins, src->njoins * sizeof *src->joins);
    dst->heir = mem_dup(src->heir, src->nheirs * sizeof *src->heir);
    dst->heir_of = mem_dup(src->heir_of, src->nheirs * sizeof *src->heir_of);
    dst->move = mem_dup(src->move, src->nmoves * sizeof *src->move);
}

char *prepare_encode(const struct prepare *p)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    put_ballot(&w, &p->ballot);
    doc_put_view(&w, "base", p->base);
    doc_put_id(&w, "controller", p->controller);
    doc_put_open(&w, "gone", '[');
    for (uint32_t i = 0; i < p->ngone; i++)
        doc_put_id(&w, NULL, p->gone[i]);
    doc_put_close(&w, ']');
    doc_put_open(&w, "joins", '[');
    for (uint32_t i = 0; i < p->njoins; i++)
        put_join(&w, &p->joins[i]);
    doc_put_close(&w, ']');
    doc_put_open(&w, "heirs", '[');
    for (uint32_t i = 0; i < p->nheirs; i++) {
        doc_put_open(&w, NULL, '{');
        doc_put_id(&w, "id", p->heir[i]);
        doc_put_id(&w, "of", p->heir_of[i]);
        doc_put_close(&w, '}');
    }
    doc_put_close(&w, ']');
    doc_put_bool(&w, "mode_change", p->mode_change);
    doc_put_open(&w, "moves", '[');
    for (uint32_t i = 0; i < p->nmoves; i++) {
        doc_put_open(&w, NULL, '{');
        doc_put_number(&w, "shard", p->move[i].shard);
        doc_put_id(&w, "to", p->move[i].to);
        doc_put_close(&w, '}');
    }
    doc_put_close(&w, ']');
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

static void get_gone(const struct doc_node *n, struct prepare *p)
{
    struct doc_list list;
    struct doc_node id;
    p->ngone = doc_get_list(n, "gone", 0, PREPARE_NODES_MAX, &list);
    p->gone = mem_alloc(p->ngone * sizeof *p->gone);
    for (uint32_t i = 0; i < p->ngone; i++) {
        doc_list_next(&list, &id);
        p->gone[i] = doc_get_id(&id, NULL, 1, UINT64_MAX);
        if (i > 0 && p->gone[i] <= p->gone[i - 1])
            doc_fail(&id, NULL, "not ascending");
    }
}

static void get_joins(const struct doc_node *n, struct prepare *p)
{
    struct doc_list list;
    struct doc_node join;
    p->njoins = doc_get_list(n, "joins", 0, PREPARE_NODES_MAX, &list);
    p->joins = mem_alloc(p->njoins * sizeof *p->joins);
    for (uint32_t i = 0; i < p->njoins; i++) {
        doc_list_next(&list, &join);
        get_join(&join, &p->joins[i]);
    }
}

static void get_heirs(const struct doc_node *n, struct prepare *p)
{
    struct doc_list list;
    struct doc_node heir;
    p->nheirs = doc_get_list(n, "heirs", 0, PREPARE_NODES_MAX, &list);
    p->heir = mem_alloc(p->nheirs * sizeof *p->heir);
    p->heir_of = mem_alloc(p->nheirs * sizeof *p->heir_of);
    for (uint32_t i = 0; i < p->nheirs; i++) {
        doc_list_next(&list, &heir);
        p->heir[i] = doc_get_id(&heir, "id", 1, UINT64_MAX);
        p->heir_of[i] = doc_get_id(&heir, "of", 1, UINT64_MAX);
    }
}

static void get_moves(const struct doc_node *n, struct prepare *p)
{
    struct doc_list list;
    struct doc_node move;
    uint32_t nshards = p->base ? p->base->nshards : 1;
    if (!doc_has(n, "moves"))
        return;
    p->nmoves = doc_get_list(n, "moves", 0, nshards, &list);
    p->move = mem_alloc(p->nmoves * sizeof *p->move);
    for (uint32_t i = 0; i < p->nmoves; i++) {
        doc_list_next(&list, &move);
        p->move[i].shard = doc_get_number(&move, "shard", 0, nshards - 1);
        p->move[i].to = doc_get_id(&move, "to", 1, UINT64_MAX);
        if (i > 0 && p->move[i].shard <= p->move[i - 1].shard)
            doc_fail(&move, "shard", "not ascending");
    }
}

int prepare_decode(const char *text, size_t size, struct prepare *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n, base;
    struct prepare p = {0};
    doc_open(&r, "prepare", text, size, DOC_LARGE_MAX, err, &n);
    get_ballot(&n, &p.ballot);
    doc_get_object(&n, "base", &base);
    p.base = doc_get_view(&base);
    p.controller = doc_get_id(&n, "controller", 1, UINT64_MAX);
    get_gone(&n, &p);
    get_joins(&n, &p);
    get_heirs(&n, &p);
    p.mode_change = doc_get_bool(&n, "mode_change");
    get_moves(&n, &p);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = p;
    else
        prepare_done(&p);
    return rc;
}

/* ---- report ---- */

static const char *const role_words[] = {"primary", "backup", "joiner", "heir"};

void report_done(struct report *r)
{
    mem_free(r->shard);
    *r = (struct report){0};
}

char *report_encode(const struct report *r)
{
    struct doc_writer w = {0};
    doc_put_open(&w, NULL, '{');
    doc_put_id(&w, "from", r->from);
    put_ballot(&w, &r->ballot);
    doc_put_id(&w, "base_epoch", r->base_epoch);
    doc_put_step(&w, "clock", r->clock);
    doc_put_open(&w, "shard", '[');
    for (uint32_t i = 0; i < r->nshards; i++) {
        const struct shard_report *s = &r->shard[i];
        doc_put_open(&w, NULL, '{');
        doc_put_number(&w, "shard", s->shard);
        doc_put_word(&w, "role", role_words, 4, (uint32_t)s->role - HOLDER_PRIMARY);
        doc_put_bool(&w, "full", s->full);
        doc_put_open(&w, "synced", '[');
        for (uint32_t k = 0; k < s->nsynced; k++)
            doc_put_id(&w, NULL, s->synced[k]);
        doc_put_close(&w, ']');
        doc_put_step(&w, "complete", s->complete);
        doc_put_step(&w, "join", s->join);
        doc_put_close(&w, '}');
    }
    doc_put_close(&w, ']');
    doc_put_close(&w, '}');
    return doc_put_done(&w);
}

static void get_synced(const struct doc_node *n, struct shard_report *s)
{
    struct doc_list list;
    struct doc_node id;
    if (!doc_has(n, "synced"))
        return;
    s->nsynced = doc_get_list(n, "synced", 0, s->role == HOLDER_PRIMARY ? BACKUPS_MAX : 0, &list);
    for (uint32_t i = 0; i < s->nsynced; i++) {
        doc_list_next(&list, &id);
        s->synced[i] = doc_get_id(&id, NULL, 1, UINT64_MAX);
    }
}

static void get_shard_report(const struct doc_node *n, struct shard_report *s)
{
    s->shard = doc_get_number(n, "shard", 0, SHARDS_MAX - 1);
    s->role = (enum holder_role)(HOLDER_PRIMARY + doc_get_word(n, "role", role_words, 4));
    s->full = doc_get_bool(n, "full");
    get_synced(n, s);
    s->complete = doc_get_step(n, "complete", -1, STEP_MAX);
    s->join = doc_get_step(n, "join", -1, STEP_MAX);
}

int report_decode(const char *text, size_t size, struct report *ret, char *err)
{
    struct doc_reader r;
    struct doc_node n, shard;
    struct doc_list list;
    struct report report = {0};
    doc_open(&r, "report", text, size, DOC_LARGE_MAX, err, &n);
    report.from = doc_get_id(&n, "from", 1, UINT64_MAX);
    get_ballot(&n, &report.ballot);
    report.base_epoch = doc_get_id(&n, "base_epoch", 0, UINT64_MAX);
    report.clock = doc_get_step(&n, "clock", -1, STEP_MAX);
    report.nshards = doc_get_list(&n, "shard", 0, SHARDS_MAX, &list);
    report.shard = mem_alloc(report.nshards * sizeof *report.shard);
    for (uint32_t i = 0; i < report.nshards; i++) {
        doc_list_next(&list, &shard);
        get_shard_report(&shard, &report.shard[i]);
    }
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = report;
    else
        report_done(&report);
    return rc;
}
