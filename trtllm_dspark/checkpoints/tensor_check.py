# SPDX-License-Identifier: Apache-2.0
"""Compares the tensors that a checkpoint has with those its configuration asks for.

Every missing, unexpected and misshaped tensor is named in one error. Also opens one-file and
sharded safetensors directories. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trtllm_dspark.config import load_json
from trtllm_dspark.errors import CheckpointError

Shape = tuple[int, ...]
_MAX_NAMED = 8


class SafetensorsDirectory:
    """All tensors of a directory's safetensors file or shards, by name, read when asked for.

    Use as a context manager; tensors returned by `get` own their memory and outlive it.
    """

    def __init__(self, directory: str | Path, stem: str = "model") -> None:
        self.directory = Path(directory)
        self._stem = stem
        self._stack = ExitStack()
        self._owner: dict[str, Any] = {}

    def __enter__(self) -> SafetensorsDirectory:
        try:
            for path in self._files():
                handle = self._stack.enter_context(_open(path))
                for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
                    if name in self._owner:
                        raise CheckpointError(f"{path}: tensor {name!r} is in two files")
                    self._owner[name] = handle
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor, from the file headers alone."""
        return {
            name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._owner.items()
        }

    def get(self, name: str) -> torch.Tensor:
        """The tensor `name`, in its stored dtype, on the CPU."""
        return self._owner[name].get_tensor(name)

    def _files(self) -> list[Path]:
        index = self.directory / f"{self._stem}.safetensors.index.json"
        single = self.directory / f"{self._stem}.safetensors"
        if index.exists():
            names = sorted(set(load_json(index).get("weight_map", {}).values()))
            return [self.directory / name for name in names]
        if single.exists():
            return [single]
        raise CheckpointError(
            f"{self.directory} has neither {single.name} nor {index.name}; "
            "other weight formats (.bin, .pt) are not read: convert them to safetensors first"
        )


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Raise one `CheckpointError` naming missing, unexpected and misshaped tensors."""
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    misshaped = [
        f"{name} {list(found[name])} (expected {list(expected[name])})"
        for name in sorted(set(expected) & set(found))
        if tuple(found[name]) != tuple(expected[name])
    ]
    problems = [
        f"{kind}: {_listed(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshaped", misshaped),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where}: the tensors do not match the configuration; " + "; ".join(problems)
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path} as safetensors: {error}") from error
