# SPDX-License-Identifier: Apache-2.0
"""Reads and writes models on disk: HF, GGUF, published drafters, the unified drafter format.

Turns what others publish into `ModelConfig`/`DrafterConfig` and tensors in the unified names.
Knows no torch modules, engines or servers.
"""

from trtllm_dspark.checkpoints.drafter_config import resolve_drafter_config
from trtllm_dspark.checkpoints.drafter_reader import is_unified, load_drafter
from trtllm_dspark.checkpoints.drafter_tensors import drafter_shapes
from trtllm_dspark.checkpoints.drafter_writer import convert_drafter, write_drafter
from trtllm_dspark.checkpoints.hf_config import load_model_config
from trtllm_dspark.checkpoints.hf_reader import load_target_weights
from trtllm_dspark.checkpoints.prepare import prepare_model
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
    "is_unified",
    "load_drafter",
    "load_model_config",
    "load_target_weights",
    "load_tokenizer",
    "load_trtllm_checkpoint",
    "prepare_model",
    "resolve_drafter_config",
    "target_shapes",
    "write_drafter",
    "write_trtllm_checkpoint",
]
