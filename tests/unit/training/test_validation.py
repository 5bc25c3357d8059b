# SPDX-License-Identifier: Apache-2.0
"""The greedy walk and what is made of it, on hand-made tables."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.training.validation import WalkTable, summarize_walk, walk_anchors


@pytest.mark.parametrize(
    ("accepted", "labels", "visited"),
    [
        ([0, 0, 0], [2, 2, 1], [0, 1, 2]),
        ([2, 0, 0, 1, 0], [2, 2, 2, 2, 1], [0, 3]),
        ([1, 0, 2, 0, 1], [2, 2, 2, 2, 1], [0, 2]),
        ([0, 1], [2, 1], [0]),
        ([], [], []),
    ],
)
def test_the_walk_jumps_over_what_a_step_commits(
    accepted: list[int], labels: list[int], visited: list[int]
) -> None:
    assert walk_anchors(np.array(accepted), np.array(labels), 2) == visited


def test_survival_is_joint_and_conditional_is_given_the_slots_before() -> None:
    table = WalkTable(
        accepted=np.array([0, 1, 2, 2]),
        num_labels=np.array([2, 2, 2, 2]),
        confidences=np.array([[0.5, 0.9], [0.7, 0.1], [0.8, 0.8], [0.9, 0.9]]),
        sequence_ids=np.zeros(4, np.int64),
    )
    summary = summarize_walk(table, 2)
    assert summary["acceptance_length"] == 2.25
    assert summary["survival"] == [0.75, 0.5]
    assert summary["conditional"] == [0.75, pytest.approx(2 / 3)]
    assert summary["roc_auc"] == [1.0, 1.0]


def test_slots_without_a_label_are_not_judged() -> None:
    table = WalkTable(np.array([1, 0]), np.array([2, 1]), np.full((2, 2), 0.5), np.zeros(2, int))
    summary = summarize_walk(table, 2)
    assert summary["survival"] == [0.5, 0.0]
    assert summary["acceptance_length"] == 2.0  # of the one block with γ tokens to come
