#include "base/clock.h"

#include <sys/random.h>
#include <time.h>

#include "base/check.h"
#include "base/rng.h"

enum { INCARNATION_RANDOM_BITS = 20 };

uint64_t clock_now_us(void)
{
    struct timespec ts;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &ts) == 0);
    return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}

uint64_t clock_wall_ms(void)
{
    struct timespec ts;
    CHECK(clock_gettime(CLOCK_REALTIME, &ts) == 0);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

uint64_t incarnation_new(void)
{
    uint64_t r = 0;
    if (getrandom(&r, sizeof r, 0) != (ssize_t)sizeof r)
        r = hash_mix(clock_now_us() ^ (uint64_t)(uintptr_t)&r);
    r &= (1u << INCARNATION_RANDOM_BITS) - 1;
    uint64_t id = clock_wall_ms() << INCARNATION_RANDOM_BITS | r;
    return id ? id : 1;
}
