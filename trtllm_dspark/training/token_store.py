# SPDX-License-Identifier: Apache-2.0
"""Append-only store of token sequences: tokens.bin, index.bin, meta.json and, for whoever goes on
writing, skipped.bin in one directory.

A row of the index is written after its tokens, so a store that was interrupted is merely shorter.
Readers map the files and may read while a writer appends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError

INDEX_COLUMNS = 4
"""offset, prompt_len, total_len, source_id (int64 each)."""
SKIPPED = "skipped.bin"
"""Ids of items that gave no sequence (int64 each)."""


@dataclass(frozen=True)
class StoredSequence:
    """One prompt with its answer."""

    token_ids: npt.NDArray[np.int64]
    """[total_len]"""
    prompt_len: int
    source_id: int


class TokenStore:
    """Reads a store; call `refresh` to see what a writer has appended since."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.meta: dict[str, Any] = load_json(self.directory / "meta.json")
        self.dtype = np.dtype(self.meta["dtype"])
        self.refresh()

    def refresh(self) -> None:
        """Map what is on disk now."""
        index = np.fromfile(self.directory / "index.bin", np.int64)
        self.index = index[: len(index) // INDEX_COLUMNS * INDEX_COLUMNS].reshape(-1, INDEX_COLUMNS)
        path = self.directory / "tokens.bin"
        empty = not path.stat().st_size
        self.tokens = np.zeros(0, self.dtype) if empty else np.memmap(path, self.dtype, "r")

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> StoredSequence:
        offset, prompt_len, total_len, source_id = self.index[row].tolist()
        tokens = self.tokens[offset : offset + total_len].astype(np.int64)
        return StoredSequence(tokens, prompt_len, source_id)

    @property
    def num_answer_tokens(self) -> int:
        """Generated tokens over all sequences."""
        return int((self.index[:, 2] - self.index[:, 1]).sum())


class TokenStoreWriter:
    """Appends sequences; opening an existing store of the same model goes on where it ended."""

    def __init__(self, directory: str | Path, *, vocab_size: int, model_hash: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        meta = {"dtype": dtype, "vocab_size": vocab_size, "model_hash": model_hash}
        path = self.directory / "meta.json"
        if path.exists() and (found := load_json(path)) != meta:
            raise ConfigError(
                f"{self.directory} holds tokens of another model ({found}): choose another "
                "directory or remove it"
            )
        path.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        self.dtype = np.dtype(dtype)
        for name in ("tokens.bin", "index.bin", SKIPPED):
            (self.directory / name).touch()
        self._trim()

    def _trim(self) -> None:
        """Drop half-written rows and tokens that no row names."""
        index_path, tokens_path = self.directory / "index.bin", self.directory / "tokens.bin"
        row_bytes = INDEX_COLUMNS * 8
        with index_path.open("r+b") as file:
            file.truncate(index_path.stat().st_size // row_bytes * row_bytes)
        rows = np.fromfile(index_path, np.int64).reshape(-1, INDEX_COLUMNS)
        skipped = np.fromfile(self.directory / SKIPPED, np.int64)
        with (self.directory / SKIPPED).open("r+b") as file:
            file.truncate(skipped.nbytes)
        self.source_ids = {*rows[:, 3].tolist(), *skipped.tolist()}
        self.num_sequences = len(rows)
        self.num_answer_tokens = int((rows[:, 2] - rows[:, 1]).sum())
        self.offset = int((rows[:, 0] + rows[:, 2]).max()) if len(rows) else 0
        with tokens_path.open("r+b") as file:
            file.truncate(self.offset * self.dtype.itemsize)

    def append(self, token_ids: npt.ArrayLike, prompt_len: int, source_id: int) -> None:
        """Add one sequence, tokens first."""
        tokens = np.asarray(token_ids, self.dtype)
        with (self.directory / "tokens.bin").open("ab") as file:
            tokens.tofile(file)
        row = np.array([self.offset, prompt_len, len(tokens), source_id], np.int64)
        with (self.directory / "index.bin").open("ab") as file:
            row.tofile(file)
        self.offset += len(tokens)
        self.source_ids.add(source_id)
        self.num_sequences += 1
        self.num_answer_tokens += len(tokens) - prompt_len

    def skip(self, source_id: int) -> None:
        """Remember an item that gives no sequence: a resumed run must not try it again."""
        with (self.directory / SKIPPED).open("ab") as file:
            np.array([source_id], np.int64).tofile(file)
        self.source_ids.add(source_id)
