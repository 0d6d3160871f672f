/* view_core.h - the controller: one change of the view at a time (docs/PROTOCOL.md "View change"), sans-IO.
 *
 * Runs inside the server that holds the leader key (server/ctl_core.h owns it and does the talking). It is told
 * who wants to join or leave, who is suspected, what is reported and what became of its compare-and-swap; it
 * says whom to send PREPARE and which view to commit. Enforces I8 and its part of I4.
 *
 * A change: collect (a batching delay) -> PREPARE to every server of the base view that is not gone, to heirs, and
 * to members (which are waited for only when mode_change) -> all reports -> next view -> compare-and-swap on
 * (epoch, leadership) -> announce. Silence past report_ms makes a node gone, in a new round.
 *
 * A server that is gone and whose shards nobody else holds is waited for: the change stands still (phase
 * VIEW_WAITING) until an heir (a new life of the same data directory) registers, or wait_for_server_ms is over;
 * then the job ends with a reason. Others that hold them are committed backups, heirs of backups, and joiners that have
 * everything; where there are any, the change proceeds at once.
 *
 * The controller also plans by itself, from the view alone, so that the next controller goes on where this one stopped:
 * it replaces lost backups, evens out what servers hold when some join, and empties servers that are drained. A shard
 * moves in steps: joining -> backup (its primary says that it is synced) -> primary (named in PREPARE). */
#ifndef COORD_VIEW_CORE_H
#define COORD_VIEW_CORE_H

#include "wire/doc.h"

struct view_config {
    uint64_t self;
    struct job_doc job;
    uint32_t batch_ms, report_ms, wait_for_server_ms;   /* 0: 20, 1000, job.wait_for_server_s * 1000 (0: for ever) */
};
struct view_core;
struct view_core *view_core_create(const struct view_config *c);
void view_core_free(struct view_core *v);

enum view_event_kind {
    VIEW_ELECTED = 1,   /* term, view (NULL: the job has none yet): start over, always run one change */
    VIEW_DEPOSED,       /* leadership lost: forget the change that runs */
    VIEW_SERVER,        /* a server is registered: server (id, addresses, heir_of) */
    VIEW_SERVER_GONE,   /* its registration is gone (id) */
    VIEW_JOIN,          /* a member wants in: join */
    VIEW_LEAVE,         /* member id finished `step` and leaves */
    VIEW_SUSPECT,       /* node id is dead or cut off: text says why. The caller has checked. */
    VIEW_MODE,          /* mode: from mode.from on, or later if that is too early */
    VIEW_REPORT,        /* report */
    VIEW_CAS_DONE,      /* ok: written. !ok: certainly not written, somebody else's view or leader stands */
    VIEW_CAS_UNKNOWN,   /* the answer was lost: the caller has asked the store; `view` is what stands there now */
    VIEW_ADOPTED,       /* this process adopted `view` */
    VIEW_END,           /* operator: end the job; text */
    VIEW_DRAIN,         /* server id is to hold nothing, and to be listed no more once it does. Lasts as long as this
                           process leads: who wants it tells every new leader. */
    VIEW_REBALANCE,     /* operator: run a change now, whether or not the plan asks for one */
    VIEW_SYNCED,        /* the primary of `shard` says that joiner id has everything */
    VIEW_TICK,          /* time has passed; at least when view_core_deadline says */
};
struct view_event {
    enum view_event_kind kind;
    uint64_t now_us;
    uint64_t id, term;
    uint32_t shard;
    int64_t step;
    const struct view *view;
    const struct server_doc *server;
    const struct join_doc *join;
    const struct report *report;
    struct mode mode;
    bool ok;
    const char *text;
};
enum view_effect_kind {
    VIEW_SEND_PREPARE = 1,   /* prepare to node `to` (may be self) */
    VIEW_CAS,                /* write `view`: guarded by the base epoch's record and by the leadership of view->term */
    VIEW_ANNOUNCE,           /* `view` is committed and adopted here: tell every node of it and of its base */
};
struct view_effect {
    enum view_effect_kind kind;
    uint64_t to;
    const struct prepare *prepare;    /* owned by the core until the next step */
    const struct view *view;          /* likewise */
};
struct view_outbox {
    struct view_effect *effect;
    uint32_t n, cap;
};
void view_outbox_done(struct view_outbox *o);
void view_core_step(struct view_core *v, const struct view_event *e, struct view_outbox *out);
/* When VIEW_TICK is wanted at the latest (microseconds), or UINT64_MAX. */
uint64_t view_core_deadline(const struct view_core *v);
/* One line for status and logs: "collecting 12 ms", "waiting 4.2 s for server s1 (shards 0, 2, ...)", "idle". */
void view_core_describe(const struct view_core *v, uint64_t now_us, char *out, size_t size);
bool view_core_draining(const struct view_core *v, uint64_t id);
/* The server whose return is waited for (0: none), and since when. */
uint64_t view_core_waiting_for(const struct view_core *v, uint64_t *ret_since_us);
/* Was this life listed (servers, live members) by a view that this process adopted, and left out by a later one?
 * The newest 4096 are known. Such a life is never listed again. */
bool view_core_removed(const struct view_core *v, uint64_t id);

#endif
