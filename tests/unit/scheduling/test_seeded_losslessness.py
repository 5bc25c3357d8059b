# SPDX-License-Identifier: Apache-2.0
"""Seeded requests (coupled acceptance) by exact enumeration: every served policy, whatever it sees.

A request's tokens are a function of its noise alone, and over the noise they are the target's.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.unit.scheduling.lossless_cases import (
    ADAPTIVE,
    CURVES,
    EXACT,
    POLICIES,
    SAMPLED,
    TOY,
    VARYING,
    check,
    policy_of,
    table_of,
)
from tests.unit.scheduling.toys import Case, Tokens, Toy, deviation
from trtllm_dspark.scheduling.policy import BatchView

COUPLED = Toy(
    target=np.array([[0.7, 0.3], [0.4, 0.6]]),
    draft=np.array([[0.4, 0.6], [0.7, 0.3]]),
    confidences=TOY.confidences,
)


@pytest.mark.parametrize("curve", ["linear", "cliff"])
@pytest.mark.parametrize(("name", "options"), POLICIES)
def test_a_seeded_request_gets_the_targets_distribution(
    name: str, options: dict[str, Any], curve: str
) -> None:
    table = table_of(curve)
    case = Case(COUPLED, table, SAMPLED, length=5, is_seeded=True)
    seen = check(case, policy_of(name, options, table))
    assert seen.last_step >= 5  # staleness + 3
    if name in ("prefix_async", "adaptive"):
        assert len(seen.capacities) >= 2


def coupled_run(case: Case, policy: Any, noise: Tokens | np.ndarray) -> tuple[Tokens, set[int]]:
    """Decode one seeded request: token t is drawn from u[t] whoever draws it, draft or target."""
    toy, tokens, capacities = case.toy, list(case.anchors), set()

    def draw(row: np.ndarray, position: int) -> int:
        return int(np.searchsorted(np.cumsum(row), noise[position - 1], side="right"))

    view = BatchView(
        (0,), (SAMPLED,), np.array([toy.num_drafts], np.int32), toy.num_drafts, 0,
        case.table.rungs, case.table.rungs[-1],
    )  # fmt: skip
    while len(tokens) <= case.length:
        position = len(tokens)
        decision = policy.decide(view)
        verify_len = 0
        drafts: list[int] = []
        if decision.draft_mask.any():
            for slot in range(toy.num_drafts):
                drafts.append(draw(toy.draft[(*tokens, *drafts)[-1]], position + slot))
            survivals = toy.survivals(tokens[-1], tuple(drafts))[None]
            verify_len = int(policy.plan(view, decision, survivals)[0])
        capacities.add(verify_len)
        for k in range(verify_len + 1):
            truth = draw(toy.target[tokens[-1]], position + k)
            tokens.append(truth)
            if k == verify_len or truth != drafts[k]:
                break
    return tuple(tokens[1 : case.length + 1]), capacities


@pytest.mark.parametrize(("name", "options"), [p for p in POLICIES if p[0] != "adaptive"])
def test_a_seeded_request_is_a_function_of_its_noise_alone(
    name: str, options: dict[str, Any]
) -> None:
    atoms = [(0.4, 0.2), (0.3, 0.55), (0.3, 0.85)]  # (probability, u): thresholds are .4 and .7
    seen: set[int] = set()
    for curve in ("linear", "cliff"):
        case = Case(COUPLED, table_of(curve), SAMPLED, length=3)
        found: dict[tuple[Tokens, ...], float] = {}
        for combination in itertools.product(atoms, repeat=case.length + TOY.num_drafts):
            noise = np.array([u for _, u in combination])
            tokens, capacities = coupled_run(case, policy_of(name, options, case.table), noise)
            plain, _ = coupled_run(case, policy_of("autoregressive", {}, case.table), noise)
            assert tokens == plain
            seen |= capacities
            share = float(np.prod([share for share, _ in combination]))
            found[(tokens,)] = found.get((tokens,), 0.0) + share
        assert deviation(case, found) <= EXACT
    assert name not in VARYING or len(seen) >= 2


def test_a_seeded_request_is_reproducible_under_adaptive_over_many_steps() -> None:
    rng = np.random.default_rng(0)
    for curve in CURVES:
        table = table_of(curve)
        case = Case(COUPLED, table, SAMPLED, length=40)
        for _ in range(20):
            noise = rng.random(60)
            tokens, _ = coupled_run(case, policy_of("adaptive", ADAPTIVE, table), noise)
            assert tokens == coupled_run(case, policy_of("autoregressive", {}, table), noise)[0]
