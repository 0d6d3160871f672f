/* local_store.h - the contents of a local coordination store: one LMDB environment in a directory, shared by all
 * processes of a host and by all jobs that name it. Inside coord/ only.
 *
 * A process opens an environment once, however many handles it has: opening the same directory again gives the
 * same store. Functions that write are called with the directory's writer lock held (coord_local.c), so that
 * nobody ever waits for LMDB's own lock, which has no deadline. Any thread may call.
 *
 * Revisions count from 1 (empty) over all jobs. The last 4096 revisions are kept for watches, or 64 MiB of them. */
#ifndef COORD_LOCAL_STORE_H
#define COORD_LOCAL_STORE_H

#include "coord/coord_event.h"

struct local_store;

/* The directory exists. lock and unlock take the writer lock when the store must be made first.
 * KS_EUNAVAIL, KS_EVERSION, KS_EIO with a line in err. */
struct local_writer {
    int (*lock)(void *arg, char *err);
    void (*unlock)(void *arg);
    void *arg;
};
int local_store_open(const char *dir, const struct local_writer *w, struct local_store **ret, char *err);
void local_store_close(struct local_store *s);

struct local_state {
    int64_t revision;
    int64_t compacted;        /* changes after this revision are kept */
    int64_t lease_changes;    /* grows whenever a lease is granted or ends */
};
int local_store_state(struct local_store *s, struct local_state *ret);

/* Does r, which was checked, and fills *ret. LEASE_GRANT: prepare makes the lease's file before the grant is
 * committed; it returns 0 or a negative error. */
struct local_grant {
    int (*prepare)(void *arg, int64_t lease, uint32_t ttl_ms);
    void *arg;
};
void local_store_range(struct local_store *s, const char *job, const struct coord_request *r, struct coord_event *ret);
void local_store_txn(struct local_store *s, const char *job, const struct coord_request *r, struct coord_event *ret);
void local_store_grant(struct local_store *s, const struct coord_request *r, const struct local_grant *g,
                       struct coord_event *ret);
/* Ends a lease: its keys go at one revision. KS_ENOENT: it ended before. */
int local_store_lease_end(struct local_store *s, int64_t lease, int64_t *ret_revision);

struct local_lease {
    int64_t id;
    uint32_t ttl_ms;
};
/* All leases, ascending; free with mem_free. */
int local_store_leases(struct local_store *s, struct local_lease **ret, size_t *ret_n);

/* Pushes every change of the job's prefix after `revision`. KS_ENOENT: some were forgotten, or the store is
 * younger than that revision. */
int local_store_changes(struct local_store *s, const char *job, const char *prefix, int64_t revision,
                        struct coord_queue *q, int64_t *ret_revision);
/* Frees what readers that died left behind. */
void local_store_check_readers(struct local_store *s);

#endif
