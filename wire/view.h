/* view.h - the view: servers, members, and for each shard its primary (docs/PROTOCOL.md).
 *
 * A view is read-only once it is committed. Struct and JSON say the same; the JSON stands in the
 * coordination store under "view". Whoever made or decoded a view frees it with view_free. */
#ifndef WIRE_VIEW_H
#define WIRE_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    NAME_MAX_BYTES = 64,      /* of names of servers and members, with the final NUL */
    ADDR_MAX_BYTES = 256,     /* "host:port" */
    LOOPS_MAX = 64,
    BACKUPS_MAX = 2,
    SHARDS_MAX = 4096,
    MEMBERS_MAX = 256,        /* of one job at once, with those that left and are listed still */
    MODES_MAX = 16,
};
#define STEP_NONE INT64_MAX   /* a member's `last` while it lives */

enum mode_kind { MODE_SYNC = 1, MODE_SSP, MODE_ASYNC };
/* From step `from` on. bound: SSP's s; 0 otherwise. */
struct mode {
    int64_t from;
    enum mode_kind kind;
    uint32_t bound;
};

struct view_server {
    uint64_t id;                       /* this life */
    char name[NAME_MAX_BYTES];         /* over its lives */
    char ctl[ADDR_MAX_BYTES];          /* control address */
    uint32_t nloops;
    char loop[LOOPS_MAX][48];          /* data address of each loop */
};
struct view_member {
    uint64_t id;
    char name[NAME_MAX_BYTES];
    int64_t join, last;                /* in set(k) when join <= k <= last */
    bool live;                         /* false: left or gone; listed until `last` is sealed */
    uint32_t local_size;               /* ranks in it */
};
struct view_shard {
    uint64_t primary, since;           /* id, and the epoch this tenure began */
    uint32_t nbackups, njoining;
    uint64_t backup[BACKUPS_MAX], joining[BACKUPS_MAX];
};
struct view {
    uint64_t epoch, term, nonce;
    uint64_t mchg;                     /* last epoch that changed any member set */
    char ended[160];                   /* not empty: the job has ended, and why */
    bool short_of_replicas;            /* some shard has fewer backups than job.replicas_min: no new step is computed */
    uint32_t nmodes, nservers, nmembers, nshards;
    struct mode mode[MODES_MAX];       /* ascending `from`; the first is from 0 */
    struct view_server *server;        /* ascending id */
    struct view_member *member;        /* ascending id */
    struct view_shard *shard;
};

struct view *view_create(uint32_t nservers, uint32_t nmembers, uint32_t nshards);   /* zeroed */
struct view *view_copy(const struct view *v);
void view_free(struct view *v);                                   /* NULL is fine */
const struct view_server *view_server_find(const struct view *v, uint64_t id);   /* NULL: none */
const struct view_member *view_member_find(const struct view *v, uint64_t id);
/* Is this id a server, or a member that has not left? ("in my view") */
bool view_lists(const struct view *v, uint64_t id);
static inline bool view_member_in(const struct view_member *m, int64_t step)
{
    return m->join <= step && step <= m->last;
}
struct mode view_mode_at(const struct view *v, int64_t step);
/* Live ranks in id order: rank of the first rank of member `id`, or -1. */
int64_t view_rank(const struct view *v, uint64_t id);
uint32_t view_size(const struct view *v);

/* Placement: every process computes it alone. */
static inline uint32_t shard_of(uint64_t tensor, uint32_t chunk, uint32_t nshards)
{
    return (uint32_t)((tensor + chunk) % nshards);
}
static inline uint32_t loop_of(uint32_t shard, uint32_t nloops)
{
    return shard % nloops;
}
/* The server and address that serve a shard now; NULL when its primary is not listed. */
const struct view_server *view_primary(const struct view *v, uint32_t shard, const char **ret_loop_addr);

#endif
