# SPDX-License-Identifier: Apache-2.0
"""Ends of an output: which comes first, and what is held back."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.decoding.stops import find_end, held_back
from trtllm_dspark.types import FinishReason


def ids(*tokens):
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    "output,num_old,end_ids,stops,expected",
    [
        ((), 0, (2,), (), None),
        ((5, 6, 7, 2), 1, (2,), ((6, 7),), (1, FinishReason.STOP)),
        ((5, 2, 6, 7), 0, (2,), ((6, 7),), (1, FinishReason.EOS)),
        ((5, 6, 7), 3, (2,), ((6, 7),), None),
        ((5, 6, 7), 2, (2,), ((6, 7),), (1, FinishReason.STOP)),
        ((5, 6, 7), 0, (), ((5, 6, 7, 8),), None),
        ((2,), 0, (2, 3), (), (0, FinishReason.EOS)),
        ((6, 6, 7), 0, (), ((6, 7),), (1, FinishReason.STOP)),
        ((1, 6, 7, 8), 0, (), ((6, 7, 8), (7,)), (2, FinishReason.STOP)),
    ],
)
def test_the_first_completed_end_cuts_before_its_match(output, num_old, end_ids, stops, expected):
    assert find_end(ids(*output), num_old, end_ids, stops) == expected


@pytest.mark.parametrize(
    "output,stops,expected",
    [
        ((), ((1, 2),), 0),
        ((5, 1), ((1, 2),), 1),
        ((5, 1, 2), ((1, 2, 3), (2, 9, 9)), 2),
        ((5, 6), ((1, 2),), 0),
        ((1,), ((1,),), 0),
        ((1, 1), ((1, 1, 1, 1),), 2),
    ],
)
def test_the_longest_beginning_of_a_stop_word_is_held_back(output, stops, expected):
    assert held_back(ids(*output), stops) == expected
