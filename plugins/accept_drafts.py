# SPDX-License-Identifier: Apache-2.0
"""Launcher of `accept_drafts`: one program per request, arguments as in the torch reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspark_plugins.kernels.accept_drafts import accept_drafts_kernel
from dspark_plugins.launch import require_tensor

ONE_HOT, AS_PROBS, AS_LOGITS = 0, 1, 2
"""How q is given: not at all, as probabilities, or as logits with their (max, mass)."""

BLOCK_TOKENS = 1024
NUM_WARPS = 4


@dataclass(frozen=True)
class AcceptPlan:
    """Shapes and output buffers; a later call overwrites them."""

    num_requests: int
    num_drafts: int
    vocab_size: int
    has_coupled: bool
    """Whether any request may have the coupled rule (costs registers where not needed)."""
    block_tokens: int
    accepted_lens: torch.Tensor
    """[R] int32"""
    next_token_ids: torch.Tensor
    """[R] int32 recovered or bonus token, −1 for absent requests"""
    dropped_accept_probs: torch.Tensor
    """[R] float32, NaN where nothing was dropped after full acceptance"""


@dataclass(frozen=True)
class DraftDistributions:
    """q of the drafts that were sampled, in one of two forms."""

    values: torch.Tensor
    """[≤ R, γ, V] probabilities (float32), or logits when `stats` is given; a row must exist where
    `sampled` is set, the others are not read."""
    stats: torch.Tensor | None = None
    """[R, γ, 2] float32: q_v = exp((logit_v − max) · scale) / mass, as `markov_select` writes."""
    thresholds: torch.Tensor | None = None
    """[R, γ] float32 smallest logit of each slot that could be drawn; with stats only."""


def plan_accept_drafts(
    num_requests: int,
    num_drafts: int,
    vocab_size: int,
    *,
    device: torch.device,
    has_coupled: bool = True,
    block_tokens: int = BLOCK_TOKENS,
) -> AcceptPlan:
    """Allocate the outputs of calls for `num_requests` requests (absent ones included)."""

    def allocate(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_requests, dtype=dtype, device=device)

    return AcceptPlan(
        num_requests,
        num_drafts,
        vocab_size,
        has_coupled,
        block_tokens,
        accepted_lens=allocate(torch.int32),
        next_token_ids=allocate(torch.int32),
        dropped_accept_probs=allocate(torch.float32),
    )


def run_accept_drafts(
    plan: AcceptPlan,
    *,
    logits: torch.Tensor,
    scale: torch.Tensor,
    thresholds: torch.Tensor | None,
    cu_rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_lens: torch.Tensor,
    drafts: DraftDistributions | None,
    sampled: torch.Tensor,
    rules: torch.Tensor,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
) -> AcceptPlan:
    """Fill the plan's outputs; see the torch reference for the rule. Never synchronises.

    logits [M, V]; scale [R] float32; thresholds [M] float32 or None; cu_rows [R+1] int32 (equal
    entries = an absent request); draft_token_ids [R, γ], draft_lens, rules [R] int32; sampled [R]
    bool; accept_uniforms [R, γ], final_uniforms [R] float64 (or int64: u · 2⁵³); seeds,
    anchor_positions [R] int64.
    """
    requests, columns = plan.num_requests, plan.num_drafts
    require_tensor("logits", logits, (logits.shape[0], plan.vocab_size), logits.dtype)
    require_tensor("scale", scale, (requests,), torch.float32)
    require_tensor("cu_rows", cu_rows, (requests + 1,), torch.int32)
    require_tensor("draft_token_ids", draft_token_ids, (requests, columns), torch.int32)
    require_tensor("draft_lens", draft_lens, (requests,), torch.int32)
    require_tensor("sampled", sampled, (requests,), torch.bool)
    require_tensor("rules", rules, (requests,), torch.int32)
    kinds = (torch.float64, torch.int64)
    require_tensor("accept_uniforms", accept_uniforms, (requests, columns), *kinds)
    require_tensor("final_uniforms", final_uniforms, (requests,), accept_uniforms.dtype)
    require_tensor("seeds", seeds, (requests,), torch.int64)
    require_tensor("anchor_positions", anchor_positions, (requests,), torch.int64)
    if thresholds is not None:
        require_tensor("thresholds", thresholds, (logits.shape[0],), torch.float32)
    form = _draft_form(plan, drafts)
    if requests == 0:
        return plan
    values = drafts.values if drafts is not None else logits
    stats = drafts.stats if drafts is not None and drafts.stats is not None else scale
    edges = drafts.thresholds if drafts is not None and drafts.thresholds is not None else scale
    accept_drafts_kernel[(requests,)](
        logits,
        thresholds if thresholds is not None else scale,
        scale,
        cu_rows,
        draft_token_ids,
        draft_lens,
        values,
        stats,
        edges,
        sampled.view(torch.int8),
        rules,
        accept_uniforms,
        final_uniforms,
        seeds,
        anchor_positions,
        requests,
        plan.accepted_lens,
        plan.next_token_ids,
        plan.dropped_accept_probs,
        VOCAB=plan.vocab_size,
        NUM_DRAFTS=plan.num_drafts,
        HAS_THRESHOLDS=thresholds is not None,
        HAS_COUPLED=plan.has_coupled,
        DRAFT_FORM=form,
        BLOCK=plan.block_tokens,
        num_warps=NUM_WARPS,
    )
    return plan


def _draft_form(plan: AcceptPlan, drafts: DraftDistributions | None) -> int:
    if drafts is None:
        return ONE_HOT
    num_rows = min(drafts.values.shape[0], plan.num_requests)
    block = (num_rows, plan.num_drafts, plan.vocab_size)
    require_tensor("drafts.values", drafts.values, block, drafts.values.dtype)
    if drafts.stats is None:
        return AS_PROBS
    if drafts.thresholds is None:
        raise ValueError("drafts.thresholds is None: logits need the threshold of every slot")
    require_tensor("drafts.stats", drafts.stats, (*block[:2], 2), torch.float32)
    require_tensor("drafts.thresholds", drafts.thresholds, block[:2], torch.float32)
    return AS_LOGITS
