#include "base/buf.h"

#include <sys/mman.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"

#if defined(__SANITIZE_ADDRESS__)
#define POISONING 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POISONING 1
#endif
#endif
#ifdef POISONING
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n)   ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum {
    CLASS_MIN_SHIFT = 8,
    CLASS_MAX_SHIFT = 30,
    CLASSES = CLASS_MAX_SHIFT - CLASS_MIN_SHIFT + 1,
    PAGE = 4096,
    SLAB_BYTES = 2 << 20,
    HEADERS_PER_BLOCK = 255,
};

struct slab {
    uint8_t *base;
    size_t size;
};

struct header_block {
    struct header_block *next;
    struct buf buf[HEADERS_PER_BLOCK];
};

struct pool {
    size_t limit, used, held;
    size_t slab_bytes; /* of slabs that are cut up; less than SLAB_BYTES under a smaller limit */
    uint64_t allocations;
    uint8_t *cut, *cut_end; /* rest of the slab that is being cut up */
    struct buf *free_buf[CLASSES];
    struct header_block *blocks;
    uint32_t block_used;
    struct slab *slab;
    uint32_t nslabs, slabs_cap;
};

static size_t class_bytes(uint32_t c)
{
    return (size_t)1 << (c + CLASS_MIN_SHIFT);
}

static uint32_t class_of(size_t size)
{
    uint32_t c = 0;
    while (class_bytes(c) < size)
        c++;
    return c;
}

struct pool *pool_create(size_t limit_bytes)
{
    struct pool *pool = mem_alloc(sizeof *pool);
    pool->limit = limit_bytes ? limit_bytes : SIZE_MAX;
    pool->slab_bytes = SLAB_BYTES;
    while (pool->slab_bytes > pool->limit && pool->slab_bytes > PAGE)
        pool->slab_bytes /= 2;
    return pool;
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    CHECK(pool->used == 0);
    for (uint32_t i = 0; i < pool->nslabs; i++) {
        ASAN_UNPOISON_MEMORY_REGION(pool->slab[i].base, pool->slab[i].size);
        munmap(pool->slab[i].base, pool->slab[i].size);
    }
    while (pool->blocks) {
        struct header_block *next = pool->blocks->next;
        mem_free(pool->blocks);
        pool->blocks = next;
    }
    mem_free(pool->slab);
    mem_free(pool);
}

/* Memory for huge pages must start at a multiple of their size: map more and cut both ends. */
static uint8_t *pages_map(size_t size)
{
    size_t extra = size >= SLAB_BYTES ? SLAB_BYTES : 0;
    uint8_t *p = mmap(NULL, size + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t head = extra ? (SLAB_BYTES - (uintptr_t)p % SLAB_BYTES) % SLAB_BYTES : 0;
    if (head)
        munmap(p, head);
    if (extra - head)
        munmap(p + head + size, extra - head);
    p += head;
    if (extra)
        madvise(p, size, MADV_HUGEPAGE);
    for (size_t i = 0; i < size; i += PAGE)
        p[i] = 0;
    return p;
}

static uint8_t *slab_add(struct pool *pool, size_t size)
{
    if (size > pool->limit - pool->held)
        return NULL;
    uint8_t *base = pages_map(size);
    if (!base) {
        log_error("pool_refused", "bytes=%zu cause=\"the system has no memory left\"", size);
        return NULL;
    }
    ARRAY_ROOM(pool->slab, pool->nslabs, pool->slabs_cap);
    pool->slab[pool->nslabs++] = (struct slab){base, size};
    pool->held += size;
    pool->allocations++;
    return base;
}

static struct buf *header_new(struct pool *pool)
{
    if (!pool->blocks || pool->block_used == HEADERS_PER_BLOCK) {
        struct header_block *b = mem_alloc(sizeof *b);
        b->next = pool->blocks;
        pool->blocks = b;
        pool->block_used = 0;
        pool->allocations++;
    }
    return &pool->blocks->buf[pool->block_used++];
}

static struct buf *buf_at(struct pool *pool, uint8_t *data, uint32_t c)
{
    struct buf *b = header_new(pool);
    *b = (struct buf){.data = data, .cap = (uint32_t)class_bytes(c), .size_class = c, .pool = pool};
    return b;
}

static void free_push(struct buf *b)
{
    ASAN_POISON_MEMORY_REGION(b->data, b->cap);
    b->next = b->pool->free_buf[b->size_class];
    b->pool->free_buf[b->size_class] = b;
}

static struct buf *free_pop(struct pool *pool, uint32_t c)
{
    struct buf *b = pool->free_buf[c];
    if (b) {
        pool->free_buf[c] = b->next;
        ASAN_UNPOISON_MEMORY_REGION(b->data, b->cap);
    }
    return b;
}

/* Pieces of the slab that is cut up go to the free lists, the largest that fit first. */
static void cut_rest(struct pool *pool)
{
    while (pool->cut < pool->cut_end) {
        uint32_t c = class_of((size_t)(pool->cut_end - pool->cut));
        if (class_bytes(c) > (size_t)(pool->cut_end - pool->cut))
            c--;
        free_push(buf_at(pool, pool->cut, c));
        pool->cut += class_bytes(c);
    }
}

static struct buf *buf_new(struct pool *pool, uint32_t c)
{
    size_t size = class_bytes(c);
    uint8_t *data;
    if (size >= pool->slab_bytes) {
        data = slab_add(pool, size);
        return data ? buf_at(pool, data, c) : NULL;
    }
    if ((size_t)(pool->cut_end - pool->cut) < size) {
        data = slab_add(pool, pool->slab_bytes);
        if (!data)
            return NULL;
        cut_rest(pool);
        pool->cut = data;
        pool->cut_end = data + pool->slab_bytes;
    }
    data = pool->cut;
    pool->cut += size;
    return buf_at(pool, data, c);
}

struct buf *pool_get(struct pool *pool, size_t size)
{
    CHECK(size >= 1 && size <= class_bytes(CLASSES - 1));
    uint32_t c = class_of(size);
    struct buf *b = free_pop(pool, c);
    if (!b)
        b = buf_new(pool, c);
    /* At the limit a larger free buffer serves: sizes change over a job's life, what the pool holds does not. */
    for (c++; !b && c < CLASSES; c++)
        b = free_pop(pool, c);
    if (!b)
        return NULL;
    b->len = (uint32_t)size;
    b->refs = 1;
    b->next = NULL;
    pool->used += b->cap;
    return b;
}

void buf_unref(struct buf *b)
{
    if (!b)
        return;
    CHECK(b->refs > 0);
    if (--b->refs > 0)
        return;
    b->pool->used -= b->cap;
    free_push(b);
}

size_t pool_used_bytes(const struct pool *pool)
{
    return pool->used;
}

size_t pool_held_bytes(const struct pool *pool)
{
    return pool->held;
}

uint64_t pool_slabs(const struct pool *pool)
{
    return pool->allocations;
}
