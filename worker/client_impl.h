/* client_impl.h - what the files of client_core share; nobody else includes it.
 *
 * client_core.c    events, the queue between steps, the end of a life
 * client_op.c      operations and effects: records, lists, pools
 * client_view.c    views, preparing, connections, what is sent again and in which order
 * client_declare.c declaring and initialising tensors
 * client_sync.c    one synchronous step, and reading the step before the first one
 * client_async.c   pushes with a sequence number, clocks, pulls (in every mode)
 * client_wait.c    the line that says what is waited for */
#ifndef WORKER_CLIENT_IMPL_H
#define WORKER_CLIENT_IMPL_H

#include "worker/client_core.h"
#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/mutant.h"

enum { CLIENT_RETRY_US = 1000000, CLIENT_STALENESS = 64 };

enum client_phase {
    PHASE_NEW,   /* not in a view yet */
    PHASE_READ,  /* waits until step `read` is complete before it begins `step` */
    PHASE_HELD,  /* between two steps: the mode is being changed */
    PHASE_STEP,  /* operations go out as they come */
    PHASE_ENDED, /* sync: the step is ended and not finished; operations queue */
    PHASE_LEAVING,
    PHASE_OVER,
};

/* One chunk of one operation. An answer of a newer epoch than the view is kept, and counts after the view. */
enum { SLOT_GOT = 1, SLOT_DATA = 2, SLOT_SINK = 4 };
struct client_slot {
    uint32_t epoch;
    int16_t status;
    uint8_t flags;
};

struct client_arena {
    struct client_arena *next;
    _Alignas(16) uint8_t data[];
};

enum init_stage { INIT_CLAIM, INIT_SEND, INIT_FINAL };
struct client_op {
    struct client_op *next, *prev; /* in one list of the client */
    struct client_op *sibling;     /* next async push or pull of the same tensor */
    struct client_op *mate;        /* the push of a pull and the pull of a push: one operation of the host */
    struct client_tensor *t;
    enum client_event_kind kind;
    uint64_t id, since_us;
    const uint8_t *in;
    uint8_t *out;
    struct client_arena *arena; /* where results go while `in` must not change */
    int64_t step;
    uint32_t seq, left; /* left: chunks without an answer (async, pull, init) */
    float weight;
    int status;
    bool sync;
    enum init_stage stage;
    uint64_t grant; /* version of the claim */
    struct setting setting;
    uint32_t nslots;
    struct client_slot slot[];
};
struct client_list {
    struct client_op *head, *tail;
    uint32_t n;
};

enum tensor_state { TENSOR_HOME = 1, TENSOR_OTHERS, TENSOR_READY, TENSOR_FAILED };
struct client_tensor {
    struct tensor_spec spec;
    enum tensor_state state;
    bool initialised;
    uint32_t index, nchunks, stride;
    uint32_t seq; /* newest async push */
    uint64_t bytes;
    struct client_list declares;
    struct client_op *init; /* the one that is under way */
    struct client_op *push; /* sync: this step's */
    struct client_op *apush_head, *apush_tail;
    struct client_op *pull_head, *pull_tail; /* only the head is on the wire */
    struct client_op *spare;
    struct client_arena *spare_arena;
    uint64_t staleness[CLIENT_STALENESS];
};

struct client_loop {
    uint64_t server;
    uint32_t number;
    bool up, tenured;
    bool again;      /* the next DONE asks for what was released */
    bool again_sent; /* ... because a result was lacking: once per connection and view */
    bool lacks;      /* a COMPLETE came without a wanted result */
    bool retry;      /* refused something: send again after a pause */
    int refused_status;
    uint64_t retry_us, down_us;
    uint32_t serves;     /* shards */
    uint32_t generation; /* of its tenure: makes request numbers of DECLARE */
    uint64_t *declared;  /* bit per tensor: it answered in this tenure */
    uint32_t ndeclared;
    uint64_t *done; /* tensors of the DONE that is being made */
    uint32_t ndone, done_cap;
    struct client_op *sink;
    uint32_t sink_chunk;
};
struct client_peer {
    uint64_t id;
    bool listed;
    struct client_loop *loop[LOOPS_MAX];
};
struct client_shard {
    struct client_loop *serve; /* NULL: no server listed */
    uint32_t want;             /* results of this step that are wanted and lacking */
    uint32_t pushed;           /* chunks pushed in this step */
    uint32_t complete_epoch;
    bool complete, counted, tenured;
};

struct client_core {
    struct client_config config;
    struct client_outbox *out;
    uint64_t now_us;

    struct view *view;
    struct ballot promised;
    bool hold;
    struct report report;
    uint64_t want_us;
    bool want_view;
    uint32_t want_epoch;

    struct map peers;
    struct client_loop **loops; /* those that serve shards, by server id and number */
    uint32_t nloops, loops_cap;
    struct client_shard *shard;

    struct map tensor_by_id;
    struct client_tensor **tensor;
    uint32_t ntensors, tensors_cap;

    enum client_phase phase;
    bool started;
    int64_t step, read;
    enum mode_kind mode; /* of `step` */
    uint32_t setver;     /* epoch that last changed set(step) */
    uint32_t ncomplete;
    bool lacks; /* some loop does */
    uint64_t phase_us, read_us;

    struct client_list queue, pushes, apushes, pulls, inits;
    struct client_op *step_op, *leave_op, *spare;
    uint32_t sync_pulls, requests;
    bool done_held;                  /* DONE of the ended step waits for its pulls */
    struct setting *settings, *life; /* of this step; announced with CLOCK in this life */
    uint32_t nsettings, settings_cap, nlife, life_cap;
    bool leave_sent;
    uint64_t leave_us;
    int over_status;
    struct client_stats stats;
};

/* epochs travel as 32 bits: is a newer than b? */
static inline bool epoch_newer(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) > 0;
}
static inline uint32_t client_epoch(const struct client_core *c)
{
    return c->view ? (uint32_t)c->view->epoch : 0;
}
static inline uint32_t client_shard_of(const struct client_core *c, const struct client_tensor *t, uint32_t chunk)
{
    return shard_of(t->spec.id, chunk, c->config.nshards);
}
static inline struct client_loop *client_serves(const struct client_core *c, const struct client_tensor *t,
                                                uint32_t chunk)
{
    return c->shard[client_shard_of(c, t, chunk)].serve;
}
static inline uint32_t client_chunk_bytes(const struct client_core *c, const struct client_tensor *t, uint32_t chunk)
{
    return tensor_chunk_bytes(&t->spec, chunk, c->config.chunk_bytes);
}

/* client_op.c */
struct client_effect *client_emit(struct client_core *c, enum client_effect_kind kind);
/* Drops it when the loop is not up; an owned payload is freed then. */
void client_send(struct client_core *c, const struct client_loop *l, const struct frame_header *h, const void *payload,
                 bool owned);
void client_list_add(struct client_list *l, struct client_op *op);
void client_list_remove(struct client_list *l, struct client_op *op);
struct client_op *client_op_create(struct client_core *c, const struct client_event *e, struct client_tensor *t);
/* A record of the same operation: its pull. */
struct client_op *client_op_twin(struct client_core *c, struct client_op *op);
void client_op_done(struct client_core *c, struct client_op *op, int status, const char *text);
void client_op_arena(struct client_op *op);
uint8_t *client_op_place(const struct client_op *op, uint32_t chunk);
void client_op_free(struct client_core *c, struct client_op *op);
void client_ops_free(struct client_op *op);
void client_tensor_spare_free(struct client_tensor *t);

/* client_core.c */
void client_begin(struct client_core *c);
void client_over(struct client_core *c, int status, enum client_effect_kind last, const char *text);
void client_leave_over(struct client_core *c);
struct client_tensor *client_tensor_get(const struct client_core *c, uint64_t id);

/* client_view.c */
void client_adopt(struct client_core *c, const struct view *v);
void client_prepare(struct client_core *c, const struct prepare *p);
struct client_loop *client_loop_find(const struct client_core *c, uint64_t server, uint32_t number);
void client_peer_up(struct client_core *c, uint64_t server, uint32_t number);
void client_peer_down(struct client_core *c, uint64_t server, uint32_t number);
void client_refused(struct client_core *c, struct client_loop *l, const struct frame_header *h);
void client_tick(struct client_core *c);
void client_saw_epoch(struct client_core *c, uint32_t epoch);
void client_peers_free(struct client_core *c);
/* The payload of a frame that is being received ends here or nowhere. */
bool client_sink_take(struct client_loop *l, const struct client_op *op, uint32_t chunk);
void client_sink_drop(struct client_core *c, struct client_loop *l);

/* client_declare.c */
void client_declare(struct client_core *c, const struct client_event *e);
void client_declare_resend(struct client_core *c, struct client_loop *l);
void client_declare_settle(struct client_core *c, struct client_tensor *t);
void client_declared(struct client_core *c, struct client_loop *l, const struct frame_header *h, const void *text);
void client_declare_forget(struct client_loop *l, uint32_t index);
void client_init(struct client_core *c, const struct client_event *e);
void client_init_tenure(struct client_core *c);
void client_init_resend(struct client_core *c, struct client_loop *l, bool tenured_only);
void client_inited(struct client_core *c, struct client_loop *l, const struct frame_header *h);

/* client_sync.c */
void client_sync_push(struct client_core *c, struct client_op *op);
void client_sync_end(struct client_core *c, struct client_op *op);
void client_sync_read(struct client_core *c, int64_t step);
void client_sync_resend(struct client_core *c, struct client_loop *l, bool tenured_only);
void client_sync_done(struct client_core *c, struct client_loop *l);
void client_sync_recount(struct client_core *c);
bool client_sync_finish(struct client_core *c);
void client_sync_lacking(struct client_core *c);
void *client_sync_sink(struct client_core *c, struct client_loop *l, const struct frame_header *h);
void client_result(struct client_core *c, struct client_loop *l, const struct frame_header *h, const void *payload);
void client_complete(struct client_core *c, const struct frame_header *h, const void *payload);
void client_need(struct client_core *c, const struct frame_header *h, const void *payload);
void client_setting_put(struct setting **list, uint32_t *n, uint32_t *cap, const struct setting *s);

/* client_async.c */
void client_async_push(struct client_core *c, struct client_op *op);
void client_async_end(struct client_core *c, struct client_op *op);
void client_async_resend(struct client_core *c, struct client_loop *l, bool tenured_only);
void client_clock_send(struct client_core *c, struct client_loop *l, bool all_settings);
bool client_clock_counts(const struct client_core *c);
void client_clock_send_all(struct client_core *c, bool all_settings);
void client_ack(struct client_core *c, const struct frame_header *h);
void client_pull(struct client_core *c, struct client_op *op);
void client_pull_chunk(struct client_core *c, const struct client_op *op, uint32_t chunk);
void client_pull_resend(struct client_core *c, struct client_loop *l, bool tenured_only);
void *client_pull_sink(struct client_core *c, struct client_loop *l, const struct frame_header *h);
void client_value(struct client_core *c, struct client_loop *l, const struct frame_header *h, const void *payload);

#endif
