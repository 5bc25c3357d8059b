# SPDX-License-Identifier: Apache-2.0
"""Which tokens the vocabulary-wide losses run over: all of them, or an active part plus a sample.

An optional approximation, off by default. The active part is the most frequent tokens of the data
and every label of the batch, so labels are always exact; the rest is represented by a uniform
sample whose members count log(1/π) more, which keeps both distributions' normalisers unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.training.token_store import TokenStore

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """The columns of one step."""

    ids: Int64Array
    """[A] distinct token ids, the sampled ones last."""
    num_exact: int
    """Columns that stand for themselves."""
    offset: float
    """Added to the logits of sampled columns: log(1/π)."""
    columns: Int64Array
    """[V] column of each token, −1 where it is not selected."""


class ActiveVocabulary:
    """Chooses columns; `frequent` [F] are always exact."""

    def __init__(self, vocab_size: int, frequent: Int64Array, num_sampled: int) -> None:
        self.vocab_size, self.num_sampled = vocab_size, num_sampled
        self._is_frequent = np.zeros(vocab_size, dtype=np.bool_)
        self._is_frequent[frequent] = True

    def select(self, labels: Int64Array, rng: np.random.Generator) -> Selection:
        """Columns for a step with these labels."""
        is_exact = self._is_frequent.copy()
        is_exact[labels] = True
        exact, rest = np.flatnonzero(is_exact), np.flatnonzero(~is_exact)
        num_sampled = min(self.num_sampled, len(rest))
        sampled = rng.choice(rest, size=num_sampled, replace=False)
        ids = np.concatenate((exact, sampled))
        columns = np.full(self.vocab_size, -1, dtype=np.int64)
        columns[ids] = np.arange(len(ids))
        offset = math.log(len(rest) / num_sampled) if num_sampled else 0.0
        return Selection(ids, len(exact), offset, columns)


def most_frequent_tokens(stores: Sequence[TokenStore], vocab_size: int, num: int) -> Int64Array:
    """The `num` tokens seen most often (ties: the lower id first)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for store in stores:
        counts += np.bincount(store.tokens, minlength=vocab_size)[:vocab_size]
    return np.argsort(-counts, kind="stable")[:num]
