#include "storage/store_sum.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define SUM_HARDWARE    __attribute__((target("sse4.2")))
#define SUM_U64(crc, x) _mm_crc32_u64(crc, x)
#define SUM_U8(crc, x)  _mm_crc32_u8((uint32_t)(crc), x)
#define SUM_SUPPORTED() __builtin_cpu_supports("sse4.2")
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define SUM_HARDWARE
#define SUM_U64(crc, x) __crc32cd((uint32_t)(crc), x)
#define SUM_U8(crc, x)  __crc32cb((uint32_t)(crc), x)
#define SUM_SUPPORTED() 1
#endif

enum {
    LANE_BYTES = 4096,              /* three lanes hide the instruction's latency */
    COPY_BYTES = 3 * LANE_BYTES * 2 /* a piece that stays in the first-level cache */
};
static const uint32_t polynomial = 0x82f63b78u; /* 0x1edc6f41, lowest bit first */

/* byte_table: one byte of input. lane_table[i]: what the i-th byte of a state becomes after a lane of zeros. */
static uint32_t byte_table[256];
static uint32_t lane_table[4][256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static uint32_t state_step(uint32_t state, const uint8_t *p, size_t size)
{
    for (size_t i = 0; i < size; i++)
        state = (state >> 8) ^ byte_table[(state ^ p[i]) & 0xff];
    return state;
}

static uint32_t lane_skip(uint32_t state)
{
    return lane_table[0][state & 0xff] ^ lane_table[1][state >> 8 & 0xff] ^ lane_table[2][state >> 16 & 0xff] ^
           lane_table[3][state >> 24];
}

/* The map is linear, so the images of single bits give those of all bytes. */
static void lane_table_make(void)
{
    static const uint8_t zeros[LANE_BYTES];
    for (int byte = 0; byte < 4; byte++) {
        for (int bit = 0; bit < 8; bit++) {
            uint32_t image = state_step(1u << (8 * byte + bit), zeros, sizeof zeros);
            for (int v = 1 << bit; v < 2 << bit; v++)
                lane_table[byte][v] = lane_table[byte][v - (1 << bit)] ^ image;
        }
    }
}

static void tables_make(void)
{
    for (uint32_t v = 0; v < 256; v++) {
        uint32_t state = v;
        for (int bit = 0; bit < 8; bit++)
            state = (state >> 1) ^ (state & 1 ? polynomial : 0);
        byte_table[v] = state;
    }
    lane_table_make();
}

uint32_t store_sum_portable(uint32_t sum, const void *data, size_t size)
{
    pthread_once(&tables_once, tables_make);
    return ~state_step(~sum, data, size);
}

#ifdef SUM_HARDWARE
static inline uint64_t load_u64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

SUM_HARDWARE static uint64_t three_lanes(uint64_t state, const uint8_t *p)
{
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < LANE_BYTES; i += 8) {
        state = SUM_U64(state, load_u64(p + i));
        second = SUM_U64(second, load_u64(p + LANE_BYTES + i));
        third = SUM_U64(third, load_u64(p + 2 * LANE_BYTES + i));
    }
    return lane_skip(lane_skip((uint32_t)state) ^ (uint32_t)second) ^ third;
}

SUM_HARDWARE static uint32_t sum_hardware(uint32_t sum, const uint8_t *p, size_t size)
{
    uint64_t state = ~sum;
    for (; size >= 3 * LANE_BYTES; size -= 3 * LANE_BYTES, p += 3 * LANE_BYTES)
        state = three_lanes(state, p);
    for (; size >= 8; size -= 8, p += 8)
        state = SUM_U64(state, load_u64(p));
    for (; size > 0; size--, p++)
        state = SUM_U8(state, *p);
    return ~(uint32_t)state;
}
#endif

uint32_t store_sum(uint32_t sum, const void *data, size_t size)
{
#ifdef SUM_HARDWARE
    pthread_once(&tables_once, tables_make);
    if (SUM_SUPPORTED())
        return sum_hardware(sum, data, size);
#endif
    return store_sum_portable(sum, data, size);
}

uint32_t store_sum_copy(uint32_t sum, void *dst, const void *data, size_t size)
{
    uint8_t *to = dst;
    const uint8_t *from = data;
    while (size > 0) {
        size_t piece = size < COPY_BYTES ? size : COPY_BYTES;
        memcpy(to, from, piece);
        sum = store_sum(sum, to, piece);
        to += piece;
        from += piece;
        size -= piece;
    }
    return sum;
}
