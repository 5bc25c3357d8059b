# SPDX-License-Identifier: Apache-2.0
"""Reads and writes models on disk: HF, GGUF, published drafters, the unified drafter format.

Turns what others publish into `ModelConfig`/`DrafterConfig` and tensors in the unified names.
Knows no torch modules, engines or servers. Names are loaded when first used: a process that only
needs the tokenizer imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_dspark.checkpoints.drafter_config import resolve_drafter_config
    from trtllm_dspark.checkpoints.drafter_reader import is_unified, load_drafter
    from trtllm_dspark.checkpoints.drafter_tensors import drafter_shapes
    from trtllm_dspark.checkpoints.drafter_writer import convert_drafter, write_drafter
    from trtllm_dspark.checkpoints.hf_config import load_model_config
    from trtllm_dspark.checkpoints.hf_reader import load_target_weights
    from trtllm_dspark.checkpoints.packaged import find_drafter
    from trtllm_dspark.checkpoints.prepare import prepare_model, prepared_model
    from trtllm_dspark.checkpoints.target_tensors import target_shapes
    from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer
    from trtllm_dspark.checkpoints.trtllm import (
        convert_from_trtllm,
        convert_to_trtllm,
        load_trtllm_checkpoint,
        write_trtllm_checkpoint,
    )

__all__ = [
    "Tokenizer",
    "convert_drafter",
    "convert_from_trtllm",
    "convert_to_trtllm",
    "drafter_shapes",
    "find_drafter",
    "is_unified",
    "load_drafter",
    "load_model_config",
    "load_target_weights",
    "load_tokenizer",
    "load_trtllm_checkpoint",
    "prepare_model",
    "prepared_model",
    "resolve_drafter_config",
    "target_shapes",
    "write_drafter",
    "write_trtllm_checkpoint",
]

_MODULES = {
    "drafter_config": ("resolve_drafter_config",),
    "drafter_reader": ("is_unified", "load_drafter"),
    "drafter_tensors": ("drafter_shapes",),
    "drafter_writer": ("convert_drafter", "write_drafter"),
    "hf_config": ("load_model_config",),
    "hf_reader": ("load_target_weights",),
    "packaged": ("find_drafter",),
    "prepare": ("prepare_model", "prepared_model"),
    "target_tensors": ("target_shapes",),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
    "trtllm": (
        "convert_from_trtllm",
        "convert_to_trtllm",
        "load_trtllm_checkpoint",
        "write_trtllm_checkpoint",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
