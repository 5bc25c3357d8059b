# SPDX-License-Identifier: Apache-2.0
"""Losslessness by exact enumeration: every served policy × sampling mode, and its mutants."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.unit.scheduling.builders import make_table
from tests.unit.scheduling.enumeration import Seen, output_distribution
from tests.unit.scheduling.lossless_cases import (
    ADAPTIVE,
    CURVES,
    EXACT,
    GREEDY,
    GREEDY_DRAFTS,
    GREEDY_TOY,
    PAIR,
    POLICIES,
    SAMPLED,
    THREE,
    TOY,
    VARYING,
    check,
    policy_of,
    table_of,
)
from tests.unit.scheduling.toys import (
    Case,
    Tokens,
    Toy,
    accept_with_residual_after_truncation,
    deviation,
    first_token_share,
)
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.online import OnlineConfig
from trtllm_dspark.scheduling.options import draft_options
from trtllm_dspark.scheduling.policies.adaptive import AdaptivePolicy
from trtllm_dspark.scheduling.policies.base import (
    PolicyBase,
    admissible_survivals,
    plan_top,
)
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftMode, FloatArray, IntArray


@functools.cache
def enumerate_one_request(index: int, curve: str, mode: DraftMode) -> Seen | None:
    """Check one policy on six tokens (γ = 3 > staleness); None where it does not cover the mode."""
    table = table_of(curve)
    name, options = POLICIES[index]
    policy = policy_of(name, options, table)
    return check(Case(TOY, table, mode), policy) if mode in policy.covers else None


@pytest.mark.parametrize("mode", [GREEDY_DRAFTS, SAMPLED])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("index", range(len(POLICIES)), ids=lambda i: POLICIES[i][0])
def test_one_request_gets_the_targets_distribution(index: int, curve: str, mode: DraftMode) -> None:
    seen = enumerate_one_request(index, curve, mode)
    if seen is None:
        assert POLICIES[index][0] == "ratio_bucket" and mode is SAMPLED
    else:
        assert seen.last_step >= 5  # staleness + 3


@pytest.mark.parametrize("name", sorted(VARYING - {"ratio_bucket"}))
def test_the_enumeration_visits_different_capacities_of_every_policy_that_varies(name: str) -> None:
    index = [n for n, _ in POLICIES].index(name)
    runs = [enumerate_one_request(index, curve, SAMPLED) for curve in CURVES]
    assert any(len(seen.capacities) >= 2 for seen in runs if seen is not None)


def test_the_enumeration_of_adaptive_visits_drafted_steps_and_plain_ones_on_one_curve() -> None:
    seen = enumerate_one_request(len(POLICIES) - 1, "cliff", SAMPLED)
    assert seen is not None and seen.decisions == {"draft", "plain"}


def test_probes_are_lossless() -> None:
    # Survivals of one percent do not pay for a draft that costs three: plain steps and probes.
    table = make_table([[1.0, 1.03125, 4.0, 4.0]], buckets=(1,), rungs=(1, 2, 3, 4), no_draft=[1.0])
    toy = Toy(TOY.target, TOY.draft, np.array([[0.01, 0.01], [0.9, 0.1], [0.75, 0.75]]))
    seen = check(Case(toy, table, SAMPLED), policy_of("adaptive", ADAPTIVE, table))
    assert seen.decisions == {"draft", "plain", "probe"}


def test_an_estimator_that_learns_from_every_step_keeps_adaptive_lossless() -> None:
    table = table_of("linear")
    eager = OnlineConfig(half_life=20.0, min_evidence=0.0, prior_strength=0.5)
    estimator = SurvivalEstimator(3, online=eager)
    policy = create_policy("adaptive", ADAPTIVE, PolicyResources(table, estimator))
    seen = check(Case(TOY, table, SAMPLED, length=4, estimates=True), policy)
    assert len(seen.capacities) >= 2


@pytest.mark.parametrize(("name", "options"), POLICIES)
def test_a_greedy_target_commits_its_arg_max_tokens(name: str, options: dict[str, Any]) -> None:
    for curve in CURVES:
        table = table_of(curve)
        case = Case(GREEDY_TOY, table, GREEDY)
        check(case, policy_of(name, options, table))


@pytest.mark.parametrize("name", ["threshold", "prefix", "prefix_async", "adaptive"])
def test_three_tokens_of_vocabulary_and_two_drafts(name: str) -> None:
    options = dict(POLICIES)[name]
    for curve in ("linear", "cliff"):
        table = table_of(curve)
        check(Case(THREE, table, SAMPLED, length=4), policy_of(name, options, table))


@pytest.mark.parametrize("mode", [GREEDY_DRAFTS, SAMPLED])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(
    ("name", "options"), [p for p in POLICIES if p[0] in VARYING or p[0] == "fixed_ratio"]
)
def test_two_requests_get_independent_target_distributions(
    name: str, options: dict[str, Any], curve: str, mode: DraftMode
) -> None:
    table = table_of(curve)
    policy = policy_of(name, options, table)
    if mode in policy.covers:
        check(Case(PAIR, table, mode, anchors=(0, 1), length=3), policy)


def enumerate_two_requests(name: str, length: int) -> Seen:
    """Two requests with γ = 3 > staleness on a curve where capacities differ."""
    table = table_of("cliff")
    case = Case(TOY, table, SAMPLED, anchors=(0, 1), length=length)
    return check(case, policy_of(name, dict(POLICIES)[name], table))


@pytest.mark.parametrize("name", ["prefix_async", "adaptive"])
def test_two_requests_whose_capacity_varies_get_the_targets_distribution(name: str) -> None:
    assert len(enumerate_two_requests(name, 4).capacities) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefix_async", "adaptive"])
def test_two_requests_stay_lossless_where_old_survivals_have_come_to_count(name: str) -> None:
    seen = enumerate_two_requests(name, 5)
    assert len(seen.capacities) >= 2 and seen.last_step >= 5  # staleness + 3


# --- mutants --------------------------------------------------------------------------------------


class CurrentSearch(PolicyBase):
    """Mutant: global arg-max of Θ over *current* survivals, K = 0 included."""

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        assert self.table is not None
        admissible, count = admissible_survivals(view, decision, survivals)
        options = draft_options(self.table, view, admissible, count, with_empty=True)
        assert options is not None
        return plan_top(view, decision, survivals, int(options.capacities[options.best_by_rate()]))


class CurrentAdaptive(AdaptivePolicy):
    """Mutant: decides again once the current survivals are known."""

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        assert self.table is not None
        options = draft_options(self.table, view, survivals[None], survivals.size, with_empty=True)
        assert options is not None
        best = options.best_by_value(self.last_rate)
        self.history.record(view, decision.draft_mask, survivals)
        return plan_top(view, decision, survivals, int(options.capacities[best]))


def appendix_case(toy: Toy | None = None) -> Case:
    table = make_table([[1.0, 2.0, 1 / 0.45]], buckets=(1,), rungs=(1, 2, 3), num_drafts=2)
    published = Toy(
        target=np.array([[0.7, 0.3], [0.7, 0.3]]),
        draft=np.array([[0.5, 0.5], [0.5, 0.5]]),
        confidences=np.array([[0.8, 0.8], [0.9, 0.0]]),
    )
    return Case(toy or published, table, SAMPLED, length=2)


def test_the_papers_counterexample_comes_out_with_its_published_numbers() -> None:
    case = appendix_case()
    found, _ = output_distribution(case, CurrentSearch(PolicyResources(case.table)))
    assert first_token_share(found, 0) == pytest.approx(0.85, abs=EXACT)
    assert first_token_share(found, 1) == pytest.approx(0.15, abs=EXACT)
    seen = check(case, policy_of("prefix", {}, case.table))
    assert seen.capacities == {0}


def test_a_mutant_that_takes_its_capacity_from_current_survivals_is_caught() -> None:
    table = table_of("cliff")
    case = Case(TOY, table, SAMPLED, length=3)
    mutant = CurrentSearch(PolicyResources(table))
    assert deviation(case, output_distribution(case, mutant)[0]) > 1e-3
    check(Case(TOY, table, GREEDY_DRAFTS, length=3), mutant)


def test_ratio_bucket_leaks_under_sampled_drafts_which_is_why_it_does_not_cover_them() -> None:
    table = make_table([[1.0, 1.0, 1.3, 1.3]], buckets=(1,), rungs=(1, 2, 3, 4))
    toy = Toy(TOY.target, TOY.draft, np.array([[0.8, 0.8], [0.5, 0.5], [0.99, 0.0]]))
    policy = policy_of("ratio_bucket", {"ratios": [0.25, 1.0], "exact": True}, table)
    case = Case(toy, table, SAMPLED, length=3)
    found, seen = output_distribution(case, policy)
    assert seen.capacities == {1, 3}
    assert deviation(case, found) > 1e-3
    assert SAMPLED not in policy.covers
    check(Case(toy, table, GREEDY_DRAFTS, length=3), policy)
    check(Case(toy, table, SAMPLED, length=3, is_seeded=True), policy)  # any search may cut these


def test_a_mutant_of_adaptive_that_decides_after_drafting_is_caught() -> None:
    table = table_of("cliff")
    case = Case(TOY, table, SAMPLED, length=3)
    real = policy_of("adaptive", ADAPTIVE, table)
    mutant = CurrentAdaptive(real.options, PolicyResources(table))
    assert deviation(case, output_distribution(case, mutant)[0]) > 1e-3


# γ = 4: the survival at position 4 tells x_3, which two steps of one token each leave undecided.
DEEP = Toy(
    target=np.array([[0.7, 0.3], [0.7, 0.3]]),
    draft=np.array([[0.5, 0.5], [0.5, 0.5]]),
    confidences=np.array([[0.8, 0.8], [0.8, 0.8], [0.8, 0.8], [0.99, 0.0]]),
)
DEEP_TABLE = make_table(
    [[1.0, 3.25, 3.25, 3.25, 3.25]],
    buckets=(1,),
    rungs=(1, 2, 3, 4, 5),
    no_draft=[1.0],
    num_drafts=4,
)


@pytest.mark.parametrize("name", ["prefix_async", "adaptive"])
def test_a_mutant_that_reuses_draft_noise_is_caught(name: str) -> None:
    fresh, reused = (
        Case(DEEP, DEEP_TABLE, SAMPLED, length=4, reuse_noise=r) for r in (False, True)
    )
    seen = check(fresh, policy_of(name, dict(POLICIES)[name], DEEP_TABLE))
    assert seen.capacities >= {0, 4}
    found, _ = output_distribution(reused, policy_of(name, dict(POLICIES)[name], DEEP_TABLE))
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(reused, found) > 1e-3


def test_noise_may_be_reused_only_because_fixed_depths_do_not_look_at_it() -> None:
    table = table_of("linear")
    case = Case(TOY, table, SAMPLED, length=4, reuse_noise=True)
    check(case, policy_of("fixed", {"num_draft_tokens": 2}, table))


def test_a_mutant_that_draws_a_residual_after_truncation_is_caught() -> None:
    table = table_of("linear")
    case = Case(TOY, table, SAMPLED, length=3)
    policy = policy_of("fixed", {"num_draft_tokens": 2}, table)
    found, _ = output_distribution(case, policy, accept_with_residual_after_truncation)
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(case, found) > 1e-2
    full, _ = output_distribution(
        case, policy_of("fixed", {}, table), accept_with_residual_after_truncation
    )
    assert deviation(case, full) <= EXACT  # nothing is truncated at full depth


def own_probability(toy: Toy, anchor: int, drafts: Tokens) -> np.ndarray:
    """Mutant score: the candidate's own draft probability, cumulated."""
    before = (anchor, *drafts[:-1])
    own = [toy.draft[b, x] for b, x in zip(before, drafts, strict=True)]
    return np.cumprod(np.array(own, np.float32))


def test_a_score_with_the_candidates_own_probability_is_caught_with_its_published_number() -> None:
    toy = Toy(
        target=np.array([[0.5, 0.5], [0.5, 0.5]]),
        draft=np.array([[0.7, 0.3], [0.7, 0.3]]),
        confidences=np.array([[0.5, 0.5]]),
        score=own_probability,
    )
    table = make_table([[1.0, 2.0]], buckets=(1,), rungs=(1, 2), num_drafts=1)
    keep = policy_of("threshold", {"threshold": 0.5}, table)
    case = Case(toy, table, SAMPLED, length=1)
    found, _ = output_distribution(case, keep)
    assert first_token_share(found, 0) == pytest.approx(0.65, abs=EXACT)
    greedy = Case(toy, table, GREEDY_DRAFTS, length=1)
    check(greedy, keep)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("name", "options"), [("prefix_async", {}), ("adaptive", ADAPTIVE)])
def test_old_survivals_may_be_one_step_old_as_long_as_noise_is_fresh(
    name: str, options: dict[str, Any], curve: str
) -> None:
    table = table_of(curve)
    policy = policy_of(name, {**options, "staleness": 1}, table)
    check(Case(TOY, table, SAMPLED, length=5), policy)


def test_times_of_finished_steps_may_decide_even_if_they_tell_what_was_accepted() -> None:
    costs = [1.2, 1.7, 2.2, 2.7]  # drafting pays by a little, so that times decide for plain steps
    table = make_table([costs], buckets=(1,), rungs=(1, 2, 3, 4), no_draft=[1.0])
    decisions = {}
    for is_timed in (False, True):
        policy = policy_of("adaptive", {**ADAPTIVE, "min_gain": 0.0}, table)
        seen = check(Case(TOY, table, SAMPLED, length=7, is_timed=is_timed), policy)
        decisions[is_timed] = seen.decisions
    assert decisions == {False: {"draft"}, True: {"draft", "plain"}}
