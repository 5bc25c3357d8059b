// SPDX-License-Identifier: Apache-2.0
// Grouped-query attention of packed ragged rows over paged K/V, read in place, on any CPU.
//
// Every row's result is a fixed sequence of operations on that row's own keys, in key order: it
// depends on neither the batch around it, nor the number of new rows, nor where the pages lie. That
// is what makes a verified row bit-identical to the same row decoded alone.
//
// Compiled twice through this file: ELEMENT bf16 (stored as uint16_t) and float.
#include "vectors.h"

#define ROWS 4 /* query rows that share one pass over the keys */
#define CHUNK (2 * LANES) /* numbers loaded at once; head_dim is a multiple */
#define MAX_CHUNKS 8 /* head_dim up to 256 */

typedef float quad __attribute__((vector_size(ROWS * 4), aligned(2)));
typedef int32_t qmask __attribute__((vector_size(ROWS * 4), aligned(2)));

typedef struct {
  const void *q;       // [N, num_heads, head_dim]
  const void *kv_pages; // [num_pages, page_size, 2, num_kv_heads, head_dim]
  void *out;           // as q
  const int32_t *cu_query_lens, *context_lens, *page_table;
  int64_t num_rows, num_requests, table_stride;
  int64_t num_heads, num_kv_heads, head_dim, page_size, window;
  float scale;
  int32_t is_causal, is_bf16, num_threads;
} Arguments;

// 32 numbers as two vectors: of bfloat16 the even and the odd ones (no lane has to move), of float
// the first and the last sixteen. Queries, keys and values are all split alike.
static inline void load(const void *base, int64_t index, int is_bf16, vec x[2]) {
  if (is_bf16) {
    uvec pairs = *(const uvec *)((const uint16_t *)base + index);
    x[0] = (vec)(pairs << 16);
    x[1] = (vec)(pairs & 0xffff0000u);
  } else {
    x[0] = *(const vec *)((const float *)base + index);
    x[1] = *(const vec *)((const float *)base + index + LANES);
  }
}

static inline void store(void *base, int64_t index, const vec x[2], int is_bf16) {
  if (is_bf16) {
    *(uvec *)((uint16_t *)base + index) = (round_bf16(x[0]) >> 16) | (round_bf16(x[1]) & 0xffff0000u);
  } else {
    *(vec *)((float *)base + index) = x[0];
    *(vec *)((float *)base + index + LANES) = x[1];
  }
}

// Lane sums of four vectors.
static inline quad sum_lanes(vec a, vec b, vec c, vec d) {
  const ivec low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const ivec high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  vec ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high); // abab… 8 partials each
  vec cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
  const ivec low2 = {0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23};
  const ivec high2 = {8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31};
  vec abcd = __builtin_shuffle(ab, cd, low2) + __builtin_shuffle(ab, cd, high2); // 4 partials each
  quad first, second, third, fourth;
  memcpy(&first, (char *)&abcd, 16);
  memcpy(&second, (char *)&abcd + 16, 16);
  memcpy(&third, (char *)&abcd + 32, 16);
  memcpy(&fourth, (char *)&abcd + 48, 16);
  return (first + second) + (third + fourth);
}

// Where the page after `base` begins, the next request's first one included; NULL at the very end.
static inline const char *next_page(const Arguments *a, int64_t request, int64_t base, int64_t num_keys) {
  const int64_t bytes = 2 * a->num_kv_heads * a->head_dim * a->page_size * (a->is_bf16 ? 2 : 4);
  const int32_t *table = a->page_table + request * a->table_stride;
  if (base + a->page_size < num_keys)
    return (const char *)a->kv_pages + table[base / a->page_size + 1] * bytes;
  if (request + 1 < a->num_requests)
    return (const char *)a->kv_pages + table[a->table_stride] * bytes;
  return NULL;
}

// One K/V head of one request, up to ROWS of its query rows at once.
static inline __attribute__((always_inline)) void attend_rows(
    const Arguments *a, int64_t request, int64_t kv_head, int64_t first, int64_t count,
    float *scores, const int chunks, const int is_bf16) {
  const int64_t dim = chunks * CHUNK, page = a->page_size, group = a->num_heads / a->num_kv_heads;
  const int64_t start = a->cu_query_lens[request], context = a->context_lens[request];
  const int64_t new_rows = a->cu_query_lens[request + 1] - start;
  const int64_t token_stride = 2 * a->num_kv_heads * dim, value_offset = a->num_kv_heads * dim;
  const int32_t *table = a->page_table + request * a->table_stride;
  vec q[ROWS][MAX_CHUNKS][2];
  int64_t from[ROWS], to[ROWS], index[ROWS];
  int64_t first_key = INT64_MAX, num_keys = 0;
  for (int64_t b = 0; b < ROWS; b++) {
    int64_t flat = first + (b < count ? b : 0); // spare rows repeat the first
    int64_t row = flat / group;
    index[b] = ((start + row) * a->num_heads + kv_head * group + flat % group) * dim;
    for (int c = 0; c < chunks; c++) {
      load(a->q, index[b] + c * CHUNK, is_bf16, q[b][c]);
      for (int h = 0; h < 2; h++) q[b][c][h] *= a->scale;
    }
    to[b] = a->is_causal ? context + row + 1 : context + new_rows;
    from[b] = a->window > 0 && context + row + 1 > a->window ? context + row + 1 - a->window : 0;
    if (to[b] > num_keys) num_keys = to[b];
    if (from[b] < first_key) first_key = from[b];
  }
  first_key -= first_key % page; // begin with a whole page
  quad largest = (quad){} - INFINITY;
  for (int64_t base = first_key; base < num_keys; base += page) {
    const int64_t end = num_keys - base < page ? num_keys - base : page;
    int64_t at = ((int64_t)table[base / page] * page) * token_stride + kv_head * dim;
    quad *score = (quad *)(scores + (base - first_key) * ROWS);
    // A head's rows lie apart, which defeats the hardware's prefetcher: the first head fetches the
    // next page for all of them.
    const char *ahead = kv_head == 0 && first == 0 ? next_page(a, request, base, num_keys) : NULL;
    for (int64_t slot = 0; slot < end; slot++, at += token_stride) {
      if (ahead != NULL)
        for (int64_t line = 0; line < token_stride * (is_bf16 ? 2 : 4); line += 64)
          __builtin_prefetch(ahead + slot * token_stride * (is_bf16 ? 2 : 4) + line);
      vec sum[ROWS] = {};
      for (int c = 0; c < chunks; c++) {
        vec k[2];
        load(a->kv_pages, at + c * CHUNK, is_bf16, k);
        for (int b = 0; b < ROWS; b++)
          for (int h = 0; h < 2; h++) sum[b] += q[b][c][h] * k[h];
      }
      score[slot] = sum_lanes(sum[0], sum[1], sum[2], sum[3]);
    }
  }
  for (int b = 0; b < ROWS; b++) {
    for (int64_t key = first_key; key < from[b]; key++)
      scores[(key - first_key) * ROWS + b] = -INFINITY;
    for (int64_t key = to[b]; key < num_keys; key++)
      scores[(key - first_key) * ROWS + b] = -INFINITY;
  }
  for (int64_t key = first_key; key < num_keys; key++) {
    quad score = *(quad *)(scores + (key - first_key) * ROWS);
    qmask higher = score > largest;
    largest = (quad)(((qmask)score & higher) | ((qmask)largest & ~higher));
  }
  const int64_t num_scores = (num_keys - first_key) * ROWS;
  for (int64_t s = num_scores; s % LANES; s++) scores[s] = -INFINITY;
  vec shift;
  for (int lane = 0; lane < LANES; lane++) shift[lane] = largest[lane % ROWS];
  quad total = {};
  for (int64_t s = 0; s < num_scores; s += LANES) {
    *(vec *)(scores + s) = exp_negative(*(vec *)(scores + s) - shift);
    for (int part = 0; part < LANES; part += ROWS) total += *(quad *)(scores + s + part);
  }
  vec acc[ROWS][MAX_CHUNKS][2];
  memset(acc, 0, sizeof acc);
  for (int64_t base = first_key; base < num_keys; base += page) {
    const int64_t end = num_keys - base < page ? num_keys - base : page;
    int64_t at = ((int64_t)table[base / page] * page) * token_stride + value_offset + kv_head * dim;
    const float *weight = scores + (base - first_key) * ROWS;
    for (int64_t slot = 0; slot < end; slot++, at += token_stride, weight += ROWS)
      for (int c = 0; c < chunks; c++) {
        vec v[2];
        load(a->kv_pages, at + c * CHUNK, is_bf16, v);
        for (int b = 0; b < ROWS; b++)
          for (int h = 0; h < 2; h++) acc[b][c][h] += weight[b] * v[h];
      }
  }
  for (int b = 0; b < count; b++)
    for (int c = 0; c < chunks; c++) {
      for (int h = 0; h < 2; h++) acc[b][c][h] /= total[b];
      store(a->out, index[b] + c * CHUNK, acc[b][c], is_bf16);
    }
}

#define BOTH_TYPES(chunks)                                                                   \
  if (a->is_bf16)                                                                            \
    attend_rows(a, request, kv_head, first, count, scores, chunks, 1);                       \
  else                                                                                       \
    attend_rows(a, request, kv_head, first, count, scores, chunks, 0);

static void attend_head(const Arguments *a, int64_t request, int64_t kv_head, float *scores) {
  const int64_t rows = (int64_t)(a->cu_query_lens[request + 1] - a->cu_query_lens[request]) *
                       (a->num_heads / a->num_kv_heads);
  for (int64_t first = 0; first < rows; first += ROWS) {
    const int64_t count = rows - first < ROWS ? rows - first : ROWS;
    switch (a->head_dim / CHUNK) { // constant trip counts keep the accumulators in registers
    case 2: BOTH_TYPES(2) break;
    case 4: BOTH_TYPES(4) break;
    default: BOTH_TYPES((int)(a->head_dim / CHUNK)) break;
    }
  }
}

// Returns 0, or 1 when there is no memory for the scores.
int ragged_attention(const Arguments *a) {
  const int64_t num_tasks = a->num_requests * a->num_kv_heads, width = a->num_heads * a->head_dim;
  const int64_t size = a->is_bf16 ? 2 : 4, used = a->cu_query_lens[a->num_requests];
  int64_t most_keys = 0;
  for (int64_t r = 0; r < a->num_requests; r++) {
    int64_t keys = a->context_lens[r] + a->cu_query_lens[r + 1] - a->cu_query_lens[r];
    if (keys > most_keys) most_keys = keys;
  }
  memset((char *)a->out + used * width * size, 0, (a->num_rows - used) * width * size);
  // The heads of a request share the lines that the first one fetches: one thread takes them all,
  // unless there would then be nothing for another thread to do.
  const int64_t chunk = a->num_requests >= a->num_threads ? a->num_kv_heads : 1;
  int failed = 0;
#pragma omp parallel num_threads(a->num_threads) reduction(| : failed) if (a->num_threads > 1)
  {
    float *scores = malloc((most_keys + LANES) * ROWS * sizeof(float));
    failed |= scores == NULL;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < num_tasks; task++)
      if (scores != NULL)
        attend_head(a, task / a->num_kv_heads, task % a->num_kv_heads, scores);
    free(scores);
  }
  return failed;
}
