# SPDX-License-Identifier: Apache-2.0
"""Loads a drafter of any supported layout: its configuration and tensors in the unified names.

Knows which published tensors are copies of the target's or mere book-keeping, and which variants
are refused. The configs themselves are resolved by `drafter_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.checkpoints.drafter_config import check_target_match, resolve_drafter_config
from trtllm_dspark.checkpoints.drafter_tensors import drafter_shapes, published_drafter_parts
from trtllm_dspark.checkpoints.tensor_check import SafetensorsDirectory, Shape, check_tensors
from trtllm_dspark.config import DrafterConfig, ModelConfig, from_json_dict, load_json
from trtllm_dspark.errors import CheckpointError, ConfigError

FORMAT = "dspark-drafter"
FORMAT_VERSION = 1
UNIFIED_STEM = "drafter"
"""The unified format keeps its tensors in drafter.safetensors."""

_EXPLICIT_KEYS = ("label_shift", "mask_token_id", "target_layer_ids")
"""What a unified config.json must say itself, since no tensor shape would tell."""

TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Frozen copies of the target's tensors that some checkpoints carry; they are not loaded."""
_BOOK_KEEPING = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")
_REFUSED_TENSORS = (
    ("mask_embedding", "a mask embedding of its own (only a mask token of the vocabulary is)"),
    ("scales", "quantised weights"),
    ("weight_scale", "quantised weights"),
)


def load_drafter(
    drafter_dir: str | Path, target: ModelConfig, *, label_shift: bool | None = None
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """Read a drafter of any supported layout for `target`: (config, unified name → tensor).

    Tensors are on the CPU in their stored dtype; embedding and head are the target's and are not
    among them. `label_shift` overrides a published config; a unified one is always explicit.
    Raises `CheckpointError` for anything that is missing, unexpected, misshaped, ambiguous or made
    for another target.
    """
    directory = Path(drafter_dir)
    data = load_json(directory / "config.json")
    try:
        if data.get("format") is not None:
            return _load_unified(directory, data, target, label_shift)
        return _load_published(directory, data, target, label_shift)
    except ConfigError as error:
        raise CheckpointError(f"drafter {directory}: {error}") from error


def is_unified(drafter_dir: str | Path) -> bool:
    """Whether the directory holds a drafter in the unified format."""
    path = Path(drafter_dir) / "config.json"
    return path.is_file() and load_json(path).get("format") == FORMAT


def _load_unified(
    directory: Path, data: Mapping[str, Any], target: ModelConfig, label_shift: bool | None
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    if (data["format"], data.get("version")) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"format {data['format']!r} version {data.get('version')!r} is not known: it must be "
            f"{FORMAT!r} version {FORMAT_VERSION}"
        )
    missing = [key for key in _EXPLICIT_KEYS if key not in data.get("drafter", {})]
    if missing:
        raise CheckpointError(f"config.json: keys {missing} are missing under 'drafter'")
    config = from_json_dict(DrafterConfig, data["drafter"], "drafter")
    if label_shift not in (None, config.label_shift):
        raise CheckpointError(
            f"label_shift = {label_shift} contradicts the converted drafter, which has "
            f"{config.label_shift}: convert the original again with the other value"
        )
    check_target_match(config, target)
    with SafetensorsDirectory(directory, UNIFIED_STEM) as files:
        check_tensors(files.shapes(), drafter_shapes(config), str(directory))
        return config, {name: files.get(name) for name in files.shapes()}


def _load_published(
    directory: Path, data: Mapping[str, Any], target: ModelConfig, label_shift: bool | None
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    with SafetensorsDirectory(directory) as files:
        shapes = files.shapes()
        config = resolve_drafter_config(data, target, tensor_names=shapes, label_shift=label_shift)
        _refuse_tensors(shapes)
        _check_vocabulary_map(files, config)
        own = _without_target_copies(shapes, config)
        parts = published_drafter_parts(config)
        tensors = _TensorSource(files, config, own)
        expected = {part.name: part.shape for group in parts.values() for part in group}
        check_tensors(tensors.shapes, expected, str(directory))
        return config, {
            name: torch.cat([tensors.get(part.name) for part in group])
            if len(group) > 1
            else tensors.get(group[0].name)
            for name, group in parts.items()
        }


class _TensorSource:
    """Published tensors by name, with a fused `qkv_proj` seen as its three parts."""

    def __init__(
        self, files: SafetensorsDirectory, config: DrafterConfig, own: Mapping[str, Shape]
    ) -> None:
        self._files = files
        self._slices: dict[str, tuple[str, int, int]] = {}
        self.shapes = dict(own)
        q_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        for fused in [name for name in own if ".self_attn.qkv_proj." in name]:
            shape = self.shapes.pop(fused)
            if shape[0] != q_rows + 2 * kv_rows:
                raise CheckpointError(
                    f"{fused} has {shape[0]} rows, expected {q_rows + 2 * kv_rows} (q|k|v)"
                )
            start = 0
            for part, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
                name = fused.replace("qkv_proj", part)
                self._slices[name] = (fused, start, rows)
                self.shapes[name] = (rows, *shape[1:])
                start += rows

    def get(self, name: str) -> torch.Tensor:
        if name not in self._slices:
            return self._files.get(name)
        fused, start, rows = self._slices[name]
        return self._files.get(fused)[start : start + rows].clone()


def _refuse_tensors(shapes: Mapping[str, Shape]) -> None:
    for mark, what in _REFUSED_TENSORS:
        found = sorted(name for name in shapes if mark in name.split("."))
        if found:
            raise CheckpointError(f"{what} is not supported: the checkpoint has {found[0]!r}")


def _check_vocabulary_map(files: SafetensorsDirectory, config: DrafterConfig) -> None:
    """Refuse a map between a reduced vocabulary and the target's; an identity map is harmless."""
    shapes = files.shapes()
    if "d2t" not in shapes:
        return
    if shapes["d2t"] != (config.vocab_size,) or torch.count_nonzero(files.get("d2t")):
        raise CheckpointError(
            f"a reduced draft vocabulary is not supported: d2t maps {shapes['d2t'][0]} draft "
            f"tokens into the vocabulary of {config.vocab_size}"
        )


def _without_target_copies(shapes: Mapping[str, Shape], config: DrafterConfig) -> dict[str, Shape]:
    expected = (config.vocab_size, config.hidden_size)
    for name in TARGET_COPIES:
        if name in shapes and shapes[name] != expected:
            raise CheckpointError(
                f"misshaped: {name} {list(shapes[name])} (expected {list(expected)}, a copy of the "
                "target's)"
            )
    ignored = {*TARGET_COPIES, *_BOOK_KEEPING}
    return {name: shape for name, shape in shapes.items() if name not in ignored}
