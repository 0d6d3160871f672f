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

enum { SLOT_NONE = UINT32_MAX, SETTINGS_MAX = 1024, DISCARDS_MAX = 16 };
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

struct ack_wait {
    uint64_t member, version;
    uint32_t seq;
    int status;
    int64_t clock;
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
    uint64_t persist_seq;         /* of cur */
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
    uint64_t persisting;          /* seq in flight, 0: none */
    uint64_t persisting_version;
    struct buf *persisting_out;
    int64_t need_served;
    struct ack_wait *ack;
    uint32_t nack, cack;
    struct pull_wait *pull;
    uint32_t npull, cpull;
    uint64_t init_version;
};

struct shard {
    uint32_t no;
    bool held;                    /* this life has its data (primary, or heir before its view) */
    bool primary, announced;
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
    bool marking;
    uint64_t mark_seq;
    struct mset mark_set;

    int64_t w, w_held, w_cap;     /* ssp/async: lowest clock; on disk; limit while somebody joins */
    uint64_t w_seq;
    int64_t w_writing;
    int64_t *clock;               /* by slot */
    struct mset clock_known;
    uint32_t async_pending;       /* chunks with a version that is not on disk */
    bool wants_transition;

    bool pulls_parked;            /* some chunk may have a parked pull */
    struct chunk **chunk;
    uint32_t nchunks, cchunks;
};

enum wait_kind { WAIT_RESULT = 1, WAIT_MARK, WAIT_ASYNC, WAIT_W, WAIT_INIT, WAIT_DECLARE, WAIT_INITIALISED };
struct wait {
    enum wait_kind kind;
    uint64_t seq;
    struct chunk *chunk;
    struct shard *shard;
    struct tensor *tensor;
    uint64_t member, version;     /* who is answered; request number */
};

struct parked {
    uint64_t from;
    struct frame_header header;
    struct buf *payload;
    bool discarded, declare;
    struct tensor_spec *spec;
};

struct setting_entry {
    struct setting s;
    uint64_t member;
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
void init_chunk_durable(struct shard_core *c, const struct wait *w);
void declare_durable(struct shard_core *c, const struct wait *w);
void initialised_durable(struct shard_core *c, const struct wait *w);

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
void sync_release_all(struct shard_core *c, struct shard *s);  /* what a promoted primary holds already */
void sync_flush_completed(struct shard_core *c);
void acc_clear(struct shard_core *c, struct chunk *ch);

/* ---- shard_compute.c ---- */
/* Adds one member's contribution; takes over `payload` (NULL: nothing to add). False: the pool is full, nothing was added. */
bool acc_add(struct shard_core *c, struct chunk *ch, uint32_t slot, float weight, struct buf *payload);
/* Turns what is accumulated into the next image. False: the pool is full, nothing changed. */
bool acc_finish(struct shard_core *c, struct chunk *ch, int64_t step, struct image *ret);
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
void async_slot_gone(struct shard_core *c, uint32_t slot);
void pulls_drop_member(struct chunk *ch, uint64_t member);

/* ---- shard_settings.c ---- */
void settings_take(struct shard_core *c, uint64_t member, const struct done_head *d);
void settings_drop(struct shard_core *c, uint64_t member, int64_t from_step);
void settings_compact(struct shard_core *c);

/* ---- shard_store.c ---- */
void persist_result(struct shard_core *c, struct chunk *ch);    /* sync: cur to the other disk slot, with mask */
uint64_t persist_async(struct shard_core *c, struct chunk *ch); /* cur to its disk slot, with applied. The caller adds the wait. */
void persist_delete(struct shard_core *c, struct chunk *ch, uint32_t disk_slot);
/* Shard record of what `complete` will be; settings too when they changed. Returns the seq. */
uint64_t persist_mark(struct shard_core *c, struct shard *s, int64_t complete, const struct mset *set);
uint64_t persist_shard(struct shard_core *c, struct shard *s);
uint64_t persist_tensor(struct shard_core *c, struct tensor *t);
void wait_add(struct shard_core *c, struct wait w);

/* ---- shard_view.c ---- */
void shard_on_prepare(struct shard_core *c, const struct prepare *p);
void shard_on_adopt(struct shard_core *c, const struct view *v);

#endif
