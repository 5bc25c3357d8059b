# SPDX-License-Identifier: Apache-2.0
"""Selecting vocabulary columns: labels always exact, the rest a weighted sample."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from trtllm_dspark.training.token_store import TokenStore, TokenStoreWriter
from trtllm_dspark.training.vocabulary import ActiveVocabulary, most_frequent_tokens


def test_frequent_tokens_and_labels_are_exact_and_the_sample_comes_last() -> None:
    vocabulary = ActiveVocabulary(100, np.array([3, 5, 7]), 10)
    chosen = vocabulary.select(np.array([90, 5, 91]), np.random.default_rng(0))
    assert chosen.ids[: chosen.num_exact].tolist() == [3, 5, 7, 90, 91]
    assert len(set(chosen.ids.tolist())) == len(chosen.ids) == 15
    assert chosen.offset == math.log(95 / 10)
    assert chosen.columns[chosen.ids].tolist() == list(range(15))
    assert (chosen.columns >= 0).sum() == 15


def test_a_sample_larger_than_the_rest_takes_the_rest_as_it_is() -> None:
    chosen = ActiveVocabulary(6, np.array([1]), 50).select(np.array([2]), np.random.default_rng(0))
    assert sorted(chosen.ids.tolist()) == list(range(6))
    assert chosen.offset == 0.0


def test_the_sampled_normaliser_is_unbiased() -> None:
    weights = np.exp(np.random.default_rng(1).standard_normal(60))
    vocabulary, rng, estimates = (
        ActiveVocabulary(60, np.arange(10), 8),
        np.random.default_rng(2),
        [],
    )
    for _ in range(4000):
        chosen = vocabulary.select(np.array([0]), rng)
        factors = np.where(np.arange(len(chosen.ids)) < chosen.num_exact, 1, np.exp(chosen.offset))
        estimates.append((weights[chosen.ids] * factors).sum())
    spread = np.std(estimates) / len(estimates) ** 0.5
    assert abs(np.mean(estimates) - weights.sum()) < 6 * spread


def test_tokens_are_ranked_by_how_often_they_occur(tmp_path: Path) -> None:
    writer = TokenStoreWriter(tmp_path, vocab_size=9, model_hash="x")
    writer.append([4, 4, 4, 1, 1, 7, 2], 1, 0)
    assert most_frequent_tokens([TokenStore(tmp_path)], 9, 3).tolist() == [4, 1, 2]
