# SPDX-License-Identifier: Apache-2.0
"""Where tapped and last hidden states come from: the target on the fly, or a memory-mapped cache.

The cache is append-only and filled as sequences are first met; states.bin holds rows
[taps | last hidden] in the target's dtype, index.bin rows (store, sequence, first row, rows, digest
of the tokens). States of tokens that are not those asked for are never served.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.training.packing import PackedBlocks
from trtllm_dspark.training.run_files import write_json

logger = logging.getLogger(__name__)

FORMAT = 2
INDEX_COLUMNS = 5

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


def digest_tokens(token_ids: npt.NDArray[np.integer]) -> int:
    """A signed 64-bit digest of a sequence's tokens."""
    data = np.ascontiguousarray(token_ids, np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


class StateFile:
    """The files of a cache, shared by the workers of one process."""

    def __init__(self, directory: str | Path, target: DenseTarget, identity: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.width, self.dtype = _row_width(target), target.dtype
        self._write_meta(
            {
                "format": FORMAT,
                "identity": identity,
                "width": self.width,
                "dtype": str(self.dtype),
            }
        )
        self._row_bytes = self.width * self.dtype.itemsize
        self._lock = threading.Lock()
        self._index: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._num_rows = 0
        self._has_warned = False
        self._load()

    def _write_meta(self, meta: dict[str, Any]) -> None:
        path = self.directory / "meta.json"
        if path.exists() and (found := load_json(path)) != meta:
            version = found.get("format", 1)
            if version != FORMAT:
                raise ConfigError(
                    f"{self.directory} caches states in form {version}, this version reads form "
                    f"{FORMAT} (it names the tokens of each sequence): choose another directory "
                    "or remove it"
                )
            raise ConfigError(
                f"{self.directory} caches states of another model or other taps "
                f"({found}): choose another directory or remove it"
            )
        write_json(path, meta)

    def _load(self) -> None:
        """Read the index up to the first row whose states are not all there; drop the rest."""
        for name in ("states.bin", "index.bin"):
            (self.directory / name).touch()
        there = (self.directory / "states.bin").stat().st_size // self._row_bytes
        found = np.fromfile(self.directory / "index.bin", np.int64)
        whole = found[: len(found) // INDEX_COLUMNS * INDEX_COLUMNS].reshape(-1, INDEX_COLUMNS)
        num_entries = 0
        for store, row, first, num, digest in whole.tolist():
            if first + num > there:
                break
            self._index[store, row] = (first, num, digest)
            self._num_rows = first + num
            num_entries += 1
        with (self.directory / "states.bin").open("r+b") as file:
            file.truncate(self._num_rows * self._row_bytes)
        with (self.directory / "index.bin").open("r+b") as file:
            file.truncate(num_entries * INDEX_COLUMNS * whole.itemsize)

    @property
    def num_bytes(self) -> int:
        """Size of states.bin."""
        return self._num_rows * self._row_bytes

    def get(self, key: tuple[int, int], token_ids: npt.NDArray[np.integer]) -> torch.Tensor | None:
        """[len(token_ids), width] of a sequence, None when it is not there with these tokens."""
        found = self._index.get(key)
        if found is None:
            return None
        first, num, digest = found
        if (num, digest) != (len(token_ids), digest_tokens(token_ids)):
            self._warn(key)
            return None
        raw = np.memmap(
            self.directory / "states.bin",
            np.uint8,
            "c",
            offset=first * self._row_bytes,
            shape=(num, self._row_bytes),
        )
        # PyTorch copies (and waits for the disk) without keeping other workers from running.
        return torch.from_numpy(raw).clone().view(self.dtype)

    def _warn(self, key: tuple[int, int]) -> None:
        if not self._has_warned:
            logger.warning(
                "%s holds states of other tokens for sequence %d of store %d (the data or "
                "--max-len have changed): such states are computed again; remove the directory "
                "to free the room of the old ones",
                *(self.directory, key[1], key[0]),
            )
        self._has_warned = True

    def put(
        self, key: tuple[int, int], token_ids: npt.NDArray[np.integer], rows: torch.Tensor
    ) -> None:
        """Append a sequence, rows first, then the index that names them; the last one counts."""
        digest = digest_tokens(token_ids)
        with self._lock:
            if self._index.get(key, (0, 0, 0))[1:] == (len(rows), digest):
                return
            with (self.directory / "states.bin").open("ab") as file:
                file.write(rows.contiguous().view(torch.uint8).numpy().tobytes())
            with (self.directory / "index.bin").open("ab") as file:
                np.array([*key, self._num_rows, len(rows), digest], np.int64).tofile(file)
            self._index[key] = (self._num_rows, len(rows), digest)
            self._num_rows += len(rows)


class Cached:
    """Reads what the file has and computes, then keeps, the rest."""

    def __init__(self, target: DenseTarget, file: StateFile, max_bytes: int) -> None:
        self.target, self.file, self.max_bytes = target, file, max_bytes

    def states(self, packed: PackedBlocks) -> States:
        """See `StateSource`."""
        tokens = np.split(packed.token_ids, packed.cu_seq_lens[1:-1])
        parts = [
            None if key is None else self.file.get(key, own)
            for key, own in zip(packed.sequence_keys, tokens, strict=True)
        ]
        missing = [i for i, part in enumerate(parts) if part is None]
        if missing:
            self._compute(packed.sequence_keys, tokens, missing, parts)
        rows = torch.cat([part for part in parts if part is not None])
        last = self.target.model.config.hidden_size
        return rows[:, :-last], rows[:, -last:]

    def _compute(
        self,
        keys: Sequence[tuple[int, int] | None],
        tokens: Sequence[npt.NDArray[np.int64]],
        missing: Sequence[int],
        parts: list[torch.Tensor | None],
    ) -> None:
        chosen = [tokens[i] for i in missing]
        new_cu = np.concatenate(([0], np.cumsum([len(c) for c in chosen])))
        rows = torch.cat(self.target.run(np.concatenate(chosen), new_cu), dim=-1)
        for number, i in enumerate(missing):
            part = rows[int(new_cu[number]) : int(new_cu[number + 1])]
            parts[i] = part
            key = keys[i]
            if key is not None and self.file.num_bytes < self.max_bytes:
                self.file.put(key, tokens[i], part)
