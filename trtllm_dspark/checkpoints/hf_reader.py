# SPDX-License-Identifier: Apache-2.0
"""Reads the target's weights of a Hugging Face directory into the unified, fused names.

Knows safetensors (one file or shards) of Llama and Qwen3. Not configs (`hf_config`), not GGUF.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from trtllm_dspark.checkpoints.target_tensors import EMBEDDING, LM_HEAD, hf_target_parts
from trtllm_dspark.checkpoints.tensor_check import SafetensorsDirectory, check_tensors
from trtllm_dspark.config import ModelConfig
from trtllm_dspark.errors import CheckpointError

_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers that old checkpoints carry although they follow from the configuration."""


def load_target_weights(model_dir: str | Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read all target tensors in the unified names, on the CPU, in their stored dtype.

    A tied `lm_head.weight` is accepted and dropped where it equals the embedding.
    Raises `CheckpointError` naming missing, unexpected and misshaped tensors.
    """
    with SafetensorsDirectory(model_dir) as files:
        expected = hf_target_parts(config)
        found = {
            name: shape for name, shape in files.shapes().items() if not _COMPUTED.search(name)
        }
        if _has_redundant_head(files, config):
            del found[LM_HEAD]
        shapes = {part.name: part.shape for parts in expected.values() for part in parts}
        check_tensors(found, shapes, str(model_dir))
        return {
            name: _stack([files.get(part.name) for part in parts])
            for name, parts in expected.items()
        }


def _has_redundant_head(files: SafetensorsDirectory, config: ModelConfig) -> bool:
    """Whether a tied model also stores its head; a stored head that differs is an error."""
    embedding = "model." + EMBEDDING
    if not config.tie_word_embeddings or not {LM_HEAD, embedding} <= set(files.shapes()):
        return False
    if not torch.equal(files.get(LM_HEAD), files.get(embedding)):
        raise CheckpointError(
            f"{files.directory}: tie_word_embeddings is true but {LM_HEAD} differs from "
            f"{embedding}; set tie_word_embeddings to false in config.json"
        )
    return True


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
