/* Element types: every dtype and operation against slow arithmetic, every 16-bit pattern. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "check.h"
#include "keepstep_err.h"
#include "wire/dtype.h"

enum { ALL = 65536, MOST = 83, ROOM = MOST * 8 + 16 };

static const enum dtype acc_types[] = {DTYPE_F32, DTYPE_F64, DTYPE_I32, DTYPE_I64, DTYPE_U8};
enum { ACC_TYPES = sizeof acc_types / sizeof *acc_types };

/* A 16-bit float of `mantissa` bits, computed with ldexp alone. */
struct half {
    enum dtype t;
    int mantissa, bias;
    float (*widen)(uint16_t);
    uint16_t (*narrow)(float);
};
static const struct half f16 = {DTYPE_F16, 10, 15, f16_to_f32, f16_from_f32};
static const struct half bf16 = {DTYPE_BF16, 7, 127, bf16_to_f32, bf16_from_f32};

static double half_value(const struct half *k, uint16_t h)
{
    int exponent = (h & 0x7fff) >> k->mantissa, ones = 2 * k->bias + 1;
    double fraction = h & ((1 << k->mantissa) - 1), sign = h & 0x8000 ? -1 : 1;
    if (exponent == ones)
        return fraction != 0 ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - k->bias - k->mantissa);
    return sign * ldexp(fraction + (1 << k->mantissa), exponent - k->bias - k->mantissa);
}

/* The nearest half, ties to even: by dividing by the distance of neighbours and rounding. */
static uint16_t half_nearest(const struct half *k, float f)
{
    int e, infinite = (2 * k->bias + 1) << k->mantissa;
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    double x = fabs((double)f);
    if (isinf(f))
        return (uint16_t)(sign | infinite);
    (void)frexp(x, &e);
    int lowest = 1 - k->bias - k->mantissa, unit = e - 1 - k->mantissa;
    if (unit < lowest || x == 0)
        unit = lowest;
    double units = nearbyint(ldexp(x, -unit));
    int bits = (int)units + ((unit - lowest) << k->mantissa);
    return (uint16_t)(sign | (bits > infinite ? infinite : bits));
}

static bool same_f32(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static void check_every_pattern(const struct half *k)
{
    static uint16_t in[ALL + 1], back[ALL + 1];
    static float out[ALL + 1];
    for (uint32_t h = 0; h < ALL; h++)
        in[h + 1] = (uint16_t)h;
    /* 1 + ALL elements, so that the last take another path than those that fill registers. */
    dtype_widen(k->t, out, in, ALL + 1);
    dtype_narrow(k->t, back, out, ALL + 1);
    for (uint32_t h = 0; h < ALL; h++) {
        double want = half_value(k, (uint16_t)h);
        float one = k->widen((uint16_t)h), many = out[h + 1];
        if (isnan(want)) {
            assert_true(isnan(one) && isnan(many));
            assert_true(isnan(half_value(k, k->narrow(one))) && isnan(half_value(k, back[h + 1])));
            assert_int_equal(k->narrow(one) & 0x8000, h & 0x8000);
            continue;
        }
        assert_true(same_f32(one, (float)want) && same_f32(many, (float)want));
        assert_int_equal(k->narrow(one), h);
        assert_int_equal(back[h + 1], h);
    }
}

static void test_every_pattern(void **arg)
{
    (void)arg;
    check_every_pattern(&f16);
    check_every_pattern(&bf16);
}

static void check_rounding(const struct half *k, const float *f, size_t n)
{
    uint16_t many[64];
    assert_true(n <= 64);
    dtype_narrow(k->t, many, f, n);
    for (size_t i = 0; i < n; i++) {
        uint16_t want = half_nearest(k, f[i]), one = k->narrow(f[i]);
        if (one != want || many[i] != want)
            fail_msg("%s of %a: %04x, %04x instead of %04x", dtype_name(k->t), (double)f[i], one, many[i], want);
    }
}

/* Around each value, and around the middle between it and its neighbour, where rounding turns. */
static void check_turning_points(const struct half *k)
{
    int infinite = (2 * k->bias + 1) << k->mantissa;
    for (int h = 0; h < infinite; h++) {
        float f[16];
        float low = (float)half_value(k, (uint16_t)h), high = (float)half_value(k, (uint16_t)(h + 1));
        if (isinf(high))
            high = (float)fmin(2 * (double)low - half_value(k, (uint16_t)(h - 1)), 0x1.fffffep127);
        float middle = low + (high - low) / 2;
        for (int s = 0; s < 2; s++) {
            float *g = f + 8 * s, sign = s ? -1 : 1;
            g[0] = sign * low;
            g[1] = sign * nextafterf(low, INFINITY);
            g[2] = sign * middle;
            g[3] = sign * nextafterf(middle, INFINITY);
            g[4] = sign * nextafterf(middle, 0);
            g[5] = sign * high;
            g[6] = sign * nextafterf(high, 0);
            g[7] = sign * nextafterf(low, 0);
        }
        check_rounding(k, f, 16);
    }
}

static void test_rounding_to_nearest_even(void **arg)
{
    (void)arg;
    check_turning_points(&f16);
    check_turning_points(&bf16);
}

static void test_rounding_of_random_floats(void **arg)
{
    (void)arg;
    struct rng r = {7};
    for (int k = 0; k < 40000; k++) {
        float f[37];
        for (size_t i = 0; i < 37; i++) {
            uint32_t u = (uint32_t)rng_next(&r);
            if ((u & 0x7f800000) == 0x7f800000)
                u &= 0xff800000;
            memcpy(&f[i], &u, 4);
        }
        check_rounding(&f16, f, 37);
        check_rounding(&bf16, f, 37);
    }
}

static void test_nan_stays_nan(void **arg)
{
    (void)arg;
    /* Payloads only in the bits that are cut off must not turn into infinity, nor carry into the sign. */
    static const uint32_t nans[] = {0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff,
                                    0x7fc00000, 0x7f801fff, 0x7f80ffff, 0xff8f0000};
    float f[8];
    uint16_t h[8];
    memcpy(f, nans, sizeof f);
    for (int k = 0; k < 2; k++) {
        const struct half *kind = k ? &bf16 : &f16;
        dtype_narrow(kind->t, h, f, 8);
        for (size_t i = 0; i < 8; i++) {
            assert_true(isnan(half_value(kind, h[i])));
            assert_int_equal(h[i], kind->narrow(f[i]));
            assert_int_equal(h[i] >> 15, nans[i] >> 31);
        }
    }
}

static void test_names(void **arg)
{
    (void)arg;
    static const struct {
        enum dtype t;
        const char *name;
        size_t size;
        enum dtype acc;
        bool is_float;
    } want[] = {
        {DTYPE_F32, "f32", 4, DTYPE_F32, true},  {DTYPE_F64, "f64", 8, DTYPE_F64, true},
        {DTYPE_F16, "f16", 2, DTYPE_F32, true},  {DTYPE_BF16, "bf16", 2, DTYPE_F32, true},
        {DTYPE_I32, "i32", 4, DTYPE_I32, false}, {DTYPE_I64, "i64", 8, DTYPE_I64, false},
        {DTYPE_U8, "u8", 1, DTYPE_U8, false},
    };
    enum dtype t;
    for (size_t i = 0; i < 7; i++) {
        assert_int_equal(want[i].t, i + 1);
        assert_int_equal(dtype_parse(want[i].name, &t), 0);
        assert_int_equal(t, want[i].t);
        assert_string_equal(dtype_name(t), want[i].name);
        assert_int_equal(dtype_size(t), want[i].size);
        assert_int_equal(dtype_acc(t), want[i].acc);
        assert_int_equal(dtype_is_float(t), want[i].is_float);
    }
    t = DTYPE_U8;
    assert_int_equal(dtype_parse("float", &t), KS_EINVAL);
    assert_int_equal(dtype_parse("", &t), KS_EINVAL);
    assert_int_equal(t, DTYPE_U8);
    assert_string_equal(dtype_name((enum dtype)0), "?");
    assert_string_equal(dtype_name((enum dtype)8), "?");
    assert_int_equal(dtype_size((enum dtype)0), 0);
    assert_int_equal(dtype_size((enum dtype)200), 0);
}

enum op { ADD, ADD_SCALED, SCALE, DIVIDE, WIDEN, OPS };

static void kernel(enum op op, enum dtype t, void *acc, const void *src, size_t n, double w)
{
    switch (op) {
    case ADD:
        dtype_add(t, acc, src, n);
        break;
    case ADD_SCALED:
        dtype_add_scaled(t, acc, src, n, w);
        break;
    case SCALE:
        dtype_scale(t, acc, n, w);
        break;
    case DIVIDE:
        dtype_divide(t, acc, n, w);
        break;
    case WIDEN:
        dtype_widen(t, acc, src, n);
        break;
    default:
        fail();
    }
}

/* The same on one element, in the plainest C; volatile, so that nothing is fused. */
static double reference_float(enum op op, bool f64, double acc, double src, double w)
{
    volatile float a = (float)acc, s = (float)src, term = (float)w * s;
    volatile double product = w * src;
    switch (op) {
    case ADD:
        return f64 ? acc + src : (double)(float)(a + s);
    case ADD_SCALED:
        return f64 ? acc + product : (double)(float)(a + term);
    case SCALE:
        return f64 ? acc * w : (double)(float)(a * (float)w);
    case DIVIDE:
        return f64 ? acc / w : (double)(float)(a / (float)w);
    default:
        return src;
    }
}

static int64_t reference_integer(enum op op, int64_t acc, int64_t src, int64_t w)
{
    switch (op) {
    case ADD:
        return (int64_t)((uint64_t)acc + (uint64_t)src);
    case ADD_SCALED:
        return (int64_t)((uint64_t)acc + (uint64_t)src * (uint64_t)w);
    case SCALE:
        return (int64_t)((uint64_t)acc * (uint64_t)w);
    case DIVIDE:
        return acc / w;
    default:
        return src;
    }
}

static double float_get(enum dtype t, const uint8_t *p)
{
    float f;
    double d;
    uint16_t h;
    if (t == DTYPE_F64) {
        memcpy(&d, p, 8);
        return d;
    }
    if (t == DTYPE_F32) {
        memcpy(&f, p, 4);
        return f;
    }
    memcpy(&h, p, 2);
    return half_value(t == DTYPE_F16 ? &f16 : &bf16, h);
}

static int64_t integer_get(enum dtype t, const uint8_t *p)
{
    int32_t i;
    int64_t l;
    if (t == DTYPE_U8)
        return *p;
    if (t == DTYPE_I32) {
        memcpy(&i, p, 4);
        return i;
    }
    memcpy(&l, p, 8);
    return l;
}

static void integer_put(enum dtype t, uint8_t *p, int64_t x)
{
    memcpy(p, &x, dtype_size(t));
}

/* Any bits for integers, ordinary numbers for floats. */
static void random_elements(struct rng *r, enum dtype t, uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++, p += dtype_size(t)) {
        uint64_t u = rng_next(r);
        float f = (float)((double)(int64_t)u * 0x1p-60);
        double d = (double)(int64_t)u * 0x1p-60;
        uint16_t h = t == DTYPE_F16 ? f16_from_f32(f) : bf16_from_f32(f);
        memcpy(p,
               t == DTYPE_F64      ? (void *)&d
               : t == DTYPE_F32    ? (void *)&f
               : dtype_is_float(t) ? (void *)&h
                                   : (void *)&u,
               dtype_size(t));
    }
}

static void check_element(enum op op, enum dtype t, const uint8_t *got, const uint8_t *acc, const uint8_t *src,
                          double w)
{
    enum dtype acc_t = dtype_acc(t);
    if (dtype_is_float(t)) {
        double want = reference_float(op, t == DTYPE_F64, float_get(acc_t, acc), float_get(t, src), w);
        if (float_get(acc_t, got) != want)
            fail_msg("operation %d, %s: %a instead of %a", op, dtype_name(t), float_get(acc_t, got), want);
        return;
    }
    uint8_t want[8];
    integer_put(t, want, reference_integer(op, integer_get(t, acc), integer_get(t, src), (int64_t)rint(w)));
    if (memcmp(got, want, dtype_size(t)) != 0)
        fail_msg("operation %d, %s: %lld", op, dtype_name(t), (long long)integer_get(t, got));
}

static void check_kernel(enum op op, enum dtype t, size_t n, size_t offset, double w)
{
    uint8_t acc[ROOM], src[ROOM], before[ROOM];
    struct rng r = {(uint64_t)op * 1000003 + (uint64_t)t * 10007 + n * 101 + offset};
    size_t size = dtype_size(t), acc_size = dtype_size(dtype_acc(t));
    memset(acc, 0x5a, sizeof acc);
    random_elements(&r, dtype_acc(t), acc + offset, n);
    random_elements(&r, t, src + offset + 1, n);
    memcpy(before, acc, sizeof acc);
    kernel(op, t, acc + offset, src + offset + 1, n, w);
    for (size_t i = 0; i < n; i++)
        check_element(op, t, acc + offset + i * acc_size, before + offset + i * acc_size, src + offset + 1 + i * size,
                      w);
    assert_memory_equal(acc, before, offset);
    assert_int_equal(acc[offset + n * acc_size], 0x5a);
}

static void test_every_operation(void **arg)
{
    (void)arg;
    static const double weights[] = {3, -2, 0.3, 7.6};
    for (enum op op = ADD; op < OPS; op++) {
        for (enum dtype t = DTYPE_F32; t <= DTYPE_U8; t++) {
            if ((op == SCALE || op == DIVIDE) && dtype_acc(t) != t)
                continue;
            for (size_t n = 0; n <= MOST; n++) {
                double w = op == DIVIDE && !dtype_is_float(t) ? 1 + (double)(n % 9) : weights[n % 4];
                check_kernel(op, t, n, n % 8, w);
            }
        }
    }
}

static void test_narrow_copies_or_rounds(void **arg)
{
    (void)arg;
    uint8_t wide[ROOM], out[ROOM];
    struct rng r = {3};
    for (enum dtype t = DTYPE_F32; t <= DTYPE_U8; t++) {
        size_t size = dtype_size(t), acc_size = dtype_size(dtype_acc(t));
        for (size_t n = 0; n <= MOST; n++) {
            random_elements(&r, dtype_acc(t), wide + 3, n);
            memset(out, 0x5a, sizeof out);
            dtype_narrow(t, out + 1, wide + 3, n);
            assert_int_equal(out[1 + n * size], 0x5a);
            if (size == acc_size)
                assert_memory_equal(out + 1, wide + 3, n * size);
            for (size_t i = 0; size < acc_size && i < n; i++) {
                uint16_t h;
                memcpy(&h, out + 1 + 2 * i, 2);
                assert_int_equal(
                    h, half_nearest(t == DTYPE_F16 ? &f16 : &bf16, (float)float_get(DTYPE_F32, wide + 3 + 4 * i)));
            }
        }
    }
}

static void test_in_place(void **arg)
{
    (void)arg;
    uint8_t a[ROOM], b[ROOM], want[ROOM];
    struct rng r = {4};
    for (enum dtype t = DTYPE_F32; t <= DTYPE_U8; t++) {
        size_t acc_bytes = MOST * dtype_size(dtype_acc(t));
        random_elements(&r, t, a, MOST);
        dtype_widen(t, want, a, MOST);
        memcpy(b, a, sizeof b);
        dtype_widen(t, b, b, MOST);
        assert_memory_equal(b, want, acc_bytes);
        dtype_narrow(t, b, b, MOST);
        assert_memory_equal(b, a, MOST * dtype_size(t));
    }
    for (size_t k = 0; k < ACC_TYPES; k++) {
        enum dtype t = acc_types[k];
        random_elements(&r, t, a, MOST);
        memcpy(b, a, sizeof b);
        memcpy(want, a, sizeof want);
        dtype_add(t, want, a, MOST);
        dtype_add(t, b, b, MOST);
        assert_memory_equal(b, want, MOST * dtype_size(t));
        memcpy(b, a, sizeof b);
        memcpy(want, a, sizeof want);
        dtype_add_scaled(t, want, a, MOST, 3);
        dtype_add_scaled(t, b, b, MOST, 3);
        assert_memory_equal(b, want, MOST * dtype_size(t));
    }
}

static void test_integers_at_the_edge(void **arg)
{
    (void)arg;
    int32_t i32[] = {-7, 7, INT32_MIN}, three[] = {-7, 7, 0};
    int64_t i64[] = {INT64_MIN, -9, 9}, most = 1;
    uint8_t u8[] = {7, 255, 200};
    dtype_divide(DTYPE_I32, i32, 3, -1);
    assert_true(i32[0] == 7 && i32[1] == -7 && i32[2] == INT32_MIN);
    dtype_divide(DTYPE_I32, three, 3, 2);
    assert_true(three[0] == -3 && three[1] == 3 && three[2] == 0);
    dtype_divide(DTYPE_I64, i64, 3, -1);
    assert_true(i64[0] == INT64_MIN && i64[1] == 9 && i64[2] == -9);
    dtype_divide(DTYPE_I64, i64 + 1, 2, 2.5);
    assert_true(i64[1] == 3 && i64[2] == -3);
    dtype_divide(DTYPE_U8, u8, 3, 2.5);
    assert_true(u8[0] == 2 && u8[1] == 102 && u8[2] == 80);
    dtype_scale(DTYPE_I64, &most, 1, 1e30);
    assert_true(most == INT64_MAX);
    dtype_scale(DTYPE_I64, &most, 1, NAN);
    assert_true(most == 0);
}

static void test_all_finite(void **arg)
{
    (void)arg;
    static const enum dtype floats[] = {DTYPE_F32, DTYPE_F64, DTYPE_F16, DTYPE_BF16};
    static const uint64_t bad[][3] = {
        {0x7f800000, 0xff800000, 0x7f800001},
        {0x7ff0000000000000, 0xfff0000000000000, 0x7ff0000000000001},
        {0x7c00, 0xfc00, 0x7c01},
        {0x7f80, 0xff80, 0x7f81},
    };
    uint8_t p[ROOM];
    struct rng r = {5};
    for (size_t k = 0; k < 4; k++) {
        size_t size = dtype_size(floats[k]);
        uint64_t largest = bad[k][0] - 1;
        for (size_t i = 0; i < MOST; i++) {
            random_elements(&r, floats[k], p + 1, MOST);
            memcpy(p + 1 + i * size, &largest, size);
            assert_true(dtype_all_finite(floats[k], p + 1, MOST));
            memcpy(p + 1 + i * size, &bad[k][i % 3], size);
            assert_false(dtype_all_finite(floats[k], p + 1, MOST));
            assert_true(dtype_all_finite(floats[k], p + 1, i));
        }
    }
    memset(p, 0xff, sizeof p);
    assert_true(dtype_all_finite(DTYPE_I32, p, MOST));
    assert_true(dtype_all_finite(DTYPE_I64, p, MOST));
    assert_true(dtype_all_finite(DTYPE_U8, p, MOST));
}

static jmp_buf refused;

static void refuse(const char *text, const char *file, int line)
{
    (void)text;
    (void)file;
    (void)line;
    longjmp(refused, 1);
}

static void test_misuse_is_caught(void **arg)
{
    (void)arg;
    float f[4] = {0};
    volatile int caught = 0;
    check_hook_set(refuse);
    if (setjmp(refused))
        caught++;
    else
        dtype_scale(DTYPE_F16, f, 1, 2);
    if (setjmp(refused))
        caught++;
    else
        dtype_divide(DTYPE_F32, f, 1, 0);
    if (setjmp(refused))
        caught++;
    else
        dtype_add((enum dtype)9, f, f, 1);
    check_hook_set(NULL);
    assert_int_equal(caught, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_every_pattern),
        cmocka_unit_test(test_rounding_to_nearest_even),
        cmocka_unit_test(test_rounding_of_random_floats),
        cmocka_unit_test(test_nan_stays_nan),
        cmocka_unit_test(test_every_operation),
        cmocka_unit_test(test_narrow_copies_or_rounds),
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_integers_at_the_edge),
        cmocka_unit_test(test_all_finite),
        cmocka_unit_test(test_misuse_is_caught),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
