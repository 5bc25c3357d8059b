# SPDX-License-Identifier: Apache-2.0
"""Lines between raw and calibrated logits: what made the samples is found, order is kept."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.calibration import (
    BlockSamples,
    Calibration,
    ModeCalibration,
    fit_mode,
)
from trtllm_dspark.scheduling.logit_map import MAX_ABS_LOGIT, MIN_SLOPE, LogitMap, fit_line
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftMode


def sample_events(slope: float, offset: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and events of probability σ(slope · z + offset)."""
    rng = np.random.default_rng(0)
    z = rng.normal(0.5, 2.0, count)
    return z, rng.random(count) < 1 / (1 + np.exp(-(slope * z + offset)))


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.5, -1.5), (2.0, 1.0)])
def test_the_line_that_made_the_samples_is_found(slope: float, offset: float) -> None:
    found = fit_line(*sample_events(slope, offset, 40_000))
    np.testing.assert_allclose(found, (slope, offset), atol=0.06)


def test_few_events_move_the_line_little() -> None:
    slope, offset = fit_line(np.array([0.1]), np.array([False]))
    assert abs(slope - 1) < 0.1 and -0.3 < offset < 0
    assert fit_line(np.zeros(0), np.zeros(0, bool)) == (1.0, 0.0)


def test_a_head_that_is_wrong_about_the_order_keeps_it_and_gets_the_level_right() -> None:
    z, events = sample_events(-1.0, 0.5, 20_000)
    slope, offset = fit_line(z, events)
    assert slope == MIN_SLOPE
    assert (1 / (1 + np.exp(-(slope * z + offset)))).mean() == pytest.approx(
        events.mean(), abs=1e-6
    )


@pytest.mark.parametrize("outcome", [True, False])
def test_events_that_never_vary_give_finite_lines(outcome: bool) -> None:
    line = fit_line(np.linspace(-40, 40, 500), np.full(500, outcome))
    assert np.isfinite(line).all()
    assert np.isfinite(LogitMap(*np.float32(line).reshape(2, 1)).apply([[1e9]])).all()


def test_logits_are_clipped_where_certainty_begins() -> None:
    assert LogitMap.neutral(1).apply([[1e6], [-1e6]]).tolist() == [
        [MAX_ABS_LOGIT],
        [-MAX_ABS_LOGIT],
    ]


def test_a_line_mends_a_level_that_a_temperature_cannot() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0.0, 1.5, (20_000, 2)).astype(np.float32)
    accepted = rng.random((20_000, 2)) < 1 / (1 + np.exp(-(logits - 1.5)))
    lens = np.logical_and.accumulate(accepted, axis=1).sum(axis=1).astype(np.int32)
    fitted = fit_mode(BlockSamples(logits, np.full(20_000, 2, np.int32), lens))
    assert max(fitted.ece_after) < 0.015 < 0.1 < fitted.ece_temperatures[0]


def test_the_server_applies_the_lines_where_they_were_fitted() -> None:
    fitted = ModeCalibration((5.0,), 300, slopes=(2.0,), offsets=(-1.0,))
    estimator = SurvivalEstimator(1, Calibration(1, {DraftMode.GREEDY_TARGET: fitted}))
    survival = estimator.survivals(
        np.array([[0.75]], np.float32), np.array([1], np.int32), [DraftMode.GREEDY_TARGET]
    )
    assert survival[0, 0] == pytest.approx(1 / (1 + np.exp(-0.5)))


@pytest.mark.parametrize(
    "lines",
    [
        {"slopes": (1.0,)},
        {"slopes": (1.0,), "offsets": (0.0,)},
        {"slopes": (1.0, -1.0), "offsets": (0.0, 0.0)},
    ],
)
def test_lines_of_the_wrong_length_or_sign_are_refused(lines: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match="slopes"):
        ModeCalibration((1.0, 1.0), 300, **lines)  # type: ignore[arg-type]
