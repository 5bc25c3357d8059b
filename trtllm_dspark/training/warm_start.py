# SPDX-License-Identifier: Apache-2.0
"""First weights of a drafter: copied target layers and the rest small or zero, or a drafter's.

The target's input norms are folded into the copied projections, because context rows reach k_proj
and v_proj without a layer's input norm. Knows modules of both models, nothing of data or
optimisation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from trtllm_dspark.config import DrafterConfig, to_json_dict
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.drafter import DraftLayer, DSparkModel
from trtllm_dspark.models.target import DecoderLayer, TargetModel


@torch.no_grad()
def initialize_(model: DSparkModel, target: TargetModel, generator: torch.Generator) -> None:
    """Random weights; the final norm and W1 from the target, W2 and confidence zero.

    W1 starts as the target's embeddings in their leading directions, so that tokens which the
    target finds alike start alike; W2 = 0 makes the sequential head silent at first.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.norm.weight.copy_(target.norm.weight)
    if model.markov is not None:
        w1 = principal_directions(target.embed_tokens.weight, model.markov.rank)
        model.markov.w1.weight.copy_(w1)
        model.markov.w2.weight.zero_()
    if model.confidence is not None:
        model.confidence.proj.weight.zero_()


@torch.no_grad()
def copy_layers_(model: DSparkModel, target: TargetModel, layer_ids: tuple[int, ...]) -> None:
    """Copy target layers into the drafter's, and let fc pass on the last tap unchanged."""
    config, given = model.config, target.config
    shape = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    differing = [n for n in shape if getattr(config, n) != getattr(given, n)]
    if differing or config.qk_norm != given.qk_norm or len(layer_ids) != config.num_layers:
        raise ConfigError(
            f"layers {layer_ids} of the target cannot be copied into {config.num_layers} drafter "
            f"layers: differing {differing}, qk_norm {given.qk_norm} against {config.qk_norm}; "
            "give one layer per drafter layer and the target's shapes"
        )
    if max(layer_ids) >= given.num_layers or min(layer_ids) < 0:
        raise ConfigError(f"target layers {layer_ids} are not all in 0..{given.num_layers - 1}")
    for layer, index in zip(model.layers, layer_ids, strict=True):
        _copy_layer_(layer, target.layers[index])  # type: ignore[arg-type]
    model.fc.weight.zero_()
    model.fc.weight[:, -config.hidden_size :].copy_(torch.eye(config.hidden_size))


@torch.no_grad()
def load_drafter_(
    model: DSparkModel, config: DrafterConfig, weights: Mapping[str, torch.Tensor]
) -> None:
    """Start from another drafter's weights. Raises `ConfigError` where the drafters differ.

    The weight of a peak that `fit-confidence` added is left out where the model has none.
    """
    if config.confidence_with_peak and not model.config.confidence_with_peak:
        config = dataclasses.replace(config, confidence_with_peak=False)
        name = "confidence.proj.weight"
        weights = {**weights, name: weights[name][:, :-1]}
    wanted, given = to_json_dict(model.config), to_json_dict(config)
    differing = [
        f"{name} {given.get(name)!r} (wanted {wanted.get(name)!r})"
        for name in sorted(wanted.keys() | given.keys())
        if wanted.get(name) != given.get(name)
    ]
    if differing:
        raise ConfigError(
            f"the drafter to start from has {', '.join(differing)}: give the options it was "
            "trained with"
        )
    model.load_state_dict(dict(weights), strict=True)


def _copy_layer_(layer: DraftLayer, source: DecoderLayer) -> None:
    attention, given = layer.self_attn, source.self_attn
    rows = (attention.q_proj, attention.k_proj, attention.v_proj)
    folded = given.qkv_proj.weight.float() * source.input_layernorm.weight.float()
    offset = 0
    for projection in rows:
        end = offset + projection.weight.shape[0]
        projection.weight.copy_(folded[offset:end])
        if projection.bias is not None and given.qkv_proj.bias is not None:
            projection.bias.copy_(given.qkv_proj.bias[offset:end])
        offset = end
    layer.input_layernorm.weight.fill_(1.0)
    _copy_module_(attention.o_proj, given.o_proj)
    for name in ("q_norm", "k_norm"):
        own = getattr(attention, name)
        if own is not None:
            _copy_module_(own, getattr(given, name))
    _copy_module_(layer.post_attention_layernorm, source.post_attention_layernorm)
    _copy_module_(layer.mlp.gate_up_proj, source.mlp.gate_up_proj)
    _copy_module_(layer.mlp.down_proj, source.mlp.down_proj)


def _copy_module_(own: nn.Module, given: nn.Module) -> None:
    theirs = dict(given.named_parameters())
    for name, parameter in own.named_parameters():
        parameter.copy_(theirs[name])


def principal_directions(embeddings: torch.Tensor, rank: int) -> torch.Tensor:
    """Rows of `embeddings` [V, H] in their `rank` leading directions, [V, rank], unit variance."""
    centred = embeddings.float() - embeddings.float().mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.t() @ centred)
    projected = centred @ vectors[:, -min(rank, vectors.shape[1]) :].flip(1)
    projected = projected / projected.std(dim=0).clamp_min(1e-6)
    extra = rank - projected.shape[1]
    if extra > 0:
        projected = torch.cat((projected, projected.new_zeros(len(projected), extra)), dim=1)
    return projected
