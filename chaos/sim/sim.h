/* sim.h - a whole Keepstep cluster in one process, in virtual time, under one seed.
 *
 * The unmodified cores (ctl_core, shard_core, client_core) run in modelled processes: a server is one control core
 * and one or two loops, each with a pool and a modelled disk; a member is a client core, a host and a small
 * application. Everything between them goes through pipes (FIFO, delayed) over links that break; the coordination
 * store is coord_model. Nothing here reads a clock or libc's random: the same seed and the same muted faults give
 * the same run.
 *
 *   world.c        time, the run, the end of the run       net_model.c   pipes, links, breaks, partitions
 *   config.c       what the seed draws                     coord_host.c  the store as processes see it
 *   server_proc.c  a server process: its effects           server_loop.c its loops and disks
 *   member_proc.c  a member's host                         app.c         a member's application
 *   faults.c       numbered faults                         check_*.c     the invariants
 *   server_link.c  a server's data connections
 *   mutants.c      guards taken out, one at a time         main.c        command line, shrinking
 *   script.h       told step by step, for tests/scenario */
#ifndef SIM_SIM_H
#define SIM_SIM_H

#include "base/buf.h"
#include "base/rng.h"
#include "coord/coord.h"
#include "server/ctl_core.h"
#include "server/shard_core.h"
#include "storage/store.h"
#include "worker/client_core.h"

enum {
    SIM_PROCS_MAX = 200,
    SIM_SERVERS_MAX = 5,       /* at the start */
    SIM_MACHINES_MAX = 8,      /* with those that come later */
    SIM_LOOPS_MAX = 2,
    SIM_MEMBERS_MAX = 20,      /* lives; bounded by the counters in a value (check_value.c) */
    SIM_TENSORS_MAX = 4,
    SIM_CHUNKS_MAX = 12,       /* over all tensors */
    SIM_STEPS_MAX = 512,
    SIM_STEP_LAST = SIM_STEPS_MAX - 16,   /* applications stop there at the latest */
    SIM_FAULTS_MAX = 40,
    SIM_PARTITIONS_MAX = 16,
    SIM_LEASES_MAX = 512,
    SIM_CHUNK_BYTES = 64,
    SIM_WHY = 400,
};
#define SIM_MS 1000ull          /* microseconds */

struct world;
struct proc;
struct link;
struct op;

/* ---- statistics: what happened, so that coverage shows ---- */
#define SIM_COUNTERS(X)                                                                                                \
    X(events) X(frames) X(views) X(prepares) X(faults) X(kills) X(restarts) X(server_fenced) X(member_fenced)         \
    X(member_kills) X(pauses) X(breaks) X(partitions) X(joins) X(leaves) X(suspicions) X(mode_changes) X(outages)     \
    X(store_cuts) X(leases_lost) X(cas_applied) X(cas_refused) X(cas_answer_lost) X(cas_request_lost) X(cas_late)     \
    X(resyncs) X(commits) X(batches_lost) X(batches_kept) X(reopened) X(parked_abandoned) X(half_frames)              \
    X(steps_finished) X(values_checked) X(pushes_acked) X(joined_under_fault) X(refused) X(closed_by_core)            \
    X(docs_coded) X(stalls) X(heirs) X(elections)                                                                      \
    X(images) X(gradients) X(images_again) X(marks) X(haves) X(sync_ends) X(holders_checked) X(failovers)              \
    X(machines_lost) X(disks_lost) X(machines_new) X(backups_lost) X(backups_made) X(moved) X(drains) X(lost)          \
    X(lost_suspected) X(backups_compared)

struct sim_stats {
#define SIM_X(name) uint64_t name;
    SIM_COUNTERS(SIM_X)
#undef SIM_X
};

/* ---- messages and pipes ---- */
enum msg_kind {
    MSG_UP = 1, MSG_DOWN,          /* the connection opened, closed */
    MSG_FRAME,                     /* header + payload */
    MSG_SPEC,                      /* FRAME_DECLARE: header + spec */
    MSG_CTL,                       /* a control frame: ctl_kind and what belongs to it */
    MSG_LOOP_PREPARE, MSG_LOOP_ADOPT, MSG_LOOP_HEIR,         /* control thread -> loop */
    MSG_COORD,
};
struct msg {
    struct msg *next;
    uint64_t at;
    enum msg_kind kind;
    enum ctl_event_kind ctl_kind;
    struct frame_header header;
    struct buf *buf;               /* the payload still in its sender's buffers (one reference each) ... */
    struct buf *more[2];
    uint32_t offset;
    uint64_t sum;                  /* ... and its hash when it was sent */
    uint8_t *bytes;                /* or a copy of its own */
    bool half;                     /* header arrived: */
    struct buf *sunk;              /*   server: where the payload goes */
    void *sink;                    /*   member: likewise */
    uint64_t from, id;
    int64_t step;
    uint32_t loop, shard;
    bool is_server;
    struct view *view;
    struct prepare *prepare;
    struct report *report;
    struct join_doc *join;
    struct tensor_spec *spec;
    struct coord_event *coord;
    struct mode mode;
};
struct pipe {
    struct proc *to;
    struct msg *head, *tail, *half;
    uint64_t last;                 /* nothing may arrive before it: FIFO */
    bool armed;
    /* true: only the header has arrived; the message stays in front and comes again. */
    bool (*deliver)(struct world *w, struct pipe *p, struct msg *m);
    void *owner;
    uint32_t loop;
};
struct msg *msg_new(struct world *w, enum msg_kind kind);
void msg_free(struct world *w, struct msg *m);
void msg_detach(struct msg *m);    /* its sender's memory goes away: copy the payload */
uint64_t msg_sum(const struct msg *m);
void msg_payload(const struct msg *m, uint8_t *out);
void pipe_init(struct pipe *p, struct proc *to, void *owner,
               bool (*deliver)(struct world *, struct pipe *, struct msg *));
void pipe_push(struct world *w, struct pipe *p, struct msg *m, uint64_t delay);
void pipe_clear(struct world *w, struct pipe *p);

/* ---- links: one TCP connection that its connector keeps up ---- */
struct link {
    struct link *next;
    struct proc *connector, *listener;
    bool control;
    uint32_t loop;
    bool between;                  /* data between loops of two servers: */
    uint32_t connector_loop;       /*   the connector's */
    bool wanted, broken, gone;
    bool connector_up, listener_up;
    uint64_t stalled_to_connector, stalled_to_listener;   /* nothing arrives before; no end notices */
    struct pipe to_connector, to_listener;
};
struct link *link_want(struct world *w, struct proc *connector, struct proc *listener, bool control, uint32_t loop);
struct link *link_find(struct proc *p, uint64_t peer, bool control, uint32_t loop);
/* Between loops of servers: p's `own` and the peer's `loop`; outgoing: p is the connector. */
struct link *link_want_between(struct world *w, struct proc *p, uint32_t own, struct proc *peer, uint32_t loop);
struct link *link_find_between(struct proc *p, uint32_t own, uint64_t peer, uint32_t loop, bool outgoing);
static inline uint32_t link_loop(const struct link *l, const struct proc *of)
{
    return l->between && of == l->connector ? l->connector_loop : l->loop;
}
/* Takes m. Dropped when there is no connection. */
void link_send(struct world *w, struct link *l, struct proc *from, struct msg *m);
void link_break(struct world *w, struct link *l);
void link_stall(struct world *w, struct link *l, bool to_connector, uint64_t until);
void link_close(struct world *w, struct link *l, struct proc *by);   /* what was sent before still arrives */
void links_close_between(struct world *w, struct proc *by, uint64_t peer);
void links_kill(struct world *w, struct proc *p);
void links_break_later(struct world *w, struct proc *p, uint64_t delay);
bool net_blocked(const struct world *w, const struct proc *from, const struct proc *to, uint64_t *ret_until);
void net_partition(struct world *w, struct proc *a, struct proc *b, bool both, uint64_t until);
uint64_t net_delay(struct world *w);

/* ---- processes ---- */
enum proc_kind { PROC_SERVER = 1, PROC_MEMBER, PROC_STORE };

struct held {                      /* buffers that a queued disk batch reads */
    struct held *next;
    uint64_t seq;
    struct buf *buf[4];
};
struct sim_loop {
    struct shard_core *core;
    struct pool *pool;
    struct store *store;
    struct shard_outbox out;
    struct pipe in;                /* from the control thread */
    struct view *view;             /* that the core adopted */
    struct held *held, **held_tail;
    bool commit_armed;
    uint64_t reopened;
};
struct machine {
    uint32_t index, nloops;
    uint32_t disks;                /* how often its data went away */
    bool gone;                     /* it never comes back */
    bool draining;
    struct store_model_disk *disk[SIM_LOOPS_MAX];
    uint64_t life[SIM_PROCS_MAX];  /* lives that opened these disks, oldest first (the host keeps a note) */
    uint32_t nlives, starts;
    struct proc *proc;             /* NULL: down */
    bool restart_pending;
};
struct server {
    struct machine *machine;
    struct ctl_core *ctl;
    struct ctl_outbox out;
    struct sim_loop loop[SIM_LOOPS_MAX];
    struct pipe to_ctl;            /* from loops, and frames to itself */
    uint64_t timer_at;
    uint32_t ticks_here;           /* ticks at the same time */
    uint64_t ticked_at;
    const char *exit_why;          /* fenced or ended: the process ends after this event */
};
enum app_phase { APP_NEW, APP_DECLARE, APP_INIT, APP_READY, APP_PULL, APP_PUSH, APP_END, APP_IDLE, APP_LEAVING, APP_LEFT };
struct op {
    struct op *next;
    uint64_t id;
    enum client_event_kind kind;
    uint32_t tensor, seq;          /* index; number of the push of this tensor by this life */
    int64_t step;
    uint8_t *in, *out;
    bool counted;                  /* the application's step waits for it */
};
struct member {
    uint32_t index;
    struct client_core *core;
    struct client_outbox out;
    struct link *control;
    uint64_t leader;
    bool listed, started, leave_sent;
    int64_t leave_step;
    enum app_phase phase;
    struct op *ops;
    uint32_t nops, waiting;        /* all; of the current step */
    uint32_t tensor[SIM_TENSORS_MAX];
    uint32_t ndeclared, next_push;
    uint32_t speed_us;
    int64_t step;
    bool want_leave;
    const char *exit_why;
};
struct proc {
    uint32_t index;
    enum proc_kind kind;
    uint64_t id;
    char name[24];
    bool alive;
    uint64_t paused_until;
    struct link **links;
    uint32_t nlinks, links_cap;
    struct server *server;
    struct member *member;
    /* its client of the coordination store */
    struct pipe coord_answers, coord_watch;
    bool watching, told_unreachable;
    int64_t watch_revision;
    uint64_t store_cut_until, unreachable_count;
    bool listed, unlisted;         /* in a committed view once; not any more */
    bool lost;                     /* a server whose data nothing brings back */
    bool faulted;                  /* something happened to it for which others may take it for dead */
};

/* ---- configuration drawn from the seed ---- */
struct sim_tensor {
    struct tensor_spec spec;
    uint32_t nchunks, first;       /* index of its chunk 0 among all chunks */
};
struct sim_config {
    uint32_t nservers, nloops, nmembers, nshards, ntensors, nchunks;
    uint32_t replicas;
    bool mixed_loops;              /* servers with one loop and with two */
    bool durable, deterministic, floats, many_pushes;
    struct mode mode;
    bool mode_changes;             /* the seed changes the mode */
    bool steps_bounded;
    uint32_t delay_us, disk_us, compute_us, lease_ms, suspect_ms, batch_ms, report_ms;
    struct sim_tensor tensor[SIM_TENSORS_MAX];
    uint64_t faults_from, faults_span;
    uint32_t nfaults;
};
struct sim_options {
    uint64_t seed;
    int verbose;                   /* 1: what happens, 2: every frame */
    uint32_t servers, mode;        /* 0: the seed's choice */
    uint32_t replicas;             /* 1 + R; 0: the seed's choice */
    bool muted[SIM_FAULTS_MAX];
    bool quiet_net;                /* scenarios: no faults, no losses but those scripted */
    const struct sim_config *config;   /* scenarios: this one instead of the seed's */
};

/* ---- checkers' memory ---- */
struct known_member {
    uint64_t id, first_epoch, gone_epoch;     /* gone: first committed view that lists it as not live; 0: live */
    int64_t join, last;
    bool listed, live;
    int64_t ended;                            /* highest step that its application ended */
    uint32_t pushed[SIM_TENSORS_MAX];         /* pushes so far */
    uint32_t acked[SIM_TENSORS_MAX];
    uint32_t seen[SIM_CHUNKS_MAX][SIM_MEMBERS_MAX];   /* async: newest counts that this member was shown */
    int64_t *stamp[SIM_TENSORS_MAX];          /* step of push 1, 2, ... */
    int64_t *sum[SIM_CHUNKS_MAX];             /* of element 0 over pushes 1 .. q */
    uint32_t stamp_cap[SIM_TENSORS_MAX];
};
struct history {
    int64_t finished, known;                  /* highest step finished; sets are known up to */
    uint32_t set[SIM_STEPS_MAX];              /* bits of member indexes */
    struct mode mode[SIM_STEPS_MAX];          /* views forget those of steps long past */
    uint16_t until[SIM_STEPS_MAX][SIM_MEMBERS_MAX];  /* 1 + last step <= k whose set holds the member */
    uint64_t seen[SIM_CHUNKS_MAX][SIM_STEPS_MAX];    /* hash of the value after a step, 0: not seen */
    float *reference[SIM_STEPS_MAX];          /* floats: values after a step, 16 a chunk */
    double rate[SIM_STEPS_MAX];
    int64_t references;                       /* highest step that has one */
    struct known_member member[SIM_MEMBERS_MAX];
};

/* One version of a chunk, wherever it was seen: it has the same bytes everywhere. */
struct seen_version {
    int64_t step;
    uint64_t version, hash;        /* version 0: free */
    const struct proc *at;
};
enum { SIM_VERSIONS = 128 };       /* the newest of each chunk */

struct event;
struct partition {
    uint64_t a, b;                 /* frames from a to b wait */
    uint64_t until;
};
struct lease {
    int64_t id;
    struct proc *owner;
    uint32_t ttl_ms;
    bool live;
};
enum fault_kind {
    FAULT_KILL_SERVER, FAULT_PAUSE_SERVER, FAULT_KILL_MEMBER, FAULT_PAUSE_MEMBER, FAULT_BREAK, FAULT_JOIN, FAULT_LEAVE,
    FAULT_SUSPECT_MEMBER, FAULT_SUSPECT_SERVER, FAULT_PARTITION, FAULT_OUTAGE, FAULT_STORE_CUT, FAULT_RESYNC,
    FAULT_MODE, FAULT_SLOW_DISK, FAULT_KILL_LEADER, FAULT_PAUSE_LEADER, FAULT_LOSE_CAS_ANSWER, FAULT_LATE_CAS,
    FAULT_STALL, FAULT_STALL_LEADER, FAULT_LOSE_SERVER, FAULT_EMPTY_SERVER, FAULT_NEW_SERVER, FAULT_DRAIN,
    FAULT_KINDS
};
enum fault_trigger { TRIGGER_TIME, TRIGGER_CAS, TRIGGER_PREPARE, TRIGGER_COMMIT, TRIGGER_RESULT, TRIGGER_COMPLETE,
                     TRIGGER_ADOPT, TRIGGERS };
struct fault {
    enum fault_kind kind;
    enum fault_trigger trigger;
    uint64_t at;
    bool done;
    struct proc *at_proc;          /* where its moment came; NULL: anywhere */
    struct rng rng;                /* its own, so that muting one fault does not change another */
};

struct world {
    struct sim_options opt;
    struct sim_config cfg;
    struct job_doc job;
    struct rng rng;
    uint64_t now, digest, seq;
    struct event *heap;
    uint32_t nheap, heap_cap;
    struct msg *msg_free;
    struct proc *proc[SIM_PROCS_MAX], *store_proc;
    uint32_t nprocs, nmembers;
    uint64_t next_id, next_op;
    struct machine machine[SIM_MACHINES_MAX];
    uint32_t nmachines;
    struct link *links;
    struct partition partition[SIM_PARTITIONS_MAX];
    uint32_t npartitions;
    /* the store */
    struct coord_model *coord;
    int64_t coord_seen;            /* changes up to this revision were looked at */
    uint64_t store_down_until, disk_slow_until;
    struct lease lease[SIM_LEASES_MAX];
    uint32_t nleases;
    struct view *view;             /* newest committed */
    uint64_t leader;               /* id, from "leader" */
    bool lose_next_cas_answer, delay_next_cas;
    /* faults */
    struct fault fault[SIM_FAULTS_MAX];
    uint32_t nfaults;
    struct fault *armed[TRIGGERS];
    uint32_t moments[TRIGGERS];    /* how often each came, */
    struct proc *moment_of[TRIGGERS];   /* and where the last time */
    bool calm;
    uint64_t calm_at, quiet_since;
    int64_t target;                /* applications stop when their step reaches it */
    struct history history;
    struct seen_version *seen[SIM_CHUNKS_MAX];
    uint32_t nseen[SIM_CHUNKS_MAX];
    struct sim_stats stats;
    bool failed;
    bool lost;                     /* nothing holds some shard any more, and that is what the faults did */
    char why[SIM_WHY];
};

/* ---- what became of a run ---- */
struct sim_result {
    bool failed;
    char why[SIM_WHY];
    uint64_t at_us, digest;
    uint32_t nfaults;
};

/* ---- world.c ---- */
typedef void event_fn(struct world *w, void *arg, uint64_t n);
/* Runs fn at `at` (or now); waits while `who` is paused, never comes when it is dead. NULL: always. */
void world_at(struct world *w, uint64_t at, struct proc *who, event_fn *fn, void *arg, uint64_t n);
struct world *world_create(const struct sim_options *o);
void world_free(struct world *w);
/* One event. false: nothing left, or the run failed. */
bool world_step(struct world *w);
void world_run(struct world *w);                 /* with the seed's faults, to the end, with all checks */
void world_run_out(struct world *w);             /* from here on: until calm and everybody is through, then the last checks */
void world_calm(struct world *w);                /* faults stop: everything heals */
bool world_idle(const struct world *w);          /* every live member is at the target */
void world_end(struct world *w);                 /* everybody stops */
void world_target_raise(struct world *w);         /* a view let somebody join beyond it: the others go on until there */
void world_fail(struct world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
void world_note(struct world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
struct proc *world_proc(const struct world *w, uint64_t id);
struct proc *proc_new(struct world *w, enum proc_kind kind, const char *name);
void proc_pause(struct world *w, struct proc *p, uint64_t duration);
void proc_resume(struct world *w, struct proc *p);
/* Runs one seed under the CHECK hook. */
void sim_run(const struct sim_options *o, struct sim_stats *ret_stats, struct sim_result *ret);

/* ---- config.c ---- */
void config_draw(struct world *w);
void config_tensors(struct sim_config *c, struct rng *r);

/* ---- coord_host.c ---- */
void store_submit(struct world *w, struct proc *p, const struct coord_request *r);
void store_watch(struct world *w, struct proc *p, int64_t revision);
void store_owner_unreachable(struct world *w, struct proc *p);
void store_owner_back(struct world *w, struct proc *p);
void store_down(struct world *w, uint64_t until);
void store_cut(struct world *w, struct proc *p, uint64_t until);
void store_resync(struct world *w, struct proc *p);
void store_request_arrived(struct world *w, void *arg, uint64_t n);   /* an event's function and its argument, */
void store_request_free(void *request);                                  /* so that a world can be freed */
bool store_reachable(const struct world *w, const struct proc *p);

/* ---- server_proc.c, server_loop.c ---- */
void server_start(struct world *w, struct machine *m);
void server_kill(struct world *w, struct proc *p, const char *why);
void server_restart_later(struct world *w, struct machine *m, uint64_t delay);
enum server_end { END_RETURNS, END_EMPTY, END_FOR_GOOD, END_OF_RUN };
void server_end(struct world *w, struct proc *p, const char *why, enum server_end how);
struct machine *machine_new(struct world *w);   /* NULL: no room */
void server_event(struct world *w, struct proc *p, struct ctl_event *e);
void server_message(struct world *w, struct proc *p, struct msg *m);
void server_link_up(struct world *w, struct proc *p, struct link *l);
void server_link_down(struct world *w, struct proc *p, struct link *l);
void loop_open(struct world *w, struct proc *p, uint32_t index, uint64_t heir_of);
void loop_close(struct world *w, struct proc *p, uint32_t index);
void loop_event(struct world *w, struct proc *p, uint32_t index, struct shard_event *e);
void loop_link_up(struct world *w, struct proc *p, const struct link *l);
bool loop_frame(struct world *w, struct proc *p, const struct link *l, struct msg *m);
void loop_adopt(struct world *w, struct proc *p, uint32_t index, const struct view *v);
bool loop_deliver(struct world *w, struct pipe *pipe, struct msg *m);
void loop_half_abandon(struct msg *m);
void pools_drop(void);                           /* frees the cache of pools */
void pools_forget(void);                         /* after a failed run: their buffers are lost */

/* ---- server_link.c: data connections of a server's loops ---- */
bool view_shard_names(const struct view_shard *s, uint64_t id);      /* as backup or joining */
struct link *loop_link_of(struct proc *p, uint32_t index, const struct shard_effect *e);   /* that a frame goes over */
void loop_links_follow(struct world *w, struct proc *p, uint32_t index);   /* as the loop's view wants */
void loop_links_reset(struct world *w, struct proc *p, uint32_t index, uint64_t peer);   /* closed; what is wanted comes again */

/* ---- member_proc.c ---- */
struct proc *member_start(struct world *w);
void member_kill(struct world *w, struct proc *p, const char *why);
void member_event(struct world *w, struct proc *p, struct client_event *e);
bool member_frame(struct world *w, struct proc *p, struct link *l, struct msg *m);
void member_control(struct world *w, struct proc *p, struct msg *m);
void member_link_up(struct world *w, struct proc *p, struct link *l);
void member_link_down(struct world *w, struct proc *p, struct link *l);

/* ---- app.c ---- */
void app_begin(struct world *w, struct proc *p);
void app_done(struct world *w, struct proc *p, const struct client_effect *e);
void app_poke(struct world *w, struct proc *p);
void app_free(struct world *w, struct proc *p);
uint32_t app_push_count(const struct world *w, uint32_t member, uint32_t tensor, int64_t step);
double app_rate(const struct world *w, uint32_t member, int64_t step);   /* 0: sets none */

/* ---- faults.c ---- */
void faults_draw(struct world *w);
void faults_start(struct world *w);
void fault_trigger(struct world *w, enum fault_trigger t, struct proc *p);
const char *fault_name(enum fault_kind k);

/* ---- doc_copy.c: copies, some of them through the codecs ---- */
struct view *doc_view(struct world *w, const struct view *v);
struct prepare *doc_prepare(struct world *w, const struct prepare *p);
struct report *doc_report(struct world *w, const struct report *r);
struct tensor_spec *doc_spec(struct world *w, const struct tensor_spec *s);
struct join_doc *doc_join(struct world *w, const struct join_doc *j);
void doc_header(struct world *w, struct frame_header *h);

/* ---- check_value.c: what a value is made of ----
 * Integers: element 0 is a sum of hashes, elements 1 to 4 count the pushes of each member (12 bits each), the rest are
 * multiples of element 0. So a value tells which pushes are in it, and the sums prove it. */
void value_initial(const struct world *w, uint32_t tensor, uint8_t *out);
void value_push(const struct world *w, uint32_t member, uint32_t tensor, uint32_t seq, int64_t step, uint8_t *out);
uint32_t chunk_elements(const struct world *w, uint32_t tensor, uint32_t chunk);
/* Counts of pushes of each member in an integer chunk (of a running value); false: no counts explain it, and the
 * run has failed. */
bool value_explain(struct world *w, const char *who, uint32_t tensor, uint32_t chunk, const uint8_t *bytes,
                   uint32_t *ret_counts);
/* The sum of the pushes that carry this step, of the members in `set`. */
void value_step_sum(const struct world *w, uint32_t tensor, uint32_t chunk, int64_t step, uint32_t set, uint8_t *out);
uint32_t pushes_until(const struct world *w, uint32_t member, uint32_t tensor, int64_t step);
void history_pushed(struct world *w, uint32_t member, uint32_t tensor, int64_t step);
/* Floats: the values of all chunks after a step, in member order. The sets up to it are known. */
const float *history_reference(struct world *w, int64_t step);

/* ---- check_view.c: committed views, sets of finished steps ---- */
void check_view(struct world *w, const struct view *v);
void check_ended(struct world *w, uint32_t member, int64_t step);
void history_finish(struct world *w, const struct view *v, const char *who, int64_t step);
int member_index(const struct world *w, uint64_t id);     /* -1: no such life */
struct mode check_mode(const struct world *w, const struct proc *p, int64_t step);   /* that p is in step under */

/* ---- check_holders.c: replication ---- */
struct proc *shard_server(const struct world *w, uint64_t id, uint32_t shard, struct sim_loop **ret_loop);   /* NULL: dead */
/* A frame leaves a primary: every backup of its view holds what it says (I2). */
/* The version of a chunk that p has now, against what others had under the same number. */
void check_version(struct world *w, const struct proc *p, uint32_t loop, const struct frame_header *h);
void check_released(struct world *w, struct proc *p, uint32_t loop, const struct shard_effect *e);
void check_backups(struct world *w);             /* at the end: equal to their primaries, bit for bit */
bool replicas_restored(const struct world *w);
bool shard_lost(const struct world *w, bool suspected_too);

/* ---- check_sync.c, check_async.c: what applications are shown ---- */
void check_sync_finished(struct world *w, struct proc *p, int64_t step);
void check_sync_value(struct world *w, struct proc *p, const struct op *o);
void check_sync_read(struct world *w, struct proc *p, int64_t step);        /* a joiner can begin `step` */
/* The chunk after a finished synchronous step. */
void check_sync_chunk(struct world *w, const char *who, int64_t step, uint32_t tensor, uint32_t chunk, const uint8_t *bytes);
void check_async_value(struct world *w, struct proc *p, const struct op *o);
void check_acked(struct world *w, uint32_t member, uint32_t tensor, uint32_t seq);
void check_final(struct world *w);

/* ---- mutants.c ---- */
int mutants_run(const struct sim_options *o, uint64_t seeds, int only);   /* only: 0 all */

#endif
