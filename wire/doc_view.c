#include "wire/doc_json.h"

/* The reason comes from anywhere and may have been cut within a character: it must not make the view unreadable. */
static void put_ended(struct doc_writer *w, const char *ended)
{
    char plain[sizeof((struct view *)0)->ended];
    size_t n = 0;
    for (; ended[n]; n++)
        plain[n] = ended[n] >= 0x20 && ended[n] < 0x7f ? ended[n] : '?';
    plain[n] = 0;
    doc_put_text(w, "ended", plain);
}

static void put_member(struct doc_writer *w, const struct view_member *m)
{
    doc_put_open(w, NULL, '{');
    doc_put_id(w, "id", m->id);
    doc_put_text(w, "name", m->name);
    doc_put_step(w, "join", m->join);
    doc_put_step(w, "last", m->last);
    doc_put_bool(w, "live", m->live);
    doc_put_number(w, "local_size", m->local_size);
    doc_put_close(w, '}');
}

static void get_member(const struct doc_node *n, struct view_member *m)
{
    m->id = doc_get_id(n, "id", 1, UINT64_MAX);
    doc_get_text(n, "name", m->name, sizeof m->name, 0);
    m->join = doc_get_step(n, "join", 0, STEP_MAX);
    m->last = doc_get_step(n, "last", -1, STEP_NONE);
    m->live = doc_get_bool(n, "live");
    m->local_size = doc_get_number(n, "local_size", 1, LOCAL_SIZE_MAX);
}

static void put_ids(struct doc_writer *w, const char *key, const uint64_t *ids, uint32_t n)
{
    doc_put_open(w, key, '[');
    for (uint32_t i = 0; i < n; i++)
        doc_put_id(w, NULL, ids[i]);
    doc_put_close(w, ']');
}

static void put_shard(struct doc_writer *w, const struct view_shard *s)
{
    doc_put_open(w, NULL, '{');
    doc_put_id(w, "primary", s->primary);
    doc_put_id(w, "since", s->since);
    put_ids(w, "backup", s->backup, s->nbackups);
    put_ids(w, "joining", s->joining, s->njoining);
    doc_put_close(w, '}');
}

static uint32_t get_holders(const struct doc_node *n, const char *key, uint64_t *ids)
{
    struct doc_list list;
    struct doc_node id;
    uint32_t count = doc_get_list(n, key, 0, BACKUPS_MAX, &list);
    for (uint32_t i = 0; i < count; i++) {
        doc_list_next(&list, &id);
        ids[i] = doc_get_id(&id, NULL, 1, UINT64_MAX);
    }
    return count;
}

static void get_shard(const struct doc_node *n, struct view_shard *s)
{
    uint64_t holder[1 + 2 * BACKUPS_MAX];
    uint32_t holders = 0;
    s->primary = doc_get_id(n, "primary", 1, UINT64_MAX);
    s->since = doc_get_id(n, "since", 0, UINT64_MAX);
    s->nbackups = get_holders(n, "backup", s->backup);
    s->njoining = get_holders(n, "joining", s->joining);
    holder[holders++] = s->primary;
    for (uint32_t i = 0; i < s->nbackups; i++)
        holder[holders++] = s->backup[i];
    for (uint32_t i = 0; i < s->njoining; i++)
        holder[holders++] = s->joining[i];
    for (uint32_t i = 1; i < holders; i++) {
        for (uint32_t k = 0; k < i; k++) {
            if (holder[i] == holder[k])
                doc_fail(n, NULL, "names the same server twice");
        }
    }
}

void doc_put_view(struct doc_writer *w, const char *key, const struct view *v)
{
    doc_put_open(w, key, '{');
    doc_put_id(w, "epoch", v->epoch);
    doc_put_id(w, "term", v->term);
    doc_put_id(w, "nonce", v->nonce);
    doc_put_id(w, "mchg", v->mchg);
    put_ended(w, v->ended);
    doc_put_bool(w, "short_of_replicas", v->short_of_replicas);
    doc_put_open(w, "mode", '[');
    for (uint32_t i = 0; i < v->nmodes; i++)
        doc_put_mode(w, NULL, &v->mode[i]);
    doc_put_close(w, ']');
    doc_put_open(w, "server", '[');
    for (uint32_t i = 0; i < v->nservers; i++) {
        doc_put_open(w, NULL, '{');
        doc_put_server(w, &v->server[i]);
        doc_put_close(w, '}');
    }
    doc_put_close(w, ']');
    doc_put_open(w, "member", '[');
    for (uint32_t i = 0; i < v->nmembers; i++)
        put_member(w, &v->member[i]);
    doc_put_close(w, ']');
    doc_put_open(w, "shard", '[');
    for (uint32_t i = 0; i < v->nshards; i++)
        put_shard(w, &v->shard[i]);
    doc_put_close(w, ']');
    doc_put_close(w, '}');
}

static void get_modes(struct doc_list *list, struct view *v)
{
    struct doc_node n;
    for (uint32_t i = 0; i < v->nmodes; i++) {
        doc_list_next(list, &n);
        doc_get_mode(&n, &v->mode[i]);
        if (i == 0 && v->mode[i].from != 0)
            doc_fail(&n, "from", "the first mode starts at step 0");
        if (i > 0 && v->mode[i].from <= v->mode[i - 1].from)
            doc_fail(&n, "from", "not ascending");
    }
}

static void get_servers(struct doc_list *list, struct view *v)
{
    struct doc_node n;
    for (uint32_t i = 0; i < v->nservers; i++) {
        doc_list_next(list, &n);
        doc_get_server(&n, &v->server[i]);
        if (i > 0 && v->server[i].id <= v->server[i - 1].id)
            doc_fail(&n, "id", "not ascending");
    }
}

static void get_members(struct doc_list *list, struct view *v)
{
    struct doc_node n;
    for (uint32_t i = 0; i < v->nmembers; i++) {
        doc_list_next(list, &n);
        get_member(&n, &v->member[i]);
        if (i > 0 && v->member[i].id <= v->member[i - 1].id)
            doc_fail(&n, "id", "not ascending");
    }
}

static void get_shards(struct doc_list *list, struct view *v)
{
    struct doc_node n;
    for (uint32_t i = 0; i < v->nshards; i++) {
        doc_list_next(list, &n);
        get_shard(&n, &v->shard[i]);
    }
}

struct view *doc_get_view(const struct doc_node *n)
{
    struct doc_list modes, servers, members, shards;
    uint32_t nmodes = doc_get_list(n, "mode", 1, MODES_MAX, &modes);
    uint32_t nservers = doc_get_list(n, "server", 0, SERVERS_MAX, &servers);
    uint32_t nmembers = doc_get_list(n, "member", 0, MEMBERS_MAX, &members);
    uint32_t nshards = doc_get_list(n, "shard", 1, SHARDS_MAX, &shards);
    if (n->reader->rc)
        return NULL;
    struct view *v = view_create(nservers, nmembers, nshards);
    v->nmodes = nmodes;
    v->epoch = doc_get_id(n, "epoch", 1, UINT64_MAX);
    v->term = doc_get_id(n, "term", 0, UINT64_MAX);
    v->nonce = doc_get_id(n, "nonce", 0, UINT64_MAX);
    v->mchg = doc_get_id(n, "mchg", 0, UINT64_MAX);
    doc_get_text(n, "ended", v->ended, sizeof v->ended, 0);
    v->short_of_replicas = doc_has(n, "short_of_replicas") && doc_get_bool(n, "short_of_replicas");
    get_modes(&modes, v);
    get_servers(&servers, v);
    get_members(&members, v);
    get_shards(&shards, v);
    if (n->reader->rc) {
        view_free(v);
        return NULL;
    }
    return v;
}

char *view_encode(const struct view *v)
{
    struct doc_writer w = {0};
    doc_put_view(&w, NULL, v);
    return doc_put_done(&w);
}

int view_decode(const char *text, size_t size, struct view **ret, char *err)
{
    struct doc_reader r;
    struct doc_node n;
    doc_open(&r, "view", text, size, DOC_LARGE_MAX, err, &n);
    struct view *v = doc_get_view(&n);
    int rc = doc_close(&r);
    if (rc == 0)
        *ret = v;
    return rc;
}
