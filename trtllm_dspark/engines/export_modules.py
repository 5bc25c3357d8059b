# SPDX-License-Identifier: Apache-2.0
"""Export-side forward passes over the serving modules' own weights, through the `dspark` ops.

The arithmetic outside attention is the modules' own. Knows tensors of one engine call, not files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trtllm_dspark.engines import export_ops
from trtllm_dspark.models.drafter import DraftLayer, DSparkModel
from trtllm_dspark.models.target import DecoderLayer, TargetModel
from trtllm_dspark.ops.markov import peak_log_odds


@dataclass(frozen=True)
class PackedRows:
    """What every layer of one call shares; see `RaggedBatch` for the shapes."""

    rope: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    cu_query_lens: torch.Tensor
    context_lens: torch.Tensor
    query_offsets: torch.Tensor
    """[Q] int32 0..Q−1; its length is the longest query of the call."""

    def attend(
        self, q: torch.Tensor, pages: torch.Tensor, scale: float, is_causal: bool
    ) -> torch.Tensor:
        """[N, heads, d] → [N, heads · d] over pages that already hold the rows' K/V."""
        partials, lse = export_ops.ragged_verify_attention(
            q,
            pages,
            self.page_table,
            self.cu_query_lens,
            self.context_lens,
            self.query_offsets,
            self.slots,
            scale,
            is_causal,
        )
        out = export_ops.ragged_verify_reduce(
            partials, lse, self.cu_query_lens, self.context_lens, q
        )
        return out.flatten(1, 2)


class ExportedTarget(nn.Module):
    """The target of one engine call: logits of the wanted rows, taps, new pages."""

    def __init__(self, model: TargetModel, tap_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self.tap_layers = tap_layers

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cu_query_lens: torch.Tensor,
        context_lens: torch.Tensor,
        page_table: torch.Tensor,
        query_offsets: torch.Tensor,
        logit_rows: torch.Tensor,
        kv_pages: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """(logits [M, V] float32, taps [N, T·H] with taps, new pages of every layer)."""
        model = self.model
        rope = model.rope_table.index_select(0, positions)
        rows = PackedRows(rope, slots, page_table, cu_query_lens, context_lens, query_offsets)
        x = model.embed_tokens(token_ids)
        tapped, new_pages = {-1: x}, []
        for index, (layer, pages) in enumerate(zip(model.layers, kv_pages, strict=True)):
            assert isinstance(layer, DecoderLayer)
            x, pages = _run_target_layer(layer, x, pages, rows)
            tapped[index] = x
            new_pages.append(pages)
        logits = model.compute_logits(x.index_select(0, logit_rows))
        if not self.tap_layers:
            return (logits, *new_pages)
        return (logits, torch.cat([tapped[i] for i in self.tap_layers], dim=-1), *new_pages)


def _run_target_layer(
    layer: DecoderLayer, x: torch.Tensor, pages: torch.Tensor, rows: PackedRows
) -> tuple[torch.Tensor, torch.Tensor]:
    attention = layer.self_attn
    shape, has_norm = attention.shape, attention.q_norm is not None
    ones = x.new_ones(shape.head_dim)
    q, pages = export_ops.kv_append(
        pages,
        attention.qkv_proj(layer.input_layernorm(x)),
        rows.rope,
        rows.slots,
        attention.q_norm.weight if attention.q_norm is not None else ones,
        attention.k_norm.weight if attention.k_norm is not None else ones,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        has_norm,
        attention.eps,
    )
    x = x + attention.o_proj(rows.attend(q, pages, attention.scale, True))
    return x + layer.mlp(layer.post_attention_layernorm(x)), pages


class ExportedDrafter(nn.Module):
    """The drafter of one engine call: append context rows, then draft one block per request.

    A call without new rows, or without blocks, points one row or one request at the scratch page.
    """

    def __init__(self, model: DSparkModel, page_size: int) -> None:
        super().__init__()
        self.model = model
        self.embed_tokens, self.lm_head = model._borrowed
        self.page_size = page_size

    def forward(
        self,
        taps: torch.Tensor,
        row_positions: torch.Tensor,
        row_slots: torch.Tensor,
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        page_table: torch.Tensor,
        kv_pages: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """(token_ids [R, γ] int32, confidence logits [R, γ] float32, new pages of every layer)."""
        rows = self._block_rows(anchor_positions, page_table)
        context = self.model.encode_context(taps)
        context_rope = self.model.rope_table.index_select(0, row_positions)
        x, new_pages = self.model.embed_blocks(anchor_ids), []
        for layer, pages in zip(self.model.layers, kv_pages, strict=True):
            assert isinstance(layer, DraftLayer)
            _, pages = self._append(layer, context, pages, context_rope, row_slots)
            q, pages = self._append(layer, layer.input_layernorm(x), pages, rows.rope, rows.slots)
            attended = rows.attend(q, pages, self.model.attention_scale, False)
            x = x + layer.self_attn.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            new_pages.append(pages)
        token_ids, confidence = self._draft(anchor_ids, self.model.finish_blocks(x))
        return (token_ids, confidence, *new_pages)

    def _block_rows(self, anchor_positions: torch.Tensor, page_table: torch.Tensor) -> PackedRows:
        count, length = anchor_positions.shape[0], self.model.block_len
        offsets = torch.arange(length, dtype=torch.int32)
        positions = anchor_positions[:, None] + offsets[None, :]
        pages = page_table.gather(1, (positions // self.page_size).long())
        slots = pages.long() * self.page_size + (positions % self.page_size).long()
        flat = positions.reshape(count * length)
        cu_query_lens = torch.arange(count + 1, dtype=torch.int32) * length
        return PackedRows(
            self.model.rope_table.index_select(0, flat),
            slots.reshape(count * length),
            page_table,
            cu_query_lens,
            anchor_positions,
            offsets,
        )

    def _append(
        self,
        layer: DraftLayer,
        rows: torch.Tensor,
        pages: torch.Tensor,
        rope: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = layer.self_attn
        packed = [p(rows) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        ones = rows.new_ones(attention.head_dim)
        return export_ops.kv_append(
            pages,
            torch.cat(packed, dim=-1),
            rope,
            slots,
            attention.q_norm.weight if attention.q_norm is not None else ones,
            attention.k_norm.weight if attention.k_norm is not None else ones,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            attention.q_norm is not None,
            self.model.config.rms_norm_eps,
        )

    def _draft(
        self, anchor_ids: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The greedy sequential part, unrolled over γ."""
        model, gamma = self.model, self.model.config.num_drafts
        base = self.lm_head(hidden.flatten(0, 1)).view(hidden.shape[0], gamma, -1)
        previous, state, token_ids, confidence = anchor_ids, None, [], []
        for slot in range(gamma):
            features = embedded = None
            if model.markov is not None:
                embedded = model.markov.embed(previous).to(hidden.dtype)
                features, state = model.markov.step(embedded, hidden[:, slot], state)
            previous, peak = self._choose(base[:, slot], features)
            if model.confidence is not None:
                peak = model.confidence(hidden[:, slot], embedded, peak)
            confidence.append(peak)
            token_ids.append(previous)
        return torch.stack(token_ids, dim=1), torch.stack(confidence, dim=1)

    def _choose(
        self, base: torch.Tensor, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Arg-max [R] int32 of U + W2 f and its log-odds [R]; who does not read them drops them."""
        if features is None or self.model.markov is None:
            logits = base.float()
            return logits.argmax(dim=-1).to(torch.int32), peak_log_odds(logits)
        logits, ids, mass = export_ops.markov_tile(base, features, self.model.markov.w2.weight)
        top = logits.amax(dim=-1, keepdim=True)
        others = (mass * (logits - top).exp()).sum(dim=-1) - 1.0
        peak = -others.clamp_min(torch.finfo(torch.float32).tiny).log()
        return export_ops.markov_select(logits, ids), peak
