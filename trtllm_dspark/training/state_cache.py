# SPDX-License-Identifier: Apache-2.0
"""Where tapped and last hidden states come from: the target on the fly, or a memory-mapped cache.

The cache is append-only and filled as sequences are first met; states.bin holds rows
[taps | last hidden] in the target's dtype, index.bin rows (store, sequence, first row, rows).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.training.packing import PackedBlocks
from trtllm_dspark.training.run_files import write_json

States = tuple[torch.Tensor, torch.Tensor]
"""(taps [C, T·H], last hidden states after the final norm [C, H])"""


class StateSource(Protocol):
    """Gives the target's states of a packed batch."""

    def states(self, packed: PackedBlocks) -> States:
        """Of every packed row."""
        ...


class OnTheFly:
    """Runs the target every time."""

    def __init__(self, target: DenseTarget) -> None:
        self.target = target

    def states(self, packed: PackedBlocks) -> States:
        """See `StateSource`."""
        return self.target.run(packed.token_ids, packed.cu_seq_lens)


def bytes_per_token(target: DenseTarget) -> int:
    """What one cached token takes."""
    return _row_width(target) * target.dtype.itemsize


def _row_width(target: DenseTarget) -> int:
    return (len(target.tap_layers) + 1) * target.model.config.hidden_size


class StateFile:
    """The files of a cache, shared by the workers of one process."""

    def __init__(self, directory: str | Path, target: DenseTarget, identity: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.width, self.dtype = _row_width(target), target.dtype
        meta = {"identity": identity, "width": self.width, "dtype": str(self.dtype)}
        path = self.directory / "meta.json"
        if path.exists() and load_json(path) != meta:
            raise ConfigError(
                f"{self.directory} caches states of another model or other taps "
                f"({load_json(path)}): choose another directory or remove it"
            )
        write_json(path, meta)
        self._row_bytes = self.width * self.dtype.itemsize
        self._lock = threading.Lock()
        self._index: dict[tuple[int, int], tuple[int, int]] = {}
        self._num_rows = 0
        self._load()

    def _load(self) -> None:
        for name in ("states.bin", "index.bin"):
            (self.directory / name).touch()
        found = np.fromfile(self.directory / "index.bin", np.int64)
        for store, row, first, num in found[: len(found) // 4 * 4].reshape(-1, 4).tolist():
            self._index[store, row] = (first, num)
            self._num_rows = max(self._num_rows, first + num)
        with (self.directory / "states.bin").open("r+b") as file:
            file.truncate(self._num_rows * self._row_bytes)
        with (self.directory / "index.bin").open("r+b") as file:
            file.truncate(len(self._index) * 32)

    @property
    def num_bytes(self) -> int:
        """Size of states.bin."""
        return self._num_rows * self._row_bytes

    def get(self, key: tuple[int, int], num_rows: int) -> torch.Tensor | None:
        """[num_rows, width] of a sequence, None when it is not there in that length."""
        first, num = self._index.get(key, (0, 0))
        if num < num_rows:
            return None
        raw = np.memmap(
            self.directory / "states.bin",
            np.uint8,
            "r",
            offset=first * self._row_bytes,
            shape=(num_rows, self._row_bytes),
        )
        return torch.from_numpy(np.array(raw)).view(self.dtype)

    def put(self, key: tuple[int, int], rows: torch.Tensor) -> None:
        """Append a sequence, rows first, then the index that names them."""
        with self._lock:
            if key in self._index:
                return
            with (self.directory / "states.bin").open("ab") as file:
                file.write(rows.contiguous().view(torch.uint8).numpy().tobytes())
            with (self.directory / "index.bin").open("ab") as file:
                np.array([*key, self._num_rows, len(rows)], np.int64).tofile(file)
            self._index[key] = (self._num_rows, len(rows))
            self._num_rows += len(rows)


class Cached:
    """Reads what the file has and computes, then keeps, the rest."""

    def __init__(self, target: DenseTarget, file: StateFile, max_bytes: int) -> None:
        self.target, self.file, self.max_bytes = target, file, max_bytes

    def states(self, packed: PackedBlocks) -> States:
        """See `StateSource`."""
        lengths = np.diff(packed.cu_seq_lens).tolist()
        keys = packed.sequence_keys
        parts = [
            None if key is None else self.file.get(key, num)
            for key, num in zip(keys, lengths, strict=True)
        ]
        missing = [i for i, part in enumerate(parts) if part is None]
        if missing:
            self._compute(packed, missing, parts)
        rows = torch.cat([part for part in parts if part is not None])
        last = self.target.model.config.hidden_size
        return rows[:, :-last], rows[:, -last:]

    def _compute(
        self, packed: PackedBlocks, missing: Sequence[int], parts: list[torch.Tensor | None]
    ) -> None:
        cu = packed.cu_seq_lens
        chosen = [packed.token_ids[cu[i] : cu[i + 1]] for i in missing]
        new_cu = np.concatenate(([0], np.cumsum([len(c) for c in chosen])))
        rows = torch.cat(self.target.run(np.concatenate(chosen), new_cu), dim=-1)
        for number, i in enumerate(missing):
            part = rows[int(new_cu[number]) : int(new_cu[number + 1])]
            parts[i] = part
            key = packed.sequence_keys[i]
            if key is not None and self.file.num_bytes < self.max_bytes:
                self.file.put(key, part)
