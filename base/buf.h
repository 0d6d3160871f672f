/* buf.h - reference-counted payload buffers from a pool.
 *
 * Everything that carries tensor bytes is a struct buf: what was received, an accumulator, a
 * result, what a socket or a disk writer still reads. Whoever keeps a buffer holds a reference.
 * A buffer with more than one reference must not be written to: take a new one (copy on write).
 *
 * One pool belongs to one thread; references are counted without atomics. A disk writer thread
 * may read a buffer while the owning thread holds a reference on its behalf.
 *
 * The pool takes memory in slabs (2 MiB aligned, huge pages asked for, touched once), never gives
 * it back, and refuses beyond its limit (I11). Size classes are powers of two from 256 bytes. */
#ifndef BASE_BUF_H
#define BASE_BUF_H

#include <stddef.h>
#include <stdint.h>

struct pool;

struct buf {
    uint8_t *data;      /* 64-byte aligned */
    uint32_t cap;       /* bytes at data */
    uint32_t len;       /* bytes in use; set by the user of the buffer */
    uint32_t refs;
    uint32_t size_class;
    struct pool *pool;
    struct buf *next;   /* free list, or the holder's list when refs == 1 */
};

/* limit_bytes 0: no limit. Free with pool_free when every buffer is back (checked). */
struct pool *pool_create(size_t limit_bytes);
void pool_free(struct pool *pool);
/* A buffer with refs 1, len = size, contents undefined; NULL when the limit is reached.
 * size 1 .. 1 GiB. */
struct buf *pool_get(struct pool *pool, size_t size);
size_t pool_used_bytes(const struct pool *pool);   /* handed out now */
size_t pool_held_bytes(const struct pool *pool);   /* taken from the system */
uint64_t pool_slabs(const struct pool *pool);      /* system allocations so far: flat after warm-up */

static inline struct buf *buf_ref(struct buf *b)
{
    b->refs++;
    return b;
}
/* Gives one reference back; NULL is allowed. */
void buf_unref(struct buf *b);

#endif
