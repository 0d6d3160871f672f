/* datadir.h - the data directory of one server: whose it is, and which life ran on it last.
 *
 *     DIR/keepstep.server     text: "keepstep 1", then key=value lines; replaced whole, durably
 *     DIR/owner.lock          held for the life of the process
 *     DIR/loop-0, loop-1 ..   one store (store.h) per event loop
 *
 * A new life opens the directory, opens the stores (creating them when `fresh`), then records itself with
 * datadir_life_set, and only then tells others of itself: a directory whose stores were never all there says so by
 * life 0. Which of the recorded lives a new one is the heir of, the view says. One thread; no locks. */
#ifndef STORAGE_DATADIR_H
#define STORAGE_DATADIR_H

#include <limits.h>
#include <stdint.h>

#include "storage/store.h"

enum { DATADIR_TEXT_MAX = 256, DATADIR_LOOPS_MAX = 1024, DATADIR_FORMER_MAX = 15 };

struct datadir_config {
    const char *dir;
    int create;           /* make it (one level) when it is missing or empty */
    const char *job;      /* must be the directory's */
    uint64_t created;     /* which creation of that job; must be the directory's. 0: not compared */
    const char *name;     /* this server's; NULL: as recorded. Another name than recorded replaces it */
    uint32_t loops;       /* 0: as recorded */
    uint32_t nshards;     /* 0: as recorded; otherwise must be the directory's */
    uint32_t chunk_bytes; /* likewise */
};
struct datadir {
    char dir[PATH_MAX - 32];
    char job[DATADIR_TEXT_MAX], name[DATADIR_TEXT_MAX];
    uint64_t created;
    uint32_t loops, nshards, chunk_bytes;
    uint64_t life; /* the recorded one: the previous life until datadir_life_set; 0: none */
    uint32_t nformer;
    uint64_t former[DATADIR_FORMER_MAX]; /* lives before `life`, newest first; older ones are forgotten */
    int fresh;     /* life was 0 when it was opened: the stores may have to be created */
    int lock_fd;
};

/* A new directory needs every field of the configuration (KS_EINVAL). KS_ENOENT: missing (or empty) and not
 * create; KS_EEXIST: of another job, or with other loops, nshards or chunk_bytes; KS_ECORRUPT: not a Keepstep
 * directory; KS_EVERSION: another format; KS_EBUSY: in use; KS_EFULL, KS_EIO. One line in err (STORE_ERR_TEXT). */
int datadir_open(const struct datadir_config *c, struct datadir *ret, char *err);
/* Durable when it returns 0; d->life and fresh change only then. life is not 0. KS_EFULL, KS_EIO. */
int datadir_life_set(struct datadir *d, uint64_t life, char *err);
/* The directory of one loop's store. */
void datadir_loop_dir(const struct datadir *d, uint32_t loop, char ret[PATH_MAX]);
/* Lets the directory go. Close the stores first. */
void datadir_close(struct datadir *d);

/* The text of keepstep.server, for tests and fuzzing: fills job, name, loops, nshards, chunk_bytes, life of *ret.
 * KS_ECORRUPT or KS_EVERSION with the reason in err; *ret is untouched then. */
int datadir_text_parse(const char *text, size_t size, struct datadir *ret, char *err);

#endif
