#include <string.h>

#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "coord/local_lmdb.h"

enum { LOG_REVISIONS = 4096, LOG_BYTES = 64 << 20 };

/* One write transaction: what it has changed so far goes into the log under revision + 1. */
struct write {
    struct local_store *store;
    MDB_txn *txn;
    struct local_meta meta;
    uint32_t changes;
};

static int write_begin(struct local_store *s, struct write *w)
{
    *w = (struct write){.store = s};
    int rc = mdb_txn_begin(s->env, NULL, 0, &w->txn);
    if (rc)
        return rc;
    rc = local_meta_get(s, w->txn, &w->meta);
    if (rc)
        mdb_txn_abort(w->txn);
    return rc;
}

static int log_add(struct write *w, const MDB_val *full, const void *value, size_t value_size, int64_t create_revision)
{
    uint8_t at[LOCAL_LOG_KEY];
    struct local_log_head head = {create_revision, (uint32_t)full->mv_size, !value};
    MDB_val key = {sizeof at, at}, record = {sizeof head + full->mv_size + value_size, NULL};
    local_put_be64(at, (uint64_t)w->meta.revision + 1);
    at[8] = (uint8_t)(w->changes >> 8);
    at[9] = (uint8_t)w->changes;
    int rc = w->changes > UINT16_MAX ? MDB_TXN_FULL : mdb_put(w->txn, w->store->log, &key, &record, MDB_RESERVE);
    if (rc)
        return rc;
    char *out = record.mv_data;
    memcpy(out, &head, sizeof head);
    memcpy(out + sizeof head, full->mv_data, full->mv_size);
    if (value_size)
        memcpy(out + sizeof head + full->mv_size, value, value_size);
    w->meta.log_bytes += (int64_t)record.mv_size;
    w->changes++;
    return 0;
}

/* Drops the oldest revisions while there are too many. */
static int log_trim(struct write *w)
{
    MDB_cursor *cursor;
    MDB_val key, value;
    int rc = mdb_cursor_open(w->txn, w->store->log, &cursor);
    if (rc)
        return rc;
    while (!(rc = mdb_cursor_get(cursor, &key, &value, MDB_FIRST))) {
        int64_t oldest = (int64_t)local_get_be64(key.mv_data);
        bool cut = oldest == w->meta.compacted; /* the rest of a revision that is partly gone */
        bool many = w->meta.revision - w->meta.compacted > LOG_REVISIONS || w->meta.log_bytes > LOG_BYTES;
        if (!cut && (!many || oldest == w->meta.revision))
            break;
        w->meta.compacted = oldest;
        w->meta.log_bytes -= (int64_t)value.mv_size;
        if ((rc = mdb_cursor_del(cursor, 0)))
            break;
    }
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* KS_EUNKNOWN when the commit itself failed: LMDB cannot tell then what is on the disk. */
static int write_commit(struct write *w, bool leases_changed, int *ret_rc)
{
    int rc = 0;
    MDB_val key = {4, "meta"}, value = {sizeof w->meta, &w->meta};
    w->meta.revision += w->changes > 0;
    w->meta.lease_changes += leases_changed;
    if (w->changes)
        rc = log_trim(w);
    if (!rc)
        rc = mdb_put(w->txn, w->store->meta, &key, &value, 0);
    if (rc) {
        mdb_txn_abort(w->txn);
        *ret_rc = rc;
        return KS_EUNAVAIL;
    }
    *ret_rc = mdb_txn_commit(w->txn);
    return *ret_rc ? KS_EUNKNOWN : 0;
}

static void write_failed(struct coord_event *ret, const struct coord_request *r, int status, int rc)
{
    log_error("coord_local_write", "cause=\"%s\"", mdb_strerror(rc));
    coord_event_answer(ret, r, status, "local store: %s", mdb_strerror(rc));
}

/* *ret_head is all zero when there is no such key. */
static int kv_head(struct write *w, MDB_val *full, struct local_kv_head *ret_head)
{
    MDB_val value;
    int rc = mdb_get(w->txn, w->store->kv, full, &value);
    memset(ret_head, 0, sizeof *ret_head);
    if (rc)
        return rc == MDB_NOTFOUND ? 0 : rc;
    if (value.mv_size < sizeof *ret_head)
        return MDB_CORRUPTED;
    memcpy(ret_head, value.mv_data, sizeof *ret_head);
    return 0;
}

static MDB_val lease_key(uint8_t *buffer, int64_t lease, const MDB_val *full)
{
    local_put_be64(buffer, (uint64_t)lease);
    if (full)
        memcpy(buffer + LOCAL_LEASE_KEY, full->mv_data, full->mv_size);
    return (MDB_val){LOCAL_LEASE_KEY + (full ? full->mv_size : 0), buffer};
}

static int lease_attach(struct write *w, int64_t lease, const MDB_val *full, bool attach)
{
    uint8_t buffer[LOCAL_LEASE_KEY + LOCAL_FULL_KEY_MAX];
    MDB_val key = lease_key(buffer, lease, full), nothing = {0, ""};
    if (!lease)
        return 0;
    return attach ? mdb_put(w->txn, w->store->lease_key, &key, &nothing, 0)
                  : mdb_del(w->txn, w->store->lease_key, &key, NULL);
}

static int kv_put(struct write *w, MDB_val *full, const char *value, int64_t lease)
{
    struct local_kv_head head;
    size_t size = strlen(value);
    int rc = kv_head(w, full, &head);
    if (!rc && head.lease != lease)
        rc = lease_attach(w, head.lease, full, false);
    if (!rc && head.lease != lease)
        rc = lease_attach(w, lease, full, true);
    head.mod_revision = w->meta.revision + 1;
    head.create_revision = head.create_revision ? head.create_revision : head.mod_revision;
    head.lease = lease;
    MDB_val record = {sizeof head + size, NULL};
    if (!rc)
        rc = mdb_put(w->txn, w->store->kv, full, &record, MDB_RESERVE);
    if (rc)
        return rc;
    memcpy(record.mv_data, &head, sizeof head);
    memcpy((char *)record.mv_data + sizeof head, value, size);
    return log_add(w, full, value, size, head.create_revision);
}

static int kv_delete(struct write *w, MDB_val *full)
{
    struct local_kv_head head;
    int rc = kv_head(w, full, &head);
    if (rc || !head.create_revision)
        return rc;
    rc = lease_attach(w, head.lease, full, false);
    if (!rc)
        rc = mdb_del(w->txn, w->store->kv, full, NULL);
    return rc ? rc : log_add(w, full, NULL, 0, 0);
}

static int guards_check(struct write *w, const char *job, const struct coord_request *r, bool *ret_hold)
{
    char name[LOCAL_FULL_KEY_MAX];
    struct local_kv_head head;
    bool hold = true;
    for (uint32_t i = 0; hold && i < r->nguards; i++) {
        const struct coord_guard *g = &r->guard[i];
        MDB_val full = {local_full_key(name, job, g->key), name};
        int rc = kv_head(w, &full, &head);
        if (rc)
            return rc;
        if (g->kind == GUARD_ABSENT)
            hold = head.create_revision == 0;
        else
            hold = g->revision == (g->kind == GUARD_MOD_REVISION ? head.mod_revision : head.create_revision);
    }
    *ret_hold = hold;
    return 0;
}

/* MDB_NOTFOUND: an operation names a lease that is over. */
static int leases_check(struct write *w, const struct coord_request *r)
{
    for (uint32_t i = 0; i < r->nops; i++) {
        uint8_t buffer[LOCAL_LEASE_KEY];
        MDB_val key = lease_key(buffer, r->op[i].lease, NULL), value;
        int rc = r->op[i].value && r->op[i].lease ? mdb_get(w->txn, w->store->lease, &key, &value) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

static int ops_do(struct write *w, const char *job, const struct coord_request *r)
{
    char name[LOCAL_FULL_KEY_MAX];
    int rc = 0;
    for (uint32_t i = 0; !rc && i < r->nops; i++) {
        const struct coord_op *op = &r->op[i];
        MDB_val full = {local_full_key(name, job, op->key), name};
        rc = op->value ? kv_put(w, &full, op->value, op->lease) : kv_delete(w, &full);
    }
    return rc;
}

void local_store_txn(struct local_store *s, const char *job, const struct coord_request *r, struct coord_event *ret)
{
    struct write w;
    bool hold = false, lease_over = false;
    int status = KS_EUNAVAIL, rc = write_begin(s, &w);
    if (rc) {
        write_failed(ret, r, status, rc);
        return;
    }
    rc = guards_check(&w, job, r, &hold);
    if (!rc && hold) {
        rc = leases_check(&w, r);
        lease_over = rc == MDB_NOTFOUND;
    }
    if (!rc && hold)
        rc = ops_do(&w, job, r);
    if (rc || !w.changes)
        mdb_txn_abort(w.txn);
    else
        status = write_commit(&w, false, &rc);
    if (lease_over) {
        coord_event_answer(ret, r, KS_ENOENT, "transaction: a lease that it names is over");
    } else if (rc) {
        write_failed(ret, r, status, rc);
    } else {
        coord_event_answer(ret, r, 0, NULL);
        ret->succeeded = hold;
    }
    ret->revision = w.meta.revision;
}

void local_store_grant(struct local_store *s, const struct coord_request *r, const struct local_grant *g,
                       struct coord_event *ret)
{
    struct write w;
    uint8_t buffer[LOCAL_LEASE_KEY];
    uint32_t ttl_ms = r->ttl_ms;
    int status = KS_EUNAVAIL, rc = write_begin(s, &w);
    if (rc) {
        write_failed(ret, r, status, rc);
        return;
    }
    int64_t lease = ++w.meta.last_lease;
    status = g->prepare(g->arg, lease, ttl_ms);
    if (status) {
        mdb_txn_abort(w.txn);
        coord_event_answer(ret, r, KS_EUNAVAIL, "lease: its file cannot be made (the log says why)");
        return;
    }
    MDB_val key = lease_key(buffer, lease, NULL), value = {sizeof ttl_ms, &ttl_ms};
    status = KS_EUNAVAIL;
    rc = mdb_put(w.txn, s->lease, &key, &value, 0);
    if (rc)
        mdb_txn_abort(w.txn);
    else
        status = write_commit(&w, true, &rc);
    if (rc) {
        write_failed(ret, r, status, rc);
        return;
    }
    coord_event_answer(ret, r, 0, NULL);
    ret->lease = lease;
    ret->revision = w.meta.revision;
}

static int lease_keys_delete(struct write *w, int64_t lease)
{
    uint8_t buffer[LOCAL_LEASE_KEY];
    char name[LOCAL_FULL_KEY_MAX];
    MDB_val key, value;
    MDB_cursor *cursor;
    int rc = mdb_cursor_open(w->txn, w->store->lease_key, &cursor);
    while (!rc) {
        key = lease_key(buffer, lease, NULL);
        rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
        if (rc || key.mv_size <= LOCAL_LEASE_KEY || memcmp(key.mv_data, buffer, LOCAL_LEASE_KEY) != 0)
            break;
        MDB_val full = {key.mv_size - LOCAL_LEASE_KEY, name};
        if (full.mv_size > sizeof name)
            return MDB_CORRUPTED;
        memcpy(name, (char *)key.mv_data + LOCAL_LEASE_KEY, full.mv_size);
        rc = kv_delete(w, &full);
    }
    return rc == MDB_NOTFOUND ? 0 : rc;
}

int local_store_lease_end(struct local_store *s, int64_t lease, int64_t *ret_revision)
{
    struct write w;
    uint8_t buffer[LOCAL_LEASE_KEY];
    MDB_val key = lease_key(buffer, lease, NULL);
    int status = KS_EUNAVAIL, rc = write_begin(s, &w);
    if (rc)
        goto failed;
    rc = mdb_del(w.txn, s->lease, &key, NULL);
    if (rc == MDB_NOTFOUND) {
        mdb_txn_abort(w.txn);
        return KS_ENOENT;
    }
    if (!rc)
        rc = lease_keys_delete(&w, lease);
    if (rc)
        mdb_txn_abort(w.txn);
    else
        status = write_commit(&w, true, &rc);
    if (rc)
        goto failed;
    *ret_revision = w.meta.revision;
    return 0;
failed:
    log_error("coord_local_lease_end", "lease=%lld cause=\"%s\"", (long long)lease, mdb_strerror(rc));
    return status;
}
