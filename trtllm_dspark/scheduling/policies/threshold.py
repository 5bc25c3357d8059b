# SPDX-License-Identifier: Apache-2.0
"""The policy `threshold`: verify up to the first position whose own confidence is below t.

Diagnostic. c_k is a function of x_{<k}, so {ℓ ≥ k} is one too: lossless in every mode.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.config import require
from trtllm_dspark.scheduling.options import draft_room
from trtllm_dspark.scheduling.policies.base import ALL_MODES, PolicyBase, drafted_caps
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.scheduling.selection import check_survivals, fit_caps
from trtllm_dspark.types import FloatArray, IntArray


class ThresholdPolicy(PolicyBase):
    """ℓ_r = number of leading positions with c_{r,k} ≥ t."""

    name = "threshold"
    needs_table = False
    sees = frozenset({Sees.CURRENT_EARLY_STOP})
    covers = ALL_MODES

    def __init__(self, threshold: float, resources: PolicyResources) -> None:
        super().__init__(resources)
        self.threshold = threshold

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Recover c_k = a_k / a_{k−1} and cut before the first one below the threshold."""
        check_survivals(survivals)
        before = np.concatenate([np.ones((len(survivals), 1), np.float32), survivals[:, :-1]], 1)
        confidences = np.divide(
            survivals, before, out=np.zeros_like(survivals), where=survivals > 0
        )
        confident = (confidences >= self.threshold) & (survivals > 0)
        lens = np.logical_and.accumulate(confident, axis=1).sum(axis=1)
        wanted = np.minimum(lens, drafted_caps(view, decision)).astype(np.int32)
        return fit_caps(wanted, draft_room(view))


@register_policy("threshold")
def create_threshold(options: dict[str, Any], resources: PolicyResources) -> ThresholdPolicy:
    """Build the policy; option `threshold` in [0, 1], default 0.5."""
    refuse_unknown_options("threshold", options, ("threshold",))
    threshold = options.get("threshold", 0.5)
    valid = isinstance(threshold, (int, float)) and 0.0 <= threshold <= 1.0
    require(valid, "threshold.threshold", threshold, "a number in [0, 1]")
    return ThresholdPolicy(float(threshold), resources)
