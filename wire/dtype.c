/* Results must be equal on every CPU: no fused multiply-add, no reassociation, and the F16C conversions
 * agree bit for bit with the portable ones. Every kernel is one plain loop, compiled twice: for the
 * base instruction set and for AVX2, chosen when called (ifunc resolvers break under sanitizers). */
#include "wire/dtype.h"

#include <math.h>
#include <string.h>

#include "check.h"
#include "keepstep_err.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("O3", "fp-contract=off") /* -O2 of gcc does not vectorise loops of unknown length */
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2   1
#define TARGET_AVX2 __attribute__((target("avx2,f16c")))
#else
#define HAVE_AVX2 0
#endif

#define INLINE static inline __attribute__((always_inline))

/* Elements at any address: frames and files do not promise alignment. */
#define UNALIGNED __attribute__((aligned(1), may_alias))
typedef float any_f32 UNALIGNED;
typedef double any_f64 UNALIGNED;
typedef uint16_t any_u16 UNALIGNED;
typedef uint32_t any_u32 UNALIGNED;
typedef int32_t any_i32 UNALIGNED;
typedef uint64_t any_u64 UNALIGNED;
typedef int64_t any_i64 UNALIGNED;
typedef uint8_t any_u8 UNALIGNED;

static const struct {
    const char *name;
    uint8_t size;
    uint8_t acc;
} info[] = {
    [DTYPE_F32] = {"f32", 4, DTYPE_F32},   [DTYPE_F64] = {"f64", 8, DTYPE_F64}, [DTYPE_F16] = {"f16", 2, DTYPE_F32},
    [DTYPE_BF16] = {"bf16", 2, DTYPE_F32}, [DTYPE_I32] = {"i32", 4, DTYPE_I32}, [DTYPE_I64] = {"i64", 8, DTYPE_I64},
    [DTYPE_U8] = {"u8", 1, DTYPE_U8},
};

static bool known(enum dtype t)
{
    return t >= DTYPE_F32 && t <= DTYPE_U8;
}

size_t dtype_size(enum dtype t)
{
    return known(t) ? info[t].size : 0;
}

const char *dtype_name(enum dtype t)
{
    return known(t) ? info[t].name : "?";
}

int dtype_parse(const char *name, enum dtype *ret_t)
{
    for (enum dtype t = DTYPE_F32; t <= DTYPE_U8; t++) {
        if (strcmp(name, info[t].name) == 0) {
            *ret_t = t;
            return 0;
        }
    }
    return KS_EINVAL;
}

enum dtype dtype_acc(enum dtype t)
{
    return known(t) ? (enum dtype)info[t].acc : t;
}

bool dtype_is_float(enum dtype t)
{
    return t >= DTYPE_F32 && t <= DTYPE_BF16;
}

INLINE uint32_t f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

INLINE float f32_of_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Without branches, so that loops over it vectorise. NaNs become quiet, as F16C makes them. */
INLINE float f16_widen_one(uint16_t h)
{
    int32_t a = h & 0x7fff;
    uint32_t normal = ((uint32_t)a << 13) + (112u << 23);
    uint32_t tiny = f32_bits((float)a * 0x1p-24f);
    uint32_t huge = 0x7f800000u | (uint32_t)a << 13 | (a > 0x7c00 ? 0x400000u : 0);
    uint32_t u = a < 0x400 ? tiny : normal;
    u = a >= 0x7c00 ? huge : u;
    return f32_of_bits(u | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t f16_narrow_one(float f)
{
    uint32_t u = f32_bits(f);
    int32_t a = (int32_t)(u & 0x7fffffff);
    uint32_t normal = ((uint32_t)a - (112u << 23) + 0xfff + ((uint32_t)a >> 13 & 1)) >> 13;
    /* Half a unit of 0.5f is half the smallest f16: the addition rounds where f16 subnormals do. */
    uint32_t tiny = f32_bits(f32_of_bits((uint32_t)a) + 0.5f) - 0x3f000000u;
    uint32_t nan = 0x7e00 | ((uint32_t)a >> 13 & 0x3ff);
    uint32_t h = a < 0x38800000 ? tiny : normal;
    h = a >= 0x47800000 ? 0x7c00 : h;
    h = a > 0x7f800000 ? nan : h;
    return (uint16_t)(h | (u >> 16 & 0x8000));
}

INLINE float bf16_widen_one(uint16_t h)
{
    return f32_of_bits((uint32_t)h << 16);
}

INLINE uint16_t bf16_narrow_one(float f)
{
    uint32_t u = f32_bits(f);
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    uint32_t nan = u >> 16 | 0x40;
    return (uint16_t)((int32_t)(u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

float f16_to_f32(uint16_t h)
{
    return f16_widen_one(h);
}

uint16_t f16_from_f32(float f)
{
    return f16_narrow_one(f);
}

float bf16_to_f32(uint16_t h)
{
    return bf16_widen_one(h);
}

uint16_t bf16_from_f32(float f)
{
    return bf16_narrow_one(f);
}

/* d[i] = value for every i, where value may use d[i] and s[i]. */
#define EACH(D, S, value)                                                                                              \
    do {                                                                                                               \
        D *d = dst;                                                                                                    \
        const S *s = src;                                                                                              \
        for (size_t i = 0; i < n; i++)                                                                                 \
            d[i] = (value);                                                                                            \
    } while (0)
#define EACH_BACKWARD(D, S, value)                                                                                     \
    do {                                                                                                               \
        D *d = dst;                                                                                                    \
        const S *s = src;                                                                                              \
        for (size_t i = n; i-- > 0;)                                                                                   \
            d[i] = (value);                                                                                            \
    } while (0)
#define EACH_SELF(D, value)                                                                                            \
    do {                                                                                                               \
        D *d = dst;                                                                                                    \
        for (size_t i = 0; i < n; i++)                                                                                 \
            d[i] = (value);                                                                                            \
    } while (0)

/* Only f16 and bf16 come here. In place the wider elements overwrite what is not read yet, unless the
 * last is done first. */
INLINE void widen_body(enum dtype t, void *dst, const void *src, size_t n)
{
    if (t == DTYPE_F16 && dst == src)
        EACH_BACKWARD(any_f32, any_u16, f16_widen_one(s[i]));
    else if (t == DTYPE_F16)
        EACH(any_f32, any_u16, f16_widen_one(s[i]));
    else if (dst == src)
        EACH_BACKWARD(any_f32, any_u16, bf16_widen_one(s[i]));
    else
        EACH(any_f32, any_u16, bf16_widen_one(s[i]));
}

INLINE void narrow_body(enum dtype t, void *dst, const void *src, size_t n)
{
    if (t == DTYPE_F16)
        EACH(any_u16, any_f32, f16_narrow_one(s[i]));
    else
        EACH(any_u16, any_f32, bf16_narrow_one(s[i]));
}

/* Without f16: see dtype_add. */
INLINE void add_body(enum dtype t, void *dst, const void *src, size_t n)
{
    switch (t) {
    case DTYPE_F32:
        EACH(any_f32, any_f32, d[i] + s[i]);
        break;
    case DTYPE_F64:
        EACH(any_f64, any_f64, d[i] + s[i]);
        break;
    case DTYPE_BF16:
        EACH(any_f32, any_u16, d[i] + bf16_widen_one(s[i]));
        break;
    case DTYPE_I32:
        EACH(any_u32, any_u32, d[i] + s[i]);
        break;
    case DTYPE_I64:
        EACH(any_u64, any_u64, d[i] + s[i]);
        break;
    case DTYPE_U8:
        EACH(any_u8, any_u8, (uint8_t)(d[i] + s[i]));
        break;
    default:
        break;
    }
}

/* The nearest integer; what no int64 holds saturates, NaN is 0. */
static int64_t integer_of(double w)
{
    double r = rint(w);
    if (r >= 0x1p63)
        return INT64_MAX;
    if (r < -0x1p63)
        return INT64_MIN;
    return r == r ? (int64_t)r : 0;
}

INLINE void add_scaled_body(enum dtype t, void *dst, const void *src, size_t n, double w)
{
    float f = (float)w;
    uint64_t k = dtype_is_float(t) ? 0 : (uint64_t)integer_of(w);
    switch (t) {
    case DTYPE_F32:
        EACH(any_f32, any_f32, d[i] + f * s[i]);
        break;
    case DTYPE_F64:
        EACH(any_f64, any_f64, d[i] + w * s[i]);
        break;
    case DTYPE_F16:
        EACH(any_f32, any_u16, d[i] + f * f16_widen_one(s[i]));
        break;
    case DTYPE_BF16:
        EACH(any_f32, any_u16, d[i] + f * bf16_widen_one(s[i]));
        break;
    case DTYPE_I32:
        EACH(any_u32, any_u32, d[i] + (uint32_t)k * s[i]);
        break;
    case DTYPE_I64:
        EACH(any_u64, any_u64, d[i] + k * s[i]);
        break;
    case DTYPE_U8:
        EACH(any_u8, any_u8, (uint8_t)(d[i] + (uint32_t)k * s[i]));
        break;
    }
}

INLINE void scale_body(enum dtype t, void *dst, size_t n, double w)
{
    float f = (float)w;
    uint64_t k = dtype_is_float(t) ? 0 : (uint64_t)integer_of(w);
    switch (t) {
    case DTYPE_F32:
        EACH_SELF(any_f32, d[i] * f);
        break;
    case DTYPE_F64:
        EACH_SELF(any_f64, d[i] * w);
        break;
    case DTYPE_I32:
        EACH_SELF(any_u32, d[i] * (uint32_t)k);
        break;
    case DTYPE_I64:
        EACH_SELF(any_u64, d[i] * k);
        break;
    case DTYPE_U8:
        EACH_SELF(any_u8, (uint8_t)(d[i] * (uint32_t)k));
        break;
    default:
        break;
    }
}

INLINE void divide_float_body(enum dtype t, void *dst, size_t n, double w)
{
    float f = (float)w;
    if (t == DTYPE_F32)
        EACH_SELF(any_f32, d[i] / f);
    else
        EACH_SELF(any_f64, d[i] / w);
}

/* -INT64_MIN wraps, as integers do everywhere here; in C the division would be undefined. */
static int64_t divide_i64(int64_t a, int64_t k)
{
    return k == -1 ? (int64_t)(0 - (uint64_t)a) : a / k;
}

static int64_t divide_fraction(double a, double w)
{
    return integer_of(trunc(a / w));
}

static void divide_integer(enum dtype t, void *dst, size_t n, double w)
{
    int64_t k = integer_of(w);
    bool whole = (double)k == w;
    switch (t) {
    case DTYPE_I32:
        EACH_SELF(any_i32, (int32_t)(whole ? divide_i64(d[i], k) : divide_fraction(d[i], w)));
        break;
    case DTYPE_I64:
        EACH_SELF(any_i64, whole ? divide_i64(d[i], k) : divide_fraction((double)d[i], w));
        break;
    case DTYPE_U8:
        EACH_SELF(any_u8, (uint8_t)(whole ? divide_i64(d[i], k) : divide_fraction(d[i], w)));
        break;
    default:
        break;
    }
}

#define EXPONENTS_FULL(S, mask)                                                                                        \
    do {                                                                                                               \
        const S *s = src;                                                                                              \
        for (size_t i = 0; i < n; i++)                                                                                 \
            bad |= (s[i] & (mask)) == (mask);                                                                          \
    } while (0)

/* No early exit: the usual answer needs a full pass, and this one vectorises. */
INLINE bool all_finite_body(enum dtype t, const void *src, size_t n)
{
    uint32_t bad = 0;
    switch (t) {
    case DTYPE_F32:
        EXPONENTS_FULL(any_u32, 0x7f800000u);
        break;
    case DTYPE_F64:
        EXPONENTS_FULL(any_u64, 0x7ff0000000000000ull);
        break;
    case DTYPE_F16:
        EXPONENTS_FULL(any_u16, 0x7c00u);
        break;
    case DTYPE_BF16:
        EXPONENTS_FULL(any_u16, 0x7f80u);
        break;
    default:
        break;
    }
    return bad == 0;
}

#if HAVE_AVX2
static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}

/* What of n fills no register of 8 goes to the portable code. */
static TARGET_AVX2 size_t f16_widen_f16c(void *dst, const void *src, size_t n)
{
    size_t done = 0;
    for (; dst != src && done + 8 <= n; done += 8) {
        __m128i h = _mm_loadu_si128((const __m128i *)((const uint8_t *)src + 2 * done));
        _mm256_storeu_ps((float *)((uint8_t *)dst + 4 * done), _mm256_cvtph_ps(h));
    }
    return done;
}

static TARGET_AVX2 size_t f16_narrow_f16c(void *dst, const void *src, size_t n)
{
    size_t done = 0;
    for (; done + 8 <= n; done += 8) {
        __m256 f = _mm256_loadu_ps((const float *)((const uint8_t *)src + 4 * done));
        _mm_storeu_si128((__m128i *)((uint8_t *)dst + 2 * done), _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
    }
    return done;
}

static TARGET_AVX2 size_t f16_add_scaled_f16c(void *dst, const void *src, size_t n, float w)
{
    __m256 factor = _mm256_set1_ps(w);
    size_t done = 0;
    for (; done + 8 <= n; done += 8) {
        __m128i h = _mm_loadu_si128((const __m128i *)((const uint8_t *)src + 2 * done));
        float *acc = (float *)((uint8_t *)dst + 4 * done);
        __m256 term = _mm256_mul_ps(factor, _mm256_cvtph_ps(h));
        _mm256_storeu_ps(acc, _mm256_add_ps(_mm256_loadu_ps(acc), term));
    }
    return done;
}
#endif

/* NAME_any and NAME_avx2 from NAME_body, and NAME_run that chooses. */
#if HAVE_AVX2
#define KERNEL(type, name, params, args)                                                                               \
    static type name##_any params                                                                                      \
    {                                                                                                                  \
        return name##_body args;                                                                                       \
    }                                                                                                                  \
    static TARGET_AVX2 type name##_avx2 params                                                                         \
    {                                                                                                                  \
        return name##_body args;                                                                                       \
    }                                                                                                                  \
    static type name##_run params                                                                                      \
    {                                                                                                                  \
        return has_avx2() ? name##_avx2 args : name##_any args;                                                        \
    }
#else
#define KERNEL(type, name, params, args)                                                                               \
    static type name##_run params                                                                                      \
    {                                                                                                                  \
        return name##_body args;                                                                                       \
    }
#endif

KERNEL(void, widen, (enum dtype t, void *dst, const void *src, size_t n), (t, dst, src, n))
KERNEL(void, narrow, (enum dtype t, void *dst, const void *src, size_t n), (t, dst, src, n))
KERNEL(void, add, (enum dtype t, void *dst, const void *src, size_t n), (t, dst, src, n))
KERNEL(void, add_scaled, (enum dtype t, void *dst, const void *src, size_t n, double w), (t, dst, src, n, w))
KERNEL(void, scale, (enum dtype t, void *dst, size_t n, double w), (t, dst, n, w))
KERNEL(void, divide_float, (enum dtype t, void *dst, size_t n, double w), (t, dst, n, w))
KERNEL(bool, all_finite, (enum dtype t, const void *src, size_t n), (t, src, n))

void dtype_widen(enum dtype t, void *dst, const void *src, size_t n)
{
    CHECK(known(t));
    size_t done = 0;
    if (dtype_acc(t) == t) {
        memmove(dst, src, n * dtype_size(t));
        return;
    }
#if HAVE_AVX2
    if (t == DTYPE_F16 && has_avx2())
        done = f16_widen_f16c(dst, src, n);
#endif
    widen_run(t, (uint8_t *)dst + 4 * done, (const uint8_t *)src + 2 * done, n - done);
}

void dtype_narrow(enum dtype t, void *dst, const void *src, size_t n)
{
    CHECK(known(t));
    size_t done = 0;
    if (dtype_acc(t) == t) {
        memmove(dst, src, n * dtype_size(t));
        return;
    }
#if HAVE_AVX2
    if (t == DTYPE_F16 && has_avx2())
        done = f16_narrow_f16c(dst, src, n);
#endif
    narrow_run(t, (uint8_t *)dst + 2 * done, (const uint8_t *)src + 4 * done, n - done);
}

void dtype_add(enum dtype t, void *acc, const void *src, size_t n)
{
    CHECK(known(t));
    /* Scaling by 1 changes no bit, and memory is the limit. */
    if (t == DTYPE_F16)
        dtype_add_scaled(t, acc, src, n, 1);
    else
        add_run(t, acc, src, n);
}

void dtype_add_scaled(enum dtype t, void *acc, const void *src, size_t n, double w)
{
    CHECK(known(t));
    size_t done = 0;
#if HAVE_AVX2
    if (t == DTYPE_F16 && has_avx2())
        done = f16_add_scaled_f16c(acc, src, n, (float)w);
#endif
    add_scaled_run(t, (uint8_t *)acc + 4 * done, (const uint8_t *)src + 2 * done, n - done, w);
}

void dtype_scale(enum dtype acc_t, void *acc, size_t n, double w)
{
    CHECK(known(acc_t) && dtype_acc(acc_t) == acc_t);
    scale_run(acc_t, acc, n, w);
}

void dtype_divide(enum dtype acc_t, void *acc, size_t n, double w)
{
    CHECK(known(acc_t) && dtype_acc(acc_t) == acc_t && w != 0);
    if (dtype_is_float(acc_t))
        divide_float_run(acc_t, acc, n, w);
    else
        divide_integer(acc_t, acc, n, w);
}

bool dtype_all_finite(enum dtype t, const void *src, size_t n)
{
    CHECK(known(t));
    return all_finite_run(t, src, n);
}
