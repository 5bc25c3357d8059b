# SPDX-License-Identifier: Apache-2.0
"""The measurement plan is complete and interleaved; samples become medians."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trtllm_dspark.config import BucketConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.buckets import build_ladder
from trtllm_dspark.scheduling.measurement import (
    Cell,
    Sample,
    StepKind,
    num_rounds,
    plan_cells,
    plan_round,
    table_from_samples,
)

CONFIG = BucketConfig(max_num_requests=4, max_num_tokens=64, ratios=(0.5, 1.0))
RUNGS = build_ladder(CONFIG, 3)


def true_ms(cell: Cell) -> float:
    if cell.kind is StepKind.DRAFTED:
        return 1.0 + 0.5 * cell.num_requests + 0.1 * cell.rung + cell.context_len / 1000
    return 0.5 + 0.25 * cell.num_requests + (0.01 if cell.kind is StepKind.NO_DRAFT else 0.0)


def test_the_plan_times_every_decode_rung_of_every_bucket_and_both_plain_rows() -> None:
    cells = plan_cells(CONFIG, RUNGS, 3, (128,))
    assert RUNGS == (1, 2, 3, 4, 5, 8, 10, 16, 24, 32, 48, 64)
    drafted = {
        r: [c.rung for c in cells if c.kind is StepKind.DRAFTED and c.num_requests == r]
        for r in (1, 2, 4)
    }
    assert drafted == {1: [1, 2, 3, 4], 2: [2, 3, 4, 5, 8], 4: list(RUNGS[3:])}
    for kind in (StepKind.NO_DRAFT, StepKind.AUTOREGRESSIVE):
        assert [(c.num_requests, c.rung) for c in cells if c.kind is kind] == [
            (1, 1),
            (2, 2),
            (4, 4),
        ]
    assert len(set(cells)) == len(cells)


def test_no_cell_verifies_more_drafts_than_there_are_or_than_fit_the_rung() -> None:
    for cell in plan_cells(CONFIG, RUNGS, 3, (128,)):
        assert 0 <= cell.num_verified <= 3 * cell.num_requests
        assert cell.num_requests + cell.num_verified <= cell.rung


def test_without_a_drafter_only_the_autoregressive_row_is_timed() -> None:
    cells = plan_cells(CONFIG, build_ladder(CONFIG, 0), 0, (128,))
    assert {c.kind for c in cells} == {StepKind.AUTOREGRESSIVE}


def test_every_round_visits_drafted_cells_once_and_plain_ones_thrice_in_its_own_order() -> None:
    cells = plan_cells(CONFIG, RUNGS, 3, (128, 512))
    rounds = [plan_round(cells, i) for i in range(4)]
    visits = {cell: 1 if cell.kind is StepKind.DRAFTED else 3 for cell in cells}
    assert all(Counter(r) == visits for r in rounds)
    assert len({tuple(r) for r in rounds}) == 4
    assert plan_round(cells, 2) == rounds[2]


def test_the_number_of_rounds_fits_the_budget_within_bounds() -> None:
    assert num_rounds(1000.0, 10.0) == 10
    assert num_rounds(60_000.0, 30.0) == 3
    assert num_rounds(1.0, 30.0) == 25
    with pytest.raises(ConfigError, match="round_ms"):
        num_rounds(0.0, 30.0)


def test_the_table_holds_medians_and_forgives_outliers_and_averages_contexts() -> None:
    cells = plan_cells(CONFIG, RUNGS, 3, (0, 1000))
    samples = []
    for index in range(5):
        for cell in plan_round(cells, index):
            slow = 100.0 if index == 3 else 0.0  # one round hit by something else
            samples.append(Sample(cell, true_ms(cell) + slow, draft_ms=0.2 * cell.num_requests))
    table = table_from_samples(samples, CONFIG, RUNGS, num_drafts=3, fingerprint="f")
    assert table.step_cost(2, 5) == pytest.approx(1.0 + 1.0 + 0.5 + 0.5)
    assert table.plain_cost(4) == pytest.approx(1.51)
    np.testing.assert_allclose(table.autoregressive_ms, [0.75, 1.0, 1.5])
    np.testing.assert_allclose(table.draft_ms, [0.2, 0.4, 0.8])
    assert table.context_lens == (0, 1000)
    assert np.isnan(table.step_ms[0, -1])
    assert table.step_cost(1, 64) == pytest.approx(1.0 + 0.5 + 6.4 + 0.5)  # completed


def test_a_table_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        table_from_samples([], CONFIG, RUNGS, num_drafts=3, fingerprint="f")
