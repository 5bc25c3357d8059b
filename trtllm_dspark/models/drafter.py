# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter: a DFlash backbone with injected context K/V, and its heads.

Context rows come from tapped target states and are written once; block rows (anchor + masks)
attend them without a causal mask. Embedding and output head are the target's and are not part of
the module's state. It knows nothing of requests, pages or how a draft is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.models.heads import ConfidenceHead, SequentialHead
from trtllm_dspark.models.rope import build_rope_table
from trtllm_dspark.models.target import GatedMLP, RMSNorm
from trtllm_dspark.ops.attention import ragged_verify_attention
from trtllm_dspark.ops.kv_append import apply_rope, scatter_kv_
from trtllm_dspark.ops.linear import Linear
from trtllm_dspark.ops.markov import SlotSampling, markov_sample
from trtllm_dspark.ops.ragged import RaggedBatch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [N, heads, d], k [N, kv_heads, d], v) of the block rows → attention output [N, heads, d]."""


@dataclass(frozen=True)
class DraftedTokens:
    """One block per request, in the model's own memory."""

    token_ids: torch.Tensor
    """[R, γ] int64"""
    confidence_logits: torch.Tensor
    """[R, γ] float32"""
    draft_probs: torch.Tensor | None
    """[R, γ, V] float32 q, None when every request is drafted greedily."""


class DraftAttention(nn.Module):
    """Projections of one layer; what is attended is the caller's business."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, bias = config.head_dim, config.attention_bias
        kv_rows = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv_rows, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv_rows, bias=bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project_queries(self, rows: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """[N, H] → rotated queries [N, heads, d]."""
        q = self.q_proj(rows).view(-1, self.num_heads, self.head_dim)
        return apply_rope(q if self.q_norm is None else self.q_norm(q), rope)

    def project_keys_values(
        self, rows: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, H] → rotated keys and values, [N, kv_heads, d] each."""
        k = self.k_proj(rows).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(rows).view(-1, self.num_kv_heads, self.head_dim)
        return apply_rope(k if self.k_norm is None else self.k_norm(k), rope), v


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP with residuals over block rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[N, H] → [N, H]."""
        normed = self.input_layernorm(x)
        q = self.self_attn.project_queries(normed, rope)
        k, v = self.self_attn.project_keys_values(normed, rope)
        x = x + self.self_attn.o_proj(attend(q, k, v).reshape(x.shape[0], -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class DSparkModel(nn.Module):
    """See the module docstring. `embed_tokens` and `lm_head` are borrowed from the target.

    Block rows of a request take positions anchor..anchor+`block_len`−1. With `label_shift` slot k
    predicts anchor+k+1 and all γ slots are drafts; without it row 0 (the anchor's) is not used.
    """

    rope_table: torch.Tensor

    def __init__(
        self,
        config: DrafterConfig,
        embed_tokens: nn.Embedding,
        lm_head: nn.Module,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._borrowed = (embed_tokens, lm_head)
        taps = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = Linear(taps, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov = SequentialHead(config) if config.head_type != "none" else None
        self.confidence = ConfidenceHead(config) if config.confidence_head else None
        table = build_rope_table(
            config.head_dim,
            (max_positions or config.max_position_embeddings) + config.num_drafts + 1,
            config.rope_theta,
            config.rope_scaling,
        )
        self.register_buffer("rope_table", table, persistent=False)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> DSparkModel:
        """Move or cast weights; the rotary table stays float32, whatever the cast."""
        table = self.rope_table
        super()._apply(fn, recurse)
        self.rope_table = table.to(self.rope_table.device)
        return self

    @property
    def block_len(self) -> int:
        """Input rows of one block: γ with shifted labels, γ+1 without."""
        return self.config.num_drafts + (0 if self.config.label_shift else 1)

    @property
    def attention_scale(self) -> float:
        """Factor on query-key products."""
        return float(self.config.head_dim**-0.5)

    def encode_context(self, taps: torch.Tensor) -> torch.Tensor:
        """Tapped states [C, T·H] → context rows [C, H], the same for every layer."""
        return self.hidden_norm(self.fc(taps))

    def project_context(
        self, taps: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every layer's K and V of context rows ([C, kv_heads, d] each)."""
        rows = self.encode_context(taps)
        rope = self.rope_table.index_select(0, positions)
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            yield layer.self_attn.project_keys_values(rows, rope)

    def append_context(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv_pages: list[torch.Tensor],
    ) -> None:
        """Write K/V of C context rows (any mix of requests) into `slots` of every layer's pages.

        taps [C, T·H], positions [C] int64 absolute, slots [C] int64 (page · page_size + offset).
        """
        for pages, (k, v) in zip(kv_pages, self.project_context(taps, positions), strict=True):
            scatter_kv_(pages, k, v, slots)

    def embed_blocks(self, anchor_ids: torch.Tensor) -> torch.Tensor:
        """[R] anchors → [R · block_len, H]: the anchor's embedding, then the mask's."""
        ids = anchor_ids.new_full((anchor_ids.shape[0], self.block_len), self.config.mask_token_id)
        ids[:, 0] = anchor_ids
        return self._borrowed[0](ids.view(-1))

    def finish_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """[R · block_len, H] after the last layer → hidden states of the γ drafts, [R, γ, H]."""
        hidden = self.norm(x).view(-1, self.block_len, self.config.hidden_size)
        return hidden[:, self.block_len - self.config.num_drafts :]

    def run_blocks(
        self, anchor_ids: torch.Tensor, kv_pages: list[torch.Tensor], batch: RaggedBatch
    ) -> torch.Tensor:
        """Hidden states [R, γ, H] of one block per request; the block's own K/V rows are scratch.

        `batch` is non-causal with block_len rows per request at positions anchor.., and
        context_lens = the anchors' positions.
        """
        x = self.embed_blocks(anchor_ids)
        rope = self.rope_table.index_select(0, batch.positions)
        for layer, pages in zip(self.layers, kv_pages, strict=True):
            x = layer(x, rope, self._paged_attend(pages, batch))
        return self.finish_blocks(x)

    def _paged_attend(self, pages: torch.Tensor, batch: RaggedBatch) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scatter_kv_(pages, k, v, batch.slots)
            return ragged_verify_attention(q, pages, batch, self.attention_scale)

        return attend

    def draft(
        self,
        anchor_ids: torch.Tensor,
        kv_pages: list[torch.Tensor],
        batch: RaggedBatch,
        sampling: SlotSampling | None = None,
    ) -> DraftedTokens:
        """Draft γ tokens per request, left to right; see `run_blocks` for `batch`."""
        hidden = self.run_blocks(anchor_ids, kv_pages, batch)
        return self.draft_from_hidden(anchor_ids, hidden, sampling)

    def draft_from_hidden(
        self, anchor_ids: torch.Tensor, hidden: torch.Tensor, sampling: SlotSampling | None = None
    ) -> DraftedTokens:
        """Run the sequential part: anchors [R], hidden [R, γ, H] → drafts; None = all greedy."""
        lm_head = self._borrowed[1]
        base = lm_head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        project = None if self.markov is None else self.markov.w2
        find_best = None if project is None else project.find_best
        previous, state, choices, confidence = anchor_ids, None, [], []
        for slot in range(hidden.shape[1]):
            features = embedded = None
            if self.markov is not None:
                embedded = self.markov.embed(previous).to(hidden.dtype)
                features, state = self.markov.step(embedded, hidden[:, slot], state)
            with_peak = self.confidence is None or self.confidence.with_peak
            choice = markov_sample(
                base[:, slot],
                features,
                project,
                slot,
                sampling,
                with_peak=with_peak,
                find_best=find_best,
            )
            if self.confidence is not None:
                peak = choice.peak_logits
                confidence.append(self.confidence(hidden[:, slot], embedded, peak))
            else:
                confidence.append(choice.peak_logits)
            choices.append(choice)
            previous = choice.token_ids
        return DraftedTokens(
            torch.stack([c.token_ids for c in choices], dim=1),
            torch.stack(confidence, dim=1),
            None
            if sampling is None or sampling.is_greedy.all()
            else torch.stack([c.draft_probs for c in choices if c.draft_probs is not None], dim=1),
        )

    def pack_(self) -> None:
        """Give every linear layer its machine-specific weight layout (after loading weights)."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_()
