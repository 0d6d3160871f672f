/* status.h - the inside of `keepstep status`: one picture of a job, and two ways to show it. */
#ifndef SERVER_STATUS_H
#define SERVER_STATUS_H

#include <stdio.h>

#include "server/operator.h"

struct cJSON;

struct server_row {
    struct view_server who;
    bool in_view, registered;
    struct operator_answer answer;
    struct cJSON *doc;                 /* parsed answer; NULL: none */
    uint32_t shards;                   /* by the view */
    uint64_t tensors, chunks, memory, pushes, applied, duplicates, bytes_in, bytes_out;
    int64_t complete, clock;           /* lowest over its loops; -1: no shard */
    double pushes_rate, in_rate, out_rate;   /* a second, since the picture before; negative: not known */
};
struct member_row {
    struct view_member who;
    int64_t rank, clock, lag;
    uint64_t pushes, bytes, applied, duplicates, late, stale, not_finite, refused;
};
struct wait_row {
    const struct server_row *server;   /* NULL: all of them (a staleness bound) */
    int64_t step;
    double seconds;                    /* since a step was completed or the lowest clock rose */
    char whom[256];
};
struct picture {
    struct job_state state;
    uint64_t taken_us;
    uint32_t nservers, nmembers, nwaits;
    struct server_row *server;
    struct member_row *member;
    struct wait_row *wait;
    uint64_t failovers;                /* seen by the server that has served the longest */
    uint32_t catching_up;              /* shards with a holder that does not have everything yet */
    double view_age_s;                 /* negative: not known */
    char controller[256];              /* what the leader is doing; "": not known */
    struct mode now;                   /* of the most advanced member's step */
    char mode[64];                     /* that, and what follows it */
};

/* 0, or a line in err (ERR_TEXT). before: for the rates, or NULL. */
int picture_take(struct operator *o, uint32_t timeout_ms, const struct picture *before, struct picture *ret, char *err);
void picture_done(struct picture *p);
void picture_print(const struct picture *p, FILE *to);
/* For mem_free. */
char *picture_json(const struct picture *p);

#endif
