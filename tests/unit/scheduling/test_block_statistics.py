# SPDX-License-Identifier: Apache-2.0
"""What blocks add up to, on hand-made tables and against a count block by block."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.scheduling.block_statistics import count_blocks, judge_forecast
from trtllm_dspark.scheduling.calibration import BlockSamples


def samples(verified: list[int], accepted: list[int], num_drafts: int = 3) -> BlockSamples:
    logits = np.zeros((len(verified), num_drafts), np.float32)
    return BlockSamples(logits, np.array(verified, np.int32), np.array(accepted, np.int32))


def test_rates_count_only_what_was_observed() -> None:
    found = count_blocks(samples([3, 3, 2, 1], [3, 1, 2, 0]), np.zeros(4, np.int64), 1)
    assert found.acceptance_length[0] == pytest.approx((4 + 2) / 2)  # the two full blocks
    assert found.survival[0].tolist() == [pytest.approx(v) for v in (3 / 4, 2 / 3, 1 / 2)]
    assert found.conditional[0].tolist() == [pytest.approx(v) for v in (3 / 4, 2 / 3, 1.0)]


def test_full_blocks_commit_one_token_more_than_their_survivals_add_up_to() -> None:
    rng = np.random.default_rng(0)
    blocks = samples([3] * 50, rng.integers(0, 4, 50).tolist())
    found = count_blocks(blocks, np.zeros(50, np.int64), 1)
    assert found.acceptance_length[0] == pytest.approx(1.0 + found.survival[0].sum())


def test_groups_are_counted_apart_and_an_empty_one_is_nan() -> None:
    found = count_blocks(samples([3, 3], [3, 0]), np.array([0, 2]), 3)
    assert found.acceptance_length.tolist() == [4.0, pytest.approx(np.nan, nan_ok=True), 1.0]
    assert np.isnan(found.conditional[2, 1:]).all()


def test_resampling_with_weights_equals_repeating_the_groups() -> None:
    rng = np.random.default_rng(1)
    accepted = rng.integers(0, 4, 40)
    groups = np.sort(rng.integers(0, 5, 40))
    counts = count_blocks(samples([3] * 40, accepted.tolist()), groups, 5)
    weights = np.array([2.0, 0.0, 1.0, 1.0, 1.0])
    rows = np.concatenate([np.flatnonzero(groups == g) for g in (0, 0, 2, 3, 4)])
    repeated = count_blocks(
        samples([3] * len(rows), accepted[rows].tolist()), np.zeros(len(rows), np.int64), 1
    )
    drawn = counts.resample(weights[None, :])
    assert drawn.acceptance_length[0] == pytest.approx(repeated.acceptance_length[0])
    assert drawn.conditional[0].tolist() == pytest.approx(repeated.conditional[0].tolist())


def test_a_forecast_of_the_base_rate_scores_its_brier_and_no_auc() -> None:
    events = np.array([True, False, False, True, False])
    quality = judge_forecast(np.full(5, 0.4), events)
    assert quality.brier == pytest.approx(quality.base_brier) == pytest.approx(0.24)
    assert quality.ece == pytest.approx(0.0)
    assert quality.roc_auc == 0.5
    assert np.isnan(judge_forecast(np.zeros(0), np.zeros(0, bool)).ece)
