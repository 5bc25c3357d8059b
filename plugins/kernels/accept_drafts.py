# SPDX-License-Identifier: Apache-2.0
"""`accept_drafts` on the device: accepted lengths and the recovered or bonus token, in one launch.

One program walks the target rows of one request and stops at its first rejection. No distribution
is ever written: p, q and max(p − q, 0) are recomputed tile by tile from logits where needed.
Sums and soft-maxes are float32, comparisons against uniforms float64.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102 (a compile-time `if` must stand alone)
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.rows import (
    DRAFTS_ONE_HOT,
    draft_probs,
    draw,
    final_weights,
    pick,
    probs,
    soft_max_of,
)

RULE_REJECTION = tl.constexpr(1)
RULE_COUPLED = tl.constexpr(2)


@triton.jit
def _row_threshold(thresholds_ptr, row, HAS_THRESHOLDS: tl.constexpr):
    """Smallest kept logit of a target row."""
    if HAS_THRESHOLDS:
        return tl.load(thresholds_ptr + row)
    else:
        return float("-inf")


@triton.jit
def _load_uniform(ptr, mask):
    """A uniform in [0, 1): float64, or its 53 bits as int64 (TensorRT knows no float64)."""
    x = tl.load(ptr, mask=mask, other=0)
    if x.dtype == tl.int64:
        return x.to(tl.float64) * 1.1102230246251565e-16
    else:
        return x


@triton.jit
def _walk_by_choice(
    logits_ptr,
    thresholds_ptr,
    draft_ids_ptr,
    dropped_ptr,
    first_row,
    verify_len,
    draft_len,
    scale,
    seed,
    position,
    is_coupled,
    VOCAB: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_COUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Greedy and coupled: drafts are kept while they equal the row's own token y.

    Returns (accepted length, next token); pointers to drafts and outputs are the request's.
    """
    column = 0
    going = 1
    token = -1
    while going > 0:
        threshold = _row_threshold(thresholds_ptr, first_row + column, HAS_THRESHOLDS)
        token = pick(
            logits_ptr + (first_row + column) * VOCAB,
            scale,
            threshold,
            seed,
            position + column,
            is_coupled,
            VOCAB,
            HAS_COUPLED,
            BLOCK,
        )
        is_verified = column < verify_len
        draft = tl.load(draft_ids_ptr + column, mask=is_verified, other=-1)
        going = (is_verified & (draft == token)).to(tl.int32)
        column += going
    if (column == verify_len) & (verify_len < draft_len):
        dropped = tl.load(draft_ids_ptr + column)
        tl.store(dropped_ptr, (dropped == token).to(tl.float32))
    return column, token


@triton.jit
def _walk_by_rejection(
    logits_ptr,
    thresholds_ptr,
    draft_ids_ptr,
    draft_probs_ptr,
    draft_stats_ptr,
    draft_thresholds_ptr,
    accept_uniforms_ptr,
    dropped_ptr,
    first_row,
    cells,
    verify_len,
    draft_len,
    scale,
    from_q,
    VOCAB: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    DRAFT_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep x while u · q(x) < p(x). Returns (accepted length, max and mass of the row reached)."""
    column = 0
    going = 1
    top = 0.0
    mass = 1.0
    while going > 0:
        row_ptr = logits_ptr + (first_row + column) * VOCAB
        threshold = _row_threshold(thresholds_ptr, first_row + column, HAS_THRESHOLDS)
        top, mass = soft_max_of(row_ptr, scale, threshold, VOCAB, BLOCK)
        is_verified = column < verify_len
        is_proposed = column < draft_len
        draft = tl.load(draft_ids_ptr + column, mask=is_proposed, other=0)
        p = probs(row_ptr, draft, is_proposed, scale, threshold, top, mass).to(tl.float64)
        q = p * 0.0 + 1.0
        if DRAFT_FORM != DRAFTS_ONE_HOT:
            if from_q & is_proposed:
                q = draft_probs(
                    draft_probs_ptr,
                    draft_stats_ptr,
                    draft_thresholds_ptr,
                    cells + column,
                    draft,
                    is_proposed,
                    scale,
                    VOCAB,
                    DRAFT_FORM,
                ).to(tl.float64)
        uniform = _load_uniform(accept_uniforms_ptr + column, is_verified)
        going = (is_verified & (uniform * q < p)).to(tl.int32)
        if (column == verify_len) & is_proposed:
            tl.store(dropped_ptr, tl.minimum(p / q, 1.0).to(tl.float32))
        column += going
    return column, top, mass


@triton.jit
def _draw_next(
    row_ptr,
    draft_probs_ptr,
    draft_stats_ptr,
    draft_thresholds_ptr,
    cell,
    scale,
    threshold,
    top,
    mass,
    draft,
    is_rejection,
    from_q,
    uniform,
    VOCAB: tl.constexpr,
    DRAFT_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inverse CDF over the row reached: the bonus token from p, a recovered one from max(p − q, 0).

    Two passes: the total weight, then the tile in which it crosses uniform · total.
    """
    total = tl.zeros([1], tl.float64)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=8192 // BLOCK):
        weights = final_weights(
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
            is_rejection,
            from_q,
            VOCAB,
            DRAFT_FORM,
            BLOCK,
        )
        total += tl.sum(weights, axis=0).to(tl.float64)
    whole = tl.sum(total, axis=0)
    # an empty residual means p = q up to rounding: p itself, which sums to 1, is then drawn from
    is_residual = is_rejection & (whole > 0.0)
    target = uniform * tl.where(whole > 0.0, whole, 1.0)
    before = whole * 0.0
    token = -1
    start = 0
    going = 1
    while going > 0:
        weights = final_weights(
            row_ptr,
            draft_probs_ptr,
            draft_stats_ptr,
            draft_thresholds_ptr,
            cell,
            start,
            scale,
            threshold,
            top,
            mass,
            draft,
            is_residual,
            from_q,
            VOCAB,
            DRAFT_FORM,
            BLOCK,
        )
        after = before + tl.sum(weights, axis=0).to(tl.float64)
        # the last positive weight so far stands in where rounding lets nothing cross the target
        found = draw(weights, before, target, start, BLOCK)
        token = tl.where(found >= 0, found, token)
        before = after
        start += BLOCK
        going = ((after <= target) & (start < VOCAB)).to(tl.int32)
    return token


@triton.jit(do_not_specialize=["num_requests"])
def accept_drafts_kernel(
    logits_ptr,  # [M, VOCAB] target logits before temperature
    thresholds_ptr,  # [M] float32 smallest kept logit; read with HAS_THRESHOLDS only
    scales_ptr,  # [num_requests] float32 inverse temperature
    cu_rows_ptr,  # [num_requests + 1] int32; a request without rows is absent
    draft_ids_ptr,  # [num_requests, NUM_DRAFTS] int32
    draft_lens_ptr,  # [num_requests] int32 proposed drafts
    draft_probs_ptr,  # [num_requests, NUM_DRAFTS, VOCAB] q, or logits with DRAFTS_AS_LOGITS
    draft_stats_ptr,  # [num_requests, NUM_DRAFTS, 2] float32; with DRAFTS_AS_LOGITS only
    draft_thresholds_ptr,  # [num_requests, NUM_DRAFTS] float32; with DRAFTS_AS_LOGITS only
    sampled_ptr,  # [num_requests] int8: drafts were drawn from q
    rules_ptr,  # [num_requests] int32: greedy, rejection, coupled
    accept_uniforms_ptr,  # [num_requests, NUM_DRAFTS] float64, or int64 with 53 bits
    final_uniforms_ptr,  # [num_requests] like accept_uniforms
    seeds_ptr,  # [num_requests] int64
    anchor_positions_ptr,  # [num_requests] int64
    num_requests,
    accepted_lens_ptr,  # [num_requests] int32
    next_ids_ptr,  # [num_requests] int32, −1 for absent requests
    dropped_ptr,  # [num_requests] float32 acceptance probability of the first dropped draft, or NaN
    VOCAB: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_COUPLED: tl.constexpr,
    DRAFT_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_rows_ptr + request)
    verify_len = tl.load(cu_rows_ptr + request + 1) - start - 1
    tl.store(dropped_ptr + request, float("nan"))
    if verify_len < 0:
        tl.store(accepted_lens_ptr + request, 0)
        tl.store(next_ids_ptr + request, -1)
        return
    first_row = start.to(tl.int64)
    rule = tl.load(rules_ptr + request)
    scale = tl.load(scales_ptr + request)
    draft_len = tl.load(draft_lens_ptr + request)
    cells = request * NUM_DRAFTS
    if rule == RULE_REJECTION:
        from_q = tl.load(sampled_ptr + request) > 0
        column, top, mass = _walk_by_rejection(
            logits_ptr,
            thresholds_ptr,
            draft_ids_ptr + cells,
            draft_probs_ptr,
            draft_stats_ptr,
            draft_thresholds_ptr,
            accept_uniforms_ptr + cells,
            dropped_ptr + request,
            first_row,
            cells,
            verify_len,
            draft_len,
            scale,
            from_q,
            VOCAB,
            HAS_THRESHOLDS,
            DRAFT_FORM,
            BLOCK,
        )
        is_rejection = column < verify_len
        token = _draw_next(
            logits_ptr + (first_row + column) * VOCAB,
            draft_probs_ptr,
            draft_stats_ptr,
            draft_thresholds_ptr,
            cells + column,
            scale,
            _row_threshold(thresholds_ptr, first_row + column, HAS_THRESHOLDS),
            top,
            mass,
            tl.load(draft_ids_ptr + cells + column, mask=is_rejection, other=-1),
            is_rejection,
            from_q,
            _load_uniform(final_uniforms_ptr + request, True),
            VOCAB,
            DRAFT_FORM,
            BLOCK,
        )
    else:
        column, token = _walk_by_choice(
            logits_ptr,
            thresholds_ptr,
            draft_ids_ptr + cells,
            dropped_ptr + request,
            first_row,
            verify_len,
            draft_len,
            scale,
            tl.load(seeds_ptr + request),
            tl.load(anchor_positions_ptr + request).to(tl.int32) + 1,
            rule == RULE_COUPLED,
            VOCAB,
            HAS_THRESHOLDS,
            HAS_COUPLED,
            BLOCK,
        )
    tl.store(accepted_lens_ptr + request, column)
    tl.store(next_ids_ptr + request, token)
