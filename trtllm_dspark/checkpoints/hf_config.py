# SPDX-License-Identifier: Apache-2.0
"""Translates Hugging Face decoder configs (Llama, Qwen3; old and new spelling) to `ModelConfig`.

What the target model cannot compute (other architectures, sliding windows, other rope scalings,
quantised weights) is refused by name here, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.config import ModelConfig, RopeScaling, load_json
from trtllm_dspark.errors import CheckpointError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Hugging Face class → `ModelConfig.architecture`."""
_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3"}
_DEFAULT_EPS = 1e-6
_DEFAULT_THETA = 10000.0


def load_model_config(model_dir: str | Path) -> ModelConfig:
    """Read config.json of a Hugging Face directory, and generation_config.json's end tokens."""
    directory = Path(model_dir)
    data = load_json(directory / "config.json")
    try:
        config = model_config_from_hf(data, read_eos_ids(directory, data))
    except KeyError as error:
        raise CheckpointError(f"{directory}/config.json: key {error} is missing") from error
    except CheckpointError as error:
        raise CheckpointError(f"{directory}/config.json: {error}") from error
    return config


def model_config_from_hf(data: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Build a `ModelConfig` from the contents of a Hugging Face config.json."""
    architecture = _architecture(data)
    refuse_unsupported(data)
    num_heads = int(data["num_attention_heads"])
    theta, scaling = resolve_rope(data)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_layers=int(data["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(data.get("num_key_value_heads") or num_heads),
        head_dim=resolve_head_dim(data, architecture),
        rms_norm_eps=float(data.get("rms_norm_eps", _DEFAULT_EPS)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(data.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", False)),
        qk_norm=architecture == "qwen3",
        eos_token_ids=eos_token_ids,
    )


def read_eos_ids(directory: Path, data: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens: of generation_config.json where it names any, else of config.json."""
    generation = directory / "generation_config.json"
    value = load_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = data.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def resolve_head_dim(data: Mapping[str, Any], architecture: str) -> int:
    """`head_dim`, or the default that the architecture's Hugging Face class gives it."""
    if data.get("head_dim"):
        return int(data["head_dim"])
    return 128 if architecture == "qwen3" else data["hidden_size"] // data["num_attention_heads"]


def resolve_rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_theta` + `rope_scaling` or from the newer `rope_parameters`."""
    parameters = data.get("rope_parameters") or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    scaling = data.get("rope_scaling") or parameters
    theta = parameters.get("rope_theta", data.get("rope_theta", _DEFAULT_THETA))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise CheckpointError(
            f"rope scaling {kind!r} is not supported: it must be 'default' or 'llama3'"
        )
    return float(theta), RopeScaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
    )


def refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Raise for a config key that asks for something the decoder layers here do not compute."""
    refusals = (
        (data.get("hidden_act", "silu") not in ("silu", "swish"), "hidden_act", "silu"),
        (bool(data.get("mlp_bias")), "mlp_bias", "false"),
        (bool(data.get("use_sliding_window")), "use_sliding_window", "false"),
        (
            any(kind != "full_attention" for kind in data.get("layer_types") or ()),
            "layer_types",
            "full_attention everywhere",
        ),
        (data.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor", "1.0"),
        (bool(data.get("quantization_config")), "quantization_config", "absent (plain weights)"),
    )
    for refused, key, allowed in refusals:
        if refused:
            raise CheckpointError(f"{key} = {data[key]!r} is not supported: it must be {allowed}")


def _architecture(data: Mapping[str, Any]) -> str:
    names = data.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and data.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[data["model_type"]]
    found = ", ".join(names) or f"model_type {data.get('model_type')!r}"
    raise CheckpointError(
        f"architecture {found} is not supported: it must be one of {', '.join(ARCHITECTURES)}"
    )
