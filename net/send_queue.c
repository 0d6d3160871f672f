#include "net/send_queue.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "wire/frame.h"

enum { BLOCK_BYTES = 16 << 10, SPARE_MAX = 64 };

struct send_block {
    struct send_block *next; /* in the spare list */
    uint32_t used;
    uint32_t segments; /* queued segments that point here */
    uint8_t data[BLOCK_BYTES];
};

void send_queue_init(struct send_queue *q)
{
    memset(q, 0, sizeof *q);
}

static struct send_segment *segment_at(const struct send_queue *q, uint32_t i)
{
    return &q->segment[(q->head + i) & (q->cap - 1)];
}

static struct send_segment *segment_new(struct send_queue *q)
{
    if (q->count == q->cap) {
        uint32_t cap = q->cap ? q->cap * 2 : 64;
        struct send_segment *s = mem_alloc(cap * sizeof *s);
        for (uint32_t i = 0; i < q->count; i++)
            s[i] = *segment_at(q, i);
        mem_free(q->segment);
        q->segment = s;
        q->head = 0;
        q->cap = cap;
    }
    struct send_segment *s = segment_at(q, q->count++);
    memset(s, 0, sizeof *s);
    return s;
}

static void block_close(struct send_queue *q, struct send_block *b)
{
    b->used = 0;
    if (b == q->open)
        return;
    if (q->nspare == SPARE_MAX) {
        mem_free(b);
        return;
    }
    b->next = q->spare;
    q->spare = b;
    q->nspare++;
}

static struct send_block *block_with_room(struct send_queue *q, size_t size)
{
    if (q->open && BLOCK_BYTES - q->open->used >= size)
        return q->open;
    struct send_block *b = q->spare;
    if (b) {
        q->spare = b->next;
        q->nspare--;
    } else {
        b = mem_alloc(sizeof *b);
    }
    q->open = b;
    return b;
}

static void add_copy(struct send_queue *q, const void *data, size_t size)
{
    struct send_block *b = q->open;
    uint8_t *at = b->data + b->used;
    memcpy(at, data, size);
    b->used += (uint32_t)size;
    struct send_segment *last = q->count ? segment_at(q, q->count - 1) : NULL;
    if (last && last->block == b && last->data + last->size == at) {
        last->size += size;
        return;
    }
    struct send_segment *s = segment_new(q);
    s->data = at;
    s->size = size;
    s->block = b;
    b->segments++;
}

static void add_payload(struct send_queue *q, const void *payload, size_t size, void (*release)(void *arg),
                        void *release_arg)
{
    if (size > SEND_COPY_MAX) {
        struct send_segment *s = segment_new(q);
        s->data = payload;
        s->size = size;
        s->release = release;
        s->release_arg = release_arg;
        return;
    }
    if (size)
        add_copy(q, payload, size);
    if (release)
        release(release_arg);
}

void send_queue_more(struct send_queue *q, const void *payload, size_t size, void (*release)(void *arg), void *release_arg)
{
    if (size <= SEND_COPY_MAX)
        block_with_room(q, size);
    q->bytes += size;
    add_payload(q, payload, size, release, release_arg);
}

void send_queue_add(struct send_queue *q, const uint8_t *header, const void *payload, size_t size,
                    void (*release)(void *arg), void *release_arg)
{
    size_t copied = size <= SEND_COPY_MAX ? size : 0;
    block_with_room(q, FRAME_SIZE + copied);
    add_copy(q, header, FRAME_SIZE);
    q->bytes += FRAME_SIZE + size;
    add_payload(q, payload, size, release, release_arg);
}

int send_queue_fill(const struct send_queue *q, struct iovec *iov, int max, size_t bytes_max, size_t *ret_size)
{
    size_t sum = 0;
    int n = 0;
    for (uint32_t i = 0; i < q->count && n < max && sum < bytes_max; i++, n++) {
        const struct send_segment *s = segment_at(q, i);
        size_t skip = i ? 0 : q->head_sent;
        iov[n].iov_base = (void *)(uintptr_t)(s->data + skip);
        iov[n].iov_len = s->size - skip;
        sum += iov[n].iov_len;
    }
    *ret_size = sum;
    return n;
}

static void segment_drop(struct send_queue *q)
{
    struct send_segment s = *segment_at(q, 0);
    q->head = (q->head + 1) & (q->cap - 1);
    q->count--;
    q->head_sent = 0;
    if (s.block && --s.block->segments == 0)
        block_close(q, s.block);
    if (s.release)
        s.release(s.release_arg);
}

void send_queue_sent(struct send_queue *q, size_t size)
{
    CHECK(size <= q->bytes);
    q->bytes -= size;
    while (size) {
        const struct send_segment *s = segment_at(q, 0);
        size_t rest = s->size - q->head_sent;
        if (size < rest) {
            q->head_sent += size;
            return;
        }
        size -= rest;
        segment_drop(q);
    }
}

void send_queue_clear(struct send_queue *q)
{
    q->bytes = 0;
    while (q->count)
        segment_drop(q);
}

void send_queue_done(struct send_queue *q)
{
    send_queue_clear(q);
    mem_free(q->segment);
    mem_free(q->open);
    while (q->spare) {
        struct send_block *next = q->spare->next;
        mem_free(q->spare);
        q->spare = next;
    }
    send_queue_init(q);
}
