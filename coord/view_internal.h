/* view_internal.h - what the files of the controller share: view_core.c (events, phases), view_nodes.c
 * (who is there), view_holders.c (who else holds a shard), view_change.c (PREPARE, reports, silence), view_next.c (the
 * views that are proposed), view_rules.c (what becomes of each shard), view_place.c (where holders go), view_text.c
 * (description), view_log.c (the log of a change). */
#ifndef COORD_VIEW_INTERNAL_H
#define COORD_VIEW_INTERNAL_H

#include "coord/view_core.h"

/* LATE_US: a deadline that this process passes by so much finds it had stood still: what others said may wait unread. */
enum { LATE_US = 50000, VIEW_REMOVED_MAX = 4096, ENDED_TEXT = sizeof ((struct view *)0)->ended };

enum view_phase {
    PHASE_OFF,        /* not leading */
    PHASE_FIRST,      /* no view yet: servers_min servers are waited for */
    PHASE_IDLE,
    PHASE_COLLECT,    /* something is wanted; others may want something in the same moment */
    PHASE_PREPARE,    /* PREPARE is out, reports are awaited */
    PHASE_WAIT,       /* a dead server's shards have no other holder */
    PHASE_CAS,        /* `next` is with the store */
    PHASE_ADOPT,      /* `next` is committed; this process must adopt it before anybody hears of it */
    PHASE_ENDED,
};

/* A server that the store has registered. */
struct registered {
    struct server_doc doc;
    bool down;              /* suspected while no view lists it */
};
/* A node of the base view that is dead, cut off or silent. */
struct away {
    uint64_t id, since_us;
    bool suspect;           /* goes with the next PREPARE; else only silent, and nobody else holds its shards */
    bool named;             /* a PREPARE that was sent calls it gone: others have cut it off */
    bool back;              /* it has shown itself since then */
};
struct leaving {
    uint64_t id;
    int64_t step;
};
/* A report, with shards by index. */
struct answer {
    uint64_t id;
    int64_t clock;
    int64_t join_min, join_max;   /* over its shards; join_max -1: none */
    struct shard_report *shard;   /* nshards, by number; role 0: not reported */
};
/* What is known of a joiner of the base view. */
struct syncing {
    uint32_t shard;
    uint64_t id;
    bool full;                    /* it has everything; else it has said that it has not */
    bool news;                    /* no change has made it a backup yet */
};
enum { MOVES_MAX = 16 };          /* shards that move in one change, so that it stays short */

struct view_core {
    struct view_config cfg;
    enum view_phase phase;
    uint64_t now_us, due_us;      /* due: of the phase; UINT64_MAX: none */
    uint64_t grace_us;            /* nobody counts as silent before */
    uint64_t term, round;
    bool force;                   /* newly elected: one change in any case */
    struct view *base, *next;
    struct prepare *prepare;      /* of the running change */
    uint32_t nanswers, answers_cap;
    struct answer *answer;
    uint32_t nservers, servers_cap;
    struct registered *server;    /* ascending id */
    uint32_t naway, away_cap;
    struct away *away;
    uint32_t njoins, joins_cap;
    struct join_doc *join;        /* ascending id */
    uint32_t nleaving, leaving_cap;
    struct leaving *leaving;
    uint32_t ndrains, drains_cap;
    uint64_t *drain;              /* servers that are to hold nothing */
    uint32_t nsyncing, syncing_cap;
    struct syncing *syncing;
    bool plan_known, plan_wants;  /* does the plan for the base view ask for a change? */
    bool mode_wanted;
    struct mode mode;
    uint64_t began_us, prepared_us, reported_us;   /* of the running change, for the log; 0: not yet */
    int64_t last_step;            /* L of the newest proposal, for the log; -1: none */
    char end[ENDED_TEXT];         /* not empty: the job is to end, and why */
    uint64_t removed[VIEW_REMOVED_MAX];   /* ring of ids that a view listed and a later one did not */
    uint64_t nremoved;
    /* What effects of this step may still point to; freed when the next one begins. */
    uint32_t nold_prepares, old_prepares_cap, nold_views, old_views_cap;
    struct prepare **old_prepare;
    struct view **old_view;
    struct view_outbox *out;
};

/* ---- view_core.c ---- */
void view_core_emit(struct view_core *v, const struct view_effect *e);
void view_core_propose(struct view_core *v, struct view *next);       /* takes the view */
void view_core_retire_prepare(struct view_core *v);

/* ---- view_nodes.c ---- */
void view_nodes_register(struct view_core *v, const struct server_doc *doc);
struct registered *view_nodes_find(const struct view_core *v, uint64_t id);   /* NULL: not registered */
bool view_nodes_usable(const struct view_core *v, const struct registered *r);
/* A node shows that it lives: no longer away. Of those that a PREPARE called gone only where nobody else can go on: the
 * next PREPARE does not name it, and who cut it off lets it connect again. */
void view_nodes_return(struct view_core *v, uint64_t id);
/* Nobody else can go on: takes back those that were named and have shown themselves since. true: there were some. */
bool view_nodes_take_back(struct view_core *v);
void view_nodes_remove(struct view_core *v, uint64_t id);   /* never to be listed again */
struct away *view_nodes_away(const struct view_core *v, uint64_t id);  /* NULL: it is there */
/* Notes that a listed node is away; `suspect` only grows. */
void view_nodes_away_add(struct view_core *v, uint64_t id, bool suspect);
uint32_t view_nodes_room(const struct view_core *v);         /* members that a view can still take */
bool view_nodes_joins_ready(const struct view_core *v);   /* members_min have asked, or had asked once */
bool view_nodes_suspects(const struct view_core *v, uint64_t id);
/* One for the first view: no later life has opened its directory. */
bool view_nodes_starter(const struct view_core *v, const struct registered *r);
/* Registered, not suspected, and to be listed without a report: not the heir of a listed server, unless that is gone in
 * the running change. */
bool view_nodes_newcomer(const struct view_core *v, const struct registered *r);
/* The newest usable life that holds the disk of listed server `id`; 0: none. */
uint64_t view_nodes_heir(const struct view_core *v, uint64_t id);

bool view_nodes_draining(const struct view_core *v, uint64_t id);

/* ---- view_holders.c ---- */
/* Primary or committed backup of some shard? */
bool view_holds_shards(const struct view *b, uint64_t id);
bool view_holds(const struct view_shard *s, uint64_t id);    /* primary or committed backup */
bool view_joining(const struct view_shard *s, uint64_t id);
enum view_standing {
    STANDING_OTHERS,   /* all that it holds is held by others, or by heirs, too: it can go */
    STANDING_MAYBE,    /* by joiners of which nothing is known: their reports tell */
    STANDING_ALONE,
};
/* If server, heir or joiner `id` were gone. answered: only those count that have reported in this round. */
enum view_standing view_holders_standing(const struct view_core *v, uint64_t id, bool answered);
/* Has the shard lost every committed holder, and has no joiner everything? Then heirs are asked. */
bool view_holders_orphan(const struct view_core *v, uint32_t shard);
/* Joiner id has, or says that it has not, everything. news: its primary says so, which makes it a backup. */
void view_holders_note(struct view_core *v, uint32_t shard, uint64_t id, bool full, bool news);
bool view_holders_news(const struct view_core *v);
void view_holders_trim(struct view_core *v);       /* after a new base */
/* Somebody has died or is back: whoever lacked something may have got it since, and is asked again. */
void view_holders_forget(struct view_core *v);

/* ---- view_change.c ---- */
/* A listed server that is gone, has shards, and nobody else has them; NULL: none. */
const struct view_server *view_change_missing(const struct view_core *v);
/* Starts a round: PREPARE to everybody, or PHASE_WAIT when a server is missing. */
void view_change_attempt(struct view_core *v);
/* The running round: commit when all is in, start over when somebody asked has died, act on silence. */
void view_change_run(struct view_core *v);
void view_change_report(struct view_core *v, const struct report *r);
/* Sends the running PREPARE once more to a node that is waited for and is back. */
void view_change_again(struct view_core *v, uint64_t id);
bool view_change_awaits(const struct view_core *v, uint64_t id);
bool view_change_gone(const struct view_core *v, uint64_t id);
bool view_change_heir(const struct view_core *v, uint64_t id, uint64_t *ret_of);
const struct answer *view_change_answer(const struct view_core *v, uint64_t id);
void view_change_clear(struct view_core *v);
/* Ends the job when the wait for `id` is over. */
bool view_change_overdue(struct view_core *v, uint64_t id);

/* ---- view_next.c ---- */
struct view *view_next_first(struct view_core *v);
struct view *view_next_commit(struct view_core *v);      /* NULL: somebody's shard has no holder any more */
struct view *view_next_ended(struct view_core *v);
void view_next_servers(const struct view_core *v, struct view *next);

/* ---- view_rules.c ---- */
/* A shard while its next holders are being worked out: more than a view can list. */
struct holding {
    uint64_t primary;                        /* 0: nobody holds it any more */
    uint32_t nbackups, njoining;
    uint64_t backup[2 * BACKUPS_MAX + 1], joining[BACKUPS_MAX];
};
/* What the reports and the PREPARE make of it, before anything is dropped or added. `primaries`: how much each server of
 * `next` leads, by index, to choose the least busy. */
void view_rules_shard(const struct view_core *v, const struct view *next, uint32_t shard, const uint64_t *primaries,
                      struct holding *ret);
/* `c`: what the next primary has reported; false: it has not. */
bool view_rules_complete(const struct view_core *v, const struct view *next, uint32_t shard, int64_t *ret_complete);

/* ---- view_place.c ---- */
void view_place_first(struct view_core *v, struct view *next);    /* shards of the first view */
/* Shards of the next view. false: one has no holder any more. */
bool view_place_shards(const struct view_core *v, struct view *next);
void view_place_moves(const struct view_core *v, struct prepare *p);
bool view_place_wanted(struct view_core *v);

/* ---- view_log.c ---- */
void view_log_suspect(struct view_core *v, uint64_t id, const char *cause);
void view_log_prepare(struct view_core *v);
void view_log_reports(struct view_core *v);
void view_log_commit(struct view_core *v, const struct view *next);    /* before it takes the place of the base */

/* ---- view_text.c ---- */
/* "server NAME (shards 0, 2, ...)" */
void view_text_server(const struct view *b, uint64_t id, char *out, size_t size);

#endif
