# SPDX-License-Identifier: Apache-2.0
"""Translates `ModelConfig` to and from the config.json of a TensorRT-LLM checkpoint (1.0–1.2).

Knows the keys, and which settings of TensorRT-LLM are refused (quantisation, pipeline and context
parallelism, other architectures). Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_dspark.checkpoints.hf_config import ARCHITECTURES, resolve_rope
from trtllm_dspark.checkpoints.hf_writer import rope_scaling_of
from trtllm_dspark.config import ModelConfig
from trtllm_dspark.errors import CheckpointError

_CLASS_NAMES = {kind: name for name, kind in ARCHITECTURES.items()}
_NO_QUANTIZATION = {"quant_algo": None, "kv_cache_quant_algo": None}


def trtllm_config_of(
    config: ModelConfig, *, dtype: str, tp_size: int = 1, use_parallel_embedding: bool = False
) -> dict[str, Any]:
    """The config.json of a TensorRT-LLM checkpoint; `dtype` as TensorRT-LLM spells it."""
    data = {
        "architecture": _CLASS_NAMES[config.architecture],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config.rope_theta,
        "rotary_scaling": rope_scaling_of(config),
        "use_parallel_embedding": use_parallel_embedding,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
        "quantization": dict(_NO_QUANTIZATION),
        "attn_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.architecture == "qwen3":
        data["qwen_type"] = "qwen3"
    return data


def model_config_of_trtllm(
    data: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()
) -> ModelConfig:
    """The target of a TensorRT-LLM checkpoint's config.json."""
    if data.get("architecture") not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {data.get('architecture')!r} is not supported: it must be one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[data["architecture"]]
    _refuse_unsupported(data)
    num_heads = int(data["num_attention_heads"])
    theta, scaling = resolve_rope(
        {"rope_theta": data.get("rotary_base", 10000.0), "rope_scaling": data.get("rotary_scaling")}
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_layers=int(data["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(data.get("num_key_value_heads") or num_heads),
        head_dim=int(data.get("head_size") or data["hidden_size"] // num_heads),
        rms_norm_eps=float(data.get("norm_epsilon", 1e-5)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(data["max_position_embeddings"]),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attn_bias", False)),
        qk_norm=architecture == "qwen3",
        eos_token_ids=eos_token_ids,
    )


def tensor_parallel_size(data: Mapping[str, Any]) -> int:
    """`mapping.tp_size`; pipeline and context parallelism are refused."""
    mapping = data.get("mapping") or {}
    for key in ("pp_size", "cp_size"):
        if mapping.get(key, 1) != 1:
            raise CheckpointError(f"mapping.{key} = {mapping[key]} is not supported: it must be 1")
    return int(mapping.get("tp_size", 1))


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    quantization = data.get("quantization") or {}
    experts = (data.get("moe") or {}).get("num_experts") or data.get("moe_num_experts")
    refusals = (
        (quantization.get("quant_algo"), "quantization.quant_algo", "null (plain weights)"),
        (quantization.get("kv_cache_quant_algo"), "quantization.kv_cache_quant_algo", "null"),
        (data.get("mlp_bias"), "mlp_bias", "false"),
        (experts, "moe.num_experts", "0"),
    )
    for value, key, allowed in refusals:
        if value:
            raise CheckpointError(f"{key} = {value!r} is not supported: it must be {allowed}")
    for key, allowed_values in (
        ("hidden_act", ("silu", "swiglu")),
        ("position_embedding_type", ("rope_gpt_neox",)),
    ):
        if data.get(key, allowed_values[0]) not in allowed_values:
            raise CheckpointError(
                f"{key} = {data[key]!r} is not supported: it must be {' or '.join(allowed_values)}"
            )
