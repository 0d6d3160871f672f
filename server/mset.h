/* mset.h - small sets of member slots. A slot is a process-local number of a listed member. */
#ifndef SERVER_MSET_H
#define SERVER_MSET_H

#include <stdbool.h>
#include <stdint.h>

#include "wire/view.h"

enum { MSET_WORDS = MEMBERS_MAX / 64, MSET_MAX = MSET_WORDS * 64 };

struct mset {
    uint64_t w[MSET_WORDS];
};

static inline bool mset_has(const struct mset *s, uint32_t i)
{
    return s->w[i / 64] >> (i % 64) & 1;
}
static inline void mset_add(struct mset *s, uint32_t i)
{
    s->w[i / 64] |= 1ull << (i % 64);
}
static inline void mset_del(struct mset *s, uint32_t i)
{
    s->w[i / 64] &= ~(1ull << (i % 64));
}
static inline void mset_clear(struct mset *s)
{
    for (int i = 0; i < MSET_WORDS; i++)
        s->w[i] = 0;
}
static inline bool mset_empty(const struct mset *s)
{
    uint64_t x = 0;
    for (int i = 0; i < MSET_WORDS; i++)
        x |= s->w[i];
    return x == 0;
}
/* Is every element of a in b? */
static inline bool mset_within(const struct mset *a, const struct mset *b)
{
    uint64_t x = 0;
    for (int i = 0; i < MSET_WORDS; i++)
        x |= a->w[i] & ~b->w[i];
    return x == 0;
}
/* Is every element of a in b or c? */
static inline bool mset_within2(const struct mset *a, const struct mset *b, const struct mset *c)
{
    uint64_t x = 0;
    for (int i = 0; i < MSET_WORDS; i++)
        x |= a->w[i] & ~(b->w[i] | c->w[i]);
    return x == 0;
}
static inline bool mset_equal(const struct mset *a, const struct mset *b)
{
    return mset_within(a, b) && mset_within(b, a);
}

#endif
