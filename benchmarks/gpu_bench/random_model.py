# SPDX-License-Identifier: Apache-2.0
"""A random-weight decoder with a DSpark-shaped drafter, run with the kernels on static tensors.

It is the benchmark's own small runner: what a captured step costs is measured here without an
engine around it. Weights are random; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from dspark_plugins.kv_append import KvAppendPlan, run_kv_append_
from dspark_plugins.ragged_attention import AttentionPlan, run_ragged_attention
from torch.nn import functional

from gpu_bench.shapes import ModelSpec

EPS = 1e-6
ROPE_THETA = 1e4


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer; linear weights are [out, in]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True)
class Model:
    """Target and drafter."""

    spec: ModelSpec
    embed: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: list[Layer]
    drafter_layers: list[Layer]
    drafter_norm: torch.Tensor
    fc: torch.Tensor
    hidden_norm: torch.Tensor
    mask_embedding: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    confidence_weight: torch.Tensor
    confidence_bias: torch.Tensor


@dataclass(frozen=True)
class DeviceBatch:
    """What every layer of one pass shares; all tensors static."""

    positions: torch.Tensor
    slots: torch.Tensor
    cu_query_lens: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor
    attention: AttentionPlan


def build_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Model:
    """Draw weights on the device (a 8 B-parameter model takes seconds on a GPU)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float | None = None) -> torch.Tensor:
        weight = torch.empty(size, dtype=dtype, device=device)
        return weight.normal_(0.0, scale or size[-1] ** -0.5, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + normal(size, scale=0.1)

    def layer() -> Layer:
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return Layer(
            qkv=normal(rows, spec.hidden_size),
            out=normal(spec.hidden_size, spec.num_heads * spec.head_dim),
            gate_up=normal(2 * spec.intermediate_size, spec.hidden_size),
            down=normal(spec.hidden_size, spec.intermediate_size),
            input_norm=norm(spec.hidden_size),
            post_norm=norm(spec.hidden_size),
            q_norm=norm(spec.head_dim),
            k_norm=norm(spec.head_dim),
        )

    return Model(
        spec=spec,
        embed=normal(spec.vocab_size, spec.hidden_size, scale=1.0),
        head=normal(spec.vocab_size, spec.hidden_size, scale=2.0 * spec.hidden_size**-0.5),
        norm=norm(spec.hidden_size),
        layers=[layer() for _ in range(spec.num_layers)],
        drafter_layers=[layer() for _ in range(spec.drafter_layers)],
        drafter_norm=norm(spec.hidden_size),
        fc=normal(spec.hidden_size, len(spec.tap_layers) * spec.hidden_size),
        hidden_norm=norm(spec.hidden_size),
        mask_embedding=normal(spec.hidden_size, scale=1.0),
        w1=normal(spec.vocab_size, spec.markov_rank, scale=1.0),
        w2=normal(spec.vocab_size, spec.markov_rank),
        confidence_weight=normal(spec.hidden_size + spec.markov_rank),
        confidence_bias=normal(1, scale=0.1),
    )


def allocate_pages(spec: ModelSpec, num_layers: int, num_pages: int, like: torch.Tensor) -> list:
    """Zeroed pages of `num_layers` layers."""
    shape = (num_pages, spec.page_size, 2, spec.num_kv_heads, spec.head_dim)
    return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def rope_rows(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[N, 2, head_dim/2] float32 cos and sin."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * ROPE_THETA ** (-exponents / head_dim)
    return torch.stack((angles.cos(), angles.sin()), dim=1).contiguous()


def find_slots(
    positions: torch.Tensor, requests: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots [N] int64 of rows on the device; requests −1 (padding) go to the scratch page."""
    pages = page_table[requests.clamp(min=0).long(), positions // page_size].long()
    slots = pages * page_size + positions % page_size
    return torch.where(requests >= 0, slots, 0)


def run_layer(
    spec: ModelSpec,
    layer: Layer,
    x: torch.Tensor,
    pages: torch.Tensor,
    rope: torch.Tensor,
    batch: DeviceBatch,
) -> torch.Tensor:
    """One decoder layer over packed rows [N, H]."""
    qkv = functional.linear(rms_norm(x, layer.input_norm), layer.qkv)
    rows = x.shape[0]
    q = torch.empty((rows, spec.num_heads, spec.head_dim), dtype=x.dtype, device=x.device)
    plan = KvAppendPlan(rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, EPS)
    run_kv_append_(plan, pages, qkv, rope, batch.slots, q, q_norm=layer.q_norm, k_norm=layer.k_norm)
    attended = run_ragged_attention(
        batch.attention,
        q,
        pages,
        batch.page_table,
        batch.cu_query_lens,
        batch.context_lens,
        spec.head_dim**-0.5,
        torch.empty_like(q),
    )
    x = x + functional.linear(attended.view(rows, -1), layer.out)
    gate, up = functional.linear(rms_norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, layer.down)


def run_target(
    model: Model, token_ids: torch.Tensor, pages: list[torch.Tensor], batch: DeviceBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [N, V], taps [N, T·H]) of packed rows."""
    x = functional.embedding(token_ids, model.embed)
    rope, taps = rope_rows(batch.positions, model.spec.head_dim), []
    for index, layer in enumerate(model.layers):
        x = run_layer(model.spec, layer, x, pages[index], rope, batch)
        if index in model.spec.tap_layers:
            taps.append(x)
    return functional.linear(rms_norm(x, model.norm), model.head), torch.cat(taps, dim=1)


def append_context(
    model: Model, taps: torch.Tensor, pages: list[torch.Tensor], batch: DeviceBatch
) -> None:
    """Write the drafter's K/V of target rows."""
    spec = model.spec
    rows = rms_norm(functional.linear(taps, model.fc), model.hidden_norm)
    rope = rope_rows(batch.positions, spec.head_dim)
    plan = KvAppendPlan(rows.shape[0], 0, spec.num_kv_heads, spec.head_dim, EPS)
    q = rows.new_empty((rows.shape[0], 0, spec.head_dim))
    first = spec.num_heads * spec.head_dim
    for layer, layer_pages in zip(model.drafter_layers, pages, strict=True):
        kv = functional.linear(rows, layer.qkv[first:])
        run_kv_append_(
            plan, layer_pages, kv, rope, batch.slots, q, q_norm=layer.k_norm, k_norm=layer.k_norm
        )


def run_drafter_blocks(
    model: Model,
    anchor_ids: torch.Tensor,
    num_drafts: int,
    pages: list[torch.Tensor],
    batch: DeviceBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(U [R, γ, V], hidden [R, γ, H]) of one block per request."""
    spec, count = model.spec, anchor_ids.shape[0]
    x = model.mask_embedding.expand(count, num_drafts, -1).clone()
    x[:, 0] = functional.embedding(anchor_ids, model.embed)
    x = x.view(count * num_drafts, -1)
    rope = rope_rows(batch.positions, spec.head_dim)
    for layer, layer_pages in zip(model.drafter_layers, pages, strict=True):
        x = run_layer(spec, layer, x, layer_pages, rope, batch)
    hidden = rms_norm(x, model.drafter_norm)
    base = functional.linear(hidden, model.head)
    return base.view(count, num_drafts, -1), hidden.view(count, num_drafts, -1)


def recompute_greedy(model: Model, prompt: list[int], num_tokens: int) -> tuple[list[int], list]:
    """Greedy tokens by full recomputation on the CPU in float32, with the top-two margin of each.

    Independent of pages, kernels and batches: dense causal attention over the whole sequence.
    """
    spec = model.spec
    tokens, margins = list(prompt), []
    cast: Callable[[torch.Tensor], torch.Tensor] = lambda w: w.detach().cpu().float()  # noqa: E731
    layers = [Layer(*(cast(getattr(layer, f)) for f in LAYER_FIELDS)) for layer in model.layers]
    embed, head, norm = cast(model.embed), cast(model.head), cast(model.norm)
    for _ in range(num_tokens):
        positions = torch.arange(len(tokens))
        rope = rope_rows(positions, spec.head_dim)
        x = embed[torch.tensor(tokens)]
        for layer in layers:
            x = _dense_layer(spec, layer, x, rope)
        top = (rms_norm(x[-1], norm) @ head.T).topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
    return tokens[len(prompt) :], margins


LAYER_FIELDS = tuple(Layer.__dataclass_fields__)


def _dense_layer(
    spec: ModelSpec, layer: Layer, x: torch.Tensor, rope: torch.Tensor
) -> torch.Tensor:
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = (rms_norm(x, layer.input_norm) @ layer.qkv.T).view(len(x), -1, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q, k = _rotate(rms_norm(q, layer.q_norm), rope), _rotate(rms_norm(k, layer.k_norm), rope)
    group = heads // kv_heads
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(group, dim=0),
        v.transpose(0, 1).repeat_interleave(group, dim=0),
        is_causal=True,
    )
    x = x + out.transpose(0, 1).reshape(len(x), -1) @ layer.out.T
    gate, up = (rms_norm(x, layer.post_norm) @ layer.gate_up.T).chunk(2, dim=-1)
    return x + (functional.silu(gate) * up) @ layer.down.T


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    cos, sin = rope[:, 0, None], rope[:, 1, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
