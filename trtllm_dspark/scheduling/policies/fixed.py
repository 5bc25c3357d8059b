# SPDX-License-Identifier: Apache-2.0
"""The policy `fixed`: the same depth k for every request; k = γ is full verification (DFlash)."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.config import require
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.scheduling.selection import fit_caps
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome


class FixedPolicy:
    """ℓ_r = min(k, cap_r), cut by depth only where max_num_tokens leaves no room."""

    name = "fixed"
    sees = frozenset({Sees.NOTHING})
    covers = frozenset(DraftMode)

    def __init__(self, depth: int | None = None) -> None:
        self.depth = depth
        """k; None means γ."""

    def decide(self, view: BatchView) -> DraftDecision:
        """Draft for every request that may verify at least one draft."""
        lens = self._verify_lens(view)
        return DraftDecision(draft_mask=lens > 0, capacity=int(lens.sum()))

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return min(k, cap) for the drafted requests."""
        return np.where(decision.draft_mask, self._verify_lens(view), 0).astype(np.int32)

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def _verify_lens(self, view: BatchView) -> IntArray:
        depth = view.num_drafts if self.depth is None else min(self.depth, view.num_drafts)
        wanted = np.minimum(view.draft_caps, depth).astype(np.int32)
        return fit_caps(wanted, view.max_num_tokens - len(wanted) - view.num_prefill_tokens)


@register_policy("fixed")
def create_fixed(options: dict[str, Any], resources: PolicyResources) -> FixedPolicy:
    """Build the policy; option `num_draft_tokens` (also `depth`) is k, default γ."""
    refuse_unknown_options("fixed", options, ("num_draft_tokens", "depth"))
    depth = options.get("num_draft_tokens", options.get("depth"))
    require(
        depth is None or (isinstance(depth, int) and depth >= 0),
        "fixed.num_draft_tokens",
        depth,
        "an integer ≥ 0, or left out for γ",
    )
    return FixedPolicy(depth)
