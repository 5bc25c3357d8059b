# SPDX-License-Identifier: Apache-2.0
"""Survivals from logits, and what the online estimator learns from verification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduling.builders import make_outcome
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.calibration import Calibration, ModeCalibration
from trtllm_dspark.scheduling.online import OnlineCalibrator, OnlineConfig
from trtllm_dspark.scheduling.survival import SurvivalEstimator, conditional_labels
from trtllm_dspark.types import DraftMode

GREEDY = DraftMode.GREEDY_TARGET
SAMPLED = DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def test_survivals_are_products_and_zero_where_nothing_was_drafted() -> None:
    logits = np.zeros((3, 2), np.float32)
    lens = np.array([2, 1, 0])
    survivals = SurvivalEstimator(2).survivals(logits, lens, [GREEDY] * 3)
    np.testing.assert_allclose(survivals, [[0.5, 0.25], [0.5, 0.0], [0.0, 0.0]])
    assert survivals.dtype == np.float32


def test_nan_is_refused_where_drafted_and_ignored_where_not() -> None:
    logits = np.array([[0.0, np.nan]], np.float32)
    estimator = SurvivalEstimator(2)
    assert estimator.survivals(logits, np.array([1]), [GREEDY]).tolist() == [[0.5, 0.0]]
    with pytest.raises(ConfigError, match="batch row 0 hold NaN"):
        estimator.survivals(logits, np.array([2]), [GREEDY])
    with pytest.raises(ConfigError, match=r"must lie in 0\.\.γ"):
        estimator.survivals(logits, np.array([3]), [GREEDY])


def test_infinite_logits_are_clipped_and_a_drafted_slot_never_has_survival_zero() -> None:
    logits = np.array([[np.inf] * 3, [-np.inf] * 3], np.float32)
    survivals = SurvivalEstimator(3).survivals(logits, np.array([3, 3]), [GREEDY] * 2)
    assert np.all(survivals[0] < 1.0) and survivals[0, 0] > 0.99999
    assert np.all(survivals[1] > 0.0)
    deep = SurvivalEstimator(15).survivals(
        np.full((1, 15), -np.inf, np.float32), np.array([15]), [GREEDY]
    )
    assert np.all(deep > 0.0) and np.all(np.diff(deep) <= 0.0)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-40, 40), min_size=4, max_size=4), min_size=1, max_size=5))
def test_survivals_never_increase_along_the_block(logits: list[list[float]]) -> None:
    array = np.array(logits, np.float32)
    lens = np.full(len(array), 4)
    survivals = SurvivalEstimator(4).survivals(array, lens, [GREEDY] * len(array))
    assert np.all(survivals[:, 1:] <= survivals[:, :-1]) and np.all(survivals > 0)


def test_temperatures_are_applied_by_the_mode_of_each_request() -> None:
    calibration = Calibration(1, {GREEDY: ModeCalibration((2.0,), 300)})
    estimator = SurvivalEstimator(1, calibration)
    logits, lens = np.full((2, 1), 2.0, np.float32), np.array([1, 1])
    mixed = estimator.survivals(logits, lens, [GREEDY, SAMPLED])
    np.testing.assert_allclose(mixed[:, 0], sigmoid(np.array([1.0, 2.0])), rtol=1e-6)
    same = estimator.survivals(logits, lens, [GREEDY, GREEDY])
    np.testing.assert_allclose(same[:, 0], sigmoid(np.array([1.0, 1.0])), rtol=1e-6)


def test_a_calibration_for_another_block_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="γ = 2, the drafter has γ = 3"):
        SurvivalEstimator(3, Calibration(2))


def test_labels_stop_at_the_first_rejection_and_use_the_first_dropped_draft() -> None:
    outcome = make_outcome(
        [2, 1, 3, 0, 1],
        [1, 1, 3, 0, 0],
        draft_lens=[3, 3, 3, 3, 3],
        logits=np.zeros((5, 3)),
        dropped=[np.nan, 0.4, np.nan, 0.8, 0.9],  # the last one after a rejection: no news
    )
    labels, weights = conditional_labels(outcome, np.ones(5, bool), np.ones((5, 3), bool))
    assert weights.tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]]
    np.testing.assert_allclose(
        labels * weights, [[1, 0, 0], [1, 0.4, 0], [1, 1, 1], [0.8, 0, 0], [0, 0, 0]], atol=1e-7
    )


def test_a_dropped_draft_beyond_the_drafted_ones_counts_nothing() -> None:
    outcome = make_outcome([2], [2], draft_lens=[2], logits=np.zeros((1, 3)), dropped=[0.5])
    _, weights = conditional_labels(outcome, np.ones(1, bool), np.array([[True, True, False]]))
    assert weights.tolist() == [[1, 1, 0]]


class Traffic:
    """Blocks whose truth is c_k = σ(a·z_k + b), verified as far as survivals order it."""

    def __init__(self, scale: float, offset: float, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.scale, self.offset = scale, offset

    def feed(self, estimator: SurvivalEstimator, steps: int, requests: int, capacity: int) -> None:
        gamma = estimator.num_drafts
        for _ in range(steps):
            logits = self.rng.normal(0.5, 1.5, (requests, gamma)).astype(np.float32)
            truth = sigmoid(self.scale * logits + self.offset)
            kept = np.logical_and.accumulate(self.rng.random(truth.shape) < truth, axis=1)
            survivals = estimator.survivals(logits, np.full(requests, gamma), [GREEDY] * requests)
            threshold = np.sort(survivals.ravel())[-capacity]
            verify = (survivals >= threshold).sum(axis=1)
            accepted = np.minimum(kept.sum(axis=1), verify)
            dropped = np.full(requests, np.nan)
            rows = (accepted == verify) & (verify < gamma)
            dropped[rows] = truth[np.arange(requests)[rows], verify[rows]]
            estimator.observe(
                make_outcome(
                    verify.tolist(), accepted.tolist(), logits=logits, dropped=dropped.tolist()
                )
            )


@pytest.mark.parametrize("capacity", [16 * 4, 24, 8])
def test_the_online_estimator_learns_the_truth_however_little_is_verified(capacity: int) -> None:
    estimator = SurvivalEstimator(4, online=OnlineConfig(half_life=20_000))
    Traffic(0.5, -0.8).feed(estimator, 600, 16, capacity)
    logits = np.array([[-1.0] * 4, [0.5] * 4, [2.0] * 4], np.float32)
    survivals = estimator.survivals(logits, np.full(3, 4), [GREEDY] * 3)
    truth = np.cumprod(sigmoid(0.5 * logits - 0.8), axis=1)
    np.testing.assert_allclose(survivals[:, :2], truth[:, :2], atol=0.06)
    np.testing.assert_allclose(survivals, truth, atol=0.1)


def test_before_there_is_enough_evidence_the_estimator_is_neutral() -> None:
    estimator = SurvivalEstimator(4, online=OnlineConfig(min_evidence=50))
    Traffic(0.5, -2.0).feed(estimator, 3, 16, 64)  # 48 observations at position 1
    logits = np.full((1, 4), 1.0, np.float32)
    neutral = np.cumprod(sigmoid(logits), axis=1)
    before = estimator.survivals(logits, np.array([4]), [GREEDY])
    np.testing.assert_allclose(before, neutral, rtol=1e-5)
    Traffic(0.5, -2.0).feed(estimator, 3, 16, 64)
    assert estimator.survivals(logits, np.array([4]), [GREEDY])[0, 0] < 0.9 * neutral[0, 0]


def test_a_deep_position_without_evidence_takes_the_correction_of_a_shallower_one() -> None:
    online = OnlineCalibrator(3, OnlineConfig(min_evidence=10))
    weights = np.zeros((40, 3))
    weights[:, 0] = 1.0
    online.observe(np.full((40, 3), 2.0), np.zeros((40, 3)), weights)
    scale, offset = online.corrections()
    assert scale[0] == scale[1] == scale[2] and offset[0] == offset[2] != 0.0


def test_modes_are_learned_apart() -> None:
    estimator = SurvivalEstimator(4)
    Traffic(0.5, -2.0).feed(estimator, 50, 16, 64)
    logits, lens = np.full((1, 4), 1.0, np.float32), np.array([4])
    assert estimator.survivals(logits, lens, [GREEDY])[0, 0] < 0.4
    assert estimator.survivals(logits, lens, [SAMPLED])[0, 0] == pytest.approx(0.731, abs=1e-3)
    assert set(estimator.drift_report()) == {"greedy_target"}


def test_forgetting_lets_the_estimator_follow_a_change_of_traffic() -> None:
    estimator = SurvivalEstimator(4, online=OnlineConfig(half_life=500))
    Traffic(1.0, 0.0).feed(estimator, 200, 16, 64)
    logits, lens = np.full((1, 4), 1.0, np.float32), np.array([4])
    before = estimator.survivals(logits, lens, [GREEDY])[0, 0]
    Traffic(1.0, -2.0, seed=1).feed(estimator, 200, 16, 64)
    after = estimator.survivals(logits, lens, [GREEDY])[0, 0]
    assert before == pytest.approx(sigmoid(np.array(1.0)), abs=0.05)
    assert after == pytest.approx(sigmoid(np.array(-1.0)), abs=0.05)


def test_the_drift_report_shows_the_gap_that_opens_when_traffic_changes() -> None:
    estimator = SurvivalEstimator(4, online=OnlineConfig(half_life=500))
    Traffic(1.0, 0.0).feed(estimator, 100, 16, 64)
    assert abs(estimator.drift_report()["greedy_target"]["gap"][0]) < 0.05
    Traffic(1.0, -3.0, seed=1).feed(estimator, 4, 16, 64)
    assert estimator.drift_report()["greedy_target"]["gap"][0] < -0.02


def test_the_prior_is_the_mean_survival_of_drafted_blocks_verified_or_not() -> None:
    estimator = SurvivalEstimator(2)
    start = estimator.prior(GREEDY).copy()
    logits = np.tile(np.array([[2.0, 0.0]], np.float32), (64, 1))
    for _ in range(40):
        estimator.observe(make_outcome([0] * 64, [0] * 64, draft_lens=[2] * 64, logits=logits))
    expected = np.cumprod(sigmoid(np.array([2.0, 0.0])))
    np.testing.assert_allclose(estimator.prior(GREEDY), expected, atol=0.01)
    assert start == pytest.approx([0.8, 0.64])
    assert estimator.prior(SAMPLED) == pytest.approx([0.8, 0.64])


def test_the_prior_starts_from_the_calibration_file_where_there_is_one() -> None:
    fitted = ModeCalibration((1.0, 1.0), 300, survival_rate=(0.9, 0.6))
    estimator = SurvivalEstimator(2, Calibration(2, {GREEDY: fitted}))
    assert estimator.prior(GREEDY) == pytest.approx([0.9, 0.6])


def test_raw_logits_are_clipped_before_the_line_as_where_it_was_learned() -> None:
    # A drafter without a confidence head offers the log-odds of its largest probability: up to 87.
    line = ModeCalibration((1.0,), 300, slopes=(0.35,), offsets=(0.5,))
    estimator = SurvivalEstimator(1, Calibration(1, {GREEDY: line}))
    logits, lens = np.array([[12.0], [87.0]], np.float32), np.array([1, 1])
    for modes in ([GREEDY] * 2, [GREEDY, SAMPLED]):
        survivals = estimator.survivals(logits, lens, modes)
        assert survivals[0, 0] == pytest.approx(sigmoid(np.array(0.35 * 12 + 0.5)), rel=1e-6)
    same = estimator.survivals(logits, lens, [GREEDY] * 2)
    assert same[1, 0] == same[0, 0]


def test_plain_steps_and_a_frozen_estimator_learn_nothing() -> None:
    logits = np.full((64, 1), 3.0, np.float32)
    frozen = SurvivalEstimator(1, learns=False)
    frozen.observe(make_outcome([1] * 64, [0] * 64, logits=logits))
    live = SurvivalEstimator(1)
    live.observe(make_outcome([0] * 64, [0] * 64, drafted=False))
    for estimator in (frozen, live):
        assert estimator.drift_report() == {}
        assert estimator.prior(GREEDY) == pytest.approx([0.8])


def test_a_drafter_without_a_confidence_head_gets_usable_confidences() -> None:
    # Feature = logit of the largest draft probability; the truth has another slope and offset.
    estimator = SurvivalEstimator(3)
    Traffic(0.35, 0.4).feed(estimator, 300, 16, 48)
    logits = np.array([[-1.0, -1.0, -1.0], [3.0, 3.0, 3.0]], np.float32)
    survivals = estimator.survivals(logits, np.array([3, 3]), [GREEDY] * 2)
    truth = sigmoid(0.35 * logits[:, 0] + 0.4)
    np.testing.assert_allclose(survivals[:, 0], truth, atol=0.05)
