#include "coord/local_lmdb.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"

/* Address space only. Bounded by the log (64 MiB) and by what jobs keep, which is far less. */
static const size_t map_bytes = (size_t)1 << 30;

enum { MAX_READERS = 1024, MAX_DBS = 8 };

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct local_store *registry;

/* A child must not use its parent's environments: it opens its own. */
static void registry_forget(void)
{
    pthread_mutex_init(&registry_lock, NULL);
    registry = NULL;
}

static void registry_at_fork(void)
{
    pthread_atfork(NULL, NULL, registry_forget);
}

void local_put_be64(uint8_t *out, uint64_t v)
{
    for (int i = 7; i >= 0; i--, v >>= 8)
        out[i] = (uint8_t)v;
}

uint64_t local_get_be64(const uint8_t *in)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++)
        v = v << 8 | in[i];
    return v;
}

size_t local_full_key(char *out, const char *job, const char *key)
{
    int n = snprintf(out, LOCAL_FULL_KEY_MAX, "%s/%s", job, key);
    CHECK(n > 0 && n < LOCAL_FULL_KEY_MAX);
    return (size_t)n;
}

int local_meta_get(const struct local_store *s, MDB_txn *txn, struct local_meta *ret)
{
    MDB_val key = {4, "meta"}, value;
    int rc = mdb_get(txn, s->meta, &key, &value);
    if (rc)
        return rc;
    if (value.mv_size != sizeof *ret)
        return MDB_INCOMPATIBLE;
    memcpy(ret, value.mv_data, sizeof *ret);
    return ret->format == LOCAL_FORMAT ? 0 : MDB_INCOMPATIBLE;
}

static int meta_make(struct local_store *s, MDB_txn *txn)
{
    struct local_meta m = {.format = LOCAL_FORMAT, .revision = 1, .compacted = 1};
    MDB_val key = {4, "meta"}, value = {sizeof m, &m};
    return mdb_put(txn, s->meta, &key, &value, MDB_NOOVERWRITE);
}

static int databases_open(struct local_store *s, bool make)
{
    static const char *const name[] = {"meta", "kv", "log", "lease", "lease_key"};
    MDB_dbi *const dbi[] = {&s->meta, &s->kv, &s->log, &s->lease, &s->lease_key};
    struct local_meta m;
    MDB_txn *txn;
    int rc = mdb_txn_begin(s->env, NULL, make ? 0 : MDB_RDONLY, &txn);
    if (rc)
        return rc;
    for (size_t i = 0; !rc && i < sizeof name / sizeof *name; i++)
        rc = mdb_dbi_open(txn, name[i], make ? MDB_CREATE : 0, dbi[i]);
    if (!rc && make)
        rc = meta_make(s, txn);
    if (rc == MDB_KEYEXIST)
        rc = 0;
    if (!rc)
        rc = local_meta_get(s, txn, &m);
    if (!rc)
        return mdb_txn_commit(txn);
    mdb_txn_abort(txn);
    return rc;
}

static int open_failed(const char *dir, int rc, char *err)
{
    if (rc == MDB_INCOMPATIBLE || rc == MDB_VERSION_MISMATCH) {
        snprintf(err, COORD_ERR_TEXT,
                 "local store %.150s: made by another version; remove it or give another directory", dir);
        return KS_EVERSION;
    }
    snprintf(err, COORD_ERR_TEXT, "local store %.150s: %s", dir, mdb_strerror(rc));
    return rc == MDB_INVALID || rc == MDB_CORRUPTED ? KS_ECORRUPT : KS_EIO;
}

static int env_open(struct local_store *s, const char *dir)
{
    int rc = mdb_env_create(&s->env), dead;
    if (rc)
        return rc;
    rc = mdb_env_set_mapsize(s->env, map_bytes);
    if (!rc)
        rc = mdb_env_set_maxreaders(s->env, MAX_READERS);
    if (!rc)
        rc = mdb_env_set_maxdbs(s->env, MAX_DBS);
    if (!rc)
        rc = mdb_env_open(s->env, dir, MDB_NOTLS, 0600);
    if (!rc)
        rc = mdb_reader_check(s->env, &dead);
    return rc;
}

static int store_make(const char *dir, const struct local_writer *w, struct local_store **ret, char *err)
{
    struct local_store *s = mem_alloc(sizeof *s);
    int rc = env_open(s, dir), status;
    if (!rc)
        rc = databases_open(s, false);
    if (rc == MDB_NOTFOUND) {
        status = w->lock(w->arg, err);
        if (status)
            goto close_env;
        rc = databases_open(s, true);
        w->unlock(w->arg);
    }
    if (!rc) {
        *ret = s;
        return 0;
    }
    status = open_failed(dir, rc, err);
close_env:
    if (s->env)
        mdb_env_close(s->env);
    mem_free(s);
    return status;
}

static struct local_store *registry_find(const struct stat *st)
{
    for (struct local_store *s = registry; s; s = s->next)
        if (s->device == st->st_dev && s->inode == st->st_ino)
            return s;
    return NULL;
}

int local_store_open(const char *dir, const struct local_writer *w, struct local_store **ret, char *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct stat st;
    int status = 0;
    pthread_once(&once, registry_at_fork);
    if (stat(dir, &st)) {
        snprintf(err, COORD_ERR_TEXT, "local store %.150s: %s", dir, strerror(errno));
        return KS_EIO;
    }
    pthread_mutex_lock(&registry_lock);
    struct local_store *s = registry_find(&st);
    if (!s && !(status = store_make(dir, w, &s, err))) {
        s->device = st.st_dev;
        s->inode = st.st_ino;
        s->next = registry;
        registry = s;
    }
    if (!status) {
        s->refs++;
        *ret = s;
    }
    pthread_mutex_unlock(&registry_lock);
    return status;
}

void local_store_close(struct local_store *s)
{
    pthread_mutex_lock(&registry_lock);
    if (--s->refs == 0) {
        struct local_store **at = &registry;
        while (*at != s)
            at = &(*at)->next;
        *at = s->next;
        mdb_env_close(s->env);
        mem_free(s);
    }
    pthread_mutex_unlock(&registry_lock);
}

static int read_failed(int rc)
{
    log_error("coord_local_read", "cause=\"%s\"", mdb_strerror(rc));
    return KS_EUNAVAIL;
}

int local_store_state(struct local_store *s, struct local_state *ret)
{
    struct local_meta m;
    MDB_txn *txn;
    int rc = mdb_txn_begin(s->env, NULL, MDB_RDONLY, &txn);
    if (rc)
        return read_failed(rc);
    rc = local_meta_get(s, txn, &m);
    mdb_txn_abort(txn);
    if (rc)
        return read_failed(rc);
    *ret = (struct local_state){m.revision, m.compacted, m.lease_changes};
    return 0;
}

static int range_read(struct local_store *s, MDB_txn *txn, const char *job, const char *prefix, struct coord_event *ret)
{
    char full[LOCAL_FULL_KEY_MAX], name[LOCAL_FULL_KEY_MAX];
    size_t n = local_full_key(full, job, prefix), job_size = strlen(job) + 1;
    MDB_val key = {n, full}, value;
    MDB_cursor *cursor;
    int rc = mdb_cursor_open(txn, s->kv, &cursor);
    if (rc)
        return rc;
    rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
    for (; !rc && key.mv_size >= n && memcmp(key.mv_data, full, n) == 0;
         rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
        struct local_kv_head head;
        if (key.mv_size >= sizeof name || value.mv_size < sizeof head) {
            rc = MDB_CORRUPTED;
            break;
        }
        memcpy(name, key.mv_data, key.mv_size);
        name[key.mv_size] = 0;
        memcpy(&head, value.mv_data, sizeof head);
        coord_event_add(ret, name + job_size, (char *)value.mv_data + sizeof head, value.mv_size - sizeof head,
                        head.create_revision, head.mod_revision);
    }
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

void local_store_range(struct local_store *s, const char *job, const struct coord_request *r, struct coord_event *ret)
{
    struct local_meta m;
    MDB_txn *txn = NULL;
    coord_event_answer(ret, r, 0, NULL);
    int rc = mdb_txn_begin(s->env, NULL, MDB_RDONLY, &txn);
    if (!rc)
        rc = local_meta_get(s, txn, &m);
    if (!rc)
        rc = range_read(s, txn, job, r->prefix, ret);
    if (txn)
        mdb_txn_abort(txn);
    if (!rc) {
        ret->revision = m.revision;
        return;
    }
    coord_event_done(ret);
    coord_event_answer(ret, r, read_failed(rc), "local store: %s", mdb_strerror(rc));
}

int local_store_leases(struct local_store *s, struct local_lease **ret, size_t *ret_n)
{
    struct local_lease *lease = NULL;
    size_t n = 0, cap = 0;
    MDB_val key, value;
    MDB_cursor *cursor;
    MDB_txn *txn;
    int rc = mdb_txn_begin(s->env, NULL, MDB_RDONLY, &txn);
    if (rc)
        return read_failed(rc);
    rc = mdb_cursor_open(txn, s->lease, &cursor);
    if (rc) {
        mdb_txn_abort(txn);
        return read_failed(rc);
    }
    while (!(rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT))) {
        struct local_lease l = {0};
        if (key.mv_size != LOCAL_LEASE_KEY || value.mv_size != sizeof l.ttl_ms) {
            rc = MDB_CORRUPTED;
            break;
        }
        l.id = (int64_t)local_get_be64(key.mv_data);
        memcpy(&l.ttl_ms, value.mv_data, sizeof l.ttl_ms);
        ARRAY_ROOM(lease, n, cap);
        lease[n++] = l;
    }
    mdb_cursor_close(cursor);
    mdb_txn_abort(txn);
    if (rc != MDB_NOTFOUND) {
        mem_free(lease);
        return read_failed(rc);
    }
    *ret = lease;
    *ret_n = n;
    return 0;
}

/* One entry of the log, when it is of this job and prefix. */
static int change_push(const MDB_val *key, const MDB_val *value, const char *want, size_t want_size, size_t job_size,
                       struct coord_queue *q)
{
    char name[LOCAL_FULL_KEY_MAX];
    struct local_log_head head;
    struct coord_event e;
    if (key->mv_size != LOCAL_LOG_KEY || value->mv_size < sizeof head)
        return MDB_CORRUPTED;
    memcpy(&head, value->mv_data, sizeof head);
    if (head.key_size >= sizeof name || value->mv_size - sizeof head < head.key_size)
        return MDB_CORRUPTED;
    const char *bytes = (const char *)value->mv_data + sizeof head;
    if (head.key_size < want_size || memcmp(bytes, want, want_size) != 0)
        return 0;
    memcpy(name, bytes, head.key_size);
    name[head.key_size] = 0;
    coord_event_change(&e, name + job_size, head.deleted ? NULL : bytes + head.key_size,
                       value->mv_size - sizeof head - head.key_size, head.create_revision,
                       (int64_t)local_get_be64(key->mv_data));
    coord_queue_push(q, &e);
    return 0;
}

static int changes_read(struct local_store *s, MDB_txn *txn, const char *job, const char *prefix, int64_t revision,
                        struct coord_queue *q)
{
    char want[LOCAL_FULL_KEY_MAX];
    size_t want_size = local_full_key(want, job, prefix);
    uint8_t from[LOCAL_LOG_KEY] = {0};
    MDB_val key = {sizeof from, from}, value;
    MDB_cursor *cursor;
    int rc = mdb_cursor_open(txn, s->log, &cursor);
    if (rc)
        return rc;
    local_put_be64(from, (uint64_t)revision + 1);
    rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
    while (!rc) {
        rc = change_push(&key, &value, want, want_size, strlen(job) + 1, q);
        if (!rc)
            rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT);
    }
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

int local_store_changes(struct local_store *s, const char *job, const char *prefix, int64_t revision,
                        struct coord_queue *q, int64_t *ret_revision)
{
    struct local_meta m;
    MDB_txn *txn;
    int rc = mdb_txn_begin(s->env, NULL, MDB_RDONLY, &txn);
    if (rc)
        return read_failed(rc);
    rc = local_meta_get(s, txn, &m);
    bool forgotten = !rc && (revision < m.compacted || revision > m.revision);
    if (!rc && !forgotten && revision < m.revision)
        rc = changes_read(s, txn, job, prefix, revision, q);
    mdb_txn_abort(txn);
    if (rc)
        return read_failed(rc);
    *ret_revision = m.revision;
    return forgotten ? KS_ENOENT : 0;
}

void local_store_check_readers(struct local_store *s)
{
    int dead = 0, rc = mdb_reader_check(s->env, &dead);
    if (rc)
        read_failed(rc);
    else if (dead)
        log_info("coord_local_readers", "cleared=%d", dead);
}
