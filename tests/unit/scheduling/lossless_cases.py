# SPDX-License-Identifier: Apache-2.0
"""Toys, cost curves and policies whose losslessness is enumerated, and the check itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.scheduling.builders import make_table
from tests.unit.scheduling.enumeration import Seen, output_distribution
from tests.unit.scheduling.toys import Case, Toy, deviation
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.types import DraftMode

GREEDY = DraftMode.GREEDY_TARGET
GREEDY_DRAFTS = DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS
SAMPLED = DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS
EXACT = 1e-12

# Costs in quarters, so that sums of them are exact and equal states merge.
CURVES: dict[str, list[float]] = {
    "linear": [1.0 + 0.25 * t for t in range(1, 9)],
    "staircase": [1.0, 1.25, 1.25, 2.0, 2.0, 2.0, 3.5, 3.5],
    "steep": [0.75 * t for t in range(1, 9)],
    "cliff": [0.75, 1.75, 1.75, 1.75, 2.5, 2.5, 3.25, 3.25],
}


def table_of(curve: str) -> LatencyTable:
    costs = CURVES[curve]
    return make_table(
        [costs, costs],
        buckets=(1, 2),
        rungs=tuple(range(1, 9)),
        no_draft=[0.75, 1.0],
        draft=[0.25, 0.5],
    )


# Confidences tell x_1 = 0 (good) from x_1 = 1 (bad): survivals depend on the drafts themselves.
TOY = Toy(
    target=np.array([[0.7, 0.3], [0.4, 0.6]]),
    draft=np.array([[0.5, 0.5], [0.625, 0.375]]),
    confidences=np.array([[0.8, 0.8], [0.9, 0.1], [0.75, 0.75]]),
)
THREE = Toy(
    target=np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]]),
    draft=np.array([[0.3, 0.4, 0.3], [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]),
    confidences=np.array([[0.7, 0.7, 0.7], [0.95, 0.3, 0.05]]),
)
GREEDY_TOY = Toy(np.eye(2)[[1, 0]], TOY.draft, TOY.confidences)
PAIR = Toy(TOY.target, TOY.draft, TOY.confidences[:2])

ADAPTIVE = {"rate_half_life": 1e300, "num_rows": 1, "max_samples": 1, "probe_share": 0.02}
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("fixed", {}),
    ("fixed", {"num_draft_tokens": 2}),
    ("threshold", {"threshold": 0.5}),
    ("fixed_ratio", {"ratio": 0.5, "exact": True}),
    ("ratio_bucket", {"ratios": [0.25, 0.5, 1.0], "exact": True}),
    ("prefix", {}),
    ("prefix_async", {}),
    ("adaptive", ADAPTIVE),
]
VARYING = {"threshold", "ratio_bucket", "prefix", "prefix_async", "adaptive"}


def policy_of(name: str, options: dict[str, Any], table: LatencyTable) -> Any:
    return create_policy(name, options, PolicyResources(table))


def check(case: Case, policy: Any) -> Seen:
    found, seen = output_distribution(case, policy)
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(case, found) <= EXACT
    return seen
