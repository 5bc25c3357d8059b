# SPDX-License-Identifier: Apache-2.0
"""Old survivals: the barrier of two steps, ages, new and returning requests."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.scheduling.builders import make_view
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.history import SurvivalHistory

PRIOR = 0.5


def play(
    history: SurvivalHistory, keys: list[int], value: float, num_samples: int = 1
) -> list[list[float]]:
    """One step: recall first, then record `value` for everybody; returns the recalled column."""
    view = make_view([1] * len(keys), rungs=(8,), num_drafts=1, keys=keys)
    history.begin_step()
    prior = np.full((len(keys), 1), PRIOR, np.float32)
    old = history.recall(view, lambda _: prior, num_samples)
    history.record(view, np.ones(len(keys), bool), np.full((len(keys), 1), value, np.float32))
    return np.round(old[:, :, 0].astype(float), 4).tolist()


def test_a_step_sees_survivals_that_are_two_steps_old_and_no_younger_ones() -> None:
    history = SurvivalHistory(1, staleness=2)
    seen = [play(history, [7], v)[0][0] for v in (0.1, 0.2, 0.3, 0.4)]
    assert seen == [PRIOR, PRIOR, 0.1, 0.2]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_barrier_is_as_old_as_asked(staleness: int) -> None:
    history = SurvivalHistory(2, staleness=staleness)
    seen = [play(history, [7], v, 2)[0][0] for v in (0.1, 0.2, 0.3, 0.4, 0.45)]
    assert seen == ([PRIOR] * staleness + [0.1, 0.2, 0.3, 0.4])[:5]


def test_several_samples_come_newest_first_and_missing_ones_lean_on_the_prior() -> None:
    history = SurvivalHistory(3, staleness=2)
    for value in (0.1, 0.2, 0.3):
        play(history, [7], value)
    assert play(history, [7], 0.4, 3) == [[0.2], [0.1], [0.35]]  # (0.2 + prior) / 2
    assert play(history, [7], 0.4, 3) == [[0.3], [0.2], [0.1]]


def test_a_new_request_gets_the_prior_beside_old_ones_in_any_order() -> None:
    history = SurvivalHistory(1, staleness=1)
    play(history, [1, 2], 0.1)
    assert play(history, [3, 2, 1], 0.2) == [[PRIOR, 0.1, 0.1]]
    assert play(history, [1, 3], 0.3) == [[0.2, 0.2]]


def test_the_newest_survivals_of_an_undrafted_request_stay_and_its_older_ones_expire() -> None:
    history = SurvivalHistory(2, staleness=1, max_age=3)
    view = make_view([1, 1], rungs=(8,), num_drafts=1)
    prior = np.full((2, 1), PRIOR, np.float32)
    seen = []
    for step in range(7):
        history.begin_step()
        seen.append(
            np.round(history.recall(view, lambda _: prior, 2)[:, 0, 0].astype(float), 4).tolist()
        )
        only_second = np.array([step < 2, True])
        history.record(view, only_second, np.full((2, 1), 0.1 + 0.1 * step, np.float32))
    kept, expired = [0.2, 0.1], [0.2, 0.35]
    assert seen == [[PRIOR, PRIOR], [0.1, 0.3], kept, kept, expired, expired, expired]


def test_a_drafter_that_proposed_nothing_counts_as_survivals_of_zero() -> None:
    history = SurvivalHistory(1, staleness=1)
    view = make_view([1], rungs=(8,), num_drafts=1, keys=[7])
    mask, prior = np.array([True]), np.full((1, 1), PRIOR, np.float32)
    history.begin_step()
    history.record_decision(view, mask)
    history.settle((7,))  # no record came in between
    history.begin_step()
    assert history.recall(view, lambda _: prior)[0, 0, 0] == 0.0
    history.record_decision(view, mask)
    history.record(view, mask, np.full((1, 1), 0.25, np.float32))
    history.settle((7,))
    history.begin_step()
    assert history.recall(view, lambda _: prior)[0, 0, 0] == 0.25


def test_memory_does_not_grow_with_the_number_of_requests_ever_seen() -> None:
    history = SurvivalHistory(1, staleness=1, max_age=4)
    for step in range(500):
        play(history, [step, step + 1, step + 2], 0.3)
    assert len(history._counts) <= 32
    assert play(history, [501, 502], 0.1) == [[0.3, PRIOR]]


def test_ranges_are_checked() -> None:
    for arguments in ((0, 2, 8), (1, 0, 8), (1, 2, 2)):
        with pytest.raises(ConfigError):
            SurvivalHistory(*arguments)
