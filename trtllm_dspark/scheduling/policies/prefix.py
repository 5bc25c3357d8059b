# SPDX-License-Identifier: Apache-2.0
"""The policies `prefix` (DSpark Algorithm 1) and `prefix_async` (DSpark §5.2).

`prefix` admits drafts in descending current survival while Θ = (R + Σ survival) / C rises and stops
at the first fall: whether (r, k) is admitted never depends on x_{r,k} or on later drafts.
`prefix_async` takes its capacity from survivals two steps old; current ones only rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.config import require
from trtllm_dspark.scheduling.history import SurvivalHistory
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.options import (
    Vector,
    draft_options,
    draft_room,
    gain_curve,
    mask_caps,
)
from trtllm_dspark.scheduling.policies.base import (
    ALL_MODES,
    PolicyBase,
    PriorRows,
    admissible_survivals,
    plan_decided,
    plan_everything,
    plan_top,
)
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.types import FloatArray, IntArray, StepOutcome


def throughput_curve(table: LatencyTable, view: BatchView, gains: Vector, most: int) -> Vector:
    """Return Θ [most+1]: (R + gains) / C of the rung that runs, for 0..most verified drafts."""
    num_requests = len(view.request_keys)
    rows = num_requests + view.num_prefill_tokens + np.arange(most + 1)
    columns = np.searchsorted(table.rungs, rows)
    costs = table.costs[table.bucket_index(num_requests), columns]
    theta: Vector = (num_requests + gains[: most + 1]) / costs
    return theta


class PrefixPolicy(PolicyBase):
    """Early stop on current survivals."""

    name = "prefix"
    sees = frozenset({Sees.CURRENT_EARLY_STOP})
    covers = ALL_MODES

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Admit in descending survival, stop before the first draft that lowers Θ."""
        if self.table is None:
            return plan_everything(view, decision)
        admissible, num_admissible = admissible_survivals(view, decision, survivals)
        most = min(num_admissible, draft_room(view))
        if most == 0:
            return np.zeros(len(view.request_keys), np.int32)
        theta = throughput_curve(self.table, view, gain_curve(admissible)[0], most)
        falls = np.flatnonzero(theta[1:] < theta[:-1])
        capacity = int(falls[0]) if len(falls) else most
        return plan_top(view, decision, survivals, capacity)


class PrefixAsyncPolicy(PolicyBase):
    """Capacity = global arg-max of Θ on old survivals, searched over the requests present now."""

    name = "prefix_async"
    sees = frozenset({Sees.OLD_SURVIVALS, Sees.CURRENT_RANKING})
    covers = ALL_MODES

    def __init__(self, staleness: int, resources: PolicyResources) -> None:
        super().__init__(resources)
        self.history = SurvivalHistory(num_samples=1, staleness=staleness)
        self.priors = PriorRows(self.estimator)

    def decide(self, view: BatchView) -> DraftDecision:
        """Choose the capacity from old survivals; requests without any use the prior."""
        self.history.begin_step()
        mask = view.draft_caps > 0
        if self.table is None or not mask.any():
            return DraftDecision(draft_mask=mask)
        old = mask_caps(self.history.recall(view, self.priors.rows), view.draft_caps)
        total = int(view.draft_caps.sum())
        options = draft_options(self.table, view, old, total, with_empty=True)
        capacity = 0
        if options is not None:
            prefill = self.table.prefill_cost(len(view.request_keys), view.num_prefill_tokens)
            theta = options.gains / (options.costs + prefill)
            capacity = int(options.capacities[int(np.argmax(theta))])
        self.history.record_decision(view, mask)
        return DraftDecision(draft_mask=mask, capacity=capacity)

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return the top-K drafts by current survival and remember the survivals."""
        self.history.record(view, decision.draft_mask, survivals)
        return plan_decided(view, decision, survivals)

    def observe(self, outcome: StepOutcome) -> None:
        """Close the step: a drafter that proposed nothing counts as survivals of zero."""
        self.history.settle(outcome.request_keys)


@register_policy("prefix")
def create_prefix(options: dict[str, Any], resources: PolicyResources) -> PrefixPolicy:
    """Build the policy; it has no options."""
    refuse_unknown_options("prefix", options, ())
    return PrefixPolicy(resources)


@register_policy("prefix_async")
def create_prefix_async(options: dict[str, Any], resources: PolicyResources) -> PrefixAsyncPolicy:
    """Build the policy; option `staleness` (steps, default 2)."""
    refuse_unknown_options("prefix_async", options, ("staleness",))
    staleness = options.get("staleness", 2)
    valid = isinstance(staleness, int) and staleness >= 1
    require(valid, "prefix_async.staleness", staleness, "an integer ≥ 1")
    return PrefixAsyncPolicy(staleness, resources)
