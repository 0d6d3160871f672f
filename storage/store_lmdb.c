/* The durable store: the owner queues batches, one writer thread commits all that is queued at once.
 *
 * Locking: `lock` guards queue, durable, error, err_text, closing. The environment belongs to the owner until
 * the first submit (load) and to the writer from then on. */
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/mem.h"
#include "storage/env_lmdb.h"
#include "storage/store_record.h"

/* One transaction: large enough that two syncs cost little beside the values, small enough that LMDB finds
 * the pages it freed before the last one and the file does not grow by the whole data. */
static const size_t group_bytes_max = (size_t)64 << 20;
static const size_t group_batches_max = 16384;

struct store_lmdb {
    struct store store;
    struct env_lmdb env;
    void (*wake)(void *arg);
    void *wake_arg;
    uint64_t submitted; /* owner's */
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct store_batch_list queue;
    int closing;
    uint64_t durable;
    int error;
    char err_text[STORE_ERR_TEXT];
};

static struct store_lmdb *self(struct store *s)
{
    return (struct store_lmdb *)s;
}

static int op_apply(MDB_txn *txn, MDB_dbi dbi, const struct store_op *op)
{
    MDB_val key = {op->key_size, (void *)op->key};
    if (op->nsegments == 0) {
        int rc = mdb_del(txn, dbi, &key, NULL);
        return rc == MDB_NOTFOUND ? 0 : rc;
    }
    MDB_val value = {store_value_size(op), NULL};
    int rc = mdb_put(txn, dbi, &key, &value, MDB_RESERVE);
    if (rc == 0)
        store_value_write(op, value.mv_data);
    return rc;
}

static int batch_apply(MDB_txn *txn, MDB_dbi dbi, const struct store_batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        int rc = op_apply(txn, dbi, &b->ops[i]);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* An LMDB code; nothing has changed when it is not 0. */
static int group_try(struct env_lmdb *e, const struct store_batch_list *group)
{
    MDB_txn *txn;
    int rc = mdb_txn_begin(e->env, NULL, 0, &txn);
    if (rc != 0)
        return rc;
    for (const struct store_batch *b = group->first; b != NULL && rc == 0; b = b->next)
        rc = batch_apply(txn, e->dbi, b);
    if (rc == 0)
        return mdb_txn_commit(txn);
    mdb_txn_abort(txn);
    return rc;
}

static int group_commit(struct env_lmdb *e, const struct store_batch_list *group, uint64_t *ret_seq, char *err)
{
    size_t bytes = 0;
    uint64_t seq = 0;
    for (const struct store_batch *b = group->first; b != NULL; b = b->next) {
        bytes += b->bytes;
        seq = b->seq;
    }
    int rc = group_try(e, group);
    while (rc == MDB_MAP_FULL) {
        rc = env_lmdb_grow(e, bytes);
        if (rc == 0)
            rc = group_try(e, group);
    }
    if (rc != 0)
        return env_lmdb_error(e, rc, "cannot write", bytes, err);
    *ret_seq = seq;
    return 0;
}

/* Takes the next group off the queue; empty when the store is closing. */
static void group_wait(struct store_lmdb *s, struct store_batch_list *group)
{
    pthread_mutex_lock(&s->lock);
    while (s->queue.first == NULL && !s->closing)
        pthread_cond_wait(&s->work, &s->lock);
    store_batch_list_take(&s->queue, group_batches_max, group_bytes_max, group);
    pthread_mutex_unlock(&s->lock);
}

static void group_report(struct store_lmdb *s, int rc, uint64_t seq, const char *err)
{
    pthread_mutex_lock(&s->lock);
    if (rc == 0) {
        s->durable = seq;
    } else {
        s->error = rc;
        memcpy(s->err_text, err, STORE_ERR_TEXT);
        store_batch_list_free(&s->queue);
    }
    pthread_mutex_unlock(&s->lock);
    if (s->wake != NULL)
        s->wake(s->wake_arg);
}

static void *writer_main(void *arg)
{
    struct store_lmdb *s = arg;
    struct store_batch_list group;
    char err[STORE_ERR_TEXT] = "";
    int rc = 0;
    pthread_setname_np(pthread_self(), "store-writer");
    store_batch_list_init(&group);
    while (rc == 0) {
        uint64_t seq = 0;
        group_wait(s, &group);
        if (group.first == NULL)
            break;
        rc = group_commit(&s->env, &group, &seq, err);
        store_batch_list_free(&group);
        group_report(s, rc, seq, err);
    }
    return NULL;
}

static void lmdb_submit(struct store *store, uint64_t seq, const struct store_op *ops, size_t n)
{
    struct store_lmdb *s = self(store);
    struct store_batch *b = store_batch_create(seq, ops, n);
    CHECK(seq > s->submitted);
    s->submitted = seq;
    pthread_mutex_lock(&s->lock);
    if (s->error == 0) {
        store_batch_list_append(&s->queue, b);
        b = NULL;
        pthread_cond_signal(&s->work);
    }
    pthread_mutex_unlock(&s->lock);
    mem_free(b);
}

static int lmdb_poll(struct store *store, uint64_t *ret_seq, char *err)
{
    struct store_lmdb *s = self(store);
    pthread_mutex_lock(&s->lock);
    int rc = s->error;
    *ret_seq = s->durable;
    if (rc != 0)
        memcpy(err, s->err_text, STORE_ERR_TEXT);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

typedef int load_each(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size);

static int record_load(const struct env_lmdb *e, const MDB_val *key, const MDB_val *value, load_each *each, void *arg,
                       char *err)
{
    char text[STORE_KEY_TEXT];
    const uint8_t *payload;
    size_t size;
    int rc = store_value_check(value->mv_data, value->mv_size, &payload, &size);
    if (rc != 0) {
        store_key_text(key->mv_data, key->mv_size, text);
        store_say(err, "record %s has a wrong checksum, in the store %.100s", text, e->dir);
        return rc;
    }
    if (store_key_is_format(key->mv_data, key->mv_size))
        return 0;
    return each(arg, key->mv_data, key->mv_size, payload, size);
}

static int cursor_load(const struct env_lmdb *e, MDB_cursor *cursor, load_each *each, void *arg, char *err)
{
    MDB_val key, value;
    int code = mdb_cursor_get(cursor, &key, &value, MDB_FIRST);
    for (; code == 0; code = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) {
        int rc = record_load(e, &key, &value, each, arg, err);
        if (rc != 0)
            return rc;
    }
    return code == MDB_NOTFOUND ? 0 : env_lmdb_error(e, code, "cannot read", 0, err);
}

static int lmdb_load(struct store *store, load_each *each, void *arg, char *err)
{
    struct store_lmdb *s = self(store);
    MDB_txn *txn;
    MDB_cursor *cursor;
    CHECK(s->submitted == 0);
    int code = mdb_txn_begin(s->env.env, NULL, MDB_RDONLY, &txn);
    if (code != 0)
        return env_lmdb_error(&s->env, code, "cannot read", 0, err);
    code = mdb_cursor_open(txn, s->env.dbi, &cursor);
    if (code != 0) {
        mdb_txn_abort(txn);
        return env_lmdb_error(&s->env, code, "cannot read", 0, err);
    }
    int rc = cursor_load(&s->env, cursor, each, arg, err);
    mdb_cursor_close(cursor);
    mdb_txn_abort(txn);
    return rc;
}

static void lmdb_close(struct store *store)
{
    struct store_lmdb *s = self(store);
    pthread_mutex_lock(&s->lock);
    s->closing = 1;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->writer, NULL);
    env_lmdb_close(&s->env);
    store_batch_list_free(&s->queue);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    mem_free(s);
}

static const struct store_ops lmdb_ops = {lmdb_submit, lmdb_poll, lmdb_load, lmdb_close};

/* LMDB allocates every large value that it writes. With the stock settings each one is mapped and unmapped, and its
 * first touch costs more than the disk: 1.4 GB/s instead of 2.9 with values of 1 MiB. For the whole process, once. */
static void heap_keep(void)
{
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 128 << 20);
}

/* Signals are for the process's main thread. */
static int writer_start(struct store_lmdb *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&s->writer, NULL, writer_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

int store_lmdb_open(const struct store_lmdb_config *c, struct store **ret, char *err)
{
    static pthread_once_t heap_once = PTHREAD_ONCE_INIT;
    pthread_once(&heap_once, heap_keep);
    struct store_lmdb *s = mem_alloc(sizeof *s);
    int rc = env_lmdb_open(c, &s->env, err);
    if (rc != 0)
        goto free_store;
    s->store.ops = &lmdb_ops;
    s->wake = c->wake;
    s->wake_arg = c->wake_arg;
    store_batch_list_init(&s->queue);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    rc = writer_start(s);
    if (rc != 0) {
        store_say(err, "%.100s: cannot start the writer thread: %s", s->env.dir, strerror(rc));
        rc = KS_EIO;
        goto close_env;
    }
    *ret = &s->store;
    return 0;
close_env:
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    env_lmdb_close(&s->env);
free_store:
    mem_free(s);
    return rc;
}
