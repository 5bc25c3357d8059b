# SPDX-License-Identifier: Apache-2.0
"""How TensorRT-LLM names the target's tensors and cuts them over tensor-parallel ranks.

Column-parallel layers are cut by rows of the stored [out, in] matrix, row-parallel ones by its
columns; q, k and v are cut each on its own and stacked again per rank; K/V heads are repeated
where there are fewer than ranks; the vocabulary is padded with zero rows to a multiple of ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_dspark.checkpoints.target_tensors import EMBEDDING, LM_HEAD
from trtllm_dspark.config import ModelConfig
from trtllm_dspark.errors import CheckpointError


class Cut(enum.Enum):
    """How one tensor is laid over ranks."""

    COPY = "copy"
    ROWS = "rows"
    COLUMNS = "columns"
    QKV = "qkv"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Entry:
    """One TensorRT-LLM tensor and where it comes from."""

    name: str
    """TensorRT-LLM's name."""
    source: str
    """Unified name."""
    cut: Cut
    half: int | None = None
    """0 or 1: the first (gate) or second (up) half of the source's rows; None = all of it."""


_Rule = tuple[str, str, Cut, int | None]
_LAYER: tuple[_Rule, ...] = (
    ("input_layernorm.weight", "input_layernorm.weight", Cut.COPY, None),
    ("post_layernorm.weight", "post_attention_layernorm.weight", Cut.COPY, None),
    ("attention.qkv.weight", "self_attn.qkv_proj.weight", Cut.QKV, None),
    ("attention.dense.weight", "self_attn.o_proj.weight", Cut.COLUMNS, None),
    ("mlp.fc.weight", "mlp.gate_up_proj.weight", Cut.ROWS, 0),
    ("mlp.gate.weight", "mlp.gate_up_proj.weight", Cut.ROWS, 1),
    ("mlp.proj.weight", "mlp.down_proj.weight", Cut.COLUMNS, None),
)
_LAYER_BIAS: tuple[_Rule, ...] = (
    ("attention.qkv.bias", "self_attn.qkv_proj.bias", Cut.QKV, None),
    ("attention.dense.bias", "self_attn.o_proj.bias", Cut.COPY, None),
)
_LAYER_QK_NORM: tuple[_Rule, ...] = (
    ("attention.q_layernorm.weight", "self_attn.q_norm.weight", Cut.COPY, None),
    ("attention.k_layernorm.weight", "self_attn.k_norm.weight", Cut.COPY, None),
)


def trtllm_entries(config: ModelConfig, embedding_cut: Cut = Cut.COPY) -> list[Entry]:
    """All tensors of a checkpoint; a tied head is stored as a copy of the embedding."""
    head = EMBEDDING if config.tie_word_embeddings else LM_HEAD
    entries = [
        Entry("transformer.vocab_embedding.weight", EMBEDDING, embedding_cut),
        Entry("transformer.ln_f.weight", "norm.weight", Cut.COPY),
        Entry("lm_head.weight", head, Cut.VOCABULARY),
    ]
    rules = [*_LAYER]
    rules += _LAYER_BIAS if config.attention_bias else ()
    rules += _LAYER_QK_NORM if config.qk_norm else ()
    for layer in range(config.num_layers):
        entries += [
            Entry(f"transformer.layers.{layer}.{name}", f"layers.{layer}.{source}", cut, half)
            for name, source, cut, half in rules
        ]
    return entries


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Refuse a number of ranks that does not divide the model."""
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    fits = tp_size >= 1 and heads % tp_size == 0 and inner % tp_size == 0
    if not fits or (kv_heads % tp_size and tp_size % kv_heads):
        raise CheckpointError(
            f"tp_size = {tp_size} does not fit {heads} query heads, {kv_heads} K/V heads and an "
            f"intermediate size of {inner}: it must divide the first and the last, and divide "
            "the second or be a multiple of it"
        )


def cut_tensor(
    tensor: torch.Tensor, cut: Cut, config: ModelConfig, tp_size: int, rank: int
) -> torch.Tensor:
    """The part of a whole tensor that `rank` holds."""
    if cut is Cut.ROWS:
        return tensor.chunk(tp_size)[rank]
    if cut is Cut.COLUMNS:
        return tensor.chunk(tp_size, dim=1)[rank]
    if cut is Cut.VOCABULARY:
        padding = -tensor.shape[0] % tp_size
        padded = torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
        return padded.chunk(tp_size)[rank]
    if cut is Cut.QKV:
        q, k, v = tensor.split(_qkv_rows(config))
        k, v = (_repeat_heads(part, config, tp_size) for part in (k, v))
        return torch.cat([part.chunk(tp_size)[rank] for part in (q, k, v)])
    return tensor


def join_tensors(
    shards: Sequence[torch.Tensor], cut: Cut, config: ModelConfig, where: str
) -> torch.Tensor:
    """The whole tensor of which `shards` are the ranks' parts; the inverse of `cut_tensor`."""
    if cut is Cut.ROWS:
        return torch.cat(list(shards))
    if cut is Cut.COLUMNS:
        return torch.cat(list(shards), dim=1)
    if cut is Cut.VOCABULARY:
        return torch.cat(list(shards))[: config.vocab_size]
    if cut is Cut.QKV:
        return _join_qkv(shards, config, where)
    _require_equal(shards, where)
    return shards[0]


def _qkv_rows(config: ModelConfig) -> list[int]:
    kv_rows = config.num_kv_heads * config.head_dim
    return [config.num_heads * config.head_dim, kv_rows, kv_rows]


def _repeat_heads(part: torch.Tensor, config: ModelConfig, tp_size: int) -> torch.Tensor:
    repeats = max(1, tp_size // config.num_kv_heads)
    heads = part.unflatten(0, (config.num_kv_heads, config.head_dim))
    return heads.repeat_interleave(repeats, dim=0).flatten(0, 1)


def _join_qkv(shards: Sequence[torch.Tensor], config: ModelConfig, where: str) -> torch.Tensor:
    tp_size = len(shards)
    repeats = max(1, tp_size // config.num_kv_heads)
    kv_rows = max(1, config.num_kv_heads // tp_size) * config.head_dim
    q_rows = config.num_heads // tp_size * config.head_dim
    parts = [shard.split([q_rows, kv_rows, kv_rows]) for shard in shards]
    for start in range(0, tp_size, repeats):
        for kind in (1, 2):
            _require_equal([part[kind] for part in parts[start : start + repeats]], where)
    rows = [[part[0] for part in parts]]
    rows += [[part[kind] for part in parts[::repeats]] for kind in (1, 2)]
    return torch.cat([torch.cat(group) for group in rows])


def _require_equal(shards: Sequence[torch.Tensor], where: str) -> None:
    if any(not torch.equal(shard, shards[0]) for shard in shards[1:]):
        raise CheckpointError(f"{where} differs between ranks although every rank must hold it")
