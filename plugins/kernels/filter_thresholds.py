# SPDX-License-Identifier: Apache-2.0
"""The filter pass on the device: the smallest kept logit of each row under top-k, top-p and min-p.

One program per row. Nothing is sorted: logits are mapped to integers of the same order, and the
edge is searched there with FAN pivots per pass over the row, by count (top-k) or by mass (top-p).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.rows import soft_max_of


@triton.jit
def _order_key(x):
    """int64 that orders like the float32 it is made of."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value_of(key):
    """The float32 of an order key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search_edge(
    row_ptr,
    top,
    scale,
    floor,
    wanted,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FAN: tl.constexpr,
):
    """Largest value τ ≥ floor whose kept logits {≥ τ} number, or weigh, at least `wanted`."""
    lanes = tl.arange(0, BLOCK)
    low = _order_key(floor)  # keeps enough
    high = _order_key(top) + 1  # keeps nothing
    while high - low > 1:
        step = (high - low + FAN - 1) // FAN
        pivots = low + step * tl.arange(0, FAN)
        kept = tl.zeros([BLOCK, FAN], tl.float32)
        for first in range(0, VOCAB, BLOCK):
            tokens = first + lanes
            mask = tokens < VOCAB
            logits = tl.load(row_ptr + tokens, mask=mask, other=float("-inf")).to(tl.float32)
            weights = tl.where(mask & (logits >= floor), 1.0, 0.0)
            if BY_MASS:
                weights = weights * tl.exp((logits - top) * scale)
            is_kept = _order_key(logits)[:, None] >= pivots[None, :]
            kept += tl.where(is_kept, weights[:, None], 0.0)
        enough = tl.sum((tl.sum(kept, axis=0) >= wanted).to(tl.int32), axis=0)
        low += step * (tl.maximum(enough, 1) - 1)
        high = tl.minimum(low + step, high)
    return _value_of(low)


@triton.jit(do_not_specialize=["num_rows"])
def filter_thresholds_kernel(
    logits_ptr,  # [num_rows, VOCAB] before temperature
    scales_ptr,  # [num_rows] float32 inverse temperature
    top_k_ptr,  # [num_rows] int32, 0 or ≥ VOCAB = off
    top_p_ptr,  # [num_rows] float32, 1 = off
    min_p_ptr,  # [num_rows] float32, 0 = off
    num_rows,
    thresholds_ptr,  # [num_rows] float32, −inf where nothing is filtered
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_MASS: tl.constexpr,
    FAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * VOCAB
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_k = (top_k > 0) & (top_k < VOCAB)
    threshold = tl.full([], float("-inf"), tl.float32)
    if has_k | (top_p < 1.0) | (min_p > 0.0):
        scale = tl.load(scales_ptr + row)
        top, _ = soft_max_of(row_ptr, scale, threshold, VOCAB, BLOCK_MASS)
        if has_k:
            wanted = top_k.to(tl.float32)
            threshold = _search_edge(
                row_ptr, top, scale, threshold, wanted, False, VOCAB, BLOCK, FAN
            )
        if top_p < 1.0:
            _, mass = soft_max_of(row_ptr, scale, threshold, VOCAB, BLOCK_MASS)
            wanted = top_p * mass
            threshold = _search_edge(
                row_ptr, top, scale, threshold, wanted, True, VOCAB, BLOCK, FAN
            )
        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + tl.log(min_p) / scale)
    tl.store(thresholds_ptr + row, threshold)
