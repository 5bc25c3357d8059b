# SPDX-License-Identifier: Apache-2.0
"""The target's tensors in the unified names: their shapes, and the Hugging Face parts of each.

Fused tensors are stacked rows: `qkv_proj` is q|k|v, `gate_up_proj` is gate|up. Reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dspark.checkpoints.tensor_check import Shape
from trtllm_dspark.config import ModelConfig

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorPart:
    """One stored tensor that becomes rows of a unified one."""

    name: str
    shape: Shape


def layer_projection_rows(config: ModelConfig) -> tuple[int, int]:
    """(rows of q, rows of k = rows of v)."""
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim


def hf_target_parts(config: ModelConfig) -> dict[str, tuple[TensorPart, ...]]:
    """Unified name → the Hugging Face tensors whose rows, stacked in order, make it."""
    hidden = config.hidden_size
    parts: dict[str, tuple[TensorPart, ...]] = {
        EMBEDDING: (TensorPart("model.embed_tokens.weight", (config.vocab_size, hidden)),),
        "norm.weight": (TensorPart("model.norm.weight", (hidden,)),),
    }
    for layer in range(config.num_layers):
        parts.update(_layer_parts(config, f"layers.{layer}."))
    if not config.tie_word_embeddings:
        parts[LM_HEAD] = (TensorPart("lm_head.weight", (config.vocab_size, hidden)),)
    return parts


def target_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every target tensor in the unified names."""
    return {name: stacked_shape(parts) for name, parts in hf_target_parts(config).items()}


def stacked_shape(parts: tuple[TensorPart, ...]) -> Shape:
    """Shape of the parts stacked along rows."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _layer_parts(config: ModelConfig, prefix: str) -> dict[str, tuple[TensorPart, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = layer_projection_rows(config)
    qkv = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))

    def single(name: str, *shape: int) -> tuple[TensorPart, ...]:
        return (TensorPart(f"model.{prefix}{name}", shape),)

    def stacked(
        room: str, rows: tuple[tuple[str, int], ...], *rest: int, kind: str = "weight"
    ) -> tuple[TensorPart, ...]:
        return tuple(
            TensorPart(f"model.{prefix}{room}.{name}.{kind}", (num, *rest)) for name, num in rows
        )

    parts = {
        "input_layernorm.weight": single("input_layernorm.weight", hidden),
        "self_attn.qkv_proj.weight": stacked("self_attn", qkv, hidden),
        "self_attn.o_proj.weight": single("self_attn.o_proj.weight", hidden, q_rows),
        "post_attention_layernorm.weight": single("post_attention_layernorm.weight", hidden),
        "mlp.gate_up_proj.weight": stacked(
            "mlp", (("gate_proj", inner), ("up_proj", inner)), hidden
        ),
        "mlp.down_proj.weight": single("mlp.down_proj.weight", hidden, inner),
    }
    if config.attention_bias:
        parts["self_attn.qkv_proj.bias"] = stacked("self_attn", qkv, kind="bias")
        parts["self_attn.o_proj.bias"] = single("self_attn.o_proj.bias", hidden)
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            parts[f"self_attn.{norm}.weight"] = single(f"self_attn.{norm}.weight", config.head_dim)
    return {prefix + name: part for name, part in parts.items()}
