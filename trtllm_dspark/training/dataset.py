# SPDX-License-Identifier: Apache-2.0
"""Endless, resumable epochs over token stores, each epoch in a fresh order given by a seed.

Stores may grow while they are read: new sequences join at the next epoch. Knows sequences, not
anchors, batches or models.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.training.packing import TokenSequence
from trtllm_dspark.training.token_store import TokenStore


def load_sequence(store: TokenStore, row: int, max_len: int) -> TokenSequence:
    """Row of a store, cut at `max_len` tokens."""
    stored = store[row]
    return TokenSequence(stored.token_ids[:max_len], min(stored.prompt_len, max_len))


def usable_rows(store: TokenStore, size: int, max_len: int) -> np.ndarray:
    """Rows among the first `size` that keep at least two answer tokens."""
    index = store.index[:size]
    return np.flatnonzero(np.minimum(index[:, 2], max_len) - index[:, 1] >= 2)


def hash_stores(stores: Sequence[TokenStore]) -> str:
    """sha256 over indices and tokens as they are now: names the data in provenance files."""
    digest = hashlib.sha256()
    for store in stores:
        digest.update(np.ascontiguousarray(store.index).tobytes())
        digest.update(np.ascontiguousarray(store.tokens).tobytes())
    return digest.hexdigest()


def check_stores(stores: Sequence[TokenStore], model_dir: str | Path, model_hash: str) -> None:
    """Refuse answers of any model but the one in `model_dir`, whose digest is `model_hash`."""
    for store in stores:
        found = store.meta.get("model_hash")
        if found != model_hash:
            raise ConfigError(
                f"{store.directory} holds answers of the model {found}, the target in {model_dir} "
                f"is {model_hash}: name the model that gave the answers, or let this one answer "
                f"(dspark generate-data --model-dir {model_dir})"
            )


class SequenceStream:
    """`state()` is all it takes to go on at the very next sequence, also if data grew since."""

    def __init__(self, stores: Sequence[TokenStore], seed: int, max_len: int) -> None:
        self._stores, self._seed, self._max_len = list(stores), seed, max_len
        self._start_epoch(0, [len(store) for store in self._stores])
        if not len(self._order):
            raise ConfigError(
                f"no sequence with two answer tokens in {[str(s.directory) for s in stores]}: "
                "generate data first (dspark generate-data)"
            )

    def state(self) -> dict[str, Any]:
        """Plain data that `restore` takes."""
        return {"epoch": self.epoch, "cursor": self._cursor, "sizes": list(self._sizes)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises `ConfigError` if data is missing since."""
        sizes, found = list(state["sizes"]), [len(store) for store in self._stores]
        if len(sizes) != len(found) or any(a > b for a, b in zip(sizes, found, strict=True)):
            raise ConfigError(
                f"the run was saved with {sizes} sequences per data directory, found {found}: "
                "resume with the same directories, in the same order, none of them shortened"
            )
        self._start_epoch(int(state["epoch"]), sizes)
        self._cursor = int(state["cursor"])

    def _start_epoch(self, epoch: int, sizes: list[int]) -> None:
        self.epoch, self._cursor, self._sizes = epoch, 0, sizes
        parts = []
        for number, (store, size) in enumerate(zip(self._stores, sizes, strict=True)):
            rows = usable_rows(store, size, self._max_len)
            parts.append(np.stack((np.full(len(rows), number), rows), axis=1))
        rng = np.random.default_rng((self._seed, epoch))
        self._order = rng.permutation(np.concatenate(parts))

    def __iter__(self) -> Iterator[TokenSequence]:
        return self

    def __next__(self) -> TokenSequence:
        if self._cursor >= len(self._order):
            for store in self._stores:
                store.refresh()
            self._start_epoch(self.epoch + 1, [len(store) for store in self._stores])
        number, row = self._order[self._cursor].tolist()
        self._cursor += 1
        sequence = load_sequence(self._stores[number], row, self._max_len)
        return dataclasses.replace(sequence, key=(number, row))
