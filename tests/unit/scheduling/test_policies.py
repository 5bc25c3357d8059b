# SPDX-License-Identifier: Apache-2.0
"""Every policy's rule on small cases, its declarations, its caps, and optimality by brute force."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduling.builders import dcut_table, make_table, make_view
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling import PolicyResources, create_policy, policy_names
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.options import DraftOptions, draft_options, gain_curve, gains_at
from trtllm_dspark.scheduling.policy import BatchView, Sees
from trtllm_dspark.types import DraftMode

LINEAR = make_table(
    [[1.0 + 0.1 * t for t in range(1, 17)]] * 2, buckets=(1, 4), rungs=tuple(range(1, 17))
)
SERVED = policy_names(servable=True)


def run_policy(
    name: str,
    survivals: list[list[float]],
    table: LatencyTable | None = LINEAR,
    options: dict[str, Any] | None = None,
    **view_fields: Any,
) -> list[int]:
    array = np.array(survivals, np.float32)
    fields: dict[str, Any] = {
        "caps": [array.shape[1]] * len(array),
        "rungs": table.rungs if table else (1, 2, 4, 8, 16),
        "num_drafts": array.shape[1],
        **view_fields,
    }
    view = make_view(fields.pop("caps"), **fields)
    policy = create_policy(name, options, PolicyResources(table))
    decision = policy.decide(view)
    drafted = np.where(decision.draft_mask[:, None], array, np.float32(0.0))
    return policy.plan(view, decision, drafted).tolist()


def allocations(caps: list[int]) -> Any:
    return itertools.product(*(range(cap + 1) for cap in caps))


def rate_of(lens: tuple[int, ...], survivals: np.ndarray, table: LatencyTable) -> float:
    gain = len(lens) + sum(
        float(survivals[r, :n].sum(dtype=np.float64)) for r, n in enumerate(lens)
    )
    return gain / table.step_cost(len(lens), len(lens) + sum(lens))


def test_the_registry_holds_all_policies_of_the_design_and_names_them_on_error() -> None:
    assert set(policy_names()) == {
        "autoregressive", "fixed", "threshold", "fixed_ratio", "ratio_bucket", "prefix",
        "prefix_async", "adaptive", "best_uniform", "oracle",
    }  # fmt: skip
    assert set(policy_names()) - set(SERVED) == {"best_uniform", "oracle"}
    with pytest.raises(ConfigError, match="policy 'dcut' is unknown: choose one of adaptive"):
        create_policy("dcut")


def test_only_policies_that_look_ahead_leave_sampled_drafts_uncovered() -> None:
    for name in SERVED:
        policy = create_policy(name, {}, PolicyResources(LINEAR))
        looks_ahead = bool(policy.sees & {Sees.CURRENT_ALL, Sees.OWN_PROBABILITY})
        assert (DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS in policy.covers) != looks_ahead, name
        assert {DraftMode.GREEDY_TARGET, DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS} <= policy.covers


@pytest.mark.parametrize("name", policy_names())
def test_unknown_options_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has no options \['depht'\]"):
        create_policy(name, {"depht": 1})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed", {"num_draft_tokens": -1}),
        ("threshold", {"threshold": 1.5}),
        ("fixed_ratio", {"ratio": 0.0}),
        ("ratio_bucket", {"ratios": []}),
        ("ratio_bucket", {"ratios": [2.0]}),
        ("ratio_bucket", {"ratios": 0.5}),
        ("adaptive", {"min_gain": "1"}),
        ("prefix_async", {"staleness": 0}),
        ("adaptive", {"staleness": 0}),
        ("adaptive", {"probe_share": 0.5}),
        ("adaptive", {"min_gain": -1.0}),
        ("adaptive", {"rate_half_life": 0}),
    ],
)
def test_option_ranges_are_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        create_policy(name, options, PolicyResources(LINEAR))


def test_autoregressive_drafts_for_nobody() -> None:
    policy = create_policy("autoregressive")
    view = make_view([3, 3], rungs=(1, 8), num_drafts=3)
    decision = policy.decide(view)
    assert not decision.draft_mask.any() and decision.capacity == 0
    assert policy.plan(view, decision, np.ones((2, 3), np.float32)).tolist() == [0, 0]


@pytest.mark.parametrize(("depth", "lens"), [(None, [3, 2, 0]), (1, [1, 1, 0]), (0, [0, 0, 0])])
def test_fixed_verifies_k_drafts_up_to_each_cap(depth: int | None, lens: list[int]) -> None:
    options = {} if depth is None else {"num_draft_tokens": depth}
    survivals = [[0.5, 0.4, 0.3]] * 3
    assert run_policy("fixed", survivals, options=options, caps=[3, 2, 0]) == lens


def test_fixed_cuts_by_depth_where_prefill_leaves_little_room() -> None:
    survivals = [[0.5, 0.4, 0.3]] * 2
    assert run_policy("fixed", survivals, prefill=11) == [2, 1]
    assert run_policy("fixed", survivals, prefill=14) == [0, 0]


def test_threshold_stops_before_the_first_unsure_position() -> None:
    confidences = np.array([[0.9, 0.4, 0.9], [0.9, 0.9, 0.9], [0.3, 0.9, 0.9]])
    survivals = np.cumprod(confidences, axis=1).tolist()
    assert run_policy("threshold", survivals, options={"threshold": 0.5}) == [1, 3, 0]
    assert run_policy("threshold", survivals, options={"threshold": 0.0}) == [3, 3, 3]


@pytest.mark.parametrize(
    ("ratio", "exact", "total"), [(0.5, True, 3), (0.5, False, 6), (1.0, True, 6)]
)
def test_fixed_ratio_keeps_a_share_and_fills_the_rung(
    ratio: float, exact: bool, total: int
) -> None:
    table = make_table([[1.0, 2.0]], buckets=(2,), rungs=(2, 8))
    survivals = [[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]]
    lens = run_policy("fixed_ratio", survivals, table, {"ratio": ratio, "exact": exact})
    assert sum(lens) == total
    assert total != 3 or lens == [2, 1]


def test_ratio_bucket_reproduces_a_worked_decision() -> None:
    # R=2, γ=2; ratios ½ and 1 run rungs 4 and 6.
    table = make_table([[1.0, 2.0, 3.4]], buckets=(2,), rungs=(2, 4, 6))
    survivals = [[0.9, 0.8], [0.5, 0.1]]
    # ½: (2 + .9 + .8)/2 = 1.85; 1: (2 + 2.3)/3.4 = 1.26
    assert run_policy("ratio_bucket", survivals, table, {"ratios": [0.5, 1.0]}) == [2, 0]
    cheap = make_table([[1.0, 2.0, 2.1]], buckets=(2,), rungs=(2, 4, 6))
    assert run_policy("ratio_bucket", survivals, cheap, {"ratios": [0.5, 1.0]}) == [2, 2]


def test_the_published_variants_of_ratio_bucket_keep_their_own_counts() -> None:
    survivals = np.cumprod(np.full((4, 7), 0.9), axis=1).tolist()
    table = make_table(
        [[1.0 + 0.01 * t for t in (4, 8, 16, 32)]], buckets=(4,), rungs=(4, 8, 16, 32)
    )

    def total(**options: Any) -> int:
        return sum(run_policy("ratio_bucket", survivals, table, {"ratios": [0.3], **options}))

    assert total() == 12  # 4 + ⌈8.4⌉ = 13 rows run on rung 16
    assert total(exact=True) == 9
    assert total(anchors_in_ratio=True) == 6  # ⌈0.3·4·8⌉ − 4


def test_leaving_the_anchors_out_of_the_numerator_changes_the_choice() -> None:
    table = make_table([[1.0, 1.0, 2.6]], buckets=(2,), rungs=(2, 4, 6))
    survivals = [[0.9, 0.8], [0.8, 0.7]]
    # with R: 3.7/1 beats 5.2/2.6; without: 1.7/1 still beats 3.2/2.6
    options = {"ratios": [0.5, 1.0]}
    assert sum(run_policy("ratio_bucket", survivals, table, options)) == 2
    table = make_table([[1.0, 1.0, 1.6]], buckets=(2,), rungs=(2, 4, 6))
    assert sum(run_policy("ratio_bucket", survivals, table, options)) == 2
    without = {**options, "count_anchors": False}
    assert sum(run_policy("ratio_bucket", survivals, table, without)) == 4


def test_prefix_stops_at_the_first_fall_although_later_drafts_would_pay() -> None:
    # The counterexample of DSpark's appendix A: Θ = 1, 0.9, then 1.134 if the second were admitted.
    table = make_table([[1.0, 2.0, 1 / 0.45]], buckets=(1,), rungs=(1, 2, 3))
    after_a = [[0.8, 0.8 * 0.9]]
    assert run_policy("prefix", after_a, table) == [0]
    theta = [rate_of((n,), np.array(after_a), table) for n in range(3)]
    assert theta == pytest.approx([1.0, 0.9, 1.134])


def test_prefix_async_takes_its_capacity_from_the_step_before_last() -> None:
    policy = create_policy("prefix_async", {}, PolicyResources(LINEAR))
    view = make_view([3], rungs=LINEAR.rungs, num_drafts=3)
    lens = []
    for value in (0.99, 0.99, 0.01, 0.01, 0.01):
        decision = policy.decide(view)
        survivals = np.cumprod(np.full((1, 3), value, np.float32), axis=1)
        lens.append(int(policy.plan(view, decision, survivals)[0]))
    assert lens[2:] == [3, 3, 0]
    assert lens[0] == lens[1] > 0  # the prior of a neutral estimator


CURVES = st.sampled_from(["linear", "staircase", "steep", "convex"])
SURVIVALS = st.lists(
    st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]), min_size=3, max_size=3),
    min_size=1,
    max_size=3,
)


def table_of(curve: str) -> LatencyTable:
    tokens = np.arange(1, 13)
    costs = {
        "linear": 1.0 + 0.1 * tokens,
        "staircase": 1.0 + np.ceil(tokens / 4) * 0.5,
        "steep": 0.2 + tokens,
        "convex": 1.0 + 0.02 * tokens**2,
    }[curve]
    rungs = tuple(int(t) for t in tokens)
    return make_table([costs.tolist()], buckets=(4,), rungs=rungs, no_draft=[float(costs[0])])


@settings(max_examples=120, deadline=None)
@given(SURVIVALS, CURVES)
def test_prefix_equals_brute_force_where_theta_has_one_peak(
    confidences: list[list[float]], curve: str
) -> None:
    table, survivals = table_of(curve), np.cumprod(np.array(confidences, np.float32), axis=1)
    lens = tuple(run_policy("prefix", survivals.tolist(), table))
    flat = np.sort(survivals.ravel())[::-1]
    sums = np.concatenate([[0.0], np.cumsum(flat, dtype=np.float64)])
    rows = len(survivals) + np.arange(len(sums))
    theta = (len(survivals) + sums) / [table.step_cost(len(survivals), int(n)) for n in rows]
    rising = np.diff(theta) >= 0
    unimodal = bool(np.all(rising[: int(rising.sum())]))
    best = max(rate_of(a, survivals, table) for a in allocations([3] * len(survivals)))
    found = rate_of(lens, survivals, table)
    assert found <= best + 1e-9
    if unimodal:
        assert found == pytest.approx(best)


@settings(max_examples=120, deadline=None)
@given(SURVIVALS, CURVES, st.data())
def test_ratio_bucket_with_every_capacity_equals_brute_force_over_prefix_allocations(
    confidences: list[list[float]], curve: str, data: st.DataObject
) -> None:
    table, survivals = table_of(curve), np.cumprod(np.array(confidences, np.float32), axis=1)
    caps = [data.draw(st.integers(0, 3)) for _ in confidences]
    total = 3 * len(confidences)
    ratios = [(k + 1) / total for k in range(total)]
    lens = run_policy("ratio_bucket", survivals.tolist(), table, {"ratios": ratios}, caps=caps)
    candidates = [a for a in allocations(caps) if sum(a) > 0] or [(0,) * len(caps)]
    best = max(rate_of(a, survivals, table) for a in candidates)
    assert rate_of(tuple(lens), survivals, table) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(SURVIVALS, CURVES)
def test_best_uniform_equals_trying_every_depth_and_never_beats_the_best_allocation(
    confidences: list[list[float]], curve: str
) -> None:
    table, survivals = table_of(curve), np.cumprod(np.array(confidences, np.float32), axis=1)
    lens = run_policy("best_uniform", survivals.tolist(), table)
    assert len(set(lens)) == 1
    rates = [rate_of((k,) * len(lens), survivals, table) for k in range(4)]
    assert rate_of(tuple(lens), survivals, table) == pytest.approx(max(rates))


@settings(max_examples=60)
@given(SURVIVALS, st.integers(1, 3), st.data())
def test_gains_at_some_capacities_are_points_of_the_gain_curve(
    confidences: list[list[float]], num_samples: int, data: st.DataObject
) -> None:
    survivals = np.cumprod(np.array(confidences, np.float32), axis=1)
    samples = np.stack(
        [np.roll(survivals, shift, axis=0) * 0.9**shift for shift in range(num_samples)]
    )
    size = survivals.size
    capacities = np.array(sorted(data.draw(st.sets(st.integers(0, size), min_size=1))))
    gains, ascending = gains_at(samples.astype(np.float32), capacities)
    curve, ordered = gain_curve(samples.astype(np.float32))
    np.testing.assert_allclose(gains, curve[capacities], rtol=1e-6, atol=1e-6)
    options = DraftOptions(capacities, gains, np.ones(len(capacities)), ascending)
    for option, capacity in enumerate(capacities):
        expected = ordered[:, capacity] if capacity < size else np.zeros(num_samples)
        np.testing.assert_array_equal(options.first_left_out(option), expected)


def test_samples_that_proposed_little_cost_the_smaller_rung_that_they_run() -> None:
    # Half of the old blocks proposed nothing, as an n-gram drafter does where nothing matches.
    view = make_view([2], rungs=(1, 2, 3), num_drafts=2)
    table = make_table([[1.0, 2.0, 4.0]], buckets=(1,), rungs=(1, 2, 3))
    samples = np.array([[[0.9, 0.8]], [[0.0, 0.0]], [[0.9, 0.0]], [[0.0, 0.0]]], np.float32)
    options = draft_options(table, view, samples, 2, with_empty=True)
    assert options is not None
    assert options.capacities.tolist() == [0, 1, 2]
    np.testing.assert_allclose(options.gains, [1.0, 1.45, 1.65], rtol=1e-6)
    np.testing.assert_allclose(options.costs, [1.0, 1.5, 2.0])


def test_the_oracle_verifies_only_what_will_be_accepted() -> None:
    policy = create_policy("oracle", {}, PolicyResources(LINEAR))
    view = make_view([3, 3, 1], rungs=LINEAR.rungs, num_drafts=3)
    policy.reveal(np.array([2, 0, 3]))  # type: ignore[attr-defined]
    lens = policy.plan(view, policy.decide(view), np.zeros((3, 3), np.float32))
    assert lens.tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", SERVED)
def test_caps_and_prefill_room_are_honoured_by_every_policy(name: str) -> None:
    survivals = np.cumprod(np.full((4, 3), 0.95, np.float32), axis=1)
    for caps in ([3, 0, 2, 1], [0, 0, 0, 0]):
        for prefill in (0, 5, 11, 12):
            for table in (LINEAR, None):
                lens = run_policy(
                    name, survivals.tolist(), table, rungs=LINEAR.rungs, caps=caps, prefill=prefill
                )
                assert all(0 <= n <= cap for n, cap in zip(lens, caps, strict=True))
                assert 4 + prefill + sum(lens) <= 16


@pytest.mark.parametrize("name", SERVED)
def test_nan_survivals_are_refused_or_never_looked_at(name: str) -> None:
    if name in ("autoregressive", "fixed"):
        return
    with pytest.raises(ConfigError, match="NaN"):
        run_policy(name, [[0.9, float("nan"), 0.1]])


@pytest.mark.parametrize("name", ["ratio_bucket", "prefix", "prefix_async", "adaptive"])
def test_without_a_table_everything_is_verified_and_the_log_says_so_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lens = run_policy(name, [[0.01, 0.001, 0.0001]] * 2, None)
    assert lens == [3, 3]
    assert [r.getMessage() for r in caplog.records] == [
        f"policy '{name}' has no usable latency table: nothing is trimmed, every draft is "
        "verified; run `dspark profile` to measure one"
    ]


def test_a_request_that_proposed_fewer_drafts_gets_no_row_it_did_not_propose() -> None:
    survivals = [[0.9, 0.0, 0.0], [0.9, 0.8, 0.7]]
    for name in ("fixed_ratio", "ratio_bucket", "prefix", "threshold"):
        options: dict[str, Any] = {"ratio": 1.0} if name == "fixed_ratio" else {}
        assert run_policy(name, survivals, options=options)[0] <= 1, name


def test_the_published_costs_make_full_verification_dear_and_policies_trim() -> None:
    table = dcut_table()
    survivals = np.cumprod(np.full((64, 15), 0.8, np.float32), axis=1)
    for name in ("ratio_bucket", "prefix_async"):
        lens = run_policy(name, survivals.tolist(), table)
        assert 0 < sum(lens) < 0.5 * 64 * 15, name


def test_the_view_is_not_changed_by_any_policy() -> None:
    for name in SERVED:
        policy = create_policy(name, {}, PolicyResources(LINEAR))
        view: BatchView = make_view([3, 2], rungs=LINEAR.rungs, num_drafts=3)
        survivals = np.full((2, 3), 0.5, np.float32)
        policy.plan(view, policy.decide(view), survivals)
        assert view.draft_caps.tolist() == [3, 2] and np.all(survivals == 0.5)
