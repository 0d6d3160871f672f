#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "coord/coord.h"
#include "coord/coord_event.h"

struct model_kv {
    char *key, *value;
    int64_t create_revision, mod_revision, lease;
};
struct model_change {
    char *key, *value; /* value NULL: deleted */
    int64_t create_revision, revision;
};
struct coord_model {
    int64_t revision; /* 1 when empty, as in etcd */
    int64_t last_lease;
    struct model_kv *kv; /* ascending keys */
    size_t nkv, kv_cap;
    int64_t *lease; /* alive, ascending */
    size_t nleases, lease_cap;
    struct model_change *change;
    size_t nchanges, change_cap;
    struct model_client *client;
};
struct model_client {
    struct coord base;
    struct coord_model *model;
    struct coord_queue queue;
    char prefix[COORD_KEY_MAX];
    bool watching;
    size_t watched; /* changes that the watch is past */
    int64_t *lease; /* ours, alive */
    size_t nleases, lease_cap;
    struct model_client *next;
};

struct coord_model *coord_model_create(void)
{
    struct coord_model *m = mem_alloc(sizeof *m);
    m->revision = 1;
    return m;
}

void coord_model_free(struct coord_model *m)
{
    CHECK(!m->client);
    for (size_t i = 0; i < m->nkv; i++) {
        mem_free(m->kv[i].key);
        mem_free(m->kv[i].value);
    }
    for (size_t i = 0; i < m->nchanges; i++) {
        mem_free(m->change[i].key);
        mem_free(m->change[i].value);
    }
    mem_free(m->kv);
    mem_free(m->lease);
    mem_free(m->change);
    mem_free(m);
}

int64_t coord_model_revision(const struct coord_model *m)
{
    return m->revision;
}

/* Where the key is, or would be. */
static size_t kv_place(const struct coord_model *m, const char *key)
{
    size_t low = 0, high = m->nkv;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (strcmp(m->kv[mid].key, key) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static struct model_kv *kv_find(const struct coord_model *m, const char *key)
{
    size_t i = kv_place(m, key);
    return i < m->nkv && strcmp(m->kv[i].key, key) == 0 ? &m->kv[i] : NULL;
}

static bool lease_alive(const struct coord_model *m, int64_t lease)
{
    for (size_t i = 0; i < m->nleases; i++)
        if (m->lease[i] == lease)
            return true;
    return false;
}

static void change_add(struct coord_model *m, const char *key, const char *value, int64_t create_revision,
                       int64_t revision)
{
    ARRAY_ROOM(m->change, m->nchanges, m->change_cap);
    m->change[m->nchanges++] = (struct model_change){.key = mem_strdup(key),
                                                     .value = value ? mem_strdup(value) : NULL,
                                                     .create_revision = create_revision,
                                                     .revision = revision};
}

static void kv_put(struct coord_model *m, const char *key, const char *value, int64_t lease, int64_t revision)
{
    struct model_kv *kv = kv_find(m, key);
    if (!kv) {
        size_t i = kv_place(m, key);
        ARRAY_ROOM(m->kv, m->nkv, m->kv_cap);
        memmove(&m->kv[i + 1], &m->kv[i], (m->nkv - i) * sizeof *m->kv);
        m->nkv++;
        kv = &m->kv[i];
        *kv = (struct model_kv){.key = mem_strdup(key), .create_revision = revision};
    }
    mem_free(kv->value);
    kv->value = mem_strdup(value);
    kv->mod_revision = revision;
    kv->lease = lease;
    change_add(m, key, value, kv->create_revision, revision);
}

static void kv_delete(struct coord_model *m, size_t i, int64_t revision)
{
    change_add(m, m->kv[i].key, NULL, 0, revision);
    mem_free(m->kv[i].key);
    mem_free(m->kv[i].value);
    m->nkv--;
    memmove(&m->kv[i], &m->kv[i + 1], (m->nkv - i) * sizeof *m->kv);
}

static void wake_watchers(struct coord_model *m)
{
    for (struct model_client *c = m->client; c; c = c->next)
        if (c->watching && c->queue.wake)
            c->queue.wake(c->queue.wake_arg);
}

/* Deleted keys share one revision; a step that changes nothing takes none. */
static void lease_end(struct coord_model *m, int64_t lease)
{
    size_t before = m->nchanges;
    for (size_t i = 0; i < m->nkv;) {
        if (m->kv[i].lease == lease)
            kv_delete(m, i, m->revision + 1);
        else
            i++;
    }
    for (size_t i = 0; i < m->nleases; i++) {
        if (m->lease[i] != lease)
            continue;
        m->nleases--;
        memmove(&m->lease[i], &m->lease[i + 1], (m->nleases - i) * sizeof *m->lease);
        break;
    }
    if (m->nchanges == before)
        return;
    m->revision++;
    wake_watchers(m);
}

static bool guard_holds(const struct coord_model *m, const struct coord_guard *g)
{
    const struct model_kv *kv = kv_find(m, g->key);
    switch (g->kind) {
    case GUARD_ABSENT:
        return !kv;
    case GUARD_MOD_REVISION:
        return (kv ? kv->mod_revision : 0) == g->revision;
    case GUARD_CREATE_REVISION:
        return (kv ? kv->create_revision : 0) == g->revision;
    }
    return false;
}

static void apply_txn(struct coord_model *m, const struct coord_request *r, struct coord_event *ret)
{
    size_t before = m->nchanges;
    for (uint32_t i = 0; i < r->nguards; i++)
        if (!guard_holds(m, &r->guard[i]))
            return;
    for (uint32_t i = 0; i < r->nops; i++) {
        if (r->op[i].value && r->op[i].lease && !lease_alive(m, r->op[i].lease)) {
            coord_event_answer(ret, r, KS_ENOENT, "transaction: no lease %lld", (long long)r->op[i].lease);
            return;
        }
    }
    for (uint32_t i = 0; i < r->nops; i++) {
        const struct coord_op *op = &r->op[i];
        if (op->value)
            kv_put(m, op->key, op->value, op->lease, m->revision + 1);
        else if (kv_find(m, op->key))
            kv_delete(m, kv_place(m, op->key), m->revision + 1);
    }
    ret->succeeded = true;
    if (m->nchanges == before)
        return;
    m->revision++;
    wake_watchers(m);
}

static void apply_range(const struct coord_model *m, const struct coord_request *r, struct coord_event *ret)
{
    size_t n = strlen(r->prefix);
    for (size_t i = kv_place(m, r->prefix); i < m->nkv && strncmp(m->kv[i].key, r->prefix, n) == 0; i++)
        coord_event_add(ret, m->kv[i].key, m->kv[i].value, strlen(m->kv[i].value), m->kv[i].create_revision,
                        m->kv[i].mod_revision);
}

static void client_forget_lease(struct model_client *c, int64_t lease, bool tell)
{
    for (size_t i = 0; i < c->nleases; i++) {
        if (c->lease[i] != lease)
            continue;
        c->lease[i] = c->lease[--c->nleases];
        struct coord_event e = {.kind = COORD_LEASE_LOST, .lease = lease};
        if (tell)
            coord_queue_push(&c->queue, &e);
        return;
    }
}

void coord_model_apply(struct coord_model *m, const struct coord_request *r, struct coord_event *ret)
{
    char err[COORD_ERR_TEXT];
    if (coord_request_check(r, err)) {
        coord_event_answer(ret, r, KS_EINVAL, "%s", err);
        return;
    }
    coord_event_answer(ret, r, 0, NULL);
    switch (r->kind) {
    case COORD_RANGE:
        apply_range(m, r, ret);
        break;
    case COORD_TXN:
        apply_txn(m, r, ret);
        break;
    case COORD_LEASE_GRANT:
        ARRAY_ROOM(m->lease, m->nleases, m->lease_cap);
        ret->lease = m->lease[m->nleases++] = ++m->last_lease;
        break;
    case COORD_LEASE_REVOKE:
        if (lease_alive(m, r->lease))
            lease_end(m, r->lease);
        else
            coord_event_answer(ret, r, KS_ENOENT, "revoke: no lease %lld", (long long)r->lease);
        break;
    }
    ret->revision = m->revision;
}

bool coord_model_change(const struct coord_model *m, int64_t revision, size_t n, struct coord_event *ret)
{
    size_t low = 0, high = m->nchanges;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (m->change[mid].revision <= revision)
            low = mid + 1;
        else
            high = mid;
    }
    if (n >= m->nchanges - low)
        return false;
    const struct model_change *c = &m->change[low + n];
    coord_event_change(ret, c->key, c->value, c->value ? strlen(c->value) : 0, c->create_revision, c->revision);
    return true;
}

void coord_model_expire(struct coord_model *m, int64_t lease)
{
    if (!lease_alive(m, lease))
        return;
    lease_end(m, lease);
    for (struct model_client *c = m->client; c; c = c->next)
        client_forget_lease(c, lease, true);
}

static void client_submit(struct coord *coord, const struct coord_request *r)
{
    struct model_client *c = (struct model_client *)coord;
    struct coord_event e;
    coord_model_apply(c->model, r, &e);
    if (r->kind == COORD_LEASE_GRANT && e.status == 0) {
        ARRAY_ROOM(c->lease, c->nleases, c->lease_cap);
        c->lease[c->nleases++] = e.lease;
    }
    if (r->kind == COORD_LEASE_REVOKE && e.status == 0)
        for (struct model_client *o = c->model->client; o; o = o->next)
            client_forget_lease(o, r->lease, o != c);
    coord_queue_push(&c->queue, &e);
}

static void client_watch(struct coord *coord, const char *prefix, int64_t revision)
{
    struct model_client *c = (struct model_client *)coord;
    CHECK(str_copy(c->prefix, sizeof c->prefix, prefix) == 0);
    coord_queue_drop_changes(&c->queue);
    c->watching = revision <= c->model->revision;
    c->watched = 0;
    while (c->watched < c->model->nchanges && c->model->change[c->watched].revision <= revision)
        c->watched++;
    struct coord_event lost = {.kind = COORD_RESYNC, .revision = c->model->revision};
    if (!c->watching)
        coord_queue_push(&c->queue, &lost);
    else if (c->watched < c->model->nchanges && c->queue.wake)
        c->queue.wake(c->queue.wake_arg);
}

static bool client_next(struct coord *coord, struct coord_event *ret)
{
    struct model_client *c = (struct model_client *)coord;
    size_t n = strlen(c->prefix);
    if (coord_queue_pop(&c->queue, ret))
        return true;
    while (c->watching && c->watched < c->model->nchanges) {
        const struct model_change *h = &c->model->change[c->watched++];
        if (strncmp(h->key, c->prefix, n) != 0)
            continue;
        coord_event_change(ret, h->key, h->value, h->value ? strlen(h->value) : 0, h->create_revision, h->revision);
        return true;
    }
    return false;
}

static void client_close(struct coord *coord)
{
    struct model_client *c = (struct model_client *)coord, **at = &c->model->client;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    coord_queue_done(&c->queue);
    mem_free(c->lease);
    mem_free(c);
}

static const struct coord_ops model_ops = {client_submit, client_watch, client_next, client_close};

int coord_model_open(struct coord_model *m, const struct coord_config *config, struct coord **ret)
{
    struct model_client *c = mem_alloc(sizeof *c);
    c->base.ops = &model_ops;
    c->model = m;
    coord_queue_init(&c->queue, config);
    c->next = m->client;
    m->client = c;
    *ret = &c->base;
    return 0;
}
