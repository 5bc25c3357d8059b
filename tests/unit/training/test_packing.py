# SPDX-License-Identifier: Apache-2.0
"""Anchors, labels and rows of packed blocks on enumerated cases."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.training.packing import TokenSequence, pack_blocks, sample_anchors


def sequence(prompt: list[int], answer: list[int]) -> TokenSequence:
    return TokenSequence(np.array(prompt + answer), len(prompt))


@pytest.mark.parametrize(
    ("num_answer", "max_anchors", "share", "expected"),
    [
        (0, 5, 1.0, 0),
        (1, 5, 1.0, 0),
        (2, 5, 1.0, 1),
        (9, 5, 1.0, 5),
        (9, 50, 1.0, 8),
        (9, 50, 0.5, 4),
    ],
)
def test_anchors_are_answer_tokens_that_have_a_successor(
    num_answer: int, max_anchors: int, share: float, expected: int
) -> None:
    item = sequence([1, 2, 3], list(range(num_answer)))
    anchors = sample_anchors(item, max_anchors, np.random.default_rng(0), share)
    assert len(anchors) == len(set(anchors.tolist())) == expected
    assert all(3 <= a < 3 + num_answer - 1 for a in anchors)
    assert anchors.tolist() == sorted(anchors.tolist())


def test_every_candidate_is_drawn_equally_often() -> None:
    item, rng = sequence([0], list(range(11))), np.random.default_rng(1)
    counts = np.zeros(12)
    for _ in range(2000):
        counts[sample_anchors(item, 3, rng)] += 1
    # 600 expected, standard deviation 20.5: six of them.
    np.testing.assert_allclose(counts[1:11], 600, atol=125)


def test_the_example_of_the_docstring() -> None:
    item = sequence([10, 11], [12, 13, 14])
    packed = pack_blocks([item], [np.array([2, 3])], 2)
    rows = packed.slot_rows(2)
    assert packed.token_ids[rows].tolist() == [[12, 13], [13, 13]]
    assert packed.label_mask(2).tolist() == [[True, True], [True, False]]
    assert packed.token_ids[rows + 1][packed.label_mask(2)].tolist() == [13, 14, 14]


def test_three_sequences_are_packed_one_after_the_other() -> None:
    items = [sequence([1], [2, 3]), sequence([4, 5], [6]), sequence([7], [8, 9, 10])]
    packed = pack_blocks(items, [np.array([1]), np.zeros(0, np.int64), np.array([1, 2])], 3)
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert packed.cu_seq_lens.tolist() == [0, 3, 6, 10]
    assert packed.cu_blocks.tolist() == [0, 1, 1, 3]
    assert packed.anchor_rows.tolist() == [1, 7, 8]
    assert packed.num_labels.tolist() == [1, 2, 1]
    assert packed.num_blocks == 3
