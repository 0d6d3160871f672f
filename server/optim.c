/* The steps themselves are in optim_steps.h. As in wire/dtype.c: compiled for the base instruction set and
 * for AVX2, never with fused multiply-add, so that every server computes the same bits. */
#include "server/optim.h"

#include <math.h>
#include <string.h>

#include "check.h"

/* INDEPENDENT: no iteration of the loop reads what another one writes. Square roots vectorise only with
 * -fno-math-errno, which the Makefile sets. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#define INDEPENDENT
#else
#pragma GCC optimize("O3", "fp-contract=off")
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define INLINE    static inline __attribute__((always_inline))
#define UNALIGNED __attribute__((aligned(1), may_alias))
typedef float any_f32 UNALIGNED;
typedef double any_f64 UNALIGNED;

/* new_value may be grad's memory: every element is read before it is written. */
struct arrays {
    size_t n;
    const void *value, *state, *grad;
    void *new_value, *new_state;
};

#define REAL       any_f32
#define SCALAR     float
#define SQRT       sqrtf
#define STEP(name) name##_f32
#include "server/optim_steps.h"
#undef REAL
#undef SCALAR
#undef SQRT
#undef STEP

#define REAL       any_f64
#define SCALAR     double
#define SQRT       sqrt
#define STEP(name) name##_f64
#include "server/optim_steps.h"

static void apply_any(const struct optim *o, enum dtype acc_t, uint64_t t, const struct arrays *a)
{
    if (acc_t == DTYPE_F32)
        apply_f32(o, t, a);
    else
        apply_f64(o, t, a);
}

#if defined(__x86_64__)
static __attribute__((target("avx2"))) void apply_avx2(const struct optim *o, enum dtype acc_t, uint64_t t,
                                                       const struct arrays *a)
{
    if (acc_t == DTYPE_F32)
        apply_f32(o, t, a);
    else
        apply_f64(o, t, a);
}
#endif

static void add(enum dtype acc_t, const struct arrays *a)
{
    if (a->new_value == a->grad) {
        dtype_add(acc_t, a->new_value, a->value, a->n);
        return;
    }
    dtype_widen(acc_t, a->new_value, a->value, a->n);
    dtype_add(acc_t, a->new_value, a->grad, a->n);
}

unsigned optim_slots(const struct optim *o)
{
    switch (o->kind) {
    case OPTIM_ADD:
        return 0;
    case OPTIM_SGD:
        return o->option[OPT_MOMENTUM] != 0;
    case OPTIM_ADAGRAD:
        return 1;
    case OPTIM_RMSPROP:
        return o->option[OPT_MOMENTUM] != 0 ? 2 : 1;
    case OPTIM_ADAM:
    case OPTIM_ADAMW:
        return 2;
    }
    return 0;
}

bool optim_allows(enum optim_kind kind, enum dtype t)
{
    if (kind == OPTIM_ADD)
        return dtype_size(t) != 0;
    return kind > OPTIM_ADD && kind <= OPTIM_ADAMW && dtype_is_float(t);
}

void optim_state_init(const struct optim *o, enum dtype acc_t, void *state, size_t n)
{
    double start = o->kind == OPTIM_ADAGRAD ? o->option[OPT_INITIAL_ACCUMULATOR] : 0;
    size_t count = n * optim_slots(o);
    if (count == 0)
        return;
    CHECK(acc_t == DTYPE_F32 || acc_t == DTYPE_F64);
    if (acc_t == DTYPE_F32)
        for (size_t i = 0; i < count; i++)
            ((any_f32 *)state)[i] = (float)start;
    else
        for (size_t i = 0; i < count; i++)
            ((any_f64 *)state)[i] = start;
}

void optim_apply(const struct optim *o, enum dtype acc_t, uint64_t t, size_t n, const void *value, const void *state,
                 const void *grad, void *new_value, void *new_state)
{
    struct arrays a = {n, value, state, grad, new_value, new_state};
    CHECK(optim_allows(o->kind, acc_t) && dtype_acc(acc_t) == acc_t && t > 0);
    if (o->kind == OPTIM_ADD) {
        add(acc_t, &a);
        return;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        apply_avx2(o, acc_t, t, &a);
        return;
    }
#endif
    apply_any(o, acc_t, t, &a);
}
