/* ctl_internal.h - what the files of a server's control core share: ctl_core.c (events, effects, the controller),
 * ctl_store.c (lease, registration, election, compare-and-swap), ctl_peers.c (connections, suspicion), ctl_view.c
 * (views, PREPARE, reports, what members ask), ctl_tell.c (what every new leader must hear). */
#ifndef SERVER_CTL_INTERNAL_H
#define SERVER_CTL_INTERNAL_H

#include "server/ctl_core.h"

enum ctl_ask { ASK_RANGE, ASK_LEASE, ASK_JOB, ASK_REGISTER, ASK_CAMPAIGN, ASK_CAS, ASK_UNSEAT, ASKS };
enum { ASK_BITS = 3 };      /* of a tag: the kind; the rest counts requests */

/* A node that has, should have or had a control connection with this one. */
struct ctl_peer {
    uint64_t id;
    bool is_server, up;
    bool wanted;                /* CTL_CONNECT is in force */
    bool dead;                  /* its process is gone, for certain */
    bool late;                  /* the leader: it had time to remove this server, should that be the one that is cut off */
    bool lost;                  /* it counted as dead while another server led; the next leader may be this one */
    uint64_t suspect_us;        /* when it counts as dead unless it comes back; UINT64_MAX: never */
};
struct ctl_server {
    struct server_doc doc;
    int64_t revision;           /* of its record */
};
/* The PREPARE that the loops work on. */
struct ctl_prepare {
    bool running;
    uint64_t since_us;
    uint64_t controller, loops; /* loops: bit per loop that has answered */
    struct report report;
    uint32_t cap;
};
/* Memory that effects point to until the next step. */
struct ctl_held {
    void *memory;
    void (*release)(void *memory);
};

/* A joiner that has caught up with a primary of this server, and is not a backup yet. */
struct ctl_synced {
    uint32_t shard;
    uint64_t id;
    struct ballot heard;        /* the newest then: what was reported to it says nothing of this */
};

/* A deadline that this process passes by so much finds it had stood still: who is alive may be waiting unread. */
enum { CTL_LATE_US = 50000 };

struct ctl_core {
    struct ctl_config cfg;
    uint64_t now_us, before_us;               /* of this step and of the one before */
    bool started, fenced, ended, listed;      /* listed: by some view so far */
    struct view *view;                        /* newest committed one that is known */
    struct ballot promised;
    struct ctl_prepare prepare;

    uint64_t asked;                           /* requests so far */
    uint64_t tag[ASKS];                       /* of the request in flight; 0: none */
    uint64_t retry_us;                        /* nothing is asked before */
    bool ranged, want_range, watching;
    int64_t snapshot_revision, seen_revision;
    int64_t lease, registered_lease;          /* registered_lease: what servers/ID is attached to; 0: not there */
    uint64_t registered_heir_of;
    bool register_unsure;                     /* an earlier attempt may have been done */
    bool job_known, view_unreadable;
    int64_t view_revision;                    /* of the store's record; 0: there is none */
    uint64_t stored_epoch;
    uint32_t nservers, servers_cap;
    struct ctl_server *server;                /* registered now; ascending id */
    uint64_t leader;
    int64_t leader_revision, lost_revision;   /* lost: leadership that our lease took with it */

    bool leads;
    struct view_core *controller;             /* for the whole life, once the job is known */
    struct view *cas;                         /* what ASK_CAS writes */
    bool cas_unknown;                         /* what became of it must be looked up */

    bool draining;                            /* this server is to give everything away */
    uint32_t nsynced, synced_cap;
    struct ctl_synced *synced;

    uint32_t npeers, peers_cap;
    struct ctl_peer *peer;
    uint32_t nheld, held_cap;
    struct ctl_held *held;
    const struct prepare *held_prepare;       /* copied for effects in this step */
    struct ctl_outbox *out;
};

/* ---- ctl_core.c ---- */
void ctl_emit(struct ctl_core *c, const struct ctl_effect *e);
/* Keeps memory until the next step begins. */
void ctl_hold(struct ctl_core *c, void *memory, void (*release)(void *));
const struct prepare *ctl_hold_prepare(struct ctl_core *c, const struct prepare *p);
void ctl_controller_step(struct ctl_core *c, const struct view_event *e);
void ctl_controller_open(struct ctl_core *c, const struct job_doc *job);
void ctl_stop(struct ctl_core *c, enum ctl_effect_kind kind, const char *text);

/* Hands what `from` wants on to the leader, unless that is this server or `from` itself. */
void ctl_pass_on(struct ctl_core *c, const struct ctl_event *from, struct ctl_effect e);

/* ---- ctl_store.c ---- */
/* Asks for whatever is missing and not asked yet. */
void ctl_store_pursue(struct ctl_core *c);
void ctl_store_event(struct ctl_core *c, const struct coord_event *e);
void ctl_store_cas(struct ctl_core *c, const struct view *next);
void ctl_store_depose(struct ctl_core *c);
const struct server_doc *ctl_store_server(const struct ctl_core *c, uint64_t id);   /* NULL: not registered */
/* The leader is dead or cut off from here: another election, without waiting for its lease. */
void ctl_store_unseat(struct ctl_core *c);

/* ---- ctl_peers.c ---- */
struct ctl_peer *ctl_peer_find(const struct ctl_core *c, uint64_t id);   /* NULL: unknown */
bool ctl_peer_is_up(const struct ctl_core *c, uint64_t id);
void ctl_peer_up(struct ctl_core *c, const struct ctl_event *e);
void ctl_peer_down(struct ctl_core *c, const struct ctl_event *e);
void ctl_peer_loop_down(struct ctl_core *c, const struct ctl_event *e);
void ctl_peer_dead(struct ctl_core *c, const struct ctl_event *e);
void ctl_peer_suspected(struct ctl_core *c, const struct ctl_event *e);
/* A leader gives every listed node that is not connected some time to come. */
void ctl_peers_watch(struct ctl_core *c);
void ctl_peers_connect(struct ctl_core *c);
void ctl_peers_expire(struct ctl_core *c);
uint64_t ctl_peers_deadline(const struct ctl_core *c);

/* ---- ctl_view.c ---- */
/* A committed view; older ones are ignored. Copies it. */
void ctl_view_take(struct ctl_core *c, const struct view *view);
void ctl_view_prepare(struct ctl_core *c, const struct prepare *p);
void ctl_view_loop_report(struct ctl_core *c, uint32_t loop, const struct report *r);
/* Was this life listed once? Then the view is what it must see. */
bool ctl_view_concerns(const struct ctl_core *c, uint64_t id);

/* ---- ctl_tell.c ---- */
void ctl_tell_drain(struct ctl_core *c, const struct ctl_event *e);
void ctl_tell_loop_synced(struct ctl_core *c, const struct ctl_event *e);
void ctl_tell_synced(struct ctl_core *c, const struct ctl_event *e);
/* To a server that is drained at another's wish, and may not have heard it: so that it tells the next leader. */
void ctl_tell_drained(struct ctl_core *c, uint64_t id);
/* All of it, to a leader that may not have heard it. */
void ctl_tell_leader(struct ctl_core *c);
/* Forgets joiners that the view made backups, or lists no more; the others are told of again. */
void ctl_tell_adopted(struct ctl_core *c);
/* What a loop reports of its joiners replaces what it said before. */
void ctl_tell_reported(struct ctl_core *c, const struct report *r);

#endif
