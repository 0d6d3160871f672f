/* local_lmdb.h - layout of the local store, for the files that read (local_lmdb.c) and write it
 * (local_txn_lmdb.c). Integers are native: the file belongs to one host.
 *
 *   meta      "meta"                        struct local_meta
 *   kv        JOB/KEY                       struct local_kv_head, value
 *   log       revision, index (big-endian)  struct local_log_head, JOB/KEY, value
 *   lease     id (big-endian)               ttl_ms
 *   lease_key id (big-endian), JOB/KEY      nothing */
#ifndef COORD_LOCAL_LMDB_H
#define COORD_LOCAL_LMDB_H

#include <lmdb.h>

#include "coord/local_store.h"

enum { LOCAL_FORMAT = 1, LOCAL_FULL_KEY_MAX = 64 + 1 + COORD_KEY_MAX, LOCAL_LOG_KEY = 10, LOCAL_LEASE_KEY = 8 };

struct local_meta {
    int64_t format, revision, compacted, lease_changes, last_lease, log_bytes;
};
struct local_kv_head {
    int64_t create_revision, mod_revision, lease;
};
struct local_log_head {
    int64_t create_revision;
    uint32_t key_size, deleted;
};

struct local_store {
    MDB_env *env;
    MDB_dbi meta, kv, log, lease, lease_key;
    uint64_t device, inode;
    unsigned refs;
    struct local_store *next;
};

int local_meta_get(const struct local_store *s, MDB_txn *txn, struct local_meta *ret);
void local_put_be64(uint8_t *out, uint64_t v);
uint64_t local_get_be64(const uint8_t *in);
/* "JOB/KEY"; returns its length. */
size_t local_full_key(char *out, const char *job, const char *key);

#endif
