# SPDX-License-Identifier: Apache-2.0
"""Cached states are the target's own, survive a restart and refuse another model."""

from __future__ import annotations

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


def packed_of(*keys: tuple[int, int] | None) -> PackedBlocks:
    """Sequences whose tokens follow from their keys."""
    items = []
    for key in keys:
        seed = (9, 9) if key is None else key
        tokens = np.random.default_rng(seed).integers(0, 64, 4 + seed[1])
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


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    target = DenseTarget(make_target(), TAPS)
    StateFile(tmp_path, target, "toy")
    with pytest.raises(ConfigError, match="another model"):
        StateFile(tmp_path, target, "other")
