# SPDX-License-Identifier: Apache-2.0
"""Reads and writes models on disk: HF, GGUF, published drafters, the unified drafter format.

Turns what others publish into `ModelConfig`/`DrafterConfig` and tensors in the unified names.
Knows no torch modules, engines or servers.
"""

from trtllm_dspark.checkpoints.hf_config import load_model_config
from trtllm_dspark.checkpoints.hf_reader import load_target_weights
from trtllm_dspark.checkpoints.prepare import prepare_model
from trtllm_dspark.checkpoints.target_tensors import target_shapes
from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Tokenizer",
    "load_model_config",
    "load_target_weights",
    "load_tokenizer",
    "prepare_model",
    "target_shapes",
]
