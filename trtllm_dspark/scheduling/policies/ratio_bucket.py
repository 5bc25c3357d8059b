# SPDX-License-Identifier: Apache-2.0
"""The policy `ratio_bucket` (D-Cut): of a few ratios, the one whose best drafts give the highest
(R + Σ survival) / C(R, rung). It searches over current survivals, so it is lossless only where
drafts are deterministic; the flags reproduce the published variants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.config import from_json_dict, require
from trtllm_dspark.scheduling.options import draft_room, gain_curve
from trtllm_dspark.scheduling.policies.base import (
    DETERMINISTIC_DRAFTS,
    PolicyBase,
    admissible_survivals,
    plan_everything,
    plan_top,
)
from trtllm_dspark.scheduling.policies.fixed_ratio import ratio_capacity
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.types import FloatArray, IntArray


@dataclass(frozen=True)
class RatioBucketOptions:
    """Ratios and the published variants' flags."""

    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    exact: bool = False
    """K_q = ⌈ρ_q·R·(D−1)⌉ exactly, instead of what fits the rung that runs."""
    anchors_in_ratio: bool = False
    """Keep ⌈ρ·R·D⌉ − R drafts: the anchors are part of what the ratio counts (exact too)."""
    count_anchors: bool = True
    """False leaves R out of the numerator."""

    def __post_init__(self) -> None:
        valid = bool(self.ratios) and all(0.0 < ratio <= 1.0 for ratio in self.ratios)
        require(valid, "ratio_bucket.ratios", self.ratios, "one or more numbers in (0, 1]")


class RatioBucketPolicy(PolicyBase):
    """See the module docstring."""

    name = "ratio_bucket"
    sees = frozenset({Sees.CURRENT_ALL})
    covers = DETERMINISTIC_DRAFTS

    def __init__(self, options: RatioBucketOptions, resources: PolicyResources) -> None:
        super().__init__(resources)
        self.options = options

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Pick the ratio of highest expected rate on current survivals (ties: fewer drafts)."""
        if self.table is None:
            return plan_everything(view, decision)
        admissible, num_admissible = admissible_survivals(view, decision, survivals)
        if num_admissible == 0:
            return np.zeros(len(view.request_keys), np.int32)
        gains, _ = gain_curve(admissible)
        most = min(num_admissible, draft_room(view))
        capacities = sorted({min(self._capacity(view, q), most) for q in self.options.ratios})
        num_requests = len(view.request_keys)
        base = num_requests if self.options.count_anchors else 0
        rows = num_requests + view.num_prefill_tokens
        rates = [
            (base + gains[k]) / self.table.step_cost(num_requests, rows + k) for k in capacities
        ]
        return plan_top(view, decision, survivals, capacities[int(np.argmax(rates))])

    def _capacity(self, view: BatchView, ratio: float) -> int:
        if self.options.anchors_in_ratio:
            num_requests = len(view.request_keys)
            total = math.ceil(round(ratio * num_requests * (view.num_drafts + 1), 9))
            return max(total - num_requests, 0)
        return ratio_capacity(view, ratio, self.options.exact)


@register_policy("ratio_bucket")
def create_ratio_bucket(options: dict[str, Any], resources: PolicyResources) -> RatioBucketPolicy:
    """Build the policy from the fields of `RatioBucketOptions`."""
    known = tuple(RatioBucketOptions.__dataclass_fields__)
    refuse_unknown_options("ratio_bucket", options, known)
    return RatioBucketPolicy(from_json_dict(RatioBucketOptions, options, "ratio_bucket"), resources)
