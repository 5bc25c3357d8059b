# SPDX-License-Identifier: Apache-2.0
"""Directories that are written aside and renamed once, so that one that exists is whole."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtllm_dspark.errors import CheckpointError


@contextmanager
def staged_directory(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `output` that becomes `output` when the block ends well.

    An `output` that exists and is not empty is refused, or replaced as a whole with `replace`.
    """
    if not replace:
        refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        staged = Path(scratch) / "staged"
        staged.mkdir(mode=0o755)
        yield staged
        if output.exists():
            output.rename(Path(scratch) / "replaced")
        staged.rename(output)


def refuse_existing(output: Path) -> None:
    """Raise where `output` is something else than an empty directory or nothing."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not empty: choose another directory")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write indented UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file that others may read; tensors are brought to the CPU."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)
