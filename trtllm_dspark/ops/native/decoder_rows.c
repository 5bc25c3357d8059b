// SPDX-License-Identifier: Apache-2.0
// What is done to each row outside the products: RMSNorm, SwiGLU, rotary embedding with the scatter
// into K/V pages, and sums of sampling weights. One pass over a row instead of one per operator.
//
// A row is a fixed sequence of operations on its own numbers, rounded where torch's operators round.
#include "vectors.h"

#define MIN_NUMBERS_PER_THREAD 32768 /* fewer are done before another thread wakes up */

// How many of the threads a pass over so many numbers is worth.
static inline int threads_for(int64_t numbers, int num_threads) {
  int64_t most = 1 + numbers / MIN_NUMBERS_PER_THREAD;
  return most < num_threads ? (int)most : num_threads;
}

static inline vec load(const void *base, int64_t index, int is_bf16) {
  if (!is_bf16) return *(const vec *)((const float *)base + index);
  return widen((const uint16_t *)base + index);
}

static inline void store(void *base, int64_t index, vec x, int is_bf16) {
  if (is_bf16)
    *(halves *)((uint16_t *)base + index) = __builtin_convertvector(round_bf16(x) >> 16, halves);
  else
    *(vec *)((float *)base + index) = x;
}

// As stored and loaded again.
static inline vec rounded(vec x, int is_bf16) { return is_bf16 ? (vec)(round_bf16(x) & 0xffff0000u) : x; }

// 1 / sqrt(mean square + eps) of `width` numbers.
static inline float inverse_rms(const void *x, int64_t index, int64_t width, float eps, int is_bf16) {
  vec squares = {};
  for (int64_t i = 0; i < width; i += LANES) {
    vec v = load(x, index + i, is_bf16);
    squares += v * v;
  }
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
  return 1.0f / sqrtf(sum / width + eps);
}

static inline vec normed(const void *x, int64_t index, const void *weight, int64_t at, float scale, int is_bf16) {
  return rounded(rounded(load(x, index, is_bf16) * scale, is_bf16) * load(weight, at, is_bf16), is_bf16);
}

static inline __attribute__((always_inline)) void rms_norm_rows(
    const void *x, const void *weight, void *out, int64_t num_rows, int64_t width, float eps,
    int num_threads, const int is_bf16) {
  const int threads = threads_for(num_rows * width, num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; row++) {
    float scale = inverse_rms(x, row * width, width, eps, is_bf16);
    for (int64_t i = 0; i < width; i += LANES)
      store(out, row * width + i, normed(x, row * width + i, weight, i, scale, is_bf16), is_bf16);
  }
}

// x, out [num_rows, width]; weight [width]; width a multiple of LANES.
void rms_norm(const void *x, const void *weight, void *out, int64_t num_rows, int64_t width,
              float eps, int32_t is_bf16, int32_t num_threads) {
  if (is_bf16)
    rms_norm_rows(x, weight, out, num_rows, width, eps, num_threads, 1);
  else
    rms_norm_rows(x, weight, out, num_rows, width, eps, num_threads, 0);
}

static inline __attribute__((always_inline)) void swiglu_rows(
    const void *x, void *out, int64_t num_rows, int64_t width, int num_threads, const int is_bf16) {
  const int threads = threads_for(num_rows * width, num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; row++) {
    for (int64_t i = 0; i < width; i += LANES) {
      vec gate = load(x, row * 2 * width + i, is_bf16), up = load(x, row * 2 * width + width + i, is_bf16);
      ivec is_negative = gate < 0.0f;
      vec e = exp_negative((vec)((ivec)gate | (ivec)((uvec){} + 0x80000000u))); // exp(-|gate|)
      vec one = (vec){} + 1.0f;
      vec numerator = (vec)(((ivec)e & is_negative) | ((ivec)one & ~is_negative));
      vec silu = rounded(gate * (numerator / (one + e)), is_bf16);
      store(out, row * width + i, silu * up, is_bf16);
    }
  }
}

// x [num_rows, 2 width] = gate | up; out [num_rows, width] = silu(gate) up; width a multiple of LANES.
void swiglu(const void *x, void *out, int64_t num_rows, int64_t width, int32_t is_bf16, int32_t num_threads) {
  if (is_bf16)
    swiglu_rows(x, out, num_rows, width, num_threads, 1);
  else
    swiglu_rows(x, out, num_rows, width, num_threads, 0);
}

// One head: optional RMSNorm, then the halves rotated by rope [2, dim / 2] (cos, sin).
static inline __attribute__((always_inline)) void rotate_head(
    const void *x, int64_t from, void *out, int64_t to, int64_t dim, const float *rope,
    const void *norm, float eps, const int is_bf16) {
  const int64_t half = dim / 2;
  const float scale = norm == NULL ? 1.0f : inverse_rms(x, from, dim, eps, is_bf16);
  for (int64_t i = 0; i < half; i += LANES) {
    vec low, high, cosine = *(const vec *)(rope + i), sine = *(const vec *)(rope + half + i);
    if (norm == NULL) {
      low = load(x, from + i, is_bf16);
      high = load(x, from + half + i, is_bf16);
    } else {
      low = normed(x, from + i, norm, i, scale, is_bf16);
      high = normed(x, from + half + i, norm, half + i, scale, is_bf16);
    }
    store(out, to + i, low * cosine - high * sine, is_bf16);
    store(out, to + half + i, high * cosine + low * sine, is_bf16);
  }
}

typedef struct {
  const void *qkv;      // [N, num_heads + 2 num_kv_heads, head_dim]
  void *q_out;          // [N, num_heads, head_dim]
  void *kv_pages;       // [slots, 2, num_kv_heads, head_dim]; unused where num_kv_heads is 0
  const float *rope;    // [N, 2, head_dim / 2]
  const int64_t *slots; // [N]
  const void *q_norm, *k_norm; // [head_dim] or NULL
  int64_t num_rows, num_heads, num_kv_heads, head_dim;
  float eps;
  int32_t is_bf16, num_threads;
} RotateArguments;

static inline __attribute__((always_inline)) void rotate_rows(const RotateArguments *a, const int is_bf16) {
  const int64_t dim = a->head_dim, kv = a->num_kv_heads * dim;
  const int64_t width = a->num_heads * dim + 2 * kv, size = is_bf16 ? 2 : 4;
  const int threads = threads_for(a->num_rows * width, a->num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a->num_rows; row++) {
    const float *rope = a->rope + row * dim;
    for (int64_t head = 0; head < a->num_heads; head++)
      rotate_head(a->qkv, row * width + head * dim, a->q_out, (row * a->num_heads + head) * dim, dim,
                  rope, a->q_norm, a->eps, is_bf16);
    if (a->num_kv_heads == 0) continue;
    const int64_t keys = row * width + a->num_heads * dim, slot = a->slots[row] * 2 * kv;
    for (int64_t at = 0; at < kv; at += dim)
      rotate_head(a->qkv, keys + at, a->kv_pages, slot + at, dim, rope, a->k_norm, a->eps, is_bf16);
    memcpy((char *)a->kv_pages + (slot + kv) * size, (const char *)a->qkv + (keys + kv) * size, kv * size);
  }
}

// head_dim a multiple of 2 LANES. Rows with equal slots may be written at once: any of them wins, and
// only padding rows may share one.
void rotate_and_append(const RotateArguments *a) {
  if (a->is_bf16)
    rotate_rows(a, 1);
  else
    rotate_rows(a, 0);
}

// x [num_rows, width] float; out [num_rows, ceil(width / block)]: sums of blocks in double.
void block_sums(const float *x, double *out, int64_t num_rows, int64_t width, int64_t block, int32_t num_threads) {
  const int64_t num_blocks = (width + block - 1) / block;
  const int threads = threads_for(num_rows * width, num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t b = 0; b < num_blocks; b++) {
      const float *from = x + row * width + b * block;
      const int64_t count = width - b * block < block ? width - b * block : block;
      double sums[LANES] = {0}, sum = 0;
      int64_t i = 0;
      for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)from[i + lane];
      for (; i < count; i++) sum += (double)from[i];
      for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
      out[row * num_blocks + b] = sum;
    }
}
