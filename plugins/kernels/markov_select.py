# SPDX-License-Identifier: Apache-2.0
"""`markov_select` on the device: from the vocabulary tiles of one draft slot to the draft.

One program per request: the best tile's token, its probability q, the confidence logit of the slot,
and the features (W1 of the draft) that the next slot's tiles need.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.argmax import NO_TOKEN, lowest_best

PEAK_LIMIT = tl.constexpr(12.0)


@triton.jit
def _peak(tops, top, plain_masses):
    """log(p / (1−p)) of the largest probability p at temperature 1, from the tiles of one row."""
    decay = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - top))
    others = tl.sum(plain_masses * decay, axis=0) - 1.0
    return -tl.log(tl.maximum(others, 1.17549435e-38))


@triton.jit
def _confidence(
    hidden_ptr,
    w1_ptr,
    weight_ptr,
    bias_ptr,
    row,
    previous,
    peak,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    WITH_MARKOV: tl.constexpr,
    WITH_PEAK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """w·[h_k; W1[x_{k−1}]; peak] + b of one row, float32; the last two where the head has them."""
    total = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, HIDDEN, BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        in_row = columns < HIDDEN
        h = tl.load(hidden_ptr + row * HIDDEN + columns, mask=in_row, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
        total += h * w
    logit = tl.sum(total, axis=0) + tl.load(bias_ptr).to(tl.float32)
    if WITH_MARKOV:
        inner = tl.arange(0, BLOCK_K)
        in_rank = inner < RANK
        e = tl.load(w1_ptr + previous * RANK + inner, mask=in_rank, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + HIDDEN + inner, mask=in_rank, other=0.0).to(tl.float32)
        logit += tl.sum(e * w, axis=0)
    if WITH_PEAK:
        last = HIDDEN + RANK if WITH_MARKOV else HIDDEN
        bounded = tl.minimum(tl.maximum(peak, -PEAK_LIMIT), PEAK_LIMIT)
        logit += bounded * tl.load(weight_ptr + last).to(tl.float32)
    return logit


@triton.jit(do_not_specialize=["num_tiles", "row_stride", "row_offset"])
def markov_select_kernel(
    tile_scores_ptr,  # [num_requests, num_tiles] float32
    tile_ids_ptr,  # [num_requests, num_tiles] int32
    tile_logits_ptr,  # [num_requests, num_tiles] float32
    tile_max_ptr,  # [num_requests, num_tiles] float32
    tile_mass_ptr,  # [num_requests, num_tiles] float32
    tile_plain_mass_ptr,  # [num_requests, num_tiles] float32; read with WITH_PEAK only
    scales_ptr,  # [num_requests] float32
    previous_ids_ptr,  # [num_requests] int32 x_{k−1}
    hidden_ptr,  # [rows, HIDDEN] h_k, rows as below; read with HAS_CONFIDENCE only
    w1_ptr,  # [VOCAB, RANK]
    confidence_weight_ptr,  # [HIDDEN (+ RANK) (+ 1)]
    confidence_bias_ptr,  # [1]
    num_tiles,
    row_stride,
    row_offset,
    next_ids_ptr,  # [num_requests] int32 the draft, as the next slot's previous_ids
    next_features_ptr,  # [num_requests, RANK] W1 of the draft; written with HAS_HEAD only
    token_ids_ptr,  # [rows] int32 at r · row_stride + row_offset, like the outputs below
    draft_probs_ptr,  # [rows] float32 q of the draft (temperature and threshold applied)
    confidence_ptr,  # [rows] float32 logit; without HAS_CONFIDENCE the peak's log-odds at T = 1
    stats_ptr,  # [rows, 2] float32 (largest logit, mass): q_v = exp((logit_v − max) · scale) / mass
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    HAS_HEAD: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    WITH_MARKOV: tl.constexpr,
    WITH_PEAK: tl.constexpr,  # the confidence head sees the peak; without HAS_CONFIDENCE it is on
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = request * row_stride + row_offset
    tiles = tl.arange(0, BLOCK_T)
    in_row = tiles < num_tiles
    cells = request * num_tiles + tiles
    low: tl.constexpr = float("-inf")
    scores = tl.load(tile_scores_ptr + cells, mask=in_row, other=low)
    ids = tl.load(tile_ids_ptr + cells, mask=in_row, other=NO_TOKEN)
    logits = tl.load(tile_logits_ptr + cells, mask=in_row, other=low)
    tops = tl.load(tile_max_ptr + cells, mask=in_row, other=low)
    masses = tl.load(tile_mass_ptr + cells, mask=in_row, other=0.0)
    scale = tl.load(scales_ptr + request)
    _, token = lowest_best(scores, ids, 0)
    logit = tl.max(tl.where(ids == token, logits, low), axis=0)
    top = tl.max(tops, axis=0)
    decay = tl.where(tops == low, 0.0, tl.exp((tops - top) * scale))
    mass = tl.sum(masses * decay, axis=0)
    prob = tl.exp((logit - top) * scale) / mass
    tl.store(token_ids_ptr + row, token)
    tl.store(draft_probs_ptr + row, prob)
    tl.store(stats_ptr + 2 * row, top)
    tl.store(stats_ptr + 2 * row + 1, mass)
    tl.store(next_ids_ptr + request, token)
    peak = 0.0
    if WITH_PEAK:
        plain = tl.load(tile_plain_mass_ptr + cells, mask=in_row, other=0.0)
        peak = _peak(tops, top, plain)
    if HAS_CONFIDENCE:
        previous = tl.load(previous_ids_ptr + request).to(tl.int64)
        confidence = _confidence(
            hidden_ptr,
            w1_ptr,
            confidence_weight_ptr,
            confidence_bias_ptr,
            row,
            previous,
            peak,
            HIDDEN,
            RANK,
            WITH_MARKOV,
            WITH_PEAK,
            BLOCK_H,
            BLOCK_K,
        )
        tl.store(confidence_ptr + row, confidence)
    else:
        tl.store(confidence_ptr + row, peak)
    if HAS_HEAD:
        inner = tl.arange(0, BLOCK_K)
        in_rank = inner < RANK
        embedded = tl.load(w1_ptr + token.to(tl.int64) * RANK + inner, mask=in_rank, other=0.0)
        tl.store(next_features_ptr + request * RANK + inner, embedded, mask=in_rank)
