# SPDX-License-Identifier: Apache-2.0
"""What the policies share: which requests may be drafted, the plan that trims nothing, the prior of
requests without history. No policy lives here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtllm_dspark.scheduling.options import draft_room
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision
from trtllm_dspark.scheduling.policy_options import PolicyResources
from trtllm_dspark.scheduling.selection import fit_caps, select_drafts
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome

log = logging.getLogger(__name__)

ALL_MODES = frozenset(DraftMode)
DETERMINISTIC_DRAFTS = frozenset({DraftMode.GREEDY_TARGET, DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS})
"""Modes in which x_{r,k} is a function of the context, so that any score is (design §4)."""


class PolicyBase:
    """Drafts for everybody who may verify something; learns nothing."""

    name = ""
    needs_table = True

    def __init__(self, resources: PolicyResources) -> None:
        self.table = resources.table
        self.estimator = resources.estimator
        if self.needs_table and self.table is None:
            log.warning(
                "policy %r has no usable latency table: nothing is trimmed, every draft is "
                "verified; run `dspark profile` to measure one",
                self.name,
            )

    def decide(self, view: BatchView) -> DraftDecision:
        """Draft for every request with a cap above 0; the capacity is left to `plan`."""
        return DraftDecision(draft_mask=view.draft_caps > 0)

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""


def drafted_caps(view: BatchView, decision: DraftDecision) -> IntArray:
    """Return [R] caps, 0 for requests that were not drafted."""
    return np.where(decision.draft_mask, view.draft_caps, 0).astype(np.int32)


def plan_everything(view: BatchView, decision: DraftDecision) -> IntArray:
    """Return full verification: what a policy does without a table it may trust."""
    return fit_caps(drafted_caps(view, decision), draft_room(view))


def plan_top(
    view: BatchView, decision: DraftDecision, survivals: FloatArray, capacity: int
) -> IntArray:
    """Return the `capacity` drafts of highest current survival, within caps and room."""
    caps = drafted_caps(view, decision)
    return select_drafts(survivals, min(capacity, draft_room(view)), caps)


def plan_decided(view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
    """Rank under the capacity that `decide` fixed; no capacity = there is no table, verify all."""
    if decision.capacity is None:
        return plan_everything(view, decision)
    return plan_top(view, decision, survivals, decision.capacity)


def admissible_survivals(
    view: BatchView, decision: DraftDecision, survivals: FloatArray
) -> tuple[FloatArray, int]:
    """Return current survivals [1, R, γ], 0 where inadmissible, and how many are not."""
    caps = drafted_caps(view, decision)
    masked = np.where(np.arange(view.num_drafts) < caps[:, None], survivals, np.float32(0.0))
    return masked[None], int(np.count_nonzero(masked))


class PriorRows:
    """Prior survivals [R, γ] for the modes of a batch (cached while the modes stay)."""

    def __init__(self, estimator: SurvivalEstimator | None) -> None:
        self._estimator = estimator
        self._modes: Sequence[DraftMode] = ()
        self._kinds: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def rows(self, view: BatchView) -> FloatArray:
        """Return the prior of every request, by its mode."""
        estimator = self._estimator or SurvivalEstimator(view.num_drafts)
        if self._estimator is None:
            self._estimator = estimator
        known = list(DraftMode)
        if view.modes != self._modes:
            self._kinds = np.array([known.index(m) for m in view.modes], np.int64)
            self._modes = view.modes
        table = np.stack([estimator.prior(mode) for mode in known])
        rows: FloatArray = table[self._kinds]
        return rows
