# SPDX-License-Identifier: Apache-2.0
"""Writes small random checkpoints in every published layout, for tests of any room.

Names and shapes are spelled out here on their own, not taken from the readers under test.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtllm_dspark.config import DrafterConfig, ModelConfig

TARGET = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=256,
    qk_norm=True,
    eos_token_ids=(3,),
)
"""The target that `drafter_config` fits by default."""


def drafter_config(**changes: Any) -> DrafterConfig:
    """A small shifted DSpark drafter for `TARGET` (Markov and confidence heads), with changes."""
    values: dict[str, Any] = dict(
        hidden_size=16,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=256,
        vocab_size=61,
        qk_norm=True,
        num_drafts=5,
        label_shift=True,
        mask_token_id=60,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        target_hidden_size=16,
        head_type="markov",
        markov_rank=4,
        confidence_head=True,
        confidence_with_markov=True,
        confidence_bias=True,
    )
    return DrafterConfig(**{**values, **changes})


def plain_dflash_config(**changes: Any) -> DrafterConfig:
    """A small unshifted DFlash drafter without heads for `TARGET`, with changes."""
    plain: dict[str, Any] = dict(
        label_shift=False,
        head_type="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
        confidence_bias=False,
    )
    return drafter_config(**{**plain, **changes})


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random fp32 values that depend on the name and the seed alone; norms lie around 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    values = torch.randn(shape, generator=generator) * 0.3
    return values + 1 if "norm" in name else values


def published_drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as z-lab and DeepSpec publish them (no copies of the target's)."""
    h, f, d, r = config.hidden_size, config.intermediate_size, config.head_dim, config.markov_rank
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
            "mlp.gate_proj.weight": (f, h),
            "mlp.up_proj.weight": (f, h),
            "mlp.down_proj.weight": (h, f),
        }
        if config.attention_bias:
            for name, rows in (("q", q), ("k", kv), ("v", kv), ("o", h)):
                layer[f"self_attn.{name}_proj.bias"] = (rows,)
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    if config.head_type != "none":
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, r)
        shapes["markov_head.markov_w2.weight"] = (config.vocab_size, r)
    if config.head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (r, h + r)
        shapes["markov_head.gate_proj.bias"] = (r,)
    if config.head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
        shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if config.confidence_head:
        shapes["confidence_head.proj.weight"] = (1, h + (r if config.confidence_with_markov else 0))
        if config.confidence_bias:
            shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def random_drafter_tensors(
    config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random tensors in the published names."""
    shapes = published_drafter_shapes(config)
    return {name: random_tensor(name, shape, seed).to(dtype) for name, shape in shapes.items()}


def hf_target_tensors(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random tensors of a Llama or Qwen3 target in Hugging Face names."""
    h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
    }
    for i in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "mlp.gate_proj.weight": (f, h),
            "mlp.up_proj.weight": (f, h),
            "mlp.down_proj.weight": (h, f),
        }
        if config.qk_norm:
            layer.update({"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)})
        if config.attention_bias:
            for name, rows in (("q", q), ("k", kv), ("v", kv), ("o", h)):
                layer[f"self_attn.{name}_proj.bias"] = (rows,)
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    return {name: random_tensor(name, shape, seed).to(dtype) for name, shape in shapes.items()}


def hf_target_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a target, in the older spelling (`rope_theta`, `rope_scaling`)."""
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    scaling = config.rope_scaling
    return {
        "architectures": [names[config.architecture]],
        "model_type": config.architecture,
        "attention_bias": config.attention_bias,
        "eos_token_id": list(config.eos_token_ids),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": scaling and {"rope_type": "llama3", **dataclasses.asdict(scaling)},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }


def write_hf_target(
    directory: Path,
    config: ModelConfig = TARGET,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Write config.json and model.safetensors of a random target; returns its tensors."""
    tensors = hf_target_tensors(config, seed, dtype)
    write_checkpoint(directory, hf_target_config(config), tensors)
    return tensors


def backbone_keys(config: DrafterConfig) -> dict[str, Any]:
    """The Qwen3 keys that every drafter layout has at some level of its config."""
    return {
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def head_keys(config: DrafterConfig) -> dict[str, Any]:
    """The keys of the sequential and confidence heads."""
    kinds = {"none": "vanilla", "markov": "vanilla", "gated": "gated", "rnn": "rnn"}
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": kinds[config.head_type],
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def block_size(config: DrafterConfig) -> int:
    """What the published configs call block_size: drafts, plus the unused slot if unshifted."""
    return config.num_drafts + (0 if config.label_shift else 1)


def zlab_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json as z-lab publishes DFlash drafters."""
    return {
        **backbone_keys(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size(config),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": config.num_target_layers,
    }


def deepspec_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json as DeepSpec publishes DSpark and DFlash drafters (flat keys)."""
    return {
        **backbone_keys(config),
        **head_keys(config),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": block_size(config),
        "mask_token_id": config.mask_token_id,
        "num_anchors": 512,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
    }


def speculators_config(config: DrafterConfig, kind: str = "dspark") -> dict[str, Any]:
    """config.json as Speculators writes it: nested backbone, taps counted from 1."""
    heads = head_keys(config) if kind == "dspark" else {}
    return {
        **heads,
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": block_size(config),
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.label_shift,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
            ],
        },
        "target_hidden_size": None,
        "transformer_layer_config": {
            **backbone_keys(config),
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        },
    }


def specforge_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json as SpecForge writes it: head keys nested in dflash_config, no label statement."""
    return {
        **backbone_keys(config),
        "architectures": ["DSparkDraftModel"],
        "block_size": block_size(config),
        "dflash_config": {
            **head_keys(config),
            "confidence_head_alpha": 1.0,
            "mask_token_id": config.mask_token_id,
            "projector_type": "dspark",
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": config.num_target_layers,
    }


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Path:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_sharded(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], num_shards: int = 2
) -> Path:
    """Write config.json and the tensors spread over shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def write_zlab(
    directory: Path, config: DrafterConfig | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Write a random z-lab DFlash directory; returns its tensors."""
    config = config or plain_dflash_config()
    tensors = random_drafter_tensors(config, seed)
    write_checkpoint(directory, zlab_config(config), tensors)
    return tensors


def write_deepspec(
    directory: Path,
    config: DrafterConfig | None = None,
    seed: int = 0,
    target: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random DeepSpec directory with copies of the target's embedding and head."""
    config = config or drafter_config()
    tensors = random_drafter_tensors(config, seed)
    target = target or hf_target_tensors(TARGET)
    copies = {
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "lm_head.weight": target.get("lm_head.weight", target["model.embed_tokens.weight"]).clone(),
    }
    write_checkpoint(directory, deepspec_config(config), {**tensors, **copies})
    return tensors


def write_speculators(
    directory: Path, config: DrafterConfig | None = None, seed: int = 0, kind: str = "dspark"
) -> dict[str, torch.Tensor]:
    """Write a random Speculators directory; returns its tensors."""
    config = config or (drafter_config() if kind == "dspark" else plain_dflash_config())
    tensors = random_drafter_tensors(config, seed)
    write_checkpoint(directory, speculators_config(config, kind), tensors)
    return tensors


def write_specforge(
    directory: Path, config: DrafterConfig | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Write a random SpecForge directory; its labels need an override."""
    config = config or drafter_config()
    tensors = random_drafter_tensors(config, seed)
    write_checkpoint(directory, specforge_config(config), tensors)
    return tensors
