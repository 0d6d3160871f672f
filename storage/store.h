/* store.h - durable records of one event loop: byte-string keys, group commit.
 *
 * One store belongs to one loop. The owner submits batches; a writer (a thread in store_lmdb.c, the
 * simulator in store_model.c) makes them durable in order, several batches in one commit, and then
 * reports the highest durable sequence number. A batch is atomic and batches become durable in the
 * order of submission. Values are read from the caller's memory when the writer gets to them: the
 * caller keeps them unchanged until the batch is reported durable.
 *
 * Errors are sticky: after a failed commit nothing later is made durable, store_poll says why, and
 * what was reported durable before stays readable (a full disk, a read-only file system).
 *
 * Format: every store has a record "format" (text: "keepstep 1"); another version is refused with
 * KS_EVERSION, another kind of file with KS_ECORRUPT. Each value carries a CRC-32C of itself,
 * checked by store_load. */
#ifndef STORAGE_STORE_H
#define STORAGE_STORE_H

#include <stddef.h>
#include <stdint.h>

enum { STORE_KEY_MAX = 64, STORE_SEGMENTS_MAX = 3, STORE_ERR_TEXT = 256 };

struct store_segment {
    const void *data;
    size_t size;
};
/* nsegments 0: delete the key (no error when it is not there). Segments are stored end to end. */
struct store_op {
    uint8_t key[STORE_KEY_MAX];
    uint32_t key_size;
    uint32_t nsegments;
    struct store_segment segment[STORE_SEGMENTS_MAX];
};

struct store;
struct store_ops {
    /* Any number of batches may be queued. `seq` grows by at least one each call. Copies the ops,
     * not what segments point to. Owner's thread. */
    void (*submit)(struct store *s, uint64_t seq, const struct store_op *ops, size_t n);
    /* The highest durable seq (0: none yet). 0, or the sticky error (KS_EFULL, KS_EIO, ...) with
     * its text in err (STORE_ERR_TEXT bytes); *ret_seq is set either way. Owner's thread. */
    int (*poll)(struct store *s, uint64_t *ret_seq, char *err);
    /* Calls `each` for every record in key order; stops at the first non-zero return and passes it
     * on. KS_ECORRUPT (with the key in err) when a checksum is wrong. Only before the first submit. */
    int (*load)(struct store *s, int (*each)(void *arg, const uint8_t *key, size_t key_size,
                                             const uint8_t *value, size_t size), void *arg, char *err);
    /* Stops the writer after what is queued is durable (or failed); frees everything. */
    void (*close)(struct store *s);
};
struct store {
    const struct store_ops *ops;
};

/* ---- LMDB: a directory that holds data.mdb, owner.lock. ---- */
struct store_lmdb_config {
    const char *dir;                 /* created (one level) when missing and `create` is set */
    int create;
    size_t map_bytes;                /* address space; grown in steps when full. 0: 1 GiB */
    void (*wake)(void *arg);         /* called from the writer thread after each commit or failure, until close
                                      * returns; NULL: none */
    void *wake_arg;
};
/* KS_EBUSY: another process has it open. KS_ENOENT: missing and not `create`. Text in err. */
int store_lmdb_open(const struct store_lmdb_config *c, struct store **ret, char *err);

/* ---- model: in memory; the simulator decides when a commit happens and what a crash loses. ---- */
struct store_model_disk;             /* survives the process: what is durable */
struct store_model_disk *store_model_disk_create(void);
void store_model_disk_free(struct store_model_disk *d);
int store_model_open(struct store_model_disk *d, struct store **ret, char *err);
/* Makes up to `n` queued batches durable as one commit; returns how many it took. */
size_t store_model_commit(struct store *s, size_t n);
size_t store_model_queued(const struct store *s);
/* From now on commits fail with `error` (KS_EFULL, KS_EIO). */
void store_model_fail(struct store *s, int error);
/* The process dies: what is queued is lost, the store handle is freed, the disk stays. */
void store_model_crash(struct store *s);
/* Flips one bit of the n-th record's value, for tests of checksums. */
void store_model_flip(struct store_model_disk *d, size_t n);

#endif
