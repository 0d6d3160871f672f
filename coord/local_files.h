/* local_files.h - the files beside LMDB's in a local store's directory. Inside coord/ only.
 *
 *   writer.lock   locked by whoever writes to the store. Held for a commit; it is taken by trying, never by waiting.
 *   notify        written after each commit, so that inotify wakes the others. The environment's own file will not
 *                 do: its last write comes before the commit can be read. Every handle keeps it open for writing:
 *                 when a process dies its descriptor closes, which wakes the others too.
 *   leases/ID     one a lease, locked by the living owner, with the time of its last keep-alive. The lock goes when
 *                 the process dies; the time grows old when it is stopped.
 *
 * Locks are of open file descriptions (F_OFD_SETLK): two handles in one process exclude each other as well. */
#ifndef COORD_LOCAL_FILES_H
#define COORD_LOCAL_FILES_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct local_files {
    char dir[PATH_MAX - 64];
    int writer_fd, notify_fd;
    int inotify_fd;             /* -1: the system has none left; poll then */
    int notify_watch, leases_watch;
};
/* Makes the directory with its parents. 0, KS_EIO or KS_EINVAL with a line in err. */
int local_files_open(const char *dir, struct local_files *ret, char *err);
void local_files_close(struct local_files *f);

bool local_writer_try(struct local_files *f);
void local_writer_release(struct local_files *f);
void local_notify(struct local_files *f, int64_t revision);

/* Reads all that inotify has; changed: somebody committed or died; died: the owner of a lease may have. */
void local_files_drain(struct local_files *f, bool *ret_changed, bool *ret_died);

/* Makes (or takes over from a grant that was never committed) and locks the file; returns its descriptor, or
 * KS_EIO after a log line. Writer lock held. */
int local_lease_create(const struct local_files *f, int64_t lease, uint64_t now_us);
void local_lease_touch(int fd, uint64_t now_us);
/* Whether its owner lives; if so, until when without another keep-alive. */
bool local_lease_alive(const struct local_files *f, int64_t lease, uint32_t ttl_ms, uint64_t now_us,
                       uint64_t *ret_until_us);
void local_lease_remove(const struct local_files *f, int64_t lease);
/* Removes files of leases that the store does not know. Writer lock held. known: ascending. */
struct local_lease;
void local_lease_clean(const struct local_files *f, const struct local_lease *known, size_t n);

#endif
