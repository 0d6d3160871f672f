#include "wire/frame.h"

#include <string.h>

#include "wire/bytes.h"

#define POLYNOMIAL 0x82f63b78u /* Castagnoli's, bits reversed */

enum { SLICES = 8 };

/* slice[i][b]: what byte b does to the register when i more bytes follow it. */
static uint32_t slice[SLICES][256];

static void slices_init(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t r = b;
        for (int bit = 0; bit < 8; bit++)
            r = r & 1 ? r >> 1 ^ POLYNOMIAL : r >> 1;
        slice[0][b] = r;
    }
    for (int i = 1; i < SLICES; i++) {
        for (uint32_t b = 0; b < 256; b++)
            slice[i][b] = slice[i - 1][b] >> 8 ^ slice[0][slice[i - 1][b] & 0xff];
    }
}

/* All registers below are without the inversions at the start and at the end. */
static uint32_t register_by_table(uint32_t r, const uint8_t *p, size_t size)
{
    for (; size >= 8; p += 8, size -= 8) {
        uint64_t x = get_u64(p) ^ r;
        r = 0;
        for (int i = 0; i < SLICES; i++)
            r ^= slice[SLICES - 1 - i][x >> (8 * i) & 0xff];
    }
    for (; size; p++, size--)
        r = r >> 8 ^ slice[0][(r ^ *p) & 0xff];
    return r;
}

static uint32_t (*register_update)(uint32_t, const uint8_t *, size_t) = register_by_table;

#ifdef __x86_64__
#include <nmmintrin.h>

/* The instruction takes one cycle but its result three, so three lanes run side by side and are joined:
 * the register is linear, and skip[][] says what a register becomes when LANE zero bytes follow. */
enum { LANE = 1360 };

static uint32_t skip[4][256];

static void skips_init(void)
{
    static const uint8_t zeros[LANE];
    for (int k = 0; k < 4; k++) {
        for (int bit = 0; bit < 8; bit++) {
            uint32_t one = 1u << bit, moved = register_by_table(one << (8 * k), zeros, LANE);
            for (uint32_t b = 0; b < one; b++)
                skip[k][one + b] = skip[k][b] ^ moved;
        }
    }
}

static uint64_t lane_skip(uint64_t r)
{
    return skip[0][r & 0xff] ^ skip[1][r >> 8 & 0xff] ^ skip[2][r >> 16 & 0xff] ^ skip[3][r >> 24 & 0xff];
}

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

__attribute__((target("sse4.2"))) static uint32_t register_by_sse42(uint32_t start, const uint8_t *p, size_t size)
{
    uint64_t a = start;
    for (; size >= 3 * LANE; p += 3 * LANE, size -= 3 * LANE) {
        uint64_t b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            a = _mm_crc32_u64(a, load_u64(p + i));
            b = _mm_crc32_u64(b, load_u64(p + i + LANE));
            c = _mm_crc32_u64(c, load_u64(p + i + 2 * LANE));
        }
        a = lane_skip(lane_skip(a) ^ b) ^ c;
    }
    for (; size >= 8; p += 8, size -= 8)
        a = _mm_crc32_u64(a, load_u64(p));
    uint32_t r = (uint32_t)a;
    for (; size; p++, size--)
        r = _mm_crc32_u8(r, *p);
    return r;
}
#endif

__attribute__((constructor)) static void crc32c_init(void)
{
    slices_init();
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2")) {
        skips_init();
        register_update = register_by_sse42;
    }
#endif
}

uint32_t crc32c(uint32_t crc, const void *data, size_t size)
{
    return ~register_update(~crc, data, size);
}
