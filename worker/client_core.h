/* client_core.h - one member's life: steps, pushes, pulls, re-sending, joining (docs/PROTOCOL.md), sans-IO.
 *
 * Created for one life (id); after FENCED the host makes a new one and moves the tensors over. Names nodes by id and
 * loop number; the host maps them to connections. User memory is named by pointers that stay valid until the operation's
 * CLIENT_DONE. Enforces: nothing of a step is shown before it is finished (I4), re-sending in order (I3), waits that
 * say for whom (I6).
 *
 * Thread: whoever holds the client's lock. */
#ifndef WORKER_CLIENT_CORE_H
#define WORKER_CLIENT_CORE_H

#include "wire/doc.h"
#include "wire/frame.h"

struct client_config {
    uint64_t self;
    uint32_t chunk_bytes, nshards;
};
struct client_core;
struct client_core *client_core_create(const struct client_config *c);
void client_core_free(struct client_core *c);

/* A tensor is declared with its home first (the loop of chunk 0), then with every other loop; the answer to
 * CLIENT_DECLARE is CLIENT_DONE with the same op. The returned index names it from then on. */
enum client_event_kind {
    CLIENT_ADOPT = 1,     /* view: the first one starts this life */
    CLIENT_PREPARE,       /* prepare: answer with a report; mode_change: do not start a later step until the next view */
    CLIENT_PEER_UP,       /* data connection to (from, loop) is new */
    CLIENT_PEER_DOWN,
    CLIENT_FRAME,         /* data frame from (from, loop); a payload that client_core_sink took is in place */
    CLIENT_DECLARE,       /* op, spec */
    CLIENT_INIT,          /* op, tensor, in */
    CLIENT_PUSH,          /* op, tensor, in, weight; out != NULL: push_pull. in NULL: adds nothing */
    CLIENT_PULL,          /* op, tensor, out */
    CLIENT_STEP_END,      /* op is done when the step is finished (sync) or at once */
    CLIENT_OPTION,        /* setting for the next step end */
    CLIENT_LEAVE,         /* op is done when a view lists this member no more */
    CLIENT_TICK,
};
struct client_event {
    enum client_event_kind kind;
    uint64_t now_us;
    uint64_t from;
    uint32_t loop;
    const struct view *view;
    const struct prepare *prepare;
    struct frame_header header;
    const void *payload;             /* small frames; NULL when sunk */
    uint64_t op;                     /* chosen by the host, never 0 */
    uint32_t tensor;                 /* index of client_core_tensor */
    const struct tensor_spec *spec;
    const void *in;
    void *out;
    double weight;
    struct setting setting;
};
enum client_effect_kind {
    CLIENT_SEND = 1,      /* header + payload to (to, loop); dropped when not connected. owned: payload is mem_free'd after */
    CLIENT_SEND_SPEC,     /* FRAME_DECLARE: the host encodes spec */
    CLIENT_DONE,          /* op is over: status, tensor (DECLARE) */
    CLIENT_STARTED,       /* in the view and able to begin: step */
    CLIENT_STEP,          /* the clock is now `step` */
    CLIENT_SEND_REPORT,   /* to the controller: report */
    CLIENT_SEND_LEAVE,    /* to the controller: step finished */
    CLIENT_FENCED,        /* this life is over; every op was ended with KS_EFENCED before */
    CLIENT_ENDED,         /* the job has ended; text */
    CLIENT_WANT_VIEW,
};
struct client_effect {
    enum client_effect_kind kind;
    uint64_t to;
    uint32_t loop;
    struct frame_header header;
    const void *payload;
    bool owned;
    uint64_t op;
    int status;
    uint32_t tensor;
    int64_t step;
    const struct tensor_spec *spec;
    const struct report *report;     /* owned by the core until the next step */
    char text[256];
};
struct client_outbox {
    struct client_effect *effect;
    uint32_t n, cap;
};
void client_outbox_done(struct client_outbox *o);
void client_core_step(struct client_core *c, const struct client_event *e, struct client_outbox *out);
/* Where a RESULT's or VALUE's payload goes (user memory or the arena of an in-place call), or NULL: drop it. */
void *client_core_sink(struct client_core *c, uint64_t from, uint32_t loop, const struct frame_header *h);

const struct view *client_core_view(const struct client_core *c);
const struct tensor_spec *client_core_tensor(const struct client_core *c, uint32_t index);   /* NULL: none */
int64_t client_core_step_now(const struct client_core *c);
bool client_core_started(const struct client_core *c);
/* Has CLIENT_STEP_END been given for the step it is in? (sync; a wait before it could never end) */
bool client_core_step_ended(const struct client_core *c);
/* One line: whom and what it waits for; "" when nothing. Returns the length. */
size_t client_core_waiting(const struct client_core *c, uint64_t now_us, char *out, size_t size);

struct client_stats {
    uint64_t pushes, pulls, steps, resent, acked, late, stale, not_finite, views;
};
void client_core_stats(const struct client_core *c, struct client_stats *ret);
/* 64 buckets */
const uint64_t *client_core_staleness(const struct client_core *c, uint32_t tensor);

#endif
