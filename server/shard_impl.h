/* shard_impl.h - the inside of shard_core.h, shared by shard_*.c. Nobody else includes it. */
#ifndef SERVER_SHARD_IMPL_H
#define SERVER_SHARD_IMPL_H

#include "base/check.h"
#include "base/keepstep_err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/mutant.h"
#include "server/mset.h"
#include "server/optim.h"
#include "server/shard_core.h"

enum { SLOT_NONE = UINT32_MAX, SETTINGS_MAX = 1024, DISCARDS_MAX = 16, HOLDERS_MAX = 2 * BACKUPS_MAX, CATCH_UP_BYTES = 4 << 20 };
/* Who must have an item (an image, a mark, W) before it counts: a bit for each holder of the shard, and one for our disk. */
#define DISK_BIT (1u << 7)
#define VERSION_OF(epoch, n) ((uint64_t)(epoch) << 32 | (uint32_t)(n))

struct slot {
    uint64_t id;          /* 0: free */
    int64_t join, last;
    bool live;
    struct shard_member_stats stats;
};

struct tensor {
    struct tensor_spec spec;
    struct optim optim;           /* as declared; params only */
    uint64_t group;               /* hash of spec.group */
    unsigned slots;               /* optimizer state, floats an element */
    uint32_t nchunks;
    struct chunk **chunk;         /* by chunk number; NULL: another loop's */
    bool home;                    /* this loop serves chunk 0 */
    bool initialised;             /* home: the first value is complete and durable */
    uint64_t claim;               /* home: the member that initialises; 0: nobody */
    uint64_t claim_version;
    bool finishing;               /* home: `initialised` is being made safe, with chunk 0 */
    uint32_t nwaiting, cwaiting;
    uint64_t *waiting;            /* home: claims that wait */
    struct optim now;             /* cache of the options in force */
    uint64_t now_generation;
    int64_t now_step;
};

/* A contribution kept apart until all are there (deterministic=on). */
struct contrib {
    uint64_t id;
    float weight;
    struct buf *buf;              /* wire dtype */
    struct contrib *next;
};

/* One version of a chunk. Buffers are immutable once they stand here. */
struct image {
    struct buf *value;            /* accumulator type; params, and reduce in ssp/async; NULL: zeros */
    struct buf *state;            /* optimizer state; NULL: initial */
    struct buf *out;              /* what is sent, in the tensor's dtype; NULL: zeros */
    int64_t step;                 /* sync step that made it; -1: none */
    uint64_t version;
    uint64_t updates;             /* optimizer steps so far */
    uint32_t disk_slot;
};

/* A server that holds, or is to hold, what this primary has. */
struct holder {
    uint64_t id;                  /* 0: free */
    uint32_t loop;                /* of that server, for this shard */
    bool backup;                  /* of the committed view */
    bool catching;                /* joining: it said what it has, images are being sent */
    bool required;                /* backup, or SYNC_END was sent */
    bool synced;                  /* joining: SYNC_OK */
    uint32_t cursor;              /* catching: chunks before it were looked at */
    uint64_t flying;              /* catching: bytes sent and not acknowledged */
};

enum ack_kind { ACK_PUSH = 0, ACK_INIT, ACK_INITIALISED };
struct ack_wait {
    enum ack_kind kind;
    uint64_t member, version;
    uint32_t seq;
    int status;
    int64_t clock;
    uint64_t grant;               /* of INIT */
};
struct pull_wait {
    uint64_t member;
    int64_t step;
    int64_t need;                 /* ssp: W must reach this; INT64_MIN: no bound */
    bool open;                    /* the bound was met */
    uint64_t version_min;         /* what was current then */
    uint32_t seq;
    bool sync;
};

struct chunk {
    struct tensor *t;
    struct shard *s;
    uint32_t no, n, bytes;        /* number, elements, bytes on the wire */

    struct image cur, pre;
    bool has_pre;                 /* sync: the version before cur, while cur may be undone */
    struct mset mask;             /* contributors of cur when cur.step is the open or last complete step */
    struct mset want, rejected;
    bool skipped;
    bool released;
    uint64_t persist_seq;         /* sync: batch that writes cur */
    uint32_t item;                /* number of the image that is being made safe; acknowledgements name it */
    uint8_t acks;                 /* who has it */
    uint8_t sent;                 /* holders that have, or were sent, cur: they follow by themselves */
    bool before;                  /* holder: `pre` came with item before_item, its image is to follow */
    uint32_t before_item;
    bool trained;                 /* pushed to at least once: a first value comes too late */
    uint64_t image_seq;           /* counts images written to disk */

    struct buf *acc;              /* accumulator type */
    struct contrib *contribs;     /* ascending id */
    struct mset acc_mask, acc_want, acc_rejected;
    uint32_t acc_n;               /* contributions with data in acc or contribs */
    double acc_weight, acc_first;
    bool acc_weighted, acc_skip;

    uint32_t *applied, capplied;  /* async: last applied seq by slot */
    uint64_t held_version;        /* versions up to this one are on disk (and on backups) */
    struct buf *held_out;         /* async: its bytes, while cur is newer */
    bool flying;                  /* async: an image is being made safe */
    uint64_t flying_seq;          /* its batch on disk */
    uint64_t flying_version;
    struct buf *flying_out;
    int64_t need_served;
    struct ack_wait *ack;
    uint32_t nack, cack;
    struct pull_wait *pull;
    uint32_t npull, cpull;
    uint64_t init_version;
};

struct shard {
    uint32_t no;
    bool held;                    /* this life has its data */
    bool primary, announced;
    bool backup, joining;         /* our part in the committed view */
    bool full;                    /* joining: SYNC_END came from this primary */
    bool fenced;                  /* a PREPARE names us its next primary: nothing more from the old one */
    uint64_t upstream;            /* its primary, when that is another server */
    struct holder holder[HOLDERS_MAX];
    uint8_t required, targets;    /* bits; targets: who is sent every new item */
    uint64_t since;
    int64_t complete;
    uint64_t complete_version;
    uint64_t *cset;               /* ids of the set that completed it */
    uint32_t ncset;
    int64_t cap;                  /* no result of this step or later */

    struct mset oset;             /* set(complete + 1) */
    struct mset fact, done;
    uint32_t *want, *have;        /* by slot: chunks that DONE lists here, chunks that came */
    uint32_t nslots;
    uint64_t declared;            /* bytes of values of all its chunks */
    uint32_t open_acc;            /* chunks with contributions and no result */
    uint32_t unreleased;          /* primary: chunks with a result of the open step that is not released */
    bool marking;
    uint64_t mark_seq;            /* batch on disk */
    uint32_t mark_item;
    uint8_t mark_acks;
    struct mset mark_set;
    uint32_t announce_item;       /* promoted: the mark of `complete` that the backups must have first */
    uint8_t announce_acks;

    int64_t w, w_held, w_cap;     /* ssp/async: lowest clock; on disk; limit while somebody joins */
    uint64_t w_seq;               /* batch on disk */
    uint32_t w_item;              /* 0: no W is being made safe */
    uint8_t w_acks;
    int64_t w_writing;
    int64_t *clock;               /* by slot */
    struct mset clock_known;
    uint32_t async_pending;       /* chunks with a version that is not on disk */
    bool wants_transition;

    bool pulls_parked;            /* some chunk may have a parked pull */
    struct chunk **chunk;
    uint32_t nchunks, cchunks;
};

enum wait_kind { WAIT_RESULT = 1, WAIT_MARK, WAIT_ASYNC, WAIT_W, WAIT_DECLARE, WAIT_ANNOUNCE, WAIT_IMAGE_ACK,
                 WAIT_MARK_ACK };
struct wait {
    enum wait_kind kind;
    uint64_t seq;
    struct chunk *chunk;
    struct shard *shard;
    struct tensor *tensor;
    uint64_t member, version;     /* who is answered; request number */
    uint32_t item, loop;          /* acknowledgements to a primary: number, its loop */
    uint8_t flags;
};

/* Tensors whose declaration a server's loop was sent on this connection. */
struct link {
    uint64_t id;
    uint32_t loop;
    bool up;
    struct map told;
};

struct parked {
    uint64_t from;
    struct frame_header header;
    struct buf *payload;
    uint32_t loop;
    bool discarded, declare, is_server;
    struct tensor_spec *spec;
};

struct setting_entry {
    struct setting s;
    uint64_t member;
};

/* Of the newest view, for the log. */
struct shard_log {
    uint64_t epoch, adopt_us;
    bool announcing, first_step;
    uint64_t catch_us, catch_bytes;   /* since joiners began to catch up; 0: none does */
    uint32_t catch_shards;
};

struct shard_core {
    struct shard_config cfg;
    struct view *view;
    uint64_t heir_of;
    uint64_t *cut;
    uint32_t ncut;

    struct slot slot[MSET_MAX];
    uint32_t nslots;              /* highest slot in use + 1 */
    struct map slot_of;           /* id -> struct slot * */
    struct map tensors;           /* id -> struct tensor * */
    struct shard *shard;          /* by shard number; only those of this loop are used */

    struct setting_entry *setting;
    uint32_t nsetting, csetting;
    uint64_t setting_generation;
    bool settings_dirty;

    uint64_t seq, durable;        /* persist batches issued, on disk */
    uint32_t items;               /* items numbered */
    struct link *link;
    uint32_t nlinks, clinks;
    struct wait *wait;            /* ring */
    uint32_t wait_head, nwait, cwait;
    struct parked *parked;
    uint32_t nparked, cparked;
    struct contrib *free_contrib;

    /* Shards that completed a step in this call: one COMPLETE a step and member. */
    struct { int64_t step; uint16_t shard; } *completed;
    uint32_t ncompleted, ccompleted;

    struct shard_outbox *out;
    struct shard_report *report;   /* what was reported to `ballot` */
    uint32_t nreport, creport;
    struct ballot ballot;
    uint32_t discards;             /* pushes that found no buffer since one was applied */
    uint64_t discards_applied;
    struct op_block *op_block, *op_now;
    uint64_t now_us;
    struct shard_stats stats;
    struct shard_log log;
};

/* ---- shard_core.c ---- */
struct shard_effect *shard_effect_add(struct shard_core *c, enum shard_effect_kind kind);
/* payload: one reference is taken (the caller keeps its own); NULL: none. len in h. */
void shard_send(struct shard_core *c, uint64_t to, const struct frame_header *h, struct buf *payload);
void shard_close(struct shard_core *c, uint64_t peer, int status, const char *text);
/* The pool's limit cannot hold what an accepted push needs: the process ends with a line that says what to raise. */
void shard_out_of_memory(struct shard_core *c);
/* n consecutive store ops that live until the next step. n is at most 64. */
struct store_op *shard_ops(struct shard_core *c, uint32_t n);
struct buf *shard_zeros(struct shard_core *c, size_t size);
uint32_t slot_find(const struct shard_core *c, uint64_t id);
struct mode shard_mode(const struct shard_core *c, int64_t step);
void shard_refuse(struct shard_core *c, uint64_t to, const struct frame_header *h, int status);
void image_drop(struct image *i);
struct image image_ref(const struct image *i);
/* wire bytes of an image, as a buffer (one reference for the caller). */
struct buf *image_out(struct shard_core *c, struct chunk *ch, const struct image *i);
/* Makes cur.value and cur.state real where they are NULL. False: the pool is full. */
bool chunk_materialise(struct shard_core *c, struct chunk *ch);
static inline bool shard_is_mine(const struct shard_core *c, uint32_t shard)
{
    return shard % c->cfg.nloops == c->cfg.loop;
}
struct chunk *chunk_find(const struct shard_core *c, uint64_t tensor, uint32_t chunk);

/* ---- shard_declare.c ---- */
void shard_on_declare(struct shard_core *c, uint64_t from, const struct frame_header *h, const struct tensor_spec *spec);
void shard_on_init(struct shard_core *c, uint64_t from, const struct frame_header *h, struct buf *payload);
void shard_claims_recheck(struct shard_core *c);
struct tensor *tensor_add(struct shard_core *c, const struct tensor_spec *spec, const struct optim *optim);
void tensor_free(struct tensor *t);
void declare_durable(struct shard_core *c, const struct wait *w);
/* The first value, or "all of it is there", is held: answers. */
void init_answer(struct shard_core *c, struct chunk *ch, const struct ack_wait *a);

/* ---- shard_sync.c ---- */
void sync_push(struct shard_core *c, uint32_t slot, const struct frame_header *h, struct buf *payload);
void sync_done(struct shard_core *c, uint32_t slot, const struct frame_header *h, const struct done_head *d);
void sync_pull(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h);
void sync_try_shard(struct shard_core *c, struct shard *s);
void sync_result_durable(struct shard_core *c, const struct wait *w);
void sync_mark_durable(struct shard_core *c, const struct wait *w);
void sync_resolve(struct shard_core *c, struct shard *s);
void sync_open(struct shard_core *c, struct shard *s);         /* recompute oset for complete + 1 */
void sync_redo(struct shard_core *c, struct shard *s);         /* recompute have and done */
void sync_facts_clear(struct shard_core *c, struct shard *s);
void sync_answer(struct shard_core *c, struct shard *s, uint32_t slot);
void sync_serve_pulls(struct shard_core *c, struct shard *s);
void sync_complete(struct shard_core *c, struct shard *s, int64_t step);
/* Releases what enough holders have. */
void sync_check(struct shard_core *c, struct chunk *ch);
void sync_mark_check(struct shard_core *c, struct shard *s);
void sync_announce_check(struct shard_core *c, struct shard *s);
void sync_flush_completed(struct shard_core *c);
void acc_clear(struct shard_core *c, struct chunk *ch);

/* ---- shard_compute.c ---- */
/* Adds one member's contribution; takes over `payload` (NULL: nothing to add). False: the pool is full, nothing was added. */
bool acc_add(struct shard_core *c, struct chunk *ch, uint32_t slot, float weight, struct buf *payload);
/* Turns what is accumulated into the next image. False: the pool is full, nothing changed. */
/* ret_gradient: NULL, or gets the reduced gradient (one reference; NULL when nothing was added) for holders to apply. */
bool acc_finish(struct shard_core *c, struct chunk *ch, int64_t step, struct image *ret, struct buf **ret_gradient);
/* What a primary's gradient makes of `base` (grad keeps its reference). False: the pool is full. */
bool gradient_apply(struct shard_core *c, struct chunk *ch, const struct image *base, int64_t step, struct buf *grad,
                    struct image *ret);
/* Applies one asynchronous push (takes over payload) to cur. False: the pool is full. */
bool async_apply(struct shard_core *c, struct chunk *ch, int64_t stamp, struct buf *payload);
const struct optim *tensor_optim(struct shard_core *c, struct tensor *t, int64_t step);

/* ---- shard_async.c ---- */
void async_push(struct shard_core *c, uint32_t slot, const struct frame_header *h, struct buf *payload);
void async_clock(struct shard_core *c, uint32_t slot, const struct frame_header *h, const struct done_head *d);
void async_pull(struct shard_core *c, struct chunk *ch, uint32_t slot, const struct frame_header *h);
void async_durable(struct shard_core *c, const struct wait *w);
void async_w_durable(struct shard_core *c, const struct wait *w);
void async_recompute(struct shard_core *c, struct shard *s);
void async_promoted(struct shard_core *c, struct shard *s);
void async_seal(struct shard_core *c, struct shard *s);
/* cur changed: numbers it and makes it safe. */
void async_changed(struct shard_core *c, struct chunk *ch);
void async_ack_when_held(struct shard_core *c, struct chunk *ch, struct ack_wait a);
/* Somebody more has the image that is flying, or fewer are required. */
void async_check(struct shard_core *c, struct chunk *ch);
void async_w_check(struct shard_core *c, struct shard *s);
void async_result_keep(struct shard *s, struct chunk *ch);
void async_acks_flush(struct shard_core *c, struct chunk *ch);
/* A synchronous result takes the place of the image that is flying. */
void async_superseded(struct chunk *ch);
void async_slot_gone(struct shard_core *c, uint32_t slot);
void pulls_drop_member(struct chunk *ch, uint64_t member);

/* ---- shard_settings.c ---- */
void setting_put(struct shard_core *c, uint64_t member, const struct setting *s);
void settings_take(struct shard_core *c, uint64_t member, const struct done_head *d);
void settings_drop(struct shard_core *c, uint64_t member, int64_t from_step);
void settings_compact(struct shard_core *c);

/* ---- shard_store.c ---- */
/* An image of the chunk to its disk slot, with contributors and applied. Returns the batch; the caller adds the wait. */
uint64_t persist_image(struct shard_core *c, struct chunk *ch, const struct image *i);
void persist_delete(struct shard_core *c, struct chunk *ch, uint32_t disk_slot);
/* Shard record of what `complete` will be; settings too when they changed. Returns the seq. */
uint64_t persist_mark(struct shard_core *c, struct shard *s, int64_t complete, const struct mset *set);
uint64_t persist_shard(struct shard_core *c, struct shard *s);
uint64_t persist_tensor(struct shard_core *c, struct tensor *t);
void wait_add(struct shard_core *c, struct wait w);

/* What a record of cur says besides the bytes: contributors, applied. One reference; NULL: the pool is full. */
struct buf *image_record(struct shard_core *c, struct chunk *ch, const struct image *i);
struct buf *image_bytes(const struct image *i);
struct buf *shard_record(struct shard_core *c, const struct shard *s, int64_t complete, const uint64_t *ids, uint32_t n);
struct buf *settings_record(struct shard_core *c);
struct image_head {
    uint32_t nmask, napplied;
    uint64_t has_value, initialised, image_seq, bytes, state, skipped;
    struct image image;
};
/* Reads the head and checks that contributors, applied and what the head says of bytes and state fill `size`. */
int image_head_take(const uint8_t **p, size_t size, struct image_head *ret);
bool image_sizes_fit(const struct chunk *ch, const struct image_head *h);
void image_members_take(struct shard_core *c, struct chunk *ch, const uint8_t **p, const struct image_head *h);
int image_bytes_take(struct shard_core *c, struct chunk *ch, const uint8_t *p, struct image_head *h);
int shard_record_take(struct shard *s, const uint8_t *value, size_t size);
int settings_take_record(struct shard_core *c, const uint8_t *value, size_t size);

/* ---- shard_holders.c: the primary's side of replication ---- */
void holders_adopt(struct shard_core *c, struct shard *s, const struct view_shard *vs, bool promoted);
void holders_clear(struct shard_core *c, struct shard *s);
/* A new synchronous result (gradient: what made it, NULL: send all) or asynchronous image, to everybody who follows. */
void holders_image(struct shard_core *c, struct chunk *ch, struct buf *gradient);
void holders_mark(struct shard_core *c, struct shard *s, int64_t complete, const uint64_t *ids, uint32_t n, uint32_t item,
                  uint8_t to);
void holders_resend(struct shard_core *c, struct shard *s);    /* under a new epoch: what is not acknowledged */
void holders_peer_up(struct shard_core *c, uint64_t id, uint32_t loop);
void holders_frame(struct shard_core *c, const struct shard_event *e);   /* IMAGE_ACK, MARK_ACK, HAVE, SYNC_OK */

/* ---- shard_replica.c: the holder's side ---- */
void replica_frame(struct shard_core *c, const struct shard_event *e);   /* IMAGE, MARK, SYNC_END */
void replica_declare(struct shard_core *c, const struct tensor_spec *spec);
void replica_adopt(struct shard_core *c, struct shard *s);                /* joining: says what it has */
void replica_peer_up(struct shard_core *c, uint64_t id, uint32_t loop);
void replica_ack_durable(struct shard_core *c, const struct wait *w);
void shard_drop_data(struct shard_core *c, struct shard *s);

/* ---- shard_view.c ---- */
uint32_t server_loop(const struct shard_core *c, uint64_t id, uint32_t shard);
void shard_on_prepare(struct shard_core *c, const struct prepare *p);
void shard_on_adopt(struct shard_core *c, const struct view *v);

/* ---- shard_log.c ---- */
void shard_log_after(struct shard_core *c);                        /* every step */
void shard_log_catch_up(struct shard_core *c, uint64_t joiner);    /* it begins to */
void shard_log_synced(struct shard_core *c, uint64_t joiner);      /* a shard of it has */

#endif
