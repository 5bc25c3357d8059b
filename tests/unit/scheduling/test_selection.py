# SPDX-License-Identifier: Apache-2.0
"""Selection of drafts: top-K with ties by (position, request), prefix-closed, NaN refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.selection import fit_caps, select_drafts


def survivals_of(confidences: list[list[float]]) -> np.ndarray:
    return np.cumprod(np.array(confidences, np.float32), axis=1)


def select_by_sorting(survivals: np.ndarray, capacity: int, caps: list[int]) -> list[int]:
    slots = [
        (-survivals[r, k], k, r)
        for r, k in itertools.product(range(survivals.shape[0]), range(survivals.shape[1]))
        if k < caps[r] and survivals[r, k] > 0
    ]
    lens = [0] * survivals.shape[0]
    for _, k, r in sorted(slots)[: max(capacity, 0)]:
        lens[r] = max(lens[r], k + 1)
    return lens


def test_the_three_request_example_of_the_docstring() -> None:
    survivals = np.array([[0.9, 0.5], [0.5, 0.4], [0.2, 0.0]], np.float32)
    assert select_drafts(survivals, 3, np.array([2, 2, 1])).tolist() == [2, 1, 0]


def test_ties_go_to_the_shallower_position_then_to_the_earlier_request() -> None:
    survivals = np.full((3, 2), 0.5, np.float32)
    caps = np.array([2, 2, 2])
    expected = {0: [0, 0, 0], 1: [1, 0, 0], 2: [1, 1, 0], 3: [1, 1, 1], 4: [2, 1, 1], 6: [2, 2, 2]}
    for capacity, lens in expected.items():
        assert select_drafts(survivals, capacity, caps).tolist() == lens


def test_slots_beyond_a_cap_and_slots_not_drafted_are_never_chosen() -> None:
    survivals = np.array([[0.9, 0.8, 0.7], [0.6, 0.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    assert select_drafts(survivals, 99, np.array([1, 3, 3])).tolist() == [1, 1, 0]
    assert select_drafts(survivals, 2, np.array([0, 3, 3])).tolist() == [0, 1, 0]


def test_an_empty_batch_and_an_empty_block_select_nothing() -> None:
    assert select_drafts(np.zeros((0, 3), np.float32), 4, np.zeros(0, int)).tolist() == []
    assert select_drafts(np.zeros((2, 0), np.float32), 4, np.zeros(2, int)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([[float("nan"), 0.1]], "probabilities"),
        ([[1.5, 0.1]], "probabilities"),
        ([[-0.1, -0.2]], "probabilities"),
        ([[0.5, 0.6]], "increase along the draft positions"),
    ],
)
def test_nan_and_impossible_survivals_are_refused(values: list[list[float]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        select_drafts(np.array(values, np.float32), 1, np.array([2]))


CONFIDENCES = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(
            st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.0, 0.7]), min_size=width, max_size=width
        ),
        min_size=1,
        max_size=6,
    )
)


@settings(max_examples=200)
@given(CONFIDENCES, st.integers(-1, 32), st.data())
def test_selection_equals_sorting_with_ties_zeros_and_ones(
    confidences: list[list[float]], capacity: int, data: st.DataObject
) -> None:
    survivals = survivals_of(confidences)
    width = survivals.shape[1]
    caps = data.draw(
        st.lists(st.integers(0, width), min_size=len(confidences), max_size=len(confidences))
    )
    lens = select_drafts(survivals, capacity, np.array(caps)).tolist()
    assert lens == select_by_sorting(survivals, capacity, caps)
    # prefix-closed: the number of chosen slots is what the lengths say
    admissible = sum(int((survivals[r, : caps[r]] > 0).sum()) for r in range(len(confidences)))
    assert sum(lens) == min(max(capacity, 0), admissible)


@settings(max_examples=100)
@given(CONFIDENCES, st.integers(0, 12))
def test_more_capacity_never_takes_a_draft_away(
    confidences: list[list[float]], capacity: int
) -> None:
    survivals = survivals_of(confidences)
    caps = np.full(len(confidences), survivals.shape[1])
    fewer, more = (select_drafts(survivals, capacity + extra, caps) for extra in (0, 1))
    assert np.all(fewer <= more)


def test_fitting_caps_cuts_the_deepest_positions_of_the_later_requests_first() -> None:
    caps = np.array([3, 1, 2])
    expected = {6: [3, 1, 2], 5: [2, 1, 2], 4: [2, 1, 1], 3: [1, 1, 1], 1: [1, 0, 0], 0: [0, 0, 0]}
    for capacity, lens in expected.items():
        assert fit_caps(caps, capacity).tolist() == lens
    assert fit_caps(caps, -1).tolist() == [0, 0, 0]
