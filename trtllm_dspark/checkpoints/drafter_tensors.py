# SPDX-License-Identifier: Apache-2.0
"""The drafter's tensors in the unified names, and the published name of each.

The published layouts (z-lab, DeepSpec, Speculators, SpecForge) share their tensor names; they
differ in their configs only. Reads nothing.
"""

from __future__ import annotations

from trtllm_dspark.checkpoints.target_tensors import TensorPart, stacked_shape
from trtllm_dspark.checkpoints.tensor_check import Shape
from trtllm_dspark.config import DrafterConfig

_HEAD_NAMES = {
    "markov.w1.weight": "markov_head.markov_w1.weight",
    "markov.w2.weight": "markov_head.markov_w2.weight",
    "markov.gate_proj.weight": "markov_head.gate_proj.weight",
    "markov.gate_proj.bias": "markov_head.gate_proj.bias",
    "markov.joint_proj.weight": "markov_head.joint_proj.weight",
    "markov.joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence.proj.weight": "confidence_head.proj.weight",
    "confidence.proj.bias": "confidence_head.proj.bias",
}
CONFIDENCE_BIAS = _HEAD_NAMES["confidence.proj.bias"]
"""Published name whose presence decides `DrafterConfig.confidence_bias`."""


def published_drafter_parts(config: DrafterConfig) -> dict[str, tuple[TensorPart, ...]]:
    """Unified name → the published tensors whose rows, stacked in order, make it."""
    hidden = config.hidden_size
    fc_width = len(config.target_layer_ids) * config.target_hidden_size
    parts: dict[str, tuple[TensorPart, ...]] = {
        "fc.weight": (TensorPart("fc.weight", (hidden, fc_width)),),
        "hidden_norm.weight": (TensorPart("hidden_norm.weight", (hidden,)),),
        "norm.weight": (TensorPart("norm.weight", (hidden,)),),
    }
    for layer in range(config.num_layers):
        parts.update(_layer_parts(config, f"layers.{layer}."))
    for name, shape in _head_shapes(config).items():
        parts[name] = (TensorPart(_HEAD_NAMES[name], shape),)
    return parts


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Shape of every drafter tensor in the unified names (embedding and head are the target's)."""
    return {name: stacked_shape(parts) for name, parts in published_drafter_parts(config).items()}


def _layer_parts(config: DrafterConfig, prefix: str) -> dict[str, tuple[TensorPart, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.attention_bias:
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows, "o_proj": hidden}
        shapes.update({f"self_attn.{name}.bias": (num,) for name, num in rows.items()})
    parts: dict[str, tuple[TensorPart, ...]] = {
        prefix + name: (TensorPart(prefix + name, shape),) for name, shape in shapes.items()
    }
    parts[f"{prefix}mlp.gate_up_proj.weight"] = (
        TensorPart(f"{prefix}mlp.gate_proj.weight", (inner, hidden)),
        TensorPart(f"{prefix}mlp.up_proj.weight", (inner, hidden)),
    )
    return parts


def _head_shapes(config: DrafterConfig) -> dict[str, Shape]:
    hidden, rank, vocab = config.hidden_size, config.markov_rank, config.vocab_size
    shapes: dict[str, Shape] = {}
    if config.head_type != "none":
        shapes["markov.w1.weight"] = (vocab, rank)
        shapes["markov.w2.weight"] = (vocab, rank)
    if config.head_type == "gated":
        shapes["markov.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov.gate_proj.bias"] = (rank,)
    if config.head_type == "rnn":
        shapes["markov.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov.joint_proj.bias"] = (3 * rank,)
    if config.confidence_head:
        width = hidden + (rank if config.confidence_with_markov else 0)
        width += config.confidence_with_peak
        shapes["confidence.proj.weight"] = (1, width)
        if config.confidence_bias:
            shapes["confidence.proj.bias"] = (1,)
    return shapes
