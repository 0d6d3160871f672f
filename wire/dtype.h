/* dtype.h - element types and the arithmetic on them.
 *
 * 16-bit floats accumulate in f32: an accumulator has dtype_acc(dtype). Integers wrap. Kernels take
 * counts of elements, allow unaligned pointers, and a destination may equal a source. */
#ifndef WIRE_DTYPE_H
#define WIRE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers are on the wire and on disk: never renumber. Equal to KS_F32 .. in keepstep.h. */
enum dtype { DTYPE_F32 = 1, DTYPE_F64, DTYPE_F16, DTYPE_BF16, DTYPE_I32, DTYPE_I64, DTYPE_U8 };

size_t dtype_size(enum dtype t);                 /* bytes an element; 0: no such dtype */
const char *dtype_name(enum dtype t);            /* "f32" ..; "?" */
int dtype_parse(const char *name, enum dtype *ret_t);
enum dtype dtype_acc(enum dtype t);              /* f16, bf16 -> f32; else itself */
bool dtype_is_float(enum dtype t);

/* dst (acc dtype of t) = src (dtype t). A plain copy when they are the same. */
void dtype_widen(enum dtype t, void *dst, const void *src, size_t n);
/* dst (dtype t) = src (acc dtype of t), rounded to nearest even. */
void dtype_narrow(enum dtype t, void *dst, const void *src, size_t n);
/* acc (acc dtype of t) += src (dtype t). */
void dtype_add(enum dtype t, void *acc, const void *src, size_t n);
/* acc += w * src; integers: w is rounded to an integer first. */
void dtype_add_scaled(enum dtype t, void *acc, const void *src, size_t n, double w);
/* acc *= w (floats); integers: acc = acc * round(w). acc has dtype `acc_t`. */
void dtype_scale(enum dtype acc_t, void *acc, size_t n, double w);
/* acc /= w (floats, one correctly rounded division an element); integers truncate toward zero. w != 0. */
void dtype_divide(enum dtype acc_t, void *acc, size_t n, double w);
/* True when every element is finite; integers always are. */
bool dtype_all_finite(enum dtype t, const void *src, size_t n);

float f16_to_f32(uint16_t h);
uint16_t f16_from_f32(float f);
float bf16_to_f32(uint16_t h);
uint16_t bf16_from_f32(float f);

#endif
