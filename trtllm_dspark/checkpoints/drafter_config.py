# SPDX-License-Identifier: Apache-2.0
"""Resolves the config.json of a published drafter (z-lab, DeepSpec, Speculators, SpecForge).

The result is a `DrafterConfig` with every convention explicit. Drafters that need something not
computed here are refused by name, and so are drafters made for another target. Reads no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trtllm_dspark.checkpoints.drafter_labels import resolve_label_shift
from trtllm_dspark.checkpoints.drafter_tensors import CONFIDENCE_BIAS
from trtllm_dspark.checkpoints.hf_config import (
    refuse_unsupported,
    resolve_head_dim,
    resolve_rope,
)
from trtllm_dspark.config import DrafterConfig, ModelConfig
from trtllm_dspark.errors import CheckpointError

_MARKOV_TYPES = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
_REFUSED_FAMILIES = (
    ("gemma", "Gemma 4"),
    ("deepseekv4", "DeepSeek-V4 (the drafter bundled with the model)"),
)
_SPECULATORS_BLOCK_SIZE = 8
_SPECULATORS_DSPARK_DEFAULTS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def resolve_drafter_config(
    data: Mapping[str, Any],
    target: ModelConfig,
    *,
    tensor_names: Collection[str] = (),
    label_shift: bool | None = None,
) -> DrafterConfig:
    """Build the unified configuration of a published drafter's config.json.

    `tensor_names` tells whether the confidence head has a bias (no config says so);
    `label_shift` overrides what the config says about labels.
    """
    refuse_family(data)
    flat = flatten_published(data)
    _refuse_variants(flat)
    refuse_unsupported(flat)
    shifted = resolve_label_shift(flat, label_shift)
    theta, scaling = resolve_rope(flat)
    head_type, rank = _sequential_head(flat)
    confidence = bool(flat.get("enable_confidence_head", False))
    num_target_layers = int(flat.get("num_target_layers") or target.num_layers)
    block_size = int(_required(flat, "block_size"))
    config = DrafterConfig(
        hidden_size=int(_required(flat, "hidden_size")),
        intermediate_size=int(_required(flat, "intermediate_size")),
        num_layers=int(_required(flat, "num_hidden_layers")),
        num_heads=int(_required(flat, "num_attention_heads")),
        num_kv_heads=int(flat.get("num_key_value_heads") or flat["num_attention_heads"]),
        head_dim=resolve_head_dim(flat, "qwen3"),
        rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(
            flat.get("max_position_embeddings", target.max_position_embeddings)
        ),
        vocab_size=int(_required(flat, "vocab_size")),
        attention_bias=bool(flat.get("attention_bias", False)),
        qk_norm=True,
        num_drafts=block_size if shifted else block_size - 1,
        label_shift=shifted,
        mask_token_id=_mask_token_id(flat),
        target_layer_ids=_target_layer_ids(flat, num_target_layers),
        num_target_layers=num_target_layers,
        target_hidden_size=int(flat.get("target_hidden_size") or flat["hidden_size"]),
        head_type=head_type,
        markov_rank=rank,
        confidence_head=confidence,
        confidence_with_markov=confidence and bool(flat.get("confidence_head_with_markov")),
        confidence_bias=confidence and CONFIDENCE_BIAS in tensor_names,
    )
    check_target_match(config, target)
    return config


def refuse_family(data: Mapping[str, Any]) -> None:
    """Refuse, by name, drafter families that are published but not supported."""
    layer = data.get("transformer_layer_config") or {}
    names = [*(data.get("architectures") or []), data.get("model_type"), layer.get("model_type")]
    for name in filter(None, names):
        plain = name.lower().replace("_", "").replace("-", "")
        for mark, family in _REFUSED_FAMILIES:
            if plain.startswith(mark):
                raise CheckpointError(f"{name}: drafters of {family} are not supported yet")


def flatten_published(data: Mapping[str, Any]) -> dict[str, Any]:
    """One flat mapping of any published layout, taps as 0-based decoder layers.

    Nested keys (`dflash_config`, `transformer_layer_config`) win over top-level ones.
    """
    if "speculators_model_type" not in data:
        return {**data, **(data.get("dflash_config") or {})}
    flat = {**data, **(data.get("transformer_layer_config") or {})}
    flat.setdefault("block_size", _SPECULATORS_BLOCK_SIZE)
    if flat.get("aux_hidden_state_layer_ids") is not None:
        flat["target_layer_ids"] = [int(i) - 1 for i in flat["aux_hidden_state_layer_ids"]]
    if flat["speculators_model_type"] == "dspark":
        for key, default in _SPECULATORS_DSPARK_DEFAULTS.items():
            flat.setdefault(key, default)
    return flat


def check_target_match(config: DrafterConfig, target: ModelConfig) -> None:
    """Refuse a drafter that was made for another target."""
    pairs = (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        (
            "own hidden size (it shares the target's embedding)",
            config.hidden_size,
            target.hidden_size,
        ),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("layer count", config.num_target_layers, target.num_layers),
    )
    for what, drafter_value, target_value in pairs:
        if drafter_value != target_value:
            raise CheckpointError(
                f"this drafter was made for another target: its {what} is {drafter_value}, the "
                f"target has {target_value}"
            )


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """z-lab's taps where the config names none: spread between layer 1 and layer n−3."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _target_layer_ids(flat: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    ids = flat.get("target_layer_ids")
    if ids is None:
        return default_target_layer_ids(num_target_layers, int(flat["num_hidden_layers"]))
    return tuple(int(i) for i in ids)


def _mask_token_id(flat: Mapping[str, Any]) -> int:
    for key in ("mask_token_id", "dspark_noise_token_id"):
        if flat.get(key) is not None:
            return int(flat[key])
    raise CheckpointError("no mask token: neither mask_token_id nor dspark_noise_token_id is set")


def _sequential_head(flat: Mapping[str, Any]) -> tuple[str, int]:
    rank = int(flat.get("markov_rank") or 0)
    if rank == 0:
        return "none", 0
    kind = str(flat.get("markov_head_type") or "vanilla").lower()
    if kind not in _MARKOV_TYPES:
        raise CheckpointError(
            f"markov_head_type = {kind!r} is not supported: it must be one of "
            f"{', '.join(_MARKOV_TYPES)}"
        )
    return _MARKOV_TYPES[kind], rank


def _refuse_variants(flat: Mapping[str, Any]) -> None:
    vocab_size = flat.get("vocab_size")
    draft_vocab = flat.get("draft_vocab_size")
    refusals = (
        (
            draft_vocab not in (None, vocab_size),
            "draft_vocab_size",
            f"{vocab_size} (no reduced one)",
        ),
        (
            flat.get("projector_type", "dflash") not in ("dflash", "dspark"),
            "projector_type",
            "dflash",
        ),
        (bool(flat.get("causal")), "causal", "false (blocks attend in both directions)"),
        (flat.get("attention_mode", "gqa") != "gqa", "attention_mode", "gqa"),
        (bool(flat.get("draft_adapter_rank")), "draft_adapter_rank", "0"),
        (flat.get("logit_scale", 1.0) != 1.0, "logit_scale", "1.0"),
    )
    for refused, key, allowed in refusals:
        if refused:
            raise CheckpointError(f"{key} = {flat[key]!r} is not supported: it must be {allowed}")


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if flat.get(key) is None:
        raise CheckpointError(f"key {key!r} is missing")
    return flat[key]
