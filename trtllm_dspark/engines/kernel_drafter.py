# SPDX-License-Identifier: Apache-2.0
"""The drafter's forward pass by kernels: context rows, blocks, and the sequential part.

The arithmetic outside attention and sampling is the modules' own. Every method launches only: no
host data is read, so that all of it can be captured.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dspark.models.drafter import DraftLayer, DSparkModel
from trtllm_dspark.ops.attention import ragged_verify_attention
from trtllm_dspark.ops.kernels import thresholds_by_kernel
from trtllm_dspark.ops.kv_append import HeadShape, kv_append_
from trtllm_dspark.ops.ragged import RaggedBatch


class DraftKind(enum.Enum):
    """How the drafts of a batch are drawn: what a graph must hold."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    """Some requests draw with keyed noise."""
    FILTERED = "filtered"
    """Some of them filter by top-k, top-p or min-p: a second pass per slot."""


@dataclass(frozen=True)
class DraftDraws:
    """How each request's drafts are drawn, on the device; [R] each."""

    scales: torch.Tensor
    modes: torch.Tensor
    seeds: torch.Tensor
    anchor_positions: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True)
class KernelDrafts:
    """One block per request."""

    token_ids: torch.Tensor
    """[R, γ] int32"""
    confidence_logits: torch.Tensor
    """[R, γ] float32"""
    logits: torch.Tensor | None = None
    """[R, γ, V] float32, None where every draft is greedy."""
    stats: torch.Tensor | None = None
    """[R, γ, 2] float32 (max, mass): q_v = exp((logit_v − max) · scale) / mass."""
    thresholds: torch.Tensor | None = None
    """[R, γ] float32 smallest logit that could be drawn."""

    def probs(self, scales: torch.Tensor) -> torch.Tensor:
        """q [R, γ, V]."""
        if self.logits is None or self.stats is None or self.thresholds is None:
            raise ValueError("greedy drafts have a one-hot q: there are no logits to make it of")
        top, mass = self.stats[..., :1], self.stats[..., 1:]
        q = ((self.logits - top) * scales[:, None, None]).exp() / mass
        return q.masked_fill_(self.logits < self.thresholds[..., None], 0.0)


class KernelDrafter:
    """Runs a `DSparkModel`; owns nothing but the confidence head's flat weights."""

    def __init__(self, model: DSparkModel, kv_pages: list[torch.Tensor]) -> None:
        config = model.config
        self.model, self.kv_pages = model, kv_pages
        self.shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.kv_shape = HeadShape(0, config.num_kv_heads, config.head_dim)
        self.weights = _head_weights(model)

    def append_context(
        self, taps: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write K/V of context rows [C, T·H] into every layer's pages."""
        rows = self.model.encode_context(taps)
        rope = self.model.rope_table.index_select(0, positions)
        for layer, pages in zip(self._layers(), self.kv_pages, strict=True):
            attention = layer.self_attn
            packed = torch.cat((attention.k_proj(rows), attention.v_proj(rows)), dim=-1)
            self._append(layer, packed, self.kv_shape, pages, rope, slots)

    def run_blocks(self, anchor_ids: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states [R, γ, H] of one block per request; see `DSparkModel.run_blocks`."""
        model = self.model
        x = model.embed_blocks(anchor_ids)
        rope = model.rope_table.index_select(0, batch.positions)
        for layer, pages in zip(self._layers(), self.kv_pages, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            packed = torch.cat([project(normed) for project in parts], dim=-1)
            q = self._append(layer, packed, self.shape, pages, rope, batch.slots)
            attended = ragged_verify_attention(q, pages, batch, model.attention_scale)
            x = x + attention.o_proj(attended.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.finish_blocks(x).contiguous()

    def _layers(self) -> list[DraftLayer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def _append(
        self,
        layer: DraftLayer,
        packed: torch.Tensor,
        shape: HeadShape,
        pages: torch.Tensor,
        rope: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        attention = layer.self_attn
        return kv_append_(
            pages,
            packed,
            shape,
            rope,
            slots,
            q_norm=None if attention.q_norm is None else attention.q_norm.weight,
            k_norm=None if attention.k_norm is None else attention.k_norm.weight,
            eps=self.model.config.rms_norm_eps,
        )

    def draft(
        self, anchor_ids: torch.Tensor, hidden: torch.Tensor, draws: DraftDraws, kind: DraftKind
    ) -> KernelDrafts:
        """The sequential part: anchors [R] int32, hidden [R, γ, H] → drafts."""
        model = self.model
        base = model._borrowed[1](hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        slots = SlotKernels(self, base, hidden, draws, kind)
        previous, state = anchor_ids, None
        for slot in range(hidden.shape[1]):
            features = None
            if model.markov is not None:
                embedded = model.markov.embed(previous).to(hidden.dtype)
                features, state = model.markov.step(embedded, hidden[:, slot], state)
            previous = slots.choose(slot, features, previous)
        return slots.drafts()


class SlotKernels:
    """The slots of one block: `markov_tile` and `markov_select`, and the filter pass between."""

    def __init__(
        self,
        drafter: KernelDrafter,
        base: torch.Tensor,
        hidden: torch.Tensor,
        draws: DraftDraws,
        kind: DraftKind,
    ) -> None:
        from dspark_plugins.markov_plan import MarkovShape, plan_markov

        config, confidence = drafter.model.config, drafter.model.confidence
        shape = MarkovShape(
            config.num_drafts,
            base.shape[-1],
            config.markov_rank,
            config.hidden_size if confidence is not None else 0,
            with_markov=confidence is not None and confidence.with_markov,
            with_peak=confidence is not None and confidence.with_peak,
        )
        count, device = base.shape[0], base.device
        self.weights, self.base, self.hidden = drafter.weights, base, hidden
        self.draws, self.kind = draws, kind
        self.plan = plan_markov(shape, count, dtype=hidden.dtype, device=device)
        self.redraw = None
        self.logits = self.thresholds = None
        if kind is not DraftKind.GREEDY:
            self.logits = torch.empty(base.shape, dtype=torch.float32, device=device)
            self.thresholds = torch.full(base.shape[:2], float("-inf"), device=device)
        if kind is DraftKind.FILTERED:
            bare = MarkovShape(config.num_drafts, base.shape[-1])
            self.redraw = plan_markov(bare, count, dtype=torch.float32, device=device)

    def choose(
        self, slot: int, features: torch.Tensor | None, previous: torch.Tensor
    ) -> torch.Tensor:
        """Draw one slot; returns the drafts [R] int32."""
        from dspark_plugins.markov import run_markov_slot
        from dspark_plugins.markov_plan import HeadWeights

        features = None if features is None else features.contiguous()
        hidden = self.hidden if self.plan.shape.hidden_size else None
        run_markov_slot(
            self.plan,
            slot,
            self.base,
            features,
            previous,
            hidden,
            self.weights,
            self._slot_draws(slot, with_noise=self.kind is DraftKind.SAMPLED),
            self.logits,
        )
        if self.redraw is None or self.logits is None:
            return self.plan.next_ids[slot % 2]
        self._filter(slot)
        draws = self._slot_draws(slot, with_noise=True)
        run_markov_slot(self.redraw, slot, self.logits, None, previous, None, HeadWeights(), draws)
        return self.redraw.next_ids[slot % 2]

    def drafts(self) -> KernelDrafts:
        """What all slots drew."""
        drawn = self.plan if self.redraw is None else self.redraw
        if self.logits is None:
            return KernelDrafts(drawn.token_ids, self.plan.confidence)
        return KernelDrafts(
            drawn.token_ids, self.plan.confidence, self.logits, drawn.stats, self.thresholds
        )

    def _slot_draws(self, slot: int, *, with_noise: bool) -> Any:
        from dspark_plugins.markov_plan import SlotDraws, greedy_draws

        draws = self.draws
        if not with_noise or self.thresholds is None:
            return greedy_draws(self.base.shape[0], self.base.device)
        return SlotDraws(
            scales=draws.scales,
            thresholds=self.thresholds[:, slot].contiguous(),
            modes=draws.modes,
            seeds=draws.seeds,
            anchor_positions=draws.anchor_positions,
        )

    def _filter(self, slot: int) -> None:
        """Thresholds of one slot; the filters of all other rows are off, which costs nothing."""
        assert self.logits is not None and self.thresholds is not None
        draws, columns = self.draws, torch.arange(self.base.shape[1], device=self.base.device)
        is_slot = (columns == slot)[None]

        def per_row(values: torch.Tensor, off: float) -> torch.Tensor:
            return torch.where(is_slot, values[:, None], off).flatten()

        found = thresholds_by_kernel(
            self.logits.flatten(0, 1),
            per_row(draws.scales, 1.0),
            per_row(draws.top_k, 0),
            per_row(draws.top_p, 1.0),
            per_row(draws.min_p, 0.0),
        )
        self.thresholds[:, slot] = found.view(self.base.shape[:2])[:, slot]


def _head_weights(model: DSparkModel) -> Any:
    """The heads' weights as the kernels take them."""
    from dspark_plugins.markov_plan import HeadWeights

    markov, confidence = model.markov, model.confidence
    weight = bias = None
    if confidence is not None:
        weight = confidence.proj.weight.detach().reshape(-1).contiguous()
        bias = weight.new_zeros(1) if confidence.proj.bias is None else confidence.proj.bias
    return HeadWeights(
        w1=None if markov is None else markov.w1.weight,
        w2=None if markov is None else markov.w2.weight,
        confidence_weight=weight,
        confidence_bias=bias,
    )
