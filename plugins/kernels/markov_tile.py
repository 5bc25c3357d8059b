# SPDX-License-Identifier: Apache-2.0
"""`markov_tile` on the device: the vocabulary tiles of one draft slot.

Adds W2 f to a tile of U_k, draws inside the tile (arg-max, or Gumbel-max with keyed noise) and
keeps the tile's soft-max mass, so that logits are read once and need not be written. Without a head
it draws from given logits. `markov_select` reduces the tiles of a row.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.argmax import lowest_best
from dspark_plugins.kernels.noise import PURPOSE_COUPLED, PURPOSE_DRAFT, gumbel_tile

MODE_GREEDY = tl.constexpr(0)
MODE_COUPLED = tl.constexpr(2)


@triton.jit
def _head_logits(
    features_ptr,
    w2_ptr,
    requests,
    tokens,
    num_requests,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """W2 f for BLOCK_R requests and BLOCK_V tokens, float32."""
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for first in range(0, RANK, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        in_rank = inner < RANK
        f = tl.load(
            features_ptr + requests[:, None] * RANK + inner[None, :],
            mask=(requests < num_requests)[:, None] & in_rank[None, :],
            other=0.0,
        )
        w = tl.load(
            w2_ptr + tokens.to(tl.int64)[None, :] * RANK + inner[:, None],
            mask=(tokens < VOCAB)[None, :] & in_rank[:, None],
            other=0.0,
        )
        acc += tl.dot(
            f.to(DOT_DTYPE), w.to(DOT_DTYPE), input_precision="tf32x3", out_dtype=tl.float32
        )
    return acc


@triton.jit(do_not_specialize=["num_requests", "num_tiles", "row_stride", "row_offset", "slot"])
def markov_tile_kernel(
    base_logits_ptr,  # [rows, VOCAB]; request r reads row r · row_stride + row_offset
    features_ptr,  # [num_requests, RANK]; read with HAS_HEAD only
    w2_ptr,  # [VOCAB, RANK]
    scales_ptr,  # [num_requests] float32 inverse temperature
    thresholds_ptr,  # [num_requests] float32 smallest logit that may be drawn
    modes_ptr,  # [num_requests] int32: greedy, keyed by (anchor, slot), or coupled
    seeds_ptr,  # [num_requests] int64
    anchor_positions_ptr,  # [num_requests] int32
    num_requests,
    num_tiles,
    row_stride,
    row_offset,
    slot,
    tile_scores_ptr,  # [num_requests, num_tiles] float32 best of the tile
    tile_ids_ptr,  # [num_requests, num_tiles] int32
    tile_logits_ptr,  # [num_requests, num_tiles] float32 logit of tile_ids
    tile_max_ptr,  # [num_requests, num_tiles] float32 largest logit
    tile_mass_ptr,  # [num_requests, num_tiles] float32 Σ exp((logit − max) · scale) of kept tokens
    tile_plain_mass_ptr,  # [num_requests, num_tiles] float32 Σ exp(logit − max), with WITH_PEAK
    logits_out_ptr,  # like base_logits, float32; written with STORE_LOGITS only
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    HAS_HEAD: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    STORE_LOGITS: tl.constexpr,
    WITH_PEAK: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    requests = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tile = tl.program_id(1)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_request = requests < num_requests
    mask = is_request[:, None] & (tokens < VOCAB)[None, :]
    rows = requests.to(tl.int64) * row_stride + row_offset
    cells = rows[:, None] * VOCAB + tokens[None, :]
    base = tl.load(base_logits_ptr + cells, mask=mask, other=float("-inf")).to(tl.float32)
    logits = base
    if HAS_HEAD:
        logits = base + _head_logits(
            features_ptr,
            w2_ptr,
            requests,
            tokens,
            num_requests,
            VOCAB,
            RANK,
            DOT_DTYPE,
            BLOCK_R,
            BLOCK_V,
            BLOCK_K,
        )
    if STORE_LOGITS:
        tl.store(logits_out_ptr + cells, logits, mask=mask)
    scale = tl.load(scales_ptr + requests, mask=is_request, other=1.0)
    threshold = tl.load(thresholds_ptr + requests, mask=is_request, other=float("-inf"))
    is_kept = mask & (logits >= threshold[:, None])
    top = tl.max(logits, axis=1)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.where(is_kept, tl.exp((logits - pivot[:, None]) * scale[:, None]), 0.0)
    scores = tl.where(is_kept, logits, float("-inf"))
    if HAS_NOISE:
        mode = tl.load(modes_ptr + requests, mask=is_request, other=0)
        seeds = tl.load(seeds_ptr + requests, mask=is_request, other=0)
        anchors = tl.load(anchor_positions_ptr + requests, mask=is_request, other=0)
        is_coupled = mode == MODE_COUPLED
        positions = tl.where(is_coupled, anchors + 1 + slot, anchors)
        slots = tl.where(is_coupled, 0, slot)
        purposes = tl.where(is_coupled, PURPOSE_COUPLED, PURPOSE_DRAFT)
        gumbels = gumbel_tile(seeds, positions, slots, purposes, tile * BLOCK_V, BLOCK_V)
        is_drawn = (mode != MODE_GREEDY)[:, None]
        scores = tl.where(is_drawn, scores * scale[:, None] + gumbels, scores)
    best, ids = lowest_best(scores, tokens[None, :] + tl.zeros_like(requests)[:, None], 1)
    chosen = tl.max(tl.where(tokens[None, :] == ids[:, None], logits, float("-inf")), axis=1)
    out = requests * num_tiles + tile
    tl.store(tile_scores_ptr + out, best, mask=is_request)
    tl.store(tile_ids_ptr + out, ids, mask=is_request)
    tl.store(tile_logits_ptr + out, chosen, mask=is_request)
    tl.store(tile_max_ptr + out, top, mask=is_request)
    tl.store(tile_mass_ptr + out, tl.sum(weights, axis=1), mask=is_request)
    if WITH_PEAK:
        plain = tl.where(mask, tl.exp(logits - pivot[:, None]), 0.0)
        tl.store(tile_plain_mass_ptr + out, tl.sum(plain, axis=1), mask=is_request)
