#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "base/mem.h"
#include "base/rng.h"
/* The source, for both ways of computing the checksum. */
#include "wire/crc32c.c"
#include "wire/dtype.h"

enum { CHUNK = 4096 };

static struct frame_header sample(void)
{
    return (struct frame_header){.type = FRAME_PUSH,
                                 .flags = FRAME_CRC | FRAME_WANT,
                                 .dtype = DTYPE_BF16,
                                 .status = KS_ESTALE,
                                 .payload_crc = 0x01020304,
                                 .len = 0x0f00,
                                 .tensor = 0x1122334455667788ull,
                                 .step = -1,
                                 .chunk = 0xa1a2a3a4,
                                 .seq = 0xb1b2b3b4,
                                 .epoch = 0xc1c2c3c4,
                                 .weight = 1.5f,
                                 .version = 0xd1d2d3d4d5d6d7d8ull};
}

static void assert_same(const struct frame_header *a, const struct frame_header *b)
{
    assert_true(a->type == b->type && a->flags == b->flags && a->dtype == b->dtype && a->status == b->status);
    assert_true(a->payload_crc == b->payload_crc && a->len == b->len && a->tensor == b->tensor);
    assert_true(a->step == b->step && a->chunk == b->chunk && a->seq == b->seq && a->epoch == b->epoch);
    assert_true(memcmp(&a->weight, &b->weight, sizeof a->weight) == 0 && a->version == b->version);
}

/* The layout is what other builds expect: these bytes never change within FRAME_VERSION 1. */
static void test_golden(void **state)
{
    (void)state;
    static const uint8_t golden[FRAME_SIZE] = {
        0x4b, 0x53, 0x01, 0x14, 0x03, 0x04, 0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x03, 0x02, 0x01,
        0x00, 0x0f, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xa4, 0xa3, 0xa2, 0xa1, 0xb4, 0xb3, 0xb2, 0xb1,
        0xc4, 0xc3, 0xc2, 0xc1, 0x00, 0x00, 0xc0, 0x3f, 0xd8, 0xd7, 0xd6, 0xd5, 0xd4, 0xd3, 0xd2, 0xd1,
    };
    static const uint8_t checksum[4] = {0xd8, 0x1b, 0x77, 0x94};
    uint8_t out[FRAME_SIZE], masked[FRAME_SIZE];
    struct frame_header h = sample(), back;
    memset(out, 0xee, sizeof out);
    frame_encode(&h, out);
    memcpy(masked, out, sizeof out);
    memset(masked + 8, 0, 4);
    assert_memory_equal(masked, golden, FRAME_SIZE);
    assert_memory_equal(out + 8, checksum, 4);
    assert_int_equal(frame_decode(out, CHUNK, &back), 0);
    assert_same(&h, &back);
}

static void test_crc_vectors(void **state)
{
    (void)state;
    /* RFC 3720, B.4 */
    uint8_t b[32] = {0};
    assert_int_equal(crc32c(0, b, 32), 0x8a9136aa);
    memset(b, 0xff, 32);
    assert_int_equal(crc32c(0, b, 32), 0x62a8ab43);
    for (int i = 0; i < 32; i++)
        b[i] = (uint8_t)i;
    assert_int_equal(crc32c(0, b, 32), 0x46dd794e);
    assert_int_equal(crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(crc32c(crc32c(0, "1234", 4), "56789", 5), 0xe3069283);
    assert_int_equal(crc32c(7, NULL, 0), 7);
}

static uint32_t crc_by_bits(uint32_t r, const uint8_t *p, size_t size)
{
    for (; size; p++, size--) {
        r ^= *p;
        for (int bit = 0; bit < 8; bit++)
            r = r & 1 ? r >> 1 ^ POLYNOMIAL : r >> 1;
    }
    return r;
}

/* Every length around the lanes' joints, at every alignment, both ways, against the definition. */
static void test_crc_paths(void **state)
{
    (void)state;
    static uint8_t b[20000];
    struct rng rng = {5};
    for (size_t i = 0; i < sizeof b; i++)
        b[i] = (uint8_t)rng_next(&rng);
    for (int i = 0; i < 1500; i++) {
        size_t at = rng_below(&rng, 16), size = rng_chance(&rng, 500) ? 4080 * (1 + rng_below(&rng, 3)) : 0;
        size += rng_below(&rng, 200);
        uint32_t start = (uint32_t)rng_next(&rng), want = crc_by_bits(start, b + at, size);
        assert_int_equal(register_by_table(start, b + at, size), want);
        assert_int_equal(register_update(start, b + at, size), want);
    }
}

static int decode_of(const struct frame_header *h, uint32_t chunk_bytes)
{
    uint8_t out[FRAME_SIZE];
    struct frame_header back = {.seq = 4711};
    frame_encode(h, out);
    int rc = frame_decode(out, chunk_bytes, &back);
    if (rc == 0)
        assert_same(h, &back);
    else
        assert_int_equal(back.seq, 4711);
    return rc;
}

static void test_fields(void **state)
{
    (void)state;
    struct frame_header h = sample();
    for (unsigned type = 0; type < 256; type++) {
        h.type = (uint8_t)type;
        h.len = 0;
        int known = strcmp(frame_type_name(type), "?") != 0;
        assert_int_equal(decode_of(&h, CHUNK), known ? 0 : KS_EPROTO);
    }
    assert_string_equal(frame_type_name(FRAME_HELLO), "hello");
    assert_string_equal(frame_type_name(FRAME_SYNC_OK), "sync_ok");
    assert_string_equal(frame_type_name(FRAME_STOP), "stop");
    assert_string_equal(frame_type_name(1000), "?");
    for (unsigned dtype = 0; dtype < 256; dtype++) {
        h = sample();
        h.dtype = (uint8_t)dtype;
        assert_int_equal(decode_of(&h, CHUNK), dtype <= DTYPE_U8 ? 0 : KS_EPROTO);
    }
    static const int64_t bad_steps[] = {-2, -1000, INT64_MIN};
    for (size_t i = 0; i < 3; i++) {
        h = sample();
        h.step = bad_steps[i];
        assert_int_equal(decode_of(&h, CHUNK), KS_EPROTO);
    }
    h = sample();
    h.step = INT64_MAX;
    assert_int_equal(decode_of(&h, CHUNK), 0);
    static const float bad_weights[] = {-1, -1e-30f, NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 5; i++) {
        h = sample();
        h.weight = bad_weights[i];
        assert_int_equal(decode_of(&h, CHUNK), KS_EPROTO);
    }
    static const int16_t statuses[] = {0, KS_EAGAIN, INT16_MIN};
    for (size_t i = 0; i < 3; i++) {
        h = sample();
        h.status = statuses[i];
        assert_int_equal(decode_of(&h, CHUNK), 0);
    }
    h = sample();
    h.status = 1;
    assert_int_equal(decode_of(&h, CHUNK), KS_EPROTO);
}

static void test_lengths(void **state)
{
    (void)state;
    static const struct {
        uint8_t type;
        uint64_t max;
    } limits[] = {
        {FRAME_HELLO, 4096},
        {FRAME_WELCOME, 0},
        {FRAME_BYE, 4096},
        {FRAME_PING, 0},
        {FRAME_DECLARE, 65536},
        {FRAME_INIT, CHUNK},
        {FRAME_PUSH, CHUNK},
        {FRAME_RESULT, CHUNK},
        {FRAME_VALUE, CHUNK},
        {FRAME_PULL, 0},
        {FRAME_DONE, FRAME_CONTROL_MAX},
        {FRAME_VIEW, FRAME_CONTROL_MAX},
        {FRAME_IMAGE, 16 * CHUNK + FRAME_CONTROL_MAX},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        struct frame_header h = {.type = limits[i].type, .len = limits[i].max};
        assert_int_equal(decode_of(&h, CHUNK), 0);
        h.len++;
        assert_int_equal(decode_of(&h, CHUNK), KS_EPROTO);
        h.len = UINT64_MAX;
        assert_int_equal(decode_of(&h, CHUNK), KS_EPROTO);
    }
    /* Control connections have no chunks. */
    struct frame_header push = {.type = FRAME_PUSH, .len = 1}, image = {.type = FRAME_IMAGE, .len = 1};
    assert_int_equal(decode_of(&push, 0), KS_EPROTO);
    assert_int_equal(decode_of(&image, 0), KS_EPROTO);
    image.len = 1 << 30;
    assert_int_equal(decode_of(&image, CHUNK_BYTES_MAX), 0);
    image.len++;
    assert_int_equal(decode_of(&image, CHUNK_BYTES_MAX), KS_EPROTO);
}

/* One changed bit anywhere is noticed. */
static void test_bit_flips(void **state)
{
    (void)state;
    struct frame_header h = sample(), back = {.seq = 4711};
    uint8_t out[FRAME_SIZE];
    frame_encode(&h, out);
    for (int bit = 0; bit < FRAME_SIZE * 8; bit++) {
        out[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_int_equal(frame_decode(out, CHUNK, &back), bit / 8 == 2 ? KS_EVERSION : KS_EPROTO);
        out[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    assert_int_equal(back.seq, 4711);
}

static void test_chunk_refs(void **state)
{
    (void)state;
    struct chunk_ref refs[3] = {{1, 2}, {UINT64_MAX, UINT32_MAX}, {0x0102030405060708ull, 0x090a0b0c}}, back;
    uint8_t out[36];
    static const uint8_t golden[12] = {8, 7, 6, 5, 4, 3, 2, 1, 12, 11, 10, 9};
    assert_int_equal(chunk_refs_size(3), sizeof out);
    chunk_refs_encode(refs, 3, out);
    assert_memory_equal(out + 24, golden, 12);
    assert_int_equal(chunk_refs_count(sizeof out), 3);
    for (size_t i = 0; i < 3; i++) {
        chunk_ref_decode(out, i, &back);
        assert_true(back.tensor == refs[i].tensor && back.chunk == refs[i].chunk);
    }
    assert_int_equal(chunk_refs_count(0), 0);
    assert_int_equal(chunk_refs_count(35), KS_EPROTO);
    assert_int_equal(chunk_refs_count(1), KS_EPROTO);
}

static void test_done(void **state)
{
    (void)state;
    uint64_t tensors[] = {5, UINT64_MAX};
    struct setting settings[] = {{7, 99, 0.25, 3}, {0, 1, -1e300, UINT32_MAX}}, s;
    uint8_t out[8 + 16 + 64];
    struct done_head d;
    assert_int_equal(done_size(2, 2), sizeof out);
    done_encode(tensors, 2, settings, 2, out);
    assert_int_equal(done_decode(out, sizeof out, &d), 0);
    assert_true(d.ntensors == 2 && d.nsettings == 2);
    assert_true(done_tensor(&d, 0) == 5 && done_tensor(&d, 1) == UINT64_MAX);
    for (uint32_t i = 0; i < 2; i++) {
        done_setting(&d, i, &s);
        assert_true(s.from_step == settings[i].from_step && s.group == settings[i].group);
        assert_true(s.value == settings[i].value && s.option == settings[i].option);
    }
    done_encode(NULL, 0, NULL, 0, out);
    assert_int_equal(done_decode(out, 8, &d), 0);
    assert_true(d.ntensors == 0 && d.nsettings == 0);
}

static void refuse_done(const uint64_t *tensor, const struct setting *setting, size_t at, uint8_t value)
{
    uint8_t out[8 + 8 + SETTING_SIZE];
    struct done_head d = {.ntensors = 4711};
    done_encode(tensor, 1, setting, 1, out);
    out[at] = value;
    assert_int_equal(done_decode(out, sizeof out, &d), KS_EPROTO);
    assert_int_equal(d.ntensors, 4711);
}

static void test_done_refused(void **state)
{
    (void)state;
    uint64_t tensor = 5, none = 0;
    struct setting good = {7, 99, 0.25, 3}, bad = good;
    uint8_t out[8 + 8 + SETTING_SIZE];
    struct done_head d;
    refuse_done(&tensor, &good, 0, 2); /* counts that do not fit the size */
    refuse_done(&tensor, &good, 4, 0);
    refuse_done(&tensor, &good, 3, 0xff);
    refuse_done(&tensor, &good, 7, 0xff);
    refuse_done(&tensor, &good, sizeof out - 1, 1); /* reserved */
    refuse_done(&none, &good, 0, 1);
    bad.from_step = -1;
    refuse_done(&tensor, &bad, 0, 1);
    bad = good;
    bad.value = NAN;
    refuse_done(&tensor, &bad, 0, 1);
    done_encode(&tensor, 1, &good, 1, out);
    for (size_t size = 0; size < sizeof out; size++)
        assert_int_equal(done_decode(out, size, &d), KS_EPROTO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),     cmocka_unit_test(test_crc_vectors), cmocka_unit_test(test_crc_paths),
        cmocka_unit_test(test_fields),     cmocka_unit_test(test_lengths),     cmocka_unit_test(test_bit_flips),
        cmocka_unit_test(test_chunk_refs), cmocka_unit_test(test_done),        cmocka_unit_test(test_done_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
