# SPDX-License-Identifier: Apache-2.0
"""The policy `autoregressive`: nothing is drafted, every step is a plain one."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome


class AutoregressivePolicy:
    """ℓ = 0 for every request, without drafting."""

    name = "autoregressive"
    sees = frozenset({Sees.NOTHING})
    covers = frozenset(DraftMode)

    def decide(self, view: BatchView) -> DraftDecision:
        """Draft for nobody."""
        return DraftDecision(draft_mask=np.zeros(len(view.request_keys), bool), capacity=0)

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return zeros [R]."""
        return np.zeros(len(view.request_keys), np.int32)

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""


@register_policy("autoregressive")
def create_autoregressive(
    options: dict[str, Any], resources: PolicyResources
) -> AutoregressivePolicy:
    """Build the policy; it has no options."""
    refuse_unknown_options("autoregressive", options, ())
    return AutoregressivePolicy()
