// SPDX-License-Identifier: Apache-2.0
// Sixteen numbers at a time, in whatever vector registers the processor has.
#ifndef DSPARK_VECTORS_H
#define DSPARK_VECTORS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16

typedef float vec __attribute__((vector_size(LANES * 4), aligned(2)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(2)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2)));

static inline uvec round_bf16(vec x) { // to nearest even, in the upper half
  uvec bits = (uvec)x;
  uvec is_nan = (uvec)(x != x);
  bits += 0x7fff + ((bits >> 16) & 1);
  return (bits & ~is_nan) | (is_nan & 0x7fc00000u);
}

static inline vec widen(const uint16_t *bits) { // sixteen bfloat16
  return (vec)(__builtin_convertvector(*(const halves *)bits, uvec) << 16);
}

// exp(x) for x ≤ 0, within 2 ulp; 0 below -87.
static inline vec exp_negative(vec x) {
  const vec lowest = (vec){} - 87.0f;
  ivec keep = ~(x < lowest); // NaN stays NaN
  x = (vec)(((ivec)x & keep) | ((ivec)lowest & ~keep));
  vec n = x * 1.44269504f;
  const vec magic = (vec){} + 12582912.0f; // rounds to the nearest integer
  vec rounded = (n + magic) - magic;
  vec r = x - rounded * 0.693359375f + rounded * 2.12194440e-4f;
  vec y = (vec){} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  ivec power = (__builtin_convertvector(rounded, ivec) + 127) << 23;
  return (vec)((ivec)(y * (vec)power) & keep);
}

#endif
