# SPDX-License-Identifier: Apache-2.0
"""The default policy: λ, plain steps, hysteresis, bounded probes, and the set of requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduling.builders import dcut_table, make_outcome, make_table, make_view
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policies.adaptive import AdaptivePolicy
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision
from trtllm_dspark.scheduling.rates import CostRelation, ProbeBudget, RunningRate
from trtllm_dspark.scheduling.survival import SurvivalEstimator

RUNGS = tuple(range(1, 17))


def adaptive(table: LatencyTable, **options: Any) -> AdaptivePolicy:
    policy = create_policy("adaptive", options, PolicyResources(table))
    assert isinstance(policy, AdaptivePolicy)
    return policy


def pin_rate(policy: AdaptivePolicy, rate: float) -> None:
    """Make λ what the test wants: so much history that the forecast has no weight."""
    for bucket in range(len(policy.rates._tokens)):
        policy.rates.observe(bucket, rate * 1e12, 1e12)


def step(
    policy: AdaptivePolicy,
    view: BatchView,
    survivals: np.ndarray,
    accepted_share: float = 1.0,
    clock: Callable[[bool, int], float] = lambda drafted, num_rows: 0.0,
) -> tuple[DraftDecision, list[int]]:
    """Run one whole step; the accepted lengths are the expected ones, rounded.

    clock(drafted, rows) gives its milliseconds, 0 = not timed.
    """
    decision = policy.decide(view)
    drafted = np.where(decision.draft_mask[:, None], survivals, 0).astype(np.float32)
    lens = policy.plan(view, decision, drafted)
    kept = np.arange(view.num_drafts) < lens[:, None]
    expected = np.round((drafted * kept).sum(axis=1) * accepted_share)
    policy.observe(
        make_outcome(
            lens.tolist(),
            np.minimum(expected, lens).astype(int).tolist(),
            draft_lens=(decision.draft_mask * view.num_drafts).tolist(),
            keys=view.request_keys,
            drafted=bool(decision.draft_mask.any()),
            step_ms=clock(bool(decision.draft_mask.any()), len(lens) + int(lens.sum())),
        )
    )
    return decision, lens.tolist()


def warm(policy: AdaptivePolicy, view: BatchView, survivals: np.ndarray, steps: int = 2) -> None:
    """Fill the history as if everything had been drafted for `steps` steps."""
    for _ in range(steps):
        policy.history.begin_step()
        policy.history.record(view, np.ones(len(survivals), bool), survivals.astype(np.float32))


CONFIDENCES = st.lists(
    st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.99]), min_size=3, max_size=3),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(
    CONFIDENCES,
    st.sampled_from(["linear", "staircase", "convex"]),
    st.floats(0.05, 3.0),
    st.integers(0, 3),
    st.data(),
)
def test_the_decision_equals_brute_force_over_all_prefix_allocations_and_plain(
    confidences: list[list[float]], curve: str, rate: float, prefill: int, data: st.DataObject
) -> None:
    tokens = np.arange(1, 17)
    costs = {
        "linear": 1.0 + 0.1 * tokens,
        "staircase": 1.0 + np.ceil(tokens / 4) * 0.5,
        "convex": 1.0 + 0.02 * tokens**2,
    }[curve]
    table = make_table([costs.tolist()], buckets=(4,), rungs=RUNGS, no_draft=[0.9])
    survivals = np.cumprod(np.array(confidences, np.float32), axis=1)
    count = len(survivals)
    caps = [data.draw(st.integers(0, 3)) for _ in range(count)]
    view = make_view(caps, rungs=RUNGS, num_drafts=3, prefill=prefill)
    policy = adaptive(table, min_gain=0.0, probe_share=0.0, num_rows=1)
    pin_rate(policy, rate)
    warm(policy, view, survivals)
    decision = policy.decide(view)

    def value(lens: tuple[int, ...]) -> float:
        gain = count + sum(float(survivals[r, :n].sum()) for r, n in enumerate(lens))
        base = table.prefill_cost(count, prefill)
        return gain - rate * (table.step_cost(count, count + prefill + sum(lens)) - base)

    plain = count - rate * 0.9
    drafted = [
        value(lens)
        for lens in itertools.product(*(range(cap + 1) for cap in caps))
        if sum(lens) > 0
    ]
    best = max([plain, *drafted])
    if decision.draft_mask.any():
        lens = policy.plan(view, decision, np.where(decision.draft_mask[:, None], survivals, 0))
        assert value(tuple(lens.tolist())) == pytest.approx(best, rel=1e-5)
    else:
        assert plain == pytest.approx(best, rel=1e-5)


def test_the_long_run_rate_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    rates = RunningRate(2, half_life=1e9, prior_steps=1e-9)
    rates.observe(0, 1.0, 1.0)
    rates.observe(0, 10.0, 100.0)
    assert rates.rate(0, 5.0, 1.0) == pytest.approx(11.0 / 101.0)
    assert rates.rate(1, 5.0, 1.0) == pytest.approx(5.0)  # the other bucket starts afresh


def test_the_long_run_rate_forgets_and_starts_from_the_forecast() -> None:
    rates = RunningRate(1, half_life=2.0, prior_steps=1e-6)
    for _ in range(100):
        rates.observe(0, 1.0, 1.0)
    for _ in range(2):
        rates.observe(0, 3.0, 1.0)
    assert rates.rate(0, 0.0, 1.0) == pytest.approx(2.0, abs=1e-3)
    assert RunningRate(1, 2.0, 4.0).rate(0, 1.5, 8.0) == 1.5


P, D = False, True  # drafted


def relation_after(*steps: tuple[bool, float]) -> CostRelation:
    """After steps of (drafted, measured over table)."""
    relation = CostRelation(2)
    for drafted, ratio in steps:
        relation.observe(1, drafted, 10.0 * ratio, 10.0)
    assert relation.factor(0) == 1.0  # the other bucket learns nothing
    return relation


def test_the_relation_of_costs_is_learnt_where_one_kind_of_step_follows_the_other() -> None:
    pairs = [(P, 0.8), (D, 1.1)]
    assert relation_after(*pairs * 100).factor(1) == pytest.approx(0.8 / 1.1, rel=0.02)
    assert 0.8 / 1.1 < relation_after(*pairs * 2).factor(1) < 1.0  # the table still counts
    assert relation_after(*[(P, 0.8)] * 100).factor(1) == 1.0
    assert relation_after(*[(P, 0.8), (D, 0.0)] * 100).factor(1) == 1.0  # not timed


def test_a_machine_that_changes_as_a_whole_leaves_the_relation_as_it_was() -> None:
    runs = []
    for speed in (1.0, 3.0, 0.4, 2.0):  # changes inside runs of either kind
        runs += (
            [(D, speed)] * 40 + [(P, speed)] * 3 + [(P, 1.5 * speed)] * 90 + [(D, 1.5 * speed)] * 9
        )
    assert relation_after(*runs).factor(1) == pytest.approx(1.0)


def test_a_time_is_wanted_where_it_would_be_compared_and_too_few_are_known() -> None:
    after = relation_after((P, 0.8))
    assert after.wants(1, D, 1.0) and not after.wants(1, P, 1.0) and not after.wants(0, D, 1.0)
    assert not relation_after((P, 0.0)).wants(1, D, 1.0)
    assert not relation_after((P, 0.8), (D, 1.0)).wants(1, P, 0.9)
    assert relation_after((P, 0.8), (D, 1.0)).wants(1, P, 1.1)


def test_times_far_from_each_other_are_not_compared() -> None:
    apart = [(P, 1.0), *[(P, 0.0)] * 20, (D, 2.0), *[(D, 0.0)] * 20]
    assert relation_after(*apart * 5).factor(1) == 1.0
    assert relation_after(*[(P, 1.0), *[(P, 0.0)] * 3, (D, 2.0)] * 5).factor(1) < 0.8


def test_interrupted_steps_hardly_change_the_relation_and_old_times_give_way() -> None:
    even = [(P, 1.0), (D, 1.0)] * 30
    assert 1.0 < relation_after(*even, (P, 40.0)).factor(1) < 1.02
    cheap = [(P, 0.7), (D, 1.0)] * 30
    assert relation_after(*cheap).factor(1) < 0.75
    assert relation_after(*cheap, *[(D, 1.0)] * 2500).factor(1) > 0.95


def test_costs_in_the_rate_are_the_tables_so_that_a_slower_machine_changes_nothing() -> None:
    table = make_table([[1.0, 2.0, 3.0, 4.0]], buckets=(1,), rungs=(1, 2, 3, 4), no_draft=[0.9])
    policies = [adaptive(table), adaptive(table)]
    for policy, step_ms in zip(policies, (1.0, 1000.0), strict=True):
        outcome = make_outcome([2], [1], logits=np.zeros((1, 3)))
        object.__setattr__(outcome, "step_ms", step_ms)
        policy.observe(outcome)
    assert policies[0].rates.rate(0, 1.0, 1.0) == policies[1].rates.rate(0, 1.0, 1.0)
    assert policies[0].rates._tokens[0] == 2.0 and policies[0].rates._costs[0] == 3.0


DEAR = make_table(
    [[3.0 + 0.35 * t for t in range(1, 17)]],
    buckets=(4,),
    rungs=RUNGS,
    no_draft=[3.0],
    draft=[1.5],
)


def test_drafting_that_does_not_pay_stops_and_costs_at_most_the_probes() -> None:
    policy = adaptive(DEAR)
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    poor = np.cumprod(np.full((4, 3), 0.1), axis=1)
    kinds, extra, plain = [], 0.0, 0.0
    for _ in range(2000):
        decision, lens = step(policy, view, poor)
        kinds.append("probe" if decision.is_probe else "draft" if decision.capacity else "plain")
        plain += 3.0
        extra += DEAR.step_cost(4, 4 + sum(lens)) - 3.0 if kinds[-1] == "probe" else 0.0
    assert kinds[-500:].count("draft") == 0
    assert kinds.count("probe") > 0
    assert extra <= 0.02 * plain


@pytest.mark.parametrize("share", [0.0, 0.005, 0.02])
def test_probes_never_cost_more_than_their_share(share: float) -> None:
    rng = np.random.default_rng(0)
    budget, spent, time = ProbeBudget(share), 0.0, 0.0
    for _ in range(5000):
        plain, probe = rng.uniform(1, 3), rng.uniform(2, 40)
        time += plain
        if budget.spend(plain, probe - plain):
            spent += max(probe - plain, 0.0)
        assert spent <= share * time + 1e-9
    assert (spent > 0.5 * share * time) if share else spent == 0.0


# Close calls by the table: about 12 tokens in 8.6 ms, or 4 in 3 ms.
def chain(confidence: float) -> np.ndarray:
    return np.cumprod(np.full((4, 3), confidence), axis=1)


class Machine:
    """Times steps of DEAR's cells as they would be on a machine that errs from the table."""

    def __init__(self, plain: float, drafted: float) -> None:
        self.plain, self.drafted = plain, drafted
        self.speed, self.was_drafted, self.elapsed = 1.0, False, 0.0

    def __call__(self, drafted: bool, num_rows: int) -> float:
        spent = self.drafted * DEAR.step_cost(4, num_rows) if drafted else 3.0 * self.plain
        if drafted and not self.was_drafted:
            spent *= 1.5  # rows that plain steps left are written first
        self.was_drafted = drafted
        self.elapsed += self.speed * spent
        return self.speed * spent


def drafted_steps(
    policy: AdaptivePolicy, confidence: float, machine: Machine, n: int
) -> list[bool]:
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    survivals = chain(confidence)
    return [step(policy, view, survivals, clock=machine)[0].draft_mask.any() for _ in range(n)]


@pytest.mark.parametrize(
    ("confidence", "plain", "drafted", "drafts"),
    [
        (0.74, 1.0, 1.0, False),
        (0.74, 1.3, 1.0, True),
        (0.74, 3.0, 2.3, True),
        (0.82, 1.0, 1.0, True),
        (0.82, 0.75, 1.0, False),
        (0.82, 0.5, 0.66, False),
    ],
)
def test_measured_times_correct_a_table_that_errs_between_plain_and_drafted_steps(
    confidence: float, plain: float, drafted: float, drafts: bool
) -> None:
    policy, machine = adaptive(DEAR), Machine(plain, drafted)
    kinds = drafted_steps(policy, confidence, machine, 2000)
    assert sum(kinds[-500:]) / 500 == pytest.approx(float(drafts), abs=0.05)


@pytest.mark.parametrize(("confidence", "drafts"), [(0.74, False), (0.82, True)])
def test_a_machine_that_changes_speed_does_not_change_the_kind_of_step(
    confidence: float, drafts: bool
) -> None:
    policy, machine = adaptive(DEAR), Machine(1.0, 1.0)
    for speed in (1.0, 1.6, 0.7, 1.2):
        machine.speed = speed
        kinds = drafted_steps(policy, confidence, machine, 500)
        assert sum(kinds) / 500 == pytest.approx(float(drafts), abs=0.05), speed


@pytest.mark.parametrize("confidence", [0.82, 0.86, 0.9])
def test_trying_plain_steps_costs_at_most_its_share(confidence: float) -> None:
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    machines = [Machine(1.0, 1.0), Machine(1.0, 1.0)]
    tokens = [0.0, 0.0]
    policies = [adaptive(DEAR), adaptive(DEAR, probe_share=0.0)]
    for i in (0, 1):
        for _ in range(1500):
            _, lens = step(policies[i], view, chain(confidence), clock=machines[i])
            kept = np.arange(3) < np.array(lens)[:, None]
            tokens[i] += 4 + float((chain(confidence) * kept).sum())
    rates = [t / m.elapsed for t, m in zip(tokens, machines, strict=True)]
    assert 0.985 * rates[1] <= rates[0] <= rates[1]


def test_what_is_owed_is_paid_before_the_next_probe() -> None:
    budget = ProbeBudget(0.02)
    probes = []
    for number in range(1000):
        if budget.spend(1.0, 2.0):
            budget.owe(2.0)
            probes.append(number)
    assert probes[0] == pytest.approx(100, abs=1)
    assert np.diff(probes).tolist() == pytest.approx([200] * (len(probes) - 1), abs=1)


def test_survivals_do_not_wait_for_a_probe_that_is_only_timed() -> None:
    first = []
    for is_timed in (False, True):
        policy, machine = adaptive(DEAR), Machine(1.0, 1.0) if is_timed else None
        view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
        clock = machine or (lambda drafted, num_rows: 0.0)
        kinds = [step(policy, view, chain(0.74), clock=clock)[0].is_probe for _ in range(400)]
        first.append(kinds.index(True))
        assert not is_timed or kinds[first[-1] + 1]
    assert first[0] == first[1]


def test_a_share_above_two_percent_is_refused() -> None:
    with pytest.raises(ConfigError, match="probe_share"):
        ProbeBudget(0.03)


def test_drafting_comes_back_when_probes_show_that_acceptance_recovered() -> None:
    policy = adaptive(DEAR, probe_share=0.02)
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    poor, rich = (np.cumprod(np.full((4, 3), c), axis=1) for c in (0.1, 0.999))
    for _ in range(200):
        step(policy, view, poor)
    assert not policy.was_drafting
    drafted = [bool(step(policy, view, rich)[0].capacity) for _ in range(400)]
    assert drafted[-1] and sum(drafted[-50:]) == 50


def test_drafting_comes_back_at_once_when_the_load_drops() -> None:
    table = dcut_table()
    policy = create_policy("adaptive", {}, PolicyResources(table, SurvivalEstimator(15)))
    assert isinstance(policy, AdaptivePolicy)
    survivals = np.cumprod(np.full((64, 15), 0.6), axis=1)
    busy = make_view([15] * 64, rungs=table.rungs, num_drafts=15)
    for _ in range(60):
        step(policy, busy, survivals)
    assert not policy.was_drafting
    calm = make_view([15] * 4, rungs=table.rungs, num_drafts=15)
    decision, lens = step(policy, calm, survivals[:4])
    assert decision.draft_mask.all() and sum(lens) > 0 and not decision.is_probe


def test_hysteresis_keeps_what_the_last_step_did_inside_the_margin() -> None:
    # One draft of survival a costs 1 + a·1 extra ms: with λ = 1 it pays iff a > extra cost.
    table = make_table([[1.0, 1.5]], buckets=(1,), rungs=(1, 2), no_draft=[1.0], num_drafts=1)
    view = make_view([1], rungs=(1, 2), num_drafts=1)
    for a, was_drafting, drafts in [
        (0.52, True, True),
        (0.52, False, False),
        (0.48, True, True),
        (0.48, False, False),
        (0.58, False, True),
        (0.42, True, False),
    ]:
        policy = adaptive(table, min_gain=0.05, probe_share=0.0)
        pin_rate(policy, 1.0)
        policy.was_drafting = was_drafting
        warm(policy, view, np.array([[a]]), steps=12)
        assert bool(policy.decide(view).draft_mask.any()) == drafts, (a, was_drafting)


def test_current_survivals_never_change_the_capacity_or_the_set() -> None:
    table = dcut_table()
    view = make_view([15] * 8, rungs=table.rungs, num_drafts=15)
    rng = np.random.default_rng(0)
    past = [np.cumprod(rng.uniform(0.5, 1, (8, 15)), axis=1) for _ in range(6)]
    totals = []
    for current in (0.01, 0.99):
        policy = adaptive(table)
        for survivals in past:
            step(policy, view, survivals)
        decision, lens = step(policy, view, np.cumprod(np.full((8, 15), current), axis=1))
        totals.append((decision.capacity, decision.draft_mask.tolist(), sum(lens)))
        after, _ = step(policy, view, past[0])  # one step later they are still too young
        totals[-1] += (after.capacity if current else 0,)
    assert totals[0][:3] == totals[1][:3]


def test_prefill_rows_take_room_and_count_in_the_cost() -> None:
    costs = [1.0, 1.1, 1.2, 1.3, 9.0, 9.0, 9.0, 9.0]
    table = make_table([costs], buckets=(1,), rungs=tuple(range(1, 9)), no_draft=[0.9])
    policy = adaptive(table, probe_share=0.0)
    rich = np.cumprod(np.full((1, 3), 0.95), axis=1)
    for prefill, expected in ((0, 3), (1, 2), (2, 1), (4, 3), (7, 0)):
        view = make_view([3], rungs=table.rungs, num_drafts=3, prefill=prefill)
        warm(policy, view, rich, steps=12)
        pin_rate(policy, 2.0)
        decision = policy.decide(view)
        assert (decision.capacity or 0) == expected, prefill


def test_a_new_request_is_judged_by_the_prior_and_an_old_one_by_its_own_past() -> None:
    estimator = SurvivalEstimator(3)
    logits = np.full((256, 3), -4.0, np.float32)
    for _ in range(20):  # teach the prior that drafts rarely survive
        estimator.observe(make_outcome([0] * 256, [0] * 256, draft_lens=[3] * 256, logits=logits))
    policy = create_policy("adaptive", {"probe_share": 0.0}, PolicyResources(DEAR, estimator))
    assert isinstance(policy, AdaptivePolicy)
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3, keys=[1, 2, 3, 4])
    assert not policy.decide(view).draft_mask.any()
    warm(policy, view, np.cumprod(np.full((4, 3), 0.999), axis=1), steps=12)
    policy.was_drafting = True
    assert policy.decide(view).draft_mask.any()
    strangers = make_view([3] * 4, rungs=RUNGS, num_drafts=3, keys=[5, 6, 7, 8])
    assert not policy.decide(strangers).draft_mask.any()


# Drafting costs 1 ms per request here and verification little.
PER_REQUEST = make_table(
    [[n + 0.3 + 0.05 * t for t in range(1, 17)] for n in (1, 2, 3, 4)],
    buckets=(1, 2, 3, 4),
    rungs=RUNGS,
    no_draft=[0.4, 0.5, 0.6, 0.7],
    draft=[1.0, 2.0, 3.0, 4.0],
)


def test_hopeless_requests_are_not_drafted_while_the_others_are() -> None:
    policy = adaptive(PER_REQUEST, probe_share=0.0)
    pin_rate(policy, 1.0)
    confidences = np.array([[0.99] * 3, [0.02] * 3, [0.98] * 3, [0.05] * 3])
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    warm(policy, view, np.cumprod(confidences, axis=1), steps=12)
    decision = policy.decide(view)
    assert decision.draft_mask.tolist() == [True, False, True, False]
    everybody = adaptive(PER_REQUEST, probe_share=0.0, choose_requests=False)
    pin_rate(everybody, 1.0)
    warm(everybody, view, np.cumprod(confidences, axis=1), steps=12)
    assert everybody.decide(view).draft_mask.all() or not everybody.decide(view).draft_mask.any()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.02, 0.3, 0.6, 0.9, 0.99]), min_size=2, max_size=2),
        min_size=2,
        max_size=4,
    ),
    st.floats(0.1, 2.0),
)
def test_the_chosen_set_is_never_worse_than_everybody_and_close_to_brute_force(
    confidences: list[list[float]], rate: float
) -> None:
    survivals = np.cumprod(np.array(confidences, np.float32), axis=1)
    count = len(survivals)
    view = make_view([2] * count, rungs=RUNGS, num_drafts=2)

    def value(mask: tuple[bool, ...], lens: tuple[int, ...]) -> float:
        gain = count + sum(float(survivals[r, :n].sum()) for r, n in enumerate(lens))
        cost = PER_REQUEST.step_cost(count, count + sum(lens)) - count + sum(mask)
        return gain - rate * cost

    best = {False: -np.inf, True: -np.inf}
    for mask in itertools.product((False, True), repeat=count):
        for lens in itertools.product(*(range(3 if m else 1) for m in mask)):
            if any(lens):
                best[all(mask)] = max(best[all(mask)], value(mask, lens))
    policy = adaptive(PER_REQUEST, probe_share=0.0, min_gain=0.0, num_rows=1)
    object.__setattr__(policy, "_floor", lambda *arguments: -np.inf)  # the drafted side alone
    pin_rate(policy, rate)
    warm(policy, view, survivals)
    decision = policy.decide(view)
    lens = policy.plan(view, decision, np.where(decision.draft_mask[:, None], survivals, 0))
    found = value(tuple(decision.draft_mask.tolist()), tuple(lens.tolist()))
    overall = max(best.values())
    assert found >= best[True] - 1e-5
    assert found >= overall - 0.1 * count  # a tenth of a token per request


def test_requests_with_cap_zero_are_never_drafted_and_save_their_draft_time() -> None:
    policy = adaptive(PER_REQUEST, probe_share=0.0)
    pin_rate(policy, 1.0)
    view = make_view([3, 0, 3, 0], rungs=RUNGS, num_drafts=3)
    warm(policy, view, np.cumprod(np.full((4, 3), 0.99), axis=1), steps=12)
    decision, lens = step(policy, view, np.cumprod(np.full((4, 3), 0.99), axis=1))
    assert decision.draft_mask.tolist() == [True, False, True, False]
    assert lens[1] == lens[3] == 0 and lens[0] + lens[2] == 6


def test_without_a_plain_row_the_policy_always_drafts() -> None:
    table = make_table([[1.0, 9.0, 9.0, 9.0]], buckets=(1,), rungs=(1, 2, 3, 4))
    policy = adaptive(table)
    view = make_view([3], rungs=table.rungs, num_drafts=3)
    warm(policy, view, np.cumprod(np.full((1, 3), 0.01), axis=1), steps=12)
    assert policy.decide(view).draft_mask.all()


def test_overconfident_logits_are_corrected_and_the_policy_falls_back_to_plain_steps() -> None:
    # The drafter claims c = 0.88, one draft in twenty survives.
    estimator = SurvivalEstimator(3)
    policy = create_policy("adaptive", {}, PolicyResources(DEAR, estimator))
    assert isinstance(policy, AdaptivePolicy)
    view = make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    rng, kinds = np.random.default_rng(0), []
    for _ in range(300):
        decision = policy.decide(view)
        logits = np.full((4, 3), 2.0, np.float32)
        draft_lens = np.where(decision.draft_mask, 3, 0).astype(np.int32)
        survivals = estimator.survivals(logits, draft_lens, view.modes)
        lens = policy.plan(view, decision, survivals)
        hits = np.logical_and.accumulate(rng.random((4, 3)) < 0.05, axis=1).sum(axis=1)
        outcome = make_outcome(
            lens.tolist(),
            np.minimum(hits, lens).tolist(),
            draft_lens=draft_lens.tolist(),
            logits=logits,
            drafted=bool(decision.draft_mask.any()),
        )
        estimator.observe(outcome)
        policy.observe(outcome)
        kinds.append(bool(decision.draft_mask.any()))
    assert all(kinds[:3]) and sum(kinds[-150:]) <= 5


def test_a_plain_run_is_thought_over_when_the_batch_changes_and_every_eight_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, view = adaptive(DEAR, probe_share=0.0), make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    poor = chain(0.1)
    for _ in range(40):
        step(policy, view, poor)
    assert not policy.was_drafting
    thoughts: list[int] = []
    choose = AdaptivePolicy._choose
    monkeypatch.setattr(
        AdaptivePolicy, "_choose", lambda *given: thoughts.append(1) or choose(*given)
    )
    for _ in range(64):
        step(policy, view, poor)
    assert len(thoughts) == 8
    others = [
        make_view([3, 3, 3, 2], rungs=RUNGS, num_drafts=3),
        make_view([3] * 3, rungs=RUNGS, num_drafts=3),
        make_view([3] * 4, rungs=RUNGS, num_drafts=3, keys=[0, 1, 2, 9]),
        make_view([3] * 4, rungs=RUNGS, num_drafts=3, prefill=5),
    ]
    for number, other in enumerate(others, 1):
        step(policy, other, poor[: len(other.request_keys)])
        assert len(thoughts) == 8 + number


def test_a_plain_run_is_thought_over_as_soon_as_the_survivals_of_a_probe_may_decide() -> None:
    policy, view = adaptive(DEAR, probe_share=0.02), make_view([3] * 4, rungs=RUNGS, num_drafts=3)
    for _ in range(200):
        step(policy, view, chain(0.1))
    assert not policy.was_drafting
    while not step(policy, view, chain(0.999))[0].is_probe:
        pass
    drafts = [bool(step(policy, view, chain(0.999))[0].capacity) for _ in range(2)]
    assert drafts == [False, True]  # two steps after the probe
