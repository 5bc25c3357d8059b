# SPDX-License-Identifier: Apache-2.0
"""The policy `fixed_ratio`: a constant share ρ of the drafts, the ones of highest survival
(D-Cut's Fixed-75 and Fixed-50). The capacity depends on R alone, so it is lossless in every mode.
"""

from __future__ import annotations

from typing import Any

from trtllm_dspark.config import require
from trtllm_dspark.scheduling.buckets import grid_total, rung_for
from trtllm_dspark.scheduling.policies.base import ALL_MODES, PolicyBase, plan_top
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.types import FloatArray, IntArray


class FixedRatioPolicy(PolicyBase):
    """K = what fits the rung of R + ⌈ρ·R·γ⌉, or exactly ⌈ρ·R·γ⌉ with `exact`."""

    name = "fixed_ratio"
    needs_table = False
    sees = frozenset({Sees.CURRENT_RANKING})
    covers = ALL_MODES

    def __init__(self, ratio: float, exact: bool, resources: PolicyResources) -> None:
        super().__init__(resources)
        self.ratio, self.exact = ratio, exact

    def decide(self, view: BatchView) -> DraftDecision:
        """Fix the capacity before anything is drafted."""
        capacity = ratio_capacity(view, self.ratio, self.exact)
        return DraftDecision(draft_mask=view.draft_caps > 0, capacity=capacity)

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return the top-K drafts by current survival."""
        return plan_top(view, decision, survivals, decision.capacity or 0)


def ratio_capacity(view: BatchView, ratio: float, exact: bool) -> int:
    """Return K of a ratio: ⌈ρ·R·γ⌉, filled up to the rung that runs unless `exact`."""
    num_requests, prefill = len(view.request_keys), view.num_prefill_tokens
    if num_requests == 0:
        return 0
    total = min(grid_total(num_requests, ratio, view.num_drafts) + prefill, view.max_num_tokens)
    rows = total if exact else rung_for(view.rungs, total)
    return max(min(rows, view.max_num_tokens) - num_requests - prefill, 0)


@register_policy("fixed_ratio")
def create_fixed_ratio(options: dict[str, Any], resources: PolicyResources) -> FixedRatioPolicy:
    """Build the policy; options `ratio` in (0, 1] (default 0.5) and `exact` (default False)."""
    refuse_unknown_options("fixed_ratio", options, ("ratio", "exact"))
    ratio = options.get("ratio", 0.5)
    valid = isinstance(ratio, (int, float)) and 0.0 < ratio <= 1.0
    require(valid, "fixed_ratio.ratio", ratio, "a number in (0, 1]")
    return FixedRatioPolicy(float(ratio), bool(options.get("exact", False)), resources)
