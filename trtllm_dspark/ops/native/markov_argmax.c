// SPDX-License-Identifier: Apache-2.0
// The arg-max of U + W2 f over the vocabulary without reading most of W2.
//
// |w·f| ≤ ‖w‖ ‖f‖, so a token whose U lies further below the best sum so far cannot win. With a trained
// head that leaves about one row of W2 in sixty.
#include <float.h>

#include "vectors.h"

#define SPAN 64 /* tokens whose bounds are looked at together */
#define BOUND_SLACK 1.03125f /* covers the rounding of sums and of stored products */

static inline float to_float(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}

// U[token] + bf16(w·f), as torch adds them up.
static inline float sum_of(const uint16_t *base, const uint16_t *w2, const float *f, int64_t token, int64_t rank) {
  vec sums = {};
  for (int64_t i = 0; i < rank; i += LANES) sums += widen(w2 + token * rank + i) * *(const vec *)(f + i);
  float product = 0;
  for (int lane = 0; lane < LANES; lane++) product += sums[lane];
  vec one = (vec){} + product;
  return to_float(base[token]) + ((vec)(round_bf16(one) & 0xffff0000u))[0];
}

static inline vec larger(vec a, vec b) {
  ivec wins = a > b;
  return (vec)(((ivec)a & wins) | ((ivec)b & ~wins));
}

static inline int any_lane(ivec mask) {
  int32_t any = 0;
  for (int lane = 0; lane < LANES; lane++) any |= mask[lane];
  return any != 0;
}

// A token of the largest U.
static int64_t largest_of(const uint16_t *base, int64_t width) {
  vec top = widen(base);
  for (int64_t i = LANES; i < width; i += LANES) top = larger(widen(base + i), top);
  float largest = top[0];
  for (int lane = 1; lane < LANES; lane++) largest = top[lane] > largest ? top[lane] : largest;
  for (int64_t i = 0; i < width; i++)
    if (to_float(base[i]) == largest) return i;
  return 0; // not a number anywhere
}

// base [num_rows] rows of `width` bf16, `stride` apart; features [num_rows, rank] float;
// w2 [width, rank] bf16; norms [width] float ≥ the rows' lengths; out [num_rows]: of equal sums the
// lowest id; peaks [num_rows]: its log-odds among the tokens that were added up: the others lie too
// far below to matter. rank and width multiples of LANES.
void markov_argmax(const uint16_t *base, int64_t stride, const float *features, const uint16_t *w2,
                   const float *norms, int64_t *out, float *peaks, int64_t num_rows, int64_t width,
                   int64_t rank, int32_t num_threads) {
  const int threads = num_rows < num_threads ? (int)num_rows : num_threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; row++) {
    const uint16_t *u = base + row * stride;
    const float *f = features + row * rank;
    float square = 0;
    for (int64_t i = 0; i < rank; i++) square += f[i] * f[i];
    const float reach = sqrtf(square) * BOUND_SLACK;
    int64_t best = largest_of(u, width);
    float best_sum = sum_of(u, w2, f, best, rank), others = 0; // in units of e^best_sum
    const int64_t first = best;
    for (int64_t from = 0; from < width; from += SPAN) {
      const int64_t end = from + SPAN < width ? from + SPAN : width;
      ivec near = {};
      for (int64_t i = from; i < end; i += LANES)
        near |= widen(u + i) + *(const vec *)(norms + i) * reach >= best_sum;
      if (!any_lane(near)) continue;
      for (int64_t i = from; i < end; i++) {
        if (i == first || to_float(u[i]) + norms[i] * reach < best_sum) continue;
        const float sum = sum_of(u, w2, f, i, rank);
        if (sum > best_sum || (sum == best_sum && i < best)) {
          others = (others + 1) * expf(best_sum - sum);
          best = i;
          best_sum = sum;
        } else {
          others += expf(sum - best_sum);
        }
      }
    }
    out[row] = best;
    peaks[row] = -logf(others > FLT_MIN ? others : FLT_MIN);
  }
}
