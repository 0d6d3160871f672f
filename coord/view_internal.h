/* view_internal.h - what the files of the controller share: view_core.c (events, phases), view_nodes.c
 * (who is there), view_change.c (PREPARE, reports, silence), view_next.c (the views that are proposed), view_text.c
 * (description). */
#ifndef COORD_VIEW_INTERNAL_H
#define COORD_VIEW_INTERNAL_H

#include "coord/view_core.h"

enum { VIEW_REMOVED_MAX = 4096, ENDED_TEXT = sizeof ((struct view *)0)->ended };

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
    bool named;             /* a PREPARE that was sent calls it gone: it cannot come back */
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
    int64_t *complete;            /* nshards; REPORT_NONE: not reported */
};
#define REPORT_NONE INT64_MIN

struct view_core {
    struct view_config cfg;
    enum view_phase phase;
    uint64_t now_us, due_us;      /* due: of the phase; UINT64_MAX: none */
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
    bool mode_wanted;
    struct mode mode;
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
/* A node shows that it lives: no longer away, unless a PREPARE called it gone; others have cut it off then. */
void view_nodes_return(struct view_core *v, uint64_t id);
void view_nodes_remove(struct view_core *v, uint64_t id);   /* never to be listed again */
struct away *view_nodes_away(const struct view_core *v, uint64_t id);  /* NULL: it is there */
/* Notes that a listed node is away; `suspect` only grows. */
void view_nodes_away_add(struct view_core *v, uint64_t id, bool suspect);
uint32_t view_nodes_room(const struct view_core *v);         /* members that a view can still take */
bool view_nodes_joins_ready(const struct view_core *v);   /* members_min have asked, or had asked once */
bool view_nodes_suspects(const struct view_core *v, uint64_t id);
/* One for the first view: no later life has opened its directory. */
bool view_nodes_starter(const struct view_core *v, const struct registered *r);
/* Registered, not suspected, and to be listed without a report: not the heir of a listed server. */
bool view_nodes_newcomer(const struct view_core *v, const struct registered *r);
/* The newest usable life that holds the disk of listed server `id`; 0: none. */
uint64_t view_nodes_heir(const struct view_core *v, uint64_t id);

/* ---- view_change.c ---- */
bool view_holds_shards(const struct view *b, uint64_t id);
/* A listed server that is gone, has shards, and has no heir; NULL: none. */
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
struct view *view_next_commit(struct view_core *v);
struct view *view_next_ended(struct view_core *v);
uint64_t view_next_primary(const struct view_core *v, uint32_t shard);

/* ---- view_text.c ---- */
/* "server NAME (shards 0, 2, ...)" */
void view_text_server(const struct view *b, uint64_t id, char *out, size_t size);

#endif
