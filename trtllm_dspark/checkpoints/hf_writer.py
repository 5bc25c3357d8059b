# SPDX-License-Identifier: Apache-2.0
"""Writes a target in the unified names back as a Hugging Face directory, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark.checkpoints.hf_config import ARCHITECTURES
from trtllm_dspark.checkpoints.staging import write_json, write_tensors
from trtllm_dspark.checkpoints.target_tensors import hf_target_parts, target_shapes
from trtllm_dspark.checkpoints.tensor_check import check_tensors
from trtllm_dspark.config import ModelConfig


def write_hf_model(
    directory: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json, generation_config.json and model.safetensors into `directory`."""
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(found, target_shapes(config), str(directory))
    tensors = {}
    for name, parts in hf_target_parts(config).items():
        rows = [part.shape[0] for part in parts]
        for part, piece in zip(parts, weights[name].split(rows), strict=True):
            tensors[part.name] = piece
    dtype = str(weights["embed_tokens.weight"].dtype).removeprefix("torch.")
    write_json(directory / "config.json", {**hf_config_of(config), "torch_dtype": dtype})
    write_tensors(directory / "model.safetensors", tensors)
    if config.eos_token_ids:
        eos = {"eos_token_id": list(config.eos_token_ids)}
        write_json(directory / "generation_config.json", eos)


def hf_config_of(config: ModelConfig) -> dict[str, Any]:
    """The Hugging Face config.json of a target, without torch_dtype."""
    class_names = {kind: name for name, kind in ARCHITECTURES.items()}
    return {
        "architectures": [class_names[config.architecture]],
        "model_type": config.architecture,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "eos_token_id": list(config.eos_token_ids) or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": rope_scaling_of(config),
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }


def rope_scaling_of(config: ModelConfig) -> dict[str, Any] | None:
    """`rope_scaling` as Hugging Face and TensorRT-LLM spell it, None where there is none."""
    scaling = config.rope_scaling
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
