# SPDX-License-Identifier: Apache-2.0
"""Launcher of `markov_tile` + `markov_select`: the γ draft slots of a block, two launches each.

A plain Markov head runs as a whole (`run_markov_block`); gated and RNN heads make their own
features between slots and call `run_markov_slot`. Outputs are the plan's buffers.
"""

from __future__ import annotations

import torch
import triton
from dspark_plugins.heuristics import next_power_of_2
from dspark_plugins.kernels.markov_select import markov_select_kernel
from dspark_plugins.kernels.markov_tile import markov_tile_kernel
from dspark_plugins.launch import dot_dtype, require_tensor
from dspark_plugins.markov_plan import HeadWeights, MarkovPlan, SlotDraws


def run_markov_block(
    plan: MarkovPlan,
    base_logits: torch.Tensor,
    anchor_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    weights: HeadWeights,
    draws: SlotDraws,
    logits_out: torch.Tensor | None = None,
) -> MarkovPlan:
    """Draft all slots of a plain Markov head (or of none), filling the plan's outputs.

    base_logits U [R, γ, V]; anchor_ids [R] int32; hidden [R, γ, H] or None; logits_out [R, γ, V]
    float32 receives U_k + W2 f_k where acceptance needs q again. Thresholds of `draws` are used
    for every slot. Launches 2γ kernels (and one gather), never synchronises.
    """
    features = None
    if plan.shape.rank and weights.w1 is not None:
        features = torch.index_select(weights.w1, 0, anchor_ids)
    previous = anchor_ids
    for slot in range(plan.shape.num_drafts):
        run_markov_slot(
            plan, slot, base_logits, features, previous, hidden, weights, draws, logits_out
        )
        features = plan.next_features if plan.shape.rank else None
        previous = plan.next_ids[slot % 2]
    return plan


def run_markov_slot(
    plan: MarkovPlan,
    slot: int,
    base_logits: torch.Tensor,
    features: torch.Tensor | None,
    previous_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    weights: HeadWeights,
    draws: SlotDraws,
    logits_out: torch.Tensor | None = None,
) -> None:
    """Draft one slot (0-based) into column `slot` of the plan's outputs.

    features [R, r] of this slot; previous_ids [R] int32, not plan.next_ids[slot % 2]: there the
    draft is left. Its W1 row is left in plan.next_features.
    """
    _check_slot(plan, base_logits, features, hidden, weights, logits_out)
    if plan.num_requests:
        _launch_tiles(plan, slot, base_logits, features, weights, draws, logits_out)
        _launch_select(plan, slot, previous_ids, hidden, weights, draws)


def _check_slot(
    plan: MarkovPlan,
    base_logits: torch.Tensor,
    features: torch.Tensor | None,
    hidden: torch.Tensor | None,
    weights: HeadWeights,
    logits_out: torch.Tensor | None,
) -> None:
    shape, requests = plan.shape, plan.num_requests
    block = (requests, shape.num_drafts, shape.vocab_size)
    require_tensor("base_logits", base_logits, block, base_logits.dtype)
    if logits_out is not None:
        require_tensor("logits_out", logits_out, block, torch.float32)
    if shape.rank:
        if features is None or weights.w1 is None or weights.w2 is None:
            raise ValueError(f"rank {shape.rank} needs features, w1 and w2: one of them is None")
        require_tensor("features", features, (requests, shape.rank), weights.w2.dtype)
        require_tensor("w2", weights.w2, (shape.vocab_size, shape.rank), weights.w2.dtype)
    if shape.hidden_size:
        if hidden is None or weights.confidence_weight is None or weights.confidence_bias is None:
            raise ValueError("the confidence head needs hidden, its weight and its bias")
        rows = (requests, shape.num_drafts, shape.hidden_size)
        require_tensor("hidden", hidden, rows, hidden.dtype)
        weight = weights.confidence_weight
        wanted = (shape.num_confidence_features,)
        require_tensor("confidence_weight", weight, wanted, weight.dtype)


def _launch_tiles(
    plan: MarkovPlan,
    slot: int,
    base_logits: torch.Tensor,
    features: torch.Tensor | None,
    weights: HeadWeights,
    draws: SlotDraws,
    logits_out: torch.Tensor | None,
) -> None:
    shape = plan.shape
    has_head = features is not None and weights.w2 is not None
    operand = features if features is not None else base_logits
    scores, logits, maxima, masses, plain = plan.tile_scores
    grid = (triton.cdiv(plan.num_requests, plan.tile.num_requests), plan.num_tiles)
    markov_tile_kernel[grid](
        base_logits,
        operand,
        weights.w2 if has_head else base_logits,
        draws.scales,
        draws.thresholds,
        draws.modes,
        draws.seeds,
        draws.anchor_positions,
        plan.num_requests,
        plan.num_tiles,
        shape.num_drafts,
        slot,
        slot,
        scores,
        plan.tile_ids,
        logits,
        maxima,
        masses,
        plain,
        logits_out if logits_out is not None else scores,
        VOCAB=shape.vocab_size,
        RANK=max(shape.rank, 1),
        HAS_HEAD=has_head,
        HAS_NOISE=not draws.is_greedy,
        STORE_LOGITS=logits_out is not None,
        WITH_PEAK=shape.needs_peak,
        DOT_DTYPE=dot_dtype(operand.dtype),
        BLOCK_R=plan.tile.num_requests,
        BLOCK_V=plan.tile.num_tokens,
        BLOCK_K=min(max(next_power_of_2(shape.rank), 16), 64),
        num_warps=plan.tile.num_warps,
        num_stages=3,
    )


def _launch_select(
    plan: MarkovPlan,
    slot: int,
    previous_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    weights: HeadWeights,
    draws: SlotDraws,
) -> None:
    shape = plan.shape
    scores, logits, maxima, masses, plain = plan.tile_scores
    spare = scores  # stands for pointers that this shape never reads
    markov_select_kernel[(plan.num_requests,)](
        scores,
        plan.tile_ids,
        logits,
        maxima,
        masses,
        plain,
        draws.scales,
        previous_ids,
        hidden if hidden is not None else spare,
        weights.w1 if weights.w1 is not None else spare,
        weights.confidence_weight if weights.confidence_weight is not None else spare,
        weights.confidence_bias if weights.confidence_bias is not None else spare,
        plan.num_tiles,
        shape.num_drafts,
        slot,
        plan.next_ids[slot % 2],
        plan.next_features,
        plan.token_ids,
        plan.draft_probs,
        plan.confidence,
        plan.stats,
        HIDDEN=shape.hidden_size,
        RANK=max(shape.rank, 1),
        HAS_HEAD=shape.rank > 0,
        HAS_CONFIDENCE=shape.hidden_size > 0,
        WITH_MARKOV=shape.with_markov,
        WITH_PEAK=shape.needs_peak,
        BLOCK_T=next_power_of_2(plan.num_tiles),
        BLOCK_H=1024,
        BLOCK_K=next_power_of_2(shape.rank),
        num_warps=4,
    )
