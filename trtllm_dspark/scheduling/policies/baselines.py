# SPDX-License-Identifier: Apache-2.0
"""Baselines for evaluation only: `best_uniform` (the best equal depth, on current survivals) and
`oracle` (the best allocation when the accepted lengths are known beforehand). Never served.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.scheduling.options import draft_room
from trtllm_dspark.scheduling.policies.base import (
    DETERMINISTIC_DRAFTS,
    PolicyBase,
    drafted_caps,
    plan_everything,
)
from trtllm_dspark.scheduling.policies.prefix import throughput_curve
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.scheduling.selection import check_survivals, fit_caps
from trtllm_dspark.types import FloatArray, IntArray


class BestUniformPolicy(PolicyBase):
    """ℓ_r = min(k, cap_r) for the k of highest (R + Σ survival) / C."""

    name = "best_uniform"
    sees = frozenset({Sees.CURRENT_ALL})
    covers = DETERMINISTIC_DRAFTS

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Search all depths 0..γ on current survivals."""
        check_survivals(survivals)
        caps = drafted_caps(view, decision)
        if self.table is None:
            return plan_everything(view, decision)
        num_requests = len(view.request_keys)
        best_rate, best_lens = -np.inf, np.zeros(num_requests, np.int32)
        for depth in range(view.num_drafts + 1):
            lens = np.minimum(caps, depth).astype(np.int32)
            num_verified = int(lens.sum())
            if num_verified > draft_room(view):
                break
            kept = np.arange(view.num_drafts) < lens[:, None]
            gain = num_requests + float(survivals[kept].sum(dtype=np.float64))
            rows = num_requests + view.num_prefill_tokens + num_verified
            rate = gain / self.table.step_cost(num_requests, max(rows, 1))
            if rate > best_rate:
                best_rate, best_lens = rate, lens
        return best_lens


class OraclePolicy(PolicyBase):
    """Verifies only drafts that will be accepted, as many as pay. `reveal` tells it which."""

    name = "oracle"
    sees = frozenset({Sees.OWN_PROBABILITY})
    covers = frozenset[Any]()

    def __init__(self, resources: PolicyResources) -> None:
        super().__init__(resources)
        self._accepted: IntArray | None = None

    def reveal(self, accepted_lens: IntArray) -> None:
        """Tell [R] how many drafts of each request would be accepted under full verification."""
        self._accepted = np.asarray(accepted_lens, np.int32)

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Verify the number of acceptable drafts of highest Θ, shallow positions first."""
        caps = drafted_caps(view, decision)
        lens = caps if self._accepted is None else np.minimum(caps, self._accepted)
        most = min(int(lens.sum()), draft_room(view))
        if self.table is None or most == 0:
            return fit_caps(lens, draft_room(view))
        theta = throughput_curve(self.table, view, np.arange(most + 1.0), most)
        return fit_caps(lens, int(np.argmax(theta)))


@register_policy("best_uniform", evaluation_only=True)
def create_best_uniform(options: dict[str, Any], resources: PolicyResources) -> BestUniformPolicy:
    """Build the baseline; it has no options."""
    refuse_unknown_options("best_uniform", options, ())
    return BestUniformPolicy(resources)


@register_policy("oracle", evaluation_only=True)
def create_oracle(options: dict[str, Any], resources: PolicyResources) -> OraclePolicy:
    """Build the baseline; it has no options."""
    refuse_unknown_options("oracle", options, ())
    return OraclePolicy(resources)
