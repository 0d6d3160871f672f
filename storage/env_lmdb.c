#include "storage/env_lmdb.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/keepstep_err.h"
#include "base/log.h"
#include "base/mem.h"
#include "storage/dirlock.h"
#include "storage/store_record.h"

static const size_t map_bytes_default = (size_t)1 << 30;
static const size_t space_slack_bytes = (size_t)1 << 20;
/* A fresh environment whose first commit is large can crash in LMDB 0.9.24: small commits come first. */
enum { SEED_COMMITS = 3 };

static unsigned long long space_left(const char *dir)
{
    struct statvfs v;
    if (statvfs(dir, &v) != 0)
        return ~0ull;
    return (unsigned long long)v.f_bavail * v.f_frsize;
}

/* A short write on a full disk comes back from LMDB as EIO. */
static int is_full(const struct env_lmdb *e, int code, size_t bytes)
{
    if (code == ENOSPC || code == EDQUOT)
        return 1;
    return code == EIO && space_left(e->dir) < bytes + space_slack_bytes;
}

static int is_corrupt(int code)
{
    return code == MDB_CORRUPTED || code == MDB_PAGE_NOTFOUND || code == MDB_INVALID || code == MDB_PANIC ||
           code == MDB_INCOMPATIBLE;
}

int env_lmdb_error(const struct env_lmdb *e, int code, const char *what, size_t bytes, char *err)
{
    if (is_full(e, code, bytes)) {
        store_say(err, "%.100s: %s: no space left on the disk (%zu bytes to write, %llu free)", e->dir, what, bytes,
                  space_left(e->dir));
        return KS_EFULL;
    }
    store_say(err, "%.100s: %s: %s", e->dir, what, mdb_strerror(code));
    return is_corrupt(code) ? KS_ECORRUPT : KS_EIO;
}

int env_lmdb_grow(struct env_lmdb *e, size_t bytes)
{
    size_t more = e->map_bytes > 2 * bytes ? e->map_bytes : 2 * bytes;
    size_t size = (e->map_bytes + more + 0xfffff) & ~(size_t)0xfffff;
    int rc = mdb_env_set_mapsize(e->env, size);
    if (rc == 0) {
        e->map_bytes = size;
        log_info("store_map_grown", "dir=%s bytes=%zu", e->dir, size);
    }
    return rc;
}

static int entry_known(const char *name)
{
    return strcmp(name, "data.mdb") == 0 || strcmp(name, "lock.mdb") == 0;
}

/* Refuses what is not a store before anything is written into it. */
static int dir_check(const struct env_lmdb *e, int create, char *err)
{
    char path[PATH_MAX + 16];
    struct stat st;
    int rc = dir_ensure(e->dir, create, err);
    if (rc == 0)
        rc = dir_has_other(e->dir, entry_known, err);
    if (rc == 1) {
        store_say(err, "%.100s holds other files and is not a Keepstep store; choose an empty directory", e->dir);
        return KS_ECORRUPT;
    }
    if (rc != 0 || create)
        return rc;
    snprintf(path, sizeof path, "%s/data.mdb", e->dir);
    if (stat(path, &st) == 0 && st.st_size > 0)
        return 0;
    store_say(err, "%.100s holds no store", e->dir);
    return KS_ENOENT;
}

/* A file that was cut short would be SIGBUS in the map; as zeros it is a wrong checksum. */
static int file_fill(struct env_lmdb *e)
{
    MDB_envinfo info;
    MDB_stat page;
    struct stat st;
    mdb_filehandle_t fd;
    mdb_env_info(e->env, &info);
    mdb_env_stat(e->env, &page);
    e->map_bytes = info.me_mapsize;
    if (mdb_env_get_fd(e->env, &fd) != 0 || fstat(fd, &st) != 0)
        return errno;
    off_t size = (off_t)(info.me_last_pgno + 1) * page.ms_psize;
    return st.st_size < size && ftruncate(fd, size) != 0 ? errno : 0;
}

static int env_start(struct env_lmdb *e, size_t map_bytes, char *err)
{
    int rc = mdb_env_create(&e->env);
    if (rc != 0)
        return env_lmdb_error(e, rc, "cannot start LMDB", 0, err);
    rc = mdb_env_set_mapsize(e->env, map_bytes ? map_bytes : map_bytes_default);
    if (rc == 0)
        rc = mdb_env_open(e->env, e->dir, MDB_NOTLS | MDB_NOLOCK, 0644);
    if (rc == 0)
        rc = file_fill(e);
    if (rc == 0)
        return 0;
    rc = env_lmdb_error(e, rc, "cannot open data.mdb", 0, err);
    mdb_env_close(e->env);
    return rc;
}

/* *ret_empty: no record at all. */
static int format_check_in(const struct env_lmdb *e, MDB_txn *txn, int *ret_empty, char *err)
{
    MDB_val key = {strlen(store_format_key), (void *)store_format_key}, value;
    char why[STORE_ERR_TEXT];
    MDB_stat st;
    unsigned flags;
    int rc = mdb_stat(txn, e->dbi, &st);
    if (rc == 0)
        rc = mdb_dbi_flags(txn, e->dbi, &flags);
    if (rc != 0)
        return env_lmdb_error(e, rc, "cannot read data.mdb", 0, err);
    *ret_empty = st.ms_entries == 0;
    if (*ret_empty)
        return 0;
    rc = flags != 0 ? MDB_NOTFOUND : mdb_get(txn, e->dbi, &key, &value);
    if (rc == MDB_NOTFOUND) {
        store_say(err, "%.100s: data.mdb is not a Keepstep store (it has no format record)", e->dir);
        return KS_ECORRUPT;
    }
    if (rc != 0)
        return env_lmdb_error(e, rc, "cannot read the format record", 0, err);
    rc = store_format_check(value.mv_data, value.mv_size, why);
    if (rc != 0)
        store_say(err, "%.100s: %s", e->dir, why);
    return rc;
}

static int format_check(struct env_lmdb *e, int *ret_empty, char *err)
{
    MDB_txn *txn;
    int rc = mdb_txn_begin(e->env, NULL, MDB_RDONLY, &txn);
    if (rc != 0)
        return env_lmdb_error(e, rc, "cannot read data.mdb", 0, err);
    rc = mdb_dbi_open(txn, NULL, 0, &e->dbi);
    rc = rc != 0 ? env_lmdb_error(e, rc, "cannot read data.mdb", 0, err) : format_check_in(e, txn, ret_empty, err);
    mdb_txn_abort(txn);
    return rc;
}

static int seed_commit(struct env_lmdb *e)
{
    uint8_t format[64];
    MDB_val key = {strlen(store_format_key), (void *)store_format_key};
    MDB_val value = {store_format_write(format), format};
    MDB_txn *txn;
    int rc = mdb_txn_begin(e->env, NULL, 0, &txn);
    if (rc != 0)
        return rc;
    rc = mdb_put(txn, e->dbi, &key, &value, 0);
    if (rc != 0) {
        mdb_txn_abort(txn);
        return rc;
    }
    return mdb_txn_commit(txn);
}

static int env_seed(struct env_lmdb *e, char *err)
{
    MDB_envinfo info;
    mdb_env_info(e->env, &info);
    if (info.me_last_txnid >= SEED_COMMITS)
        return 0;
    for (size_t n = info.me_last_txnid; n < SEED_COMMITS; n++) {
        int rc = seed_commit(e);
        if (rc != 0)
            return env_lmdb_error(e, rc, "cannot write the format record", 0, err);
    }
    return dir_sync(e->dir, err);
}

static int env_format(struct env_lmdb *e, int create, char *err)
{
    int empty;
    int rc = format_check(e, &empty, err);
    if (rc != 0)
        return rc;
    if (empty && !create) {
        store_say(err, "%.100s holds no store", e->dir);
        return KS_ENOENT;
    }
    return env_seed(e, err);
}

int env_lmdb_open(const struct store_lmdb_config *c, struct env_lmdb *ret, char *err)
{
    struct env_lmdb e = {0};
    if (str_copy(e.dir, sizeof e.dir, c->dir) != 0) {
        store_say(err, "the name of the store's directory is too long");
        return KS_EINVAL;
    }
    int rc = dir_check(&e, c->create, err);
    if (rc != 0)
        return rc;
    rc = dirlock_take(e.dir, &e.lock_fd, err);
    if (rc != 0)
        return rc;
    rc = env_start(&e, c->map_bytes, err);
    if (rc != 0)
        goto release_lock;
    rc = env_format(&e, c->create, err);
    if (rc != 0)
        goto close_env;
    *ret = e;
    return 0;
close_env:
    mdb_env_close(e.env);
release_lock:
    dirlock_release(e.lock_fd);
    return rc;
}

void env_lmdb_close(struct env_lmdb *e)
{
    mdb_env_close(e->env);
    dirlock_release(e->lock_fd);
}
