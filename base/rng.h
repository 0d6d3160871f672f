/* rng.h - seeded random numbers and hashing. Header only; no state but the caller's.
 *
 * splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). */
#ifndef BASE_RNG_H
#define BASE_RNG_H

#include <stddef.h>
#include <stdint.h>

struct rng {
    uint64_t state;
};

static inline uint64_t hash_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint64_t rng_next(struct rng *r)
{
    r->state += 0x9e3779b97f4a7c15ull;
    return hash_mix(r->state);
}

/* Uniform in [0, n); 0 when n is 0. */
static inline uint64_t rng_below(struct rng *r, uint64_t n)
{
    return n ? rng_next(r) % n : 0;
}

/* True in `permille` of 1000 draws. */
static inline int rng_chance(struct rng *r, unsigned permille)
{
    return rng_next(r) % 1000 < permille;
}

/* 64-bit hash of bytes: FNV-1a, then mixed so that all bits depend on all bytes. */
static inline uint64_t hash_bytes(const void *data, size_t size)
{
    const unsigned char *p = data;
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; i++)
        h = (h ^ p[i]) * 0x100000001b3ull;
    return hash_mix(h);
}

#endif
