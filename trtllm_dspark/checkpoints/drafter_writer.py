# SPDX-License-Identifier: Apache-2.0
"""Writes drafters in the unified format, and converts published ones into it.

A unified drafter is a directory with config.json (format, version, `DrafterConfig`) and
drafter.safetensors. It is written aside and renamed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.checkpoints.drafter_reader import (
    FORMAT,
    FORMAT_VERSION,
    TARGET_COPIES,
    UNIFIED_STEM,
    is_unified,
    load_drafter,
)
from trtllm_dspark.checkpoints.drafter_tensors import drafter_shapes
from trtllm_dspark.checkpoints.hf_config import load_model_config
from trtllm_dspark.checkpoints.hf_reader import load_target_weights
from trtllm_dspark.checkpoints.staging import staged_directory, write_json, write_tensors
from trtllm_dspark.checkpoints.target_tensors import EMBEDDING, LM_HEAD
from trtllm_dspark.checkpoints.tensor_check import SafetensorsDirectory, check_tensors
from trtllm_dspark.config import DrafterConfig, to_json_dict
from trtllm_dspark.errors import CheckpointError


def check_output(output_dir: str | Path, *, overwrite: bool) -> None:
    """Refuse a place that `write_drafter` would not write to: ask before work that takes long."""
    output = Path(output_dir)
    if output.exists() and any(output.iterdir()) and not (overwrite and is_unified(output)):
        raise CheckpointError(
            f"{output} exists and is not empty: choose another directory"
            + ("" if not is_unified(output) else ", or pass overwrite to replace the drafter in it")
        )


def write_drafter(
    output_dir: str | Path,
    config: DrafterConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a drafter in the unified format and return its directory.

    `weights` are in the unified names, in the dtype they are to be stored in. `extra` goes into
    config.json under "extra" (provenance). With `overwrite` an older unified drafter at
    `output_dir` is replaced as a whole, never in part.
    """
    output = Path(output_dir)
    check_output(output, overwrite=overwrite)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(found, drafter_shapes(config), f"drafter for {output}")
    data = {"format": FORMAT, "version": FORMAT_VERSION, "drafter": to_json_dict(config)}
    if extra:
        data["extra"] = dict(extra)
    with staged_directory(output, replace=overwrite) as staged:
        write_json(staged / "config.json", data)
        write_tensors(staged / f"{UNIFIED_STEM}.safetensors", weights)
    return output


def convert_drafter(
    drafter_dir: str | Path,
    target_dir: str | Path,
    output_dir: str | Path,
    *,
    label_shift: bool | None = None,
    overwrite: bool = False,
) -> DrafterConfig:
    """Convert a drafter of any supported layout for the target at `target_dir`.

    Copies of the target's embedding and head that the drafter carries are compared with the
    target's own: a difference means another target, and is refused.
    """
    target = load_model_config(target_dir)
    config, weights = load_drafter(drafter_dir, target, label_shift=label_shift)
    if not is_unified(drafter_dir):
        _check_target_copies(Path(drafter_dir), load_target_weights(target_dir, target))
    extra = {"converted_from": Path(drafter_dir).name}
    write_drafter(output_dir, config, weights, extra=extra, overwrite=overwrite)
    return config


def _check_target_copies(drafter_dir: Path, target: Mapping[str, torch.Tensor]) -> None:
    own = {EMBEDDING: target[EMBEDDING], LM_HEAD: target.get(LM_HEAD, target[EMBEDDING])}
    with SafetensorsDirectory(drafter_dir) as files:
        for name in set(TARGET_COPIES) & set(files.shapes()):
            copy = files.get(name)
            if not torch.equal(own[name].to(copy.dtype), copy):
                raise CheckpointError(
                    f"drafter {drafter_dir}: its copy of {name} differs from the target's; it was "
                    "made for another target (or another version of it)"
                )
