/* live.h - training by real processes under faults, and what must hold whatever happens (integers).
 *
 * Members push integers, each life in places of its own. At the end, for each life and each chunk: acknowledged <= applied
 * <= pushed, and all three are equal for a life that left in good order; in synchronous mode a step is there whole or not at
 * all, and everybody sees the same of it.
 *
 * An observer, a process of its own, reads the view from the store and says who holds what (struct seen).
 *
 * LIVE_SECONDS: length of each run under faults (the short form: a few seconds). LIVE_SEED: of the schedule; it is printed.
 * Everything has a deadline: a call of a member, a wait of the test, and the test as a whole. */
#ifndef CHAOS_LIVE_LIVE_H
#define CHAOS_LIVE_LIVE_H

#include "tests/integration/rig.h"

enum { LIVE_LIVES = 512, LIVE_CHUNKS = 5, LIVE_N = LIVE_LIVES * LIVE_CHUNKS, LIVE_PARAMS = 2, LIVE_STEPS_MAX = 1 << 20,
       LIVE_SHARDS = 6 };

struct live_life {
    _Atomic int64_t pushed, acked, steps;
    _Atomic bool ended_well;
};
/* What the store says, all of one look. */
struct seen {
    _Atomic uint64_t looks, failed;          /* looks that were answered; that were not */
    _Atomic uint64_t epoch, leader;          /* the life that holds the leader key; 0: none */
    _Atomic uint64_t id[RIG_SERVERS];        /* of the listed life that has the name of rig server i; 0: none */
    _Atomic unsigned primaries[RIG_SERVERS], backups[RIG_SERVERS];
    _Atomic unsigned nservers, nmembers;     /* listed; live */
    _Atomic unsigned least_backups, joining; /* of all shards: the fewest; in all */
};
struct live {
    struct live_life life[LIVE_LIVES];
    _Atomic unsigned next_life;
    _Atomic bool stop, leave[RIG_WORKERS];   /* all; one */
    _Atomic int64_t worker_steps[RIG_WORKERS];
    _Atomic uint64_t result_of_step[LIVE_STEPS_MAX];
    int64_t final[LIVE_PARAMS][LIVE_N], running[LIVE_N];
    bool sync, read;
    unsigned pause_ms;                       /* of a member after each step */
    unsigned observer;                       /* its worker */
    struct seen seen;
};

/* Seconds of a run under faults. */
unsigned live_seconds(unsigned short_form);
/* Prints it. */
uint64_t live_seed(const char *what);
/* The options of a new job, no server yet; the members' mode. */
struct live *live_open(struct rig *r, const char *mode, const char *replicas, const char *durability, const char *servers);
/* Starts the observer. What it needs must be reachable from the test's network namespace. */
void live_observe(struct rig *r, struct live *w);
/* For rig_worker_start. */
void live_member(struct rig_self *s);
/* Steps of all lives. */
int64_t live_steps(const struct live *w);
/* Until the members have done that many steps more. */
void live_goes_on(struct rig *r, const struct live *w, int64_t steps, int64_t ms);
/* Until two looks at the store have been answered that began after this call. */
void live_look(struct rig *r, const struct live *w);
/* Until exactly the servers that run are listed (with no life of forbidden[], which may be NULL), nothing is on the move and
 * every shard has as many backups as it can have, `replicas` at most. */
void live_settled(struct rig *r, struct live *w, unsigned replicas, const uint64_t *forbidden);
bool live_is_settled(const struct rig *r, const struct live *w, unsigned replicas, const uint64_t *forbidden);
/* Members end, the sums are read and checked, the job is stopped, the servers end with status 0. */
void live_end(struct rig *r, struct live *w);
/* The server that holds the leader key; -1: none that is known. */
int live_leader(const struct live *w);

#endif
