# SPDX-License-Identifier: Apache-2.0
"""Cached states are the target's own, survive a restart and refuse another model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.training.toy import make_target
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.training.packing import PackedBlocks, TokenSequence, pack_blocks
from trtllm_dspark.training.state_cache import Cached, OnTheFly, StateFile, bytes_per_token

TAPS = (-1, 0)


def packed_of(*keys: tuple[int, int] | None, data: int = 0, more: int = 0) -> PackedBlocks:
    """Sequences whose tokens follow from their keys and `data`, `more` tokens longer."""
    items = []
    for key in keys:
        seed = (9, 9) if key is None else key
        rng = np.random.default_rng((*seed, data))
        tokens = rng.integers(0, 64, 4 + seed[1] + more)
        items.append(TokenSequence(tokens, 1, key))
    return pack_blocks(items, [np.array([1])] * len(items), 2)


def test_any_mixture_of_cached_and_new_sequences_gives_the_targets_states(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    cached = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    for batch in (
        packed_of((0, 1), (0, 2)),
        packed_of((0, 2), (1, 1), (0, 1)),
        packed_of(None, (1, 1)),
    ):
        for found, expected in zip(
            cached.states(batch), OnTheFly(target).states(batch), strict=True
        ):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert cached.file.num_bytes == (5 + 6 + 5) * bytes_per_token(target)


def test_a_second_run_reads_what_the_first_one_kept(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    batch = packed_of((0, 3), (0, 1))
    first = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30).states(batch)
    # A row that was cut off in mid-write is dropped.
    with (tmp_path / "states.bin").open("ab") as file:
        file.write(b"abc")
    reopened = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    target.run = None  # type: ignore[method-assign, assignment]
    for found, expected in zip(reopened.states(batch), first, strict=True):
        assert torch.equal(found, expected)


def test_a_full_cache_goes_on_by_computing(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    cached = Cached(target, StateFile(tmp_path, target, "toy"), 1)
    for batch in (packed_of((0, 1)), packed_of((0, 2)), packed_of((0, 2))):
        expected = OnTheFly(target).states(batch)
        torch.testing.assert_close(cached.states(batch)[0], expected[0])
    assert cached.file.num_bytes == 5 * bytes_per_token(target)


def test_states_of_data_that_has_changed_at_its_place_are_never_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = DenseTarget(make_target(), TAPS)
    old = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    old.states(packed_of((0, 1), (0, 2), (0, 3)))
    new = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    batch = packed_of((0, 1), (0, 2), data=1)
    expected = OnTheFly(target).states(batch)
    with caplog.at_level(logging.WARNING):
        first = new.states(batch)
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-6)
    assert [record.message.count("other tokens") for record in caplog.records] == [1]
    # What was computed again replaces the old states, also for the next run.
    again = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    kept = OnTheFly(target).states(packed_of((0, 3)))
    target.run = None  # type: ignore[method-assign, assignment]
    for cached in (new, again):
        assert all(map(torch.equal, cached.states(batch), first))
    torch.testing.assert_close(again.states(packed_of((0, 3))), kept, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("more", [-1, 2])
def test_a_sequence_cut_at_another_length_is_computed_again(tmp_path: Path, more: int) -> None:
    target = DenseTarget(make_target(), TAPS)
    cached = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    cached.states(packed_of((0, 3)))
    batch = packed_of((0, 3), more=more)
    expected = OnTheFly(target).states(batch)
    torch.testing.assert_close(cached.states(batch), expected, atol=1e-6, rtol=1e-6)


def test_an_index_of_states_that_are_not_all_there_is_not_believed(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    batch = packed_of((0, 3), (0, 1))
    Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30).states(batch)
    size = (tmp_path / "states.bin").stat().st_size
    with (tmp_path / "states.bin").open("r+b") as file:
        file.truncate(size - 1)
    reopened = Cached(target, StateFile(tmp_path, target, "toy"), 1 << 30)
    assert reopened.file.num_bytes == 7 * bytes_per_token(target)
    expected = OnTheFly(target).states(batch)
    torch.testing.assert_close(reopened.states(batch), expected, atol=1e-6, rtol=1e-6)
    assert (tmp_path / "states.bin").stat().st_size == size


def test_a_cache_whose_index_knows_no_tokens_is_refused(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    StateFile(tmp_path, target, "toy")
    meta = json.loads((tmp_path / "meta.json").read_text())
    del meta["format"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"form 1, this version reads form 2.*remove it"):
        StateFile(tmp_path, target, "toy")


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    StateFile(tmp_path, target, "toy")
    with pytest.raises(ConfigError, match="another model"):
        StateFile(tmp_path, target, "other")
