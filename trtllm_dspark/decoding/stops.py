# SPDX-License-Identifier: Apache-2.0
"""Where a request's output ends: end tokens, stop words as token sequences, and how many tokens
must be held back because a stop word may still be completing. String stops live in `serving`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark.types import FinishReason, IntArray


def find_end(
    output_ids: IntArray,
    num_old: int,
    end_ids: Sequence[int],
    stop_sequences: Sequence[Sequence[int]],
) -> tuple[int, FinishReason] | None:
    """First end in output_ids [n] that lies after `num_old` tokens; the cut excludes the match.

    Returns (tokens to keep, reason) or None. An end token wins over a stop word that ends later.
    Example: output [5, 6, 7, 2], num_old 1, end_ids [2], stop [[6, 7]] → (1, STOP).
    """
    for end in range(num_old + 1, len(output_ids) + 1):
        if int(output_ids[end - 1]) in end_ids:
            return end - 1, FinishReason.EOS
        for stop in stop_sequences:
            start = end - len(stop)
            if start >= 0 and np.array_equal(output_ids[start:end], np.asarray(stop)):
                return start, FinishReason.STOP
    return None


def held_back(output_ids: IntArray, stop_sequences: Sequence[Sequence[int]]) -> int:
    """Tokens at the end of output_ids that may turn out to begin a stop word."""
    longest = 0
    for stop in stop_sequences:
        for size in range(min(len(stop) - 1, len(output_ids)), longest, -1):
            if np.array_equal(output_ids[-size:], np.asarray(stop[:size])):
                longest = size
                break
    return longest
