/* dirlock.h - one process at a time in a directory.
 *
 * DIR/owner.lock is locked with flock for as long as the holder lives (a killed process lets go) and holds
 * its process id for the message that the next one prints. The file is never removed. */
#ifndef STORAGE_DIRLOCK_H
#define STORAGE_DIRLOCK_H

#define DIRLOCK_FILE "owner.lock"

/* *ret_fd: for dirlock_release. KS_EBUSY: "DIR is in use by process PID"; KS_EIO: DIR cannot be written.
 * The text goes to err (STORE_ERR_TEXT bytes). */
int dirlock_take(const char *dir, int *ret_fd, char *err);
void dirlock_release(int fd);

/* Creates dir (one level) when it is missing and `create` is set; makes the new entry durable.
 * KS_ENOENT: missing and not create, or its parent is; KS_ECORRUPT: not a directory; KS_EIO. */
int dir_ensure(const char *dir, int create, char *err);
/* Makes the entries of dir durable. 0 or KS_EIO. */
int dir_sync(const char *dir, char *err);
/* 1: dir holds an entry that `known` does not accept; 0: none; KS_EIO. "lost+found" and the lock file are ignored. */
int dir_has_other(const char *dir, int (*known)(const char *entry), char *err);

#endif
