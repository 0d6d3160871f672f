/* receive.h - cuts a stream of bytes into frames without copying big payloads. Pure: no IO, no allocation.
 *
 *     for (;;) switch (receive_next(&r, err)) {
 *     case RECEIVE_BYTES: n = receive_space(&r, iov); got = readv(fd, iov, n); receive_added(&r, got); break;
 *     case RECEIVE_SINK:  receive_sink(&r, memory for r.head.len bytes, or NULL to drop them); break;
 *     case RECEIVE_FRAME: r.head is a frame, its payload is complete at r.target; break;
 *     default: the peer broke the protocol, err says how; nothing can follow
 *     }
 *
 * What arrives behind a payload lands in the stage, so that one system call takes the rest of a big payload and
 * many small frames after it. */
#ifndef NET_RECEIVE_H
#define NET_RECEIVE_H

#include <stdbool.h>
#include <sys/uio.h>

#include "wire/frame.h"

enum {
    RECEIVE_STAGE = 64 << 10,   /* bytes of the stage, which the owner provides */
    RECEIVE_READ_MAX = 4 << 20, /* of one receive_space */
    RECEIVE_OWN_MAX = 4096,     /* payload of the connection's own frames (hello, bye, ...) */
    RECEIVE_OWN_TYPES = 16,     /* types below are the connection's own */
};

enum receive_want { RECEIVE_BYTES = 1, RECEIVE_SINK, RECEIVE_FRAME };
enum receive_state { RECEIVE_IN_HEADER, RECEIVE_AT_SINK, RECEIVE_IN_PAYLOAD, RECEIVE_DONE };

struct receive {
    enum receive_state state;
    uint32_t chunk_bytes; /* bounds chunk payloads */
    bool own_only;        /* before authentication: nothing but the connection's own frames */
    uint8_t *stage;
    size_t begin, end; /* bytes of the stage that were not looked at */
    struct frame_header head;
    uint8_t *target; /* NULL: the payload is dropped */
    uint64_t got;
    uint32_t crc;
};

void receive_init(struct receive *r, uint8_t *stage, uint32_t chunk_bytes);
/* enum receive_want, or KS_EPROTO, KS_EVERSION, KS_ECORRUPT with a line in err (ERR_TEXT bytes). */
int receive_next(struct receive *r, char *err);
void receive_sink(struct receive *r, void *target);
/* Where the next bytes go; the number of iovecs (1 or 2), *ret_size their sum. */
int receive_space(struct receive *r, struct iovec iov[2], size_t *ret_size);
void receive_added(struct receive *r, size_t size);

#endif
