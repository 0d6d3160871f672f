/* shard_core.h - the shards of one loop: rounds, results, versions (docs/PROTOCOL.md), sans-IO.
 *
 * One shard_core serves all shards n with n mod loops == loop that the view gives to this server. It never
 * fails, never blocks, never reads a clock: the host feeds events and carries out effects.
 *
 * Enforced here: I1 (sealed versions never change), I2 (release waits for the required holders: the disk
 * with durability=write; backups when there are replicas), I3 (contributor sets; async sequence numbers),
 * I4, I5, I7 (frames of the unlisted or cut are refused), I10 (deterministic order), I11 (pool limit, parked
 * frames bounded), I12 (a frame that does not fit a declared tensor is refused).
 *
 * Ownership: a frame's payload buffer passes to the core with the event (the core unrefs it). A send's or
 * persist's buffer carries one reference that the host gives back (buf_unref) when it is written. All on the
 * loop's thread. */
#ifndef SERVER_SHARD_CORE_H
#define SERVER_SHARD_CORE_H

#include "base/buf.h"
#include "storage/store.h"
#include "wire/doc.h"
#include "wire/frame.h"

struct shard_config {
    uint64_t self;              /* this life */
    uint32_t loop, nloops, nshards, chunk_bytes;
    bool deterministic;         /* sum in member-id order (I10) */
    bool durable;               /* durability=write */
    uint32_t parked_max;        /* frames of newer epochs held; 0: 4096 */
    uint64_t declared_max;      /* bytes of values that tensors may be declared with here; 0: no limit */
    struct pool *pool;
};
struct shard_core;

struct shard_core *shard_core_create(const struct shard_config *c);
void shard_core_free(struct shard_core *c);

/* Before the first event: one record of the store (from store->load). 0 or KS_ECORRUPT/KS_EVERSION with a line
 * in err. Afterwards shard_core_loaded: this life holds, from disk, what the life `heir_of` held. */
int shard_core_load(struct shard_core *c, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size,
                    char *err);
void shard_core_loaded(struct shard_core *c, uint64_t heir_of);

/* Where the payload of a validated header goes: a buffer with one reference and room for h->len, to be handed
 * back with the frame's event or unref'ed when the connection dies. NULL: nowhere (the frame will be refused or
 * the pool is full): read and discard the payload, then step the event with payload NULL and `discarded`. */
struct buf *shard_core_sink(struct shard_core *c, uint64_t from, const struct frame_header *h);

enum shard_event_kind {
    SHARD_FRAME = 1,     /* data frame of member `from`, or of loop `loop` of server `from` (types 48..63) */
    SHARD_DECLARE,       /* FRAME_DECLARE, decoded by the host */
    SHARD_PEER_UP,       /* a connection of `from` is new: what it had not got is lost. Of a server's loop: `loop`,
                            `is_server`, and `outgoing` when this side connected (it then is the primary of something there) */
    SHARD_DURABLE,       /* every persist effect with seq <= this one is on disk */
    SHARD_PREPARE,       /* cut off, cap, report */
    SHARD_ADOPT,         /* a committed view */
};
struct shard_event {
    enum shard_event_kind kind;
    uint64_t now_us;
    uint64_t from;
    uint32_t loop;
    bool is_server, outgoing;
    struct frame_header header;
    struct buf *payload;
    bool discarded;
    const struct tensor_spec *spec;
    uint64_t seq;
    const struct prepare *prepare;
    const struct view *view;
};

enum shard_effect_kind {
    SHARD_SEND = 1,      /* header (+ payloads) to node `to`; dropped when there is no connection. is_server: to loop `loop`
                            of that server: types IMAGE, MARK, SYNC_END, DECLARE on the connection that this side made, acks and
                            HAVE on the one that it accepted */
    SHARD_PERSIST,       /* store ops as one batch; answer with SHARD_DURABLE(seq) */
    SHARD_REPORT,        /* answer to SHARD_PREPARE */
    SHARD_WANT_VIEW,     /* a frame of a newer epoch waits: fetch the view */
    SHARD_SYNCED,        /* joiner `to` of shard `seq` has everything (SYNC_OK): the controller makes it a backup */
    SHARD_CLOSE,         /* close this peer's connection: status, text. is_server: all connections with that server; those that
                            this side made are made again */
    SHARD_FATAL,         /* an invariant of the data is broken; text. The process must end. */
};
struct shard_effect {
    enum shard_effect_kind kind;
    uint64_t to;
    struct frame_header header;     /* len is the payload's; epoch is set */
    struct buf *payload;            /* one reference, or NULL */
    uint32_t offset;                /* payload bytes start here in the buffer */
    struct buf *more[2];            /* the payload goes on with these, one reference each; header.len counts all */
    bool is_server;
    uint32_t loop;
    uint64_t seq;
    uint32_t nops;
    struct store_op *ops;           /* owned by the outbox until the next step */
    struct buf *held[4];            /* references that back the ops; host unrefs when durable */
    struct ballot ballot;
    uint32_t nreports;
    struct shard_report *reports;   /* owned by the outbox until the next step */
    uint64_t epoch;
    int status;
    char text[160];
};
struct shard_outbox {
    struct shard_effect *effect;
    uint32_t n, cap;
};
void shard_outbox_done(struct shard_outbox *o);

/* Clears the outbox first. Effects must be carried out in order for one peer and for the store. */
void shard_core_step(struct shard_core *c, const struct shard_event *e, struct shard_outbox *out);

/* ---- for status and statistics; not for decisions ---- */
struct shard_member_stats {
    uint64_t id;
    uint64_t pushes, bytes, applied, duplicates, late, stale, not_finite, refused;
    int64_t clock;                   /* SSP/async: last announced; sync: step of its newest DONE */
};
struct shard_stats {
    uint64_t pushes, pulls, results, bytes_in, bytes_out, persists, steps_completed, reopened, acked, applied, duplicates;
    uint32_t tensors, chunks, primaries;
    int64_t complete_min, complete_max, clock_min;   /* over primaries; clock: SSP/async W */
    uint64_t value_bytes, state_bytes;
    uint64_t progress_us;            /* when a step was completed, or the lowest clock rose, for the last time; 0: never */
    uint64_t staleness[64];          /* async/SSP: applied pushes by (max clock - stamp), last bucket: more */
};
void shard_core_stats(const struct shard_core *c, struct shard_stats *ret);
/* Fills up to max; returns how many there are. */
uint32_t shard_core_member_stats(const struct shard_core *c, struct shard_member_stats *ret, uint32_t max);
/* Who the open steps wait for: up to max member ids; returns how many. */
uint32_t shard_core_waiting(const struct shard_core *c, uint64_t *ret_ids, uint32_t max, int64_t *ret_step);

/* ---- for the simulator's checkers ---- */
struct shard_chunk_peek {
    int64_t step; uint64_t version; const struct buf *value, *result;
    const struct tensor_spec *spec;
};
bool shard_core_peek(const struct shard_core *c, uint64_t tensor, uint32_t chunk, struct shard_chunk_peek *ret);
int64_t shard_core_complete(const struct shard_core *c, uint32_t shard);
/* async: last applied seq of a member for a chunk; 0: none */
uint32_t shard_core_applied(const struct shard_core *c, uint64_t tensor, uint32_t chunk, uint64_t member);

#endif
