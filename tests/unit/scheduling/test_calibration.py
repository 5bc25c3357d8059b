# SPDX-License-Identifier: Apache-2.0
"""Sequential temperature scaling, its metrics, its censoring rules and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.calibration import (
    BlockSamples,
    Calibration,
    ModeCalibration,
    cumulative_survivals,
    fit_mode,
)
from trtllm_dspark.scheduling.reliability import (
    brier_score,
    expected_calibration_error,
    reliability_bins,
    roc_auc,
)
from trtllm_dspark.types import DraftMode

TRUE_TEMPERATURES = np.array([2.0, 0.5, 1.25])


def sample_blocks(count: int, seed: int = 0, verify_len: int | None = None) -> BlockSamples:
    """Blocks whose conditional acceptance at k is σ(z_k / T_k) with the true temperatures."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (count, 3)).astype(np.float32)
    accepted = rng.random((count, 3)) < 1.0 / (1.0 + np.exp(-logits / TRUE_TEMPERATURES))
    lens = np.logical_and.accumulate(accepted, axis=1).sum(axis=1)
    verify = np.full(count, 3 if verify_len is None else verify_len)
    return BlockSamples(logits, verify.astype(np.int32), np.minimum(lens, verify).astype(np.int32))


def test_the_fit_recovers_the_temperatures_that_made_the_samples() -> None:
    fitted = fit_mode(sample_blocks(20_000), dataset="toy")
    np.testing.assert_allclose(fitted.temperatures, TRUE_TEMPERATURES, rtol=0.25)
    assert fitted.num_samples == 20_000 and fitted.dataset == "toy"


def test_the_fit_lowers_the_calibration_error_at_every_position() -> None:
    fitted = fit_mode(sample_blocks(20_000))
    assert all(a <= b for a, b in zip(fitted.ece_after, fitted.ece_before, strict=True))
    assert max(fitted.ece_after) < 0.02 < fitted.ece_before[0]
    assert all(a <= b for a, b in zip(fitted.brier_after, fitted.brier_before, strict=True))


def test_earlier_positions_are_frozen_while_a_later_one_is_fitted() -> None:
    samples = sample_blocks(5_000)
    cut = BlockSamples(
        samples.logits[:, :2], samples.verify_lens - 1, np.minimum(samples.accepted_lens, 2)
    )
    assert fit_mode(samples).temperatures[:2] == fit_mode(cut).temperatures


def test_a_calibrated_head_is_left_close_to_temperature_one() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0.5, 1.5, (20_000, 1)).astype(np.float32)
    accepted = (rng.random(20_000) < 1 / (1 + np.exp(-logits[:, 0]))).astype(np.int32)
    fitted = fit_mode(BlockSamples(logits, np.ones(20_000, np.int32), accepted))
    assert fitted.temperatures[0] == pytest.approx(1.0, rel=0.1)


def test_ties_of_the_grid_go_to_the_temperature_nearest_to_one() -> None:
    logits = np.zeros((400, 1), np.float32)  # σ(0 / T) is ½ whatever T
    accepted = (np.arange(400) % 2).astype(np.int32)
    fitted = fit_mode(BlockSamples(logits, np.ones(400, np.int32), accepted))
    assert fitted.temperatures == (1.0,)


def test_rates_count_the_joint_event_and_the_conditional_one() -> None:
    accepted = np.array([0] * 100 + [1] * 200 + [2] * 100, np.int32)
    blocks = BlockSamples(np.ones((400, 2), np.float32), np.full(400, 2, np.int32), accepted)
    fitted = fit_mode(blocks)
    assert fitted.survival_rate == (0.75, 0.25)
    assert fitted.conditional_rate == pytest.approx((0.75, 1 / 3))


def test_blocks_not_verified_far_enough_say_nothing_even_when_rejected_earlier() -> None:
    blocks = BlockSamples(
        np.zeros((3, 2), np.float32), np.array([2, 2, 1], np.int32), np.array([2, 0, 0], np.int32)
    )
    assert blocks.observed(1).tolist() == [True, True, True]
    assert blocks.observed(2).tolist() == [True, True, False]
    assert blocks.reached(2).tolist() == [True, False, False]


def test_truncated_verification_does_not_bias_the_fit() -> None:
    whole = sample_blocks(30_000, seed=3)
    # Verified only as far as the survival stays above ½: what a policy does.
    survivals = cumulative_survivals(whole.logits, TRUE_TEMPERATURES)
    verify = np.maximum((survivals > 0.3).sum(axis=1), 1).astype(np.int32)
    truncated = BlockSamples(whole.logits, verify, np.minimum(whole.accepted_lens, verify))
    fitted = fit_mode(truncated)
    np.testing.assert_allclose(fitted.temperatures[:2], TRUE_TEMPERATURES[:2], rtol=0.3)


def test_too_few_samples_are_refused_with_the_counts() -> None:
    with pytest.raises(ConfigError, match=r"too few samples .* \[199, 199, 199\], at least 200"):
        fit_mode(sample_blocks(199))
    with pytest.raises(ConfigError, match=r"\[300, 0, 0\]"):
        fit_mode(sample_blocks(300, verify_len=1))


def test_impossible_samples_and_nan_are_refused() -> None:
    with pytest.raises(ConfigError, match="accepted_lens"):
        BlockSamples(np.zeros((1, 2), np.float32), np.array([1]), np.array([2]))
    broken = sample_blocks(300)
    broken.logits[5, 1] = np.nan
    with pytest.raises(ConfigError, match="NaN"):
        fit_mode(broken)


def test_calibration_error_of_a_worked_example() -> None:
    # Bin 1 holds 0.1 twice (one event), bin 10 holds 0.95 twice (two events).
    predicted, observed = [0.1, 0.1, 0.95, 0.95], [1, 0, 1, 1]
    assert expected_calibration_error(predicted, observed, 10) == pytest.approx(
        0.5 * 0.4 + 0.5 * 0.05
    )
    bins = reliability_bins(predicted, observed, 10)
    assert bins.counts.tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    assert brier_score(predicted, observed) == pytest.approx((0.81 + 0.01 + 0.0025 + 0.0025) / 4)


def test_the_last_bin_holds_certainty_and_empty_input_has_no_error() -> None:
    assert reliability_bins([1.0], [1], 5).counts.tolist() == [0, 0, 0, 0, 1]
    assert np.isnan(expected_calibration_error([], []))
    with pytest.raises(ConfigError, match="must be as many"):
        brier_score([0.5], [1, 0])
    with pytest.raises(ConfigError, match="probabilities"):
        reliability_bins([np.nan], [1])


def test_roc_auc_equals_counting_pairs_with_half_for_ties() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, 60).astype(float)
    events = rng.random(60) < 0.4
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0 for a in scores[events] for b in scores[~events]
    ]
    assert roc_auc(scores, events) == pytest.approx(float(np.mean(pairs)))
    assert np.isnan(roc_auc([0.1, 0.2], [True, True]))


def test_the_file_round_trips_and_writes_unknown_numbers_as_null(tmp_path: Path) -> None:
    fitted = ModeCalibration(
        temperatures=(1.5, 2.0), num_samples=300, roc_auc=(0.8, float("nan")), dataset="d"
    )
    calibration = Calibration(2, {DraftMode.GREEDY_TARGET: fitted}, {"revision": "abc"})
    path = tmp_path / "calibration.json"
    calibration.save(path)
    data = json.loads(path.read_text())
    assert data["modes"]["greedy_target"]["roc_auc"] == [0.8, None]
    again = Calibration.load(path)
    assert again.modes[DraftMode.GREEDY_TARGET].temperatures == (1.5, 2.0)
    assert np.isnan(again.modes[DraftMode.GREEDY_TARGET].roc_auc[1])
    assert again.provenance == {"revision": "abc"}


def test_a_mode_that_was_not_fitted_is_neutral() -> None:
    calibration = Calibration(2, {DraftMode.GREEDY_TARGET: ModeCalibration((3.0, 4.0), 1)})
    known = calibration.logit_map(DraftMode.GREEDY_TARGET)
    assert known.scale.tolist() == pytest.approx([1 / 3, 1 / 4]) and not known.offset.any()
    neutral = calibration.logit_map(DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS)
    assert neutral.scale.tolist() == [1, 1] and not neutral.offset.any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 9}, "format, version"),
        ({"modes": {"greedy": {}}}, "greedy_target"),
        ({"modes": {"greedy_target": {"temperatures": [1.0], "num_samples": 1}}}, "γ = 2"),
        ({"modes": {"greedy_target": {"temperatures": [1, 0], "num_samples": 1}}}, "positive"),
        ({"modes": {"greedy_target": {"temps": [1, 1]}}}, "unknown keys"),
        ({"modes": {"greedy_target": {"num_samples": 1}}}, "'temperatures'.* are missing"),
        ({"modes": {"greedy_target": {"temperatures": 1, "num_samples": 1}}}, "wrong type"),
        ({"num_drafts": None}, "num_drafts = None"),
    ],
)
def test_wrong_files_are_refused_by_key(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Calibration.from_json_dict({**Calibration(2).to_json_dict(), **change})
