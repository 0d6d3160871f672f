/* net.h - authenticated, framed connections. TCP in net_uv.c; shared memory and verbs beside it later.
 *
 * A net belongs to one libuv loop and its thread. A listener accepts, a connector connects and reconnects by
 * itself (back-off 20 ms doubling to 1 s) until closed. Both sides prove that they know the job's token
 * (HMAC-SHA-256 over both nonces, both ids, roles and the job) before any other frame counts; before that a peer may
 * send at most one hello of 4 KiB and has 5 s. What a peer sends after is validated frame by frame; a violation
 * closes the connection with FRAME_BYE and one log line, and costs nobody else anything (I12).
 *
 * Payloads are received straight into the memory that `sink` names, and sent straight from the caller's.
 * Frames of one connection arrive in order; after a reconnect (`opened` again) what was in flight is lost. */
#ifndef NET_NET_H
#define NET_NET_H

#include "wire/doc.h"
#include "wire/frame.h"

struct uv_loop_s;
struct net;
struct net_conn;

struct net_handlers {
    /* A peer said hello (its proof is not checked yet). 0, or KS_E* to refuse, with a line in err. */
    int (*accept)(void *arg, const struct hello *hello, char *err);
    void (*opened)(void *arg, struct net_conn *c);
    /* Where h->len > 0 payload bytes go: memory for them, or NULL to read and drop them (`frame` is then called
     * with discarded). *ret_cookie is handed to `frame`, or to `abandon` when the connection dies half-way. */
    void *(*sink)(void *arg, struct net_conn *c, const struct frame_header *h, void **ret_cookie);
    void (*abandon)(void *arg, struct net_conn *c, const struct frame_header *h, void *cookie);
    void (*frame)(void *arg, struct net_conn *c, const struct frame_header *h, void *payload, void *cookie,
                  bool discarded);
    /* Not called for connections that never opened, except connectors: `closed` with each failed try, so that the
     * owner can tell whom it waits for. cause: one line. A connector tries again unless net_close was called; the
     * handle of an accepted connection is dead when this returns. net_close itself does not call it. */
    void (*closed)(void *arg, struct net_conn *c, int status, const char *cause);
};
struct net_config {
    struct uv_loop_s *loop;
    struct net_handlers handlers;
    void *arg;
    /* For an owner whose other threads send: taken around everything that libuv starts, handlers included, but not
     * around reads from sockets. Whoever calls a net_ function holds it. NULL: one thread only. */
    void (*lock)(void *arg), (*unlock)(void *arg);
    const char *token;            /* "" is allowed */
    struct hello self;            /* job, role, id, chunk_bytes; nonce is made per connection */
    const char *congestion;       /* TCP_CONGESTION; NULL: "cubic" when the kernel has it */
    uint32_t ping_ms, silence_ms; /* 0: no heartbeats. Closed with KS_ETIMEOUT after silence_ms without a byte. */
    size_t send_bytes_max;        /* queued on one connection before net_blocked; 0: 64 MiB */
    bool payload_crc;
};
/* On the loop's thread, like all functions here that do not say otherwise. */
int net_create(const struct net_config *c, struct net **ret, char *err);
/* Closes everything; no handler is called any more (abandon and release are, before this returns). Run the loop until
 * it has nothing to do, then net_free. */
void net_shutdown(struct net *n);
bool net_is_down(const struct net *n); /* net_free may be called */
void net_free(struct net *n);

/* addr "host:port", port 0: a free one. *ret_addr (ADDR_MAX_BYTES): what it became. KS_EBUSY: port in use. */
int net_listen(struct net *n, const char *addr, char *ret_addr, char *err);
struct net_conn *net_connect(struct net *n, const char *addr, void *tag);
/* Sends FRAME_BYE with status and text (when open), then closes. A connector stops trying. The handle is dead. */
void net_close(struct net_conn *c, int status, const char *text);

/* Queues a frame. payload: h->len bytes that stay unchanged until release(release_arg) is called, also when the
 * connection dies; release may be NULL. Queued frames are written together, at the end of the loop's iteration or
 * with net_flush. KS_ECLOSED when the connection is not open (release is called). Payloads of at most 512 bytes are
 * copied and released before this returns. Any thread that holds the owner's lock; `closed` never runs inside. */
int net_send(struct net_conn *c, const struct frame_header *h, const void *payload, void (*release)(void *arg),
             void *release_arg);
/* The same with a payload in parts; h->len is their sum. Each is released when it is written. */
struct net_part {
    const void *data;
    size_t size;
    void (*release)(void *arg);
    void *release_arg;
};
int net_sendv(struct net_conn *c, const struct frame_header *h, const struct net_part *parts, int n);
/* Writes what the socket takes now. May be called by another thread that holds the owner's lock over this net
 * (the client library does); returns 1 when the loop must be woken: it then does the rest by itself. */
int net_flush(struct net_conn *c);
bool net_is_open(const struct net_conn *c);
/* Inside `closed` of a connector: the host answers, and no process listens at that port. */
bool net_nobody(const struct net_conn *c);
bool net_blocked(const struct net_conn *c);
size_t net_queued(const struct net_conn *c);            /* bytes that are not written yet */
uint64_t net_peer_id(const struct net_conn *c);         /* 0 before opened; still there inside `closed` */
const struct hello *net_peer(const struct net_conn *c); /* likewise, NULL; of a listener's peer: its hello */
void *net_tag(const struct net_conn *c);
void net_tag_set(struct net_conn *c, void *tag);
const char *net_addr(const struct net_conn *c);

struct net_stats {
    uint64_t bytes_in, bytes_out, frames_in, frames_out, reads, writes, connects, closes, refused;
};
void net_stats(const struct net *n, struct net_stats *ret);

#endif
