# SPDX-License-Identifier: Apache-2.0
"""One row of logits, walked tile by tile: arg-max, soft-max, probabilities and draws.

Parts of `accept_drafts` and of the filter pass. A row is `row_ptr`[0..VOCAB); p_v = exp((logit_v −
max) · scale) / mass for logits ≥ threshold. Nothing here knows requests.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102 (a compile-time `if` must stand alone)
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.argmax import NO_TOKEN, lowest_best
from dspark_plugins.kernels.noise import PURPOSE_COUPLED, gumbel_tile

DRAFTS_ONE_HOT = tl.constexpr(0)
DRAFTS_AS_PROBS = tl.constexpr(1)
DRAFTS_AS_LOGITS = tl.constexpr(2)


@triton.jit
def pick(
    row_ptr,
    scale,
    threshold,
    seed,
    position,
    is_coupled,
    VOCAB: tl.constexpr,
    HAS_COUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Arg-max of a row, or of logit · scale + Gumbel over its kept tokens where coupled."""
    low: tl.constexpr = float("-inf")
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], low, tl.float32)
    ids = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=8192 // BLOCK + 1):
        tokens = first + lanes
        logits = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=low).to(tl.float32)
        scores = logits
        if HAS_COUPLED:
            if is_coupled:
                zero = tl.zeros([1], tl.int32)
                purpose = tl.full([1], PURPOSE_COUPLED, tl.int32)
                gumbels = gumbel_tile(seed + zero, position + zero, zero, purpose, first, BLOCK)
                noisy = logits * scale + tl.reshape(gumbels, [BLOCK])
                scores = tl.where(logits >= threshold, noisy, low)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        ids = tl.where(is_better, tokens, ids)
    _, token = lowest_best(best, ids, 0)
    return token


@triton.jit
def soft_max_of(row_ptr, scale, threshold, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(max, mass) of a row: p_v = exp((logit_v − max) · scale) / mass for logits ≥ threshold."""
    low: tl.constexpr = float("-inf")
    lanes = tl.arange(0, BLOCK)
    top = tl.max(tl.load(row_ptr + lanes, mask=lanes < VOCAB, other=low).to(tl.float32), axis=0)
    mass = top * 0.0
    for first in tl.range(0, VOCAB, BLOCK, num_stages=8192 // BLOCK + 1):
        tokens = first + lanes
        logits = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=low).to(tl.float32)
        new_top = tl.maximum(top, tl.max(logits, axis=0))
        weights = tl.where(logits >= threshold, tl.exp((logits - new_top) * scale), 0.0)
        mass = mass * tl.exp((top - new_top) * scale) + tl.sum(weights, axis=0)
        top = new_top
    return top, mass


@triton.jit
def probs(row_ptr, tokens, mask, scale, threshold, top, mass):
    """Probabilities of some tokens of a row; 0 where masked off or below the threshold."""
    logits = tl.load(row_ptr + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(mask & (logits >= threshold), tl.exp((logits - top) * scale) / mass, 0.0)


@triton.jit
def draft_probs(
    draft_probs_ptr,
    draft_stats_ptr,
    draft_thresholds_ptr,
    cell,
    tokens,
    mask,
    scale,
    VOCAB: tl.constexpr,
    DRAFT_FORM: tl.constexpr,
):
    """q of some tokens of draft slot `cell` (request · γ + column)."""
    row_ptr = draft_probs_ptr + cell * VOCAB
    if DRAFT_FORM == DRAFTS_AS_LOGITS:
        top = tl.load(draft_stats_ptr + 2 * cell)
        mass = tl.load(draft_stats_ptr + 2 * cell + 1)
        threshold = tl.load(draft_thresholds_ptr + cell)
        return probs(row_ptr, tokens, mask, scale, threshold, top, mass)
    else:
        return tl.load(row_ptr + tokens, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def final_weights(
    row_ptr,
    draft_probs_ptr,
    draft_stats_ptr,
    draft_thresholds_ptr,
    cell,
    first,
    scale,
    threshold,
    top,
    mass,
    draft,
    is_residual,
    from_q,
    VOCAB: tl.constexpr,
    DRAFT_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of the next token's weights: p, or max(p − q, 0) after a rejection."""
    tokens = first + tl.arange(0, BLOCK)
    mask = tokens < VOCAB
    p = probs(row_ptr, tokens, mask, scale, threshold, top, mass)
    weights = p
    if is_residual:
        q = tl.where(tokens == draft, p, 0.0)  # a deterministic draft: remove it whole
        if DRAFT_FORM != DRAFTS_ONE_HOT:
            if from_q:
                q = draft_probs(
                    draft_probs_ptr,
                    draft_stats_ptr,
                    draft_thresholds_ptr,
                    cell,
                    tokens,
                    mask,
                    scale,
                    VOCAB,
                    DRAFT_FORM,
                )
        weights = tl.maximum(p - q, 0.0)
    return weights


@triton.jit
def draw(weights, before, target, first, BLOCK: tl.constexpr):
    """First token of a tile whose cumulative weight (from `before`) exceeds the target."""
    tokens = first + tl.arange(0, BLOCK)
    cumulative = before + tl.cumsum(weights, axis=0).to(tl.float64)
    crossing = tl.min(tl.where((cumulative > target) & (weights > 0.0), tokens, NO_TOKEN), axis=0)
    last = tl.max(tl.where(weights > 0.0, tokens, -1), axis=0)
    return tl.where(crossing == NO_TOKEN, last, crossing)
