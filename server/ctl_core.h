/* ctl_core.h - a server's control core: registration, election, views, fencing (docs/PROTOCOL.md), sans-IO.
 *
 * One a process, on the control thread. It owns a view_core while it leads. It talks to the coordination store
 * (requests and events of coord.h), to other servers' and members' control connections, and to this server's
 * loops (shard_core): a PREPARE is answered only when every loop has applied it; a view is adopted by every loop.
 *
 * Store keys: "job" (job_doc), "view" (view), "leader" (server_doc of the leader, on its lease; its create revision
 * is the term), "servers/ID" (server_doc, on the server's lease). */
#ifndef SERVER_CTL_CORE_H
#define SERVER_CTL_CORE_H

#include "coord/coord.h"
#include "coord/view_core.h"

enum { CTL_FORMER_MAX = 16 };

struct ctl_config {
    struct server_doc self;       /* id, name, addresses, heir_of */
    /* Lives that opened this data directory before, oldest first, whether or not a view ever listed them. The newest
     * that the view lists is the one that this life is the heir of, whatever self.heir_of says: a life may have died
     * between its listing and its first note of it. 0: self.heir_of stands. */
    uint32_t nformer;
    uint64_t former[CTL_FORMER_MAX];
    struct job_doc job;           /* to create the job with; an existing job's document wins (checked by the host) */
    uint32_t nloops;
    uint32_t lease_ms;            /* 0: 3000 */
    uint32_t suspect_ms;          /* how long a disconnected node may take to come back before it is gone; 0: 300. Members,
                                     who connect again at once, get half of it. */
    struct view_config view;      /* self and job are filled in by the core */
};
struct ctl_core;
struct ctl_core *ctl_core_create(const struct ctl_config *c);
void ctl_core_free(struct ctl_core *c);

enum ctl_event_kind {
    CTL_START = 1,
    CTL_TICK,               /* at least at ctl_core_deadline */
    CTL_COORD,              /* coord */
    CTL_PEER_UP,            /* control connection with `from` is authenticated; is_server */
    CTL_PEER_DOWN,          /* it closed or fell silent; text. Not for a connection that a newer one replaced. */
    CTL_PEER_DEAD,          /* after that: the host of server `from` answers, and no process listens at its control port */
    CTL_LOOP_PEER_DOWN,     /* a data connection of member `from` closed on some loop */
    CTL_PREPARE, CTL_REPORT, CTL_VIEW, CTL_JOIN, CTL_LEAVE, CTL_SUSPECT, CTL_MODE, CTL_END,   /* frames from `from` */
    CTL_DRAIN,              /* server id is to give everything away and leave; 0: `from`; both 0: this one. Frame, operator,
                               or a signal to this process */
    CTL_SYNCED,             /* frame of server `from`, primary of `shard`: joiner id has everything */
    CTL_LOOP_SYNCED,        /* a loop of this server says so of one of its shards: shard, id */
    CTL_LOOP_REPORT,        /* loop answered LOOPS_PREPARE: ballot, report (shards of this loop) */
    CTL_WANT_VIEW,          /* a loop saw a newer epoch */
};
struct ctl_event {
    enum ctl_event_kind kind;
    uint64_t now_us;
    uint64_t from;
    bool is_server;
    uint32_t loop, shard;
    const struct coord_event *coord;
    const struct prepare *prepare;
    const struct report *report;
    const struct view *view;
    const struct join_doc *join;
    uint64_t id;                  /* SUSPECT: of whom. LEAVE: of whom, when a server passes it on; 0: `from` */
    int64_t step;                 /* LEAVE */
    struct mode mode;
    const char *text;
};
enum ctl_effect_kind {
    CTL_DO_COORD = 1,       /* submit request */
    CTL_DO_WATCH,           /* watch everything from after `revision` */
    CTL_LOOPS_PREPARE,      /* SHARD_PREPARE to every loop: prepare */
    CTL_LOOPS_ADOPT,        /* SHARD_ADOPT to every loop: view. Closes connections of the unlisted. */
    CTL_CONNECT,            /* keep a control connection to server (id, addr), until CTL_DISCONNECT; of two servers
                               the one with the greater id connects */
    CTL_DISCONNECT,         /* close the control and data connections of node `to`; text */
    CTL_SEND_PREPARE, CTL_SEND_REPORT, CTL_SEND_VIEW, CTL_SEND_JOIN, CTL_SEND_LEAVE, CTL_SEND_SUSPECT,
    CTL_SEND_MODE, CTL_SEND_END,   /* to node `to` on its control connection; dropped when there is none */
    CTL_SEND_DRAIN, CTL_SEND_SYNCED,   /* likewise, to server `to`: id, and shard */
    CTL_ADOPTED,            /* the process now runs under `view` (for persisting its life, logs) */
    CTL_FENCED,             /* this life is over: stop, come back as a new one; text */
    CTL_DRAINED,            /* CTL_DRAIN is done: the view lists this life no more and others hold what it held: exit; text */
    CTL_ENDED,              /* the job has ended: exit; text */
    CTL_HEIR_OF,            /* this life is the heir of `id`, not of self.heir_of: shard_core_loaded for every loop */
};
struct ctl_effect {
    enum ctl_effect_kind kind;
    uint64_t to;
    struct coord_request *request;      /* owned by the core until the next step, like all pointers here */
    int64_t revision;
    const struct prepare *prepare;
    const struct report *report;
    const struct view *view;
    const struct join_doc *join;
    uint64_t id;
    uint32_t shard;
    int64_t step;
    struct mode mode;
    char addr[ADDR_MAX_BYTES];
    char text[160];
};
struct ctl_outbox {
    struct ctl_effect *effect;
    uint32_t n, cap;
};
void ctl_outbox_done(struct ctl_outbox *o);
void ctl_core_step(struct ctl_core *c, const struct ctl_event *e, struct ctl_outbox *out);
uint64_t ctl_core_deadline(const struct ctl_core *c);
const struct view *ctl_core_view(const struct ctl_core *c);      /* NULL before the first */
bool ctl_core_leads(const struct ctl_core *c);
const struct view_core *ctl_core_controller(const struct ctl_core *c);   /* NULL when not leading */
uint64_t ctl_core_leader(const struct ctl_core *c);              /* id of the known leader, 0: none */

#endif
