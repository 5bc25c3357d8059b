# SPDX-License-Identifier: Apache-2.0
"""A yardstick for `adaptive`: every step maximises Σ survival − λ·C for the λ that it achieves in
the long run (found by repeating whole simulations), on survivals two steps old, which it gets even
in steps that draft nothing. Never served: λ comes from the future.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.scheduling.history import SurvivalHistory
from trtllm_dspark.scheduling.options import draft_options, mask_caps
from trtllm_dspark.scheduling.policies.base import PolicyBase, PriorRows, plan_top
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees
from trtllm_dspark.scheduling.policy_options import PolicyResources
from trtllm_dspark.types import FloatArray, IntArray


class LongRunOptimum(PolicyBase):
    """λ is given; a plain step is one of the choices."""

    name = "long_run_optimum"
    sees = frozenset({Sees.OLD_SURVIVALS, Sees.CURRENT_RANKING})
    covers = frozenset[Any]()

    def __init__(
        self, rate_per_ms: float, resources: PolicyResources, *, num_samples: int = 1
    ) -> None:
        super().__init__(resources)
        self.rate, self.num_samples = rate_per_ms, num_samples
        self.history = SurvivalHistory(num_samples=num_samples, staleness=2)
        self.priors = PriorRows(self.estimator)
        self._revealed = np.zeros((0, 0), np.float32)

    def reveal(self, survivals: FloatArray) -> None:
        """Tell this step's survivals [R, γ], drafted or not; they decide two steps later."""
        self._revealed = survivals

    def decide(self, view: BatchView) -> DraftDecision:
        """Return the best rung, or a plain step, for the given λ."""
        self.history.begin_step()
        decision = self._decide(view)
        self.history.record(view, np.ones(len(view.request_keys), bool), self._revealed)
        return decision

    def _decide(self, view: BatchView) -> DraftDecision:
        mask = view.draft_caps > 0
        nothing = DraftDecision(np.zeros_like(mask), capacity=0)
        if self.table is None or not mask.any():
            return nothing
        old = self.history.recall(view, self.priors.rows, self.num_samples)
        old = mask_caps(old, view.draft_caps)
        options = draft_options(self.table, view, old, int(view.draft_caps.sum()))
        if options is None:
            return nothing
        best = options.best_by_value(self.rate)
        value = options.gains[best] - self.rate * options.costs[best]
        count = len(view.request_keys)
        plain_ms = float(self.table.no_draft_ms[self.table.bucket_index(count)])
        if not np.isnan(plain_ms) and count - self.rate * plain_ms > value:
            return nothing
        return DraftDecision(mask, capacity=int(options.capacities[best]))

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return the top-K drafts by current survival."""
        return plan_top(view, decision, survivals, decision.capacity or 0)
