/* clock.h - time for hosts. Cores never call these: their events carry `now`. */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_now_us(void);     /* CLOCK_MONOTONIC, microseconds */
uint64_t clock_wall_ms(void);    /* CLOCK_REALTIME, milliseconds */
/* A new 64-bit incarnation: wall milliseconds in the high bits, random in the low 20, never 0. */
uint64_t incarnation_new(void);

#endif
