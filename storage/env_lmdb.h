/* env_lmdb.h - opening, checking and growing the LMDB environment of a store.
 *
 * Commits are synced twice by LMDB: the pages, then the root that points to them. One sync for both
 * (MDB_NOSYNC, then mdb_env_sync) would let the root reach the disk before the pages when the power
 * fails, and lose what had been reported durable. No MDB_WRITEMAP: a full disk would be SIGBUS. MDB_NOLOCK for
 * the same reason: LMDB maps its lock file; owner.lock keeps others out, and nobody reads while the
 * writer thread writes. */
#ifndef STORAGE_ENV_LMDB_H
#define STORAGE_ENV_LMDB_H

#include <limits.h>
#include <lmdb.h>

#include "storage/store.h"

struct env_lmdb {
    MDB_env *env;
    MDB_dbi dbi;
    int lock_fd;
    size_t map_bytes;
    char dir[PATH_MAX];
};

/* Takes the directory's lock, opens or creates the environment, checks or writes the format record.
 * 0, or an error as in store.h with one line in err. */
int env_lmdb_open(const struct store_lmdb_config *c, struct env_lmdb *ret, char *err);
void env_lmdb_close(struct env_lmdb *e);
/* More address space for a transaction that holds `bytes` of values. No transaction may be live. Returns an LMDB code.
 */
int env_lmdb_grow(struct env_lmdb *e, size_t bytes);
/* Turns LMDB's code into ours, and into a line: "DIR: WHAT: cause". `bytes`: what was being written. */
int env_lmdb_error(const struct env_lmdb *e, int code, const char *what, size_t bytes, char *err);

#endif
