# SPDX-License-Identifier: Apache-2.0
"""Epochs over growing stores, and going on at the very next sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.training.dataset import SequenceStream, hash_stores, load_sequence
from trtllm_dspark.training.token_store import TokenStore, TokenStoreWriter


def make_store(path: Path, first: int, num: int) -> TokenStore:
    writer = TokenStoreWriter(path, vocab_size=1000, model_hash="x")
    for number in range(first, first + num):
        writer.append([number, 500, 501, 502], 1, number)
    return TokenStore(path)


def take(stream: SequenceStream, num: int) -> list[int]:
    return [int(next(stream).token_ids[0]) for _ in range(num)]


def test_an_epoch_visits_every_sequence_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    stores = [make_store(tmp_path / "a", 0, 6), make_store(tmp_path / "b", 100, 5)]
    stream = SequenceStream(stores, seed=3, max_len=10)
    first, second = take(stream, 11), take(stream, 11)
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104]
    assert first != second


def test_a_restored_stream_goes_on_with_the_next_sequence_even_if_data_grew(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", 0, 8)
    stream = SequenceStream([store], seed=3, max_len=10)
    take(stream, 11)
    state = stream.state()
    expected = take(stream, 5)
    make_store(tmp_path / "a", 8, 4)
    again = SequenceStream([TokenStore(tmp_path / "a")], seed=3, max_len=10)
    again.restore(state)
    assert take(again, 5) == expected
    assert sorted(take(again, 12)) == list(range(12))


def test_missing_data_is_refused_at_resume(tmp_path: Path) -> None:
    state = SequenceStream([make_store(tmp_path / "a", 0, 8)], 0, 10).state()
    other = SequenceStream([make_store(tmp_path / "b", 0, 7)], 0, 10)
    with pytest.raises(ConfigError, match=r"\[8\] sequences per data directory, found \[7\]"):
        other.restore(state)


def test_answers_too_short_to_train_on_are_skipped(tmp_path: Path) -> None:
    writer = TokenStoreWriter(tmp_path, vocab_size=1000, model_hash="x")
    writer.append([1, 2, 3], 2, 0)
    writer.append([4, 5, 6], 1, 1)
    assert take(SequenceStream([TokenStore(tmp_path)], 0, 10), 3) == [4, 4, 4]
    with pytest.raises(ConfigError, match="generate data first"):
        SequenceStream([TokenStore(tmp_path)], 0, 2)


def test_long_sequences_are_cut(tmp_path: Path) -> None:
    store = make_store(tmp_path, 0, 1)
    assert load_sequence(store, 0, 3).token_ids.tolist() == [0, 500, 501]


def test_the_data_hash_names_contents(tmp_path: Path) -> None:
    one = hash_stores([make_store(tmp_path / "a", 0, 3)])
    assert one == hash_stores([make_store(tmp_path / "b", 0, 3)])
    assert one != hash_stores([make_store(tmp_path / "c", 1, 3)])
