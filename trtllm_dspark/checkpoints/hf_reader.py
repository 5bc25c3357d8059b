# SPDX-License-Identifier: Apache-2.0
"""Reads the target's weights of a Hugging Face directory into the unified, fused names.

Knows safetensors (one file or shards) of Llama and Qwen3. Not configs (`hf_config`), not GGUF.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from trtllm_dspark.checkpoints.target_tensors import EMBEDDING, hf_target_parts
from trtllm_dspark.checkpoints.tensor_check import SafetensorsDirectory, check_tensors
from trtllm_dspark.config import ModelConfig
from trtllm_dspark.errors import CheckpointError

_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers that old checkpoints carry although they follow from the configuration."""
_OUTPUT_BIAS = re.compile(r"\.self_attn\.o_proj\.bias$")


def load_target_weights(model_dir: str | Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read all target tensors in the unified names, on the CPU, in their stored dtype.

    A tied `lm_head.weight` is accepted and dropped where it equals the embedding; a bias of the
    output projection where it is all zero (the target model has none).
    Raises `CheckpointError` naming missing, unexpected and misshaped tensors.
    """
    with SafetensorsDirectory(model_dir) as files:
        expected = hf_target_parts(config)
        found = {
            name: shape for name, shape in files.shapes().items() if not _COMPUTED.search(name)
        }
        for name in _redundant_names(files, config):
            found.pop(name, None)
        shapes = {part.name: part.shape for parts in expected.values() for part in parts}
        check_tensors(found, shapes, str(model_dir))
        return {
            name: _stack([files.get(part.name) for part in parts])
            for name, parts in expected.items()
        }


def _redundant_names(files: SafetensorsDirectory, config: ModelConfig) -> list[str]:
    names = []
    shapes = files.shapes()
    embedding = "model." + EMBEDDING
    if config.tie_word_embeddings and "lm_head.weight" in shapes and embedding in shapes:
        if not torch.equal(files.get("lm_head.weight"), files.get(embedding)):
            raise CheckpointError(
                f"{files.directory}: tie_word_embeddings is true but lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false in config.json"
            )
        names.append("lm_head.weight")
    if config.attention_bias:
        for name in filter(_OUTPUT_BIAS.search, shapes):
            if torch.count_nonzero(files.get(name)):
                raise CheckpointError(
                    f"{files.directory}: {name} is not zero; a bias on the output projection is "
                    "not supported"
                )
            names.append(name)
    return names


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
