/* send_queue.h - frames that wait to be written to one connection. Pure: no IO.
 *
 * Headers and small payloads are copied into blocks, end to end, so that many small frames become one iovec; big
 * payloads are named where they are. Segments and blocks are re-used: no allocation once it has been as long. */
#ifndef NET_SEND_QUEUE_H
#define NET_SEND_QUEUE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum { SEND_COPY_MAX = 512 }; /* payloads up to this size are copied and released at once */

struct send_block;
struct send_segment {
    const uint8_t *data;
    size_t size;
    struct send_block *block; /* NULL: data is the caller's */
    void (*release)(void *arg);
    void *release_arg;
};
struct send_queue {
    struct send_segment *segment; /* ring */
    uint32_t head, count, cap;
    size_t head_sent; /* bytes of the first segment that are written */
    size_t bytes;     /* not written yet */
    struct send_block *open, *spare;
    uint32_t nspare;
};

void send_queue_init(struct send_queue *q);
/* Releases everything that is queued, frees. */
void send_queue_done(struct send_queue *q);
/* Releases everything that is queued, keeps the memory. */
void send_queue_clear(struct send_queue *q);
/* header: FRAME_SIZE bytes, copied. */
void send_queue_add(struct send_queue *q, const uint8_t *header, const void *payload, size_t size,
                    void (*release)(void *arg), void *release_arg);
/* More of the payload of the frame that was added last. */
void send_queue_more(struct send_queue *q, const void *payload, size_t size, void (*release)(void *arg), void *release_arg);
/* Fills up to max iovecs with at most about bytes_max bytes; returns how many, *ret_size their sum. */
int send_queue_fill(const struct send_queue *q, struct iovec *iov, int max, size_t bytes_max, size_t *ret_size);
/* The first `size` bytes are written. */
void send_queue_sent(struct send_queue *q, size_t size);

#endif
