/* store_help.h - what the tests of storage/ share: scratch directories, waiting for durability. */
#ifndef TESTS_STORE_HELP_H
#define TESTS_STORE_HELP_H

#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "storage/store.h"

enum { WAIT_SECONDS = 120 };

static inline void scratch_make(char path[PATH_MAX])
{
    const char *base = getenv("TMPDIR");
    snprintf(path, PATH_MAX, "%s/keepstep-test-XXXXXX", base ? base : "/tmp");
    if (mkdtemp(path) == NULL)
        abort();
}

static inline int scratch_entry_remove(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static inline void scratch_remove(const char *path)
{
    nftw(path, scratch_entry_remove, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void wake_post(void *arg)
{
    sem_post(arg);
}

/* Returns what poll says once `seq` is durable or an error is there; aborts after WAIT_SECONDS. */
static inline int store_wait(struct store *s, sem_t *woken, uint64_t seq, uint64_t *ret_seq, char *err)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += WAIT_SECONDS;
    for (;;) {
        int rc = s->ops->poll(s, ret_seq, err);
        if (rc != 0 || *ret_seq >= seq)
            return rc;
        while (sem_timedwait(woken, &deadline) != 0)
            if (errno != EINTR)
                abort();
    }
}

static inline struct store_op op_put(const void *key, size_t key_size, const void *value, size_t size)
{
    struct store_op op = {.key_size = (uint32_t)key_size, .nsegments = 1, .segment = {{value, size}}};
    memcpy(op.key, key, key_size);
    return op;
}

static inline struct store_op op_delete(const void *key, size_t key_size)
{
    struct store_op op = {.key_size = (uint32_t)key_size};
    memcpy(op.key, key, key_size);
    return op;
}

#endif
