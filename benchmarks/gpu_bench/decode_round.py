# SPDX-License-Identifier: Apache-2.0
"""One decode round on static tensors: draft, select, verify, accept, append context.

Nothing in `run` reads from the device, so that the whole round is one CUDA graph per (requests,
rung). The caller moves anchors and positions between rounds.
"""

from __future__ import annotations

import torch
from dspark_plugins.accept_drafts import plan_accept_drafts, run_accept_drafts
from dspark_plugins.markov import run_markov_block
from dspark_plugins.markov_plan import HeadWeights, MarkovShape, greedy_draws, plan_markov
from dspark_plugins.ragged_attention import AttentionShape, plan_attention_bounds
from dspark_plugins.select_drafts import plan_select_drafts, run_select_drafts

from gpu_bench.random_model import (
    DeviceBatch,
    Model,
    append_context,
    find_slots,
    run_drafter_blocks,
    run_target,
)


class DecodeRound:
    """Static tensors and plans of R requests, γ drafts and one rung."""

    def __init__(
        self,
        model: Model,
        pages: tuple[list[torch.Tensor], list[torch.Tensor]],
        page_table: torch.Tensor,
        *,
        num_drafts: int,
        rung: int,
        context_len: int,
        has_drafter: bool = True,
        has_head: bool = True,
    ) -> None:
        spec, device, count = model.spec, page_table.device, page_table.shape[0]
        self.model, self.pages, self.page_table = model, pages, page_table
        self.num_drafts, self.rung, self.count = num_drafts, rung, count
        self.has_drafter, self.has_head = has_drafter, has_head
        self.anchor_ids = torch.zeros(count, dtype=torch.int32, device=device)
        self.anchor_positions = torch.full((count,), context_len, dtype=torch.int32, device=device)
        self.capacity = torch.tensor([rung - count], dtype=torch.int32, device=device)
        caps = num_drafts if has_drafter else 0
        self.caps = torch.full((count,), caps, dtype=torch.int32, device=device)
        self.selection = plan_select_drafts(count, num_drafts, rung=rung, device=device)
        self.acceptance = plan_accept_drafts(
            count, num_drafts, spec.vocab_size, device=device, has_coupled=False
        )
        rank, hidden = (spec.markov_rank, spec.hidden_size) if has_head else (0, 0)
        shape = MarkovShape(num_drafts, spec.vocab_size, rank, hidden, with_markov=has_head)
        self.drafts = plan_markov(shape, count, dtype=model.embed.dtype, device=device)
        self.draws = greedy_draws(count, device)
        attention = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size, pages[0][0].shape[0]
        )
        sizes = {
            "num_requests": count,
            "max_kv_rows": context_len + num_drafts + 1,
            "total_kv_rows": count * (context_len + num_drafts + 1),
            "device": device,
        }
        self.target_attention = plan_attention_bounds(
            attention, num_rows=rung, max_query_len=caps + 1, **sizes
        )
        block = AttentionShape(*list(vars(attention).values())[:5], is_causal=False)
        self.block_attention = plan_attention_bounds(
            block, num_rows=count * num_drafts, max_query_len=num_drafts, **sizes
        )
        self.block_cu = torch.arange(count + 1, dtype=torch.int32, device=device) * num_drafts
        self.block_requests = torch.arange(count, device=device).repeat_interleave(num_drafts)
        self.forced_ids = torch.full((count, num_drafts), -1, dtype=torch.int32, device=device)
        """Drafts to verify instead of the drafter's, −1 = none: random weights are never right."""
        self.zeros = torch.zeros(count, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(count, num_drafts, dtype=torch.float64, device=device)

    def run(self) -> None:
        """Run the round; outputs are in `drafts`, `selection` and `acceptance`."""
        if self.has_drafter:
            self.draft()
        self.select()
        taps = self.verify()
        if self.has_drafter:
            append_context(self.model, taps, self.pages[1], self.batch)

    def draft(self) -> None:
        """Propose γ tokens per request and their confidence."""
        offsets = torch.arange(self.num_drafts, device=self.caps.device)
        positions = (self.anchor_positions[:, None] + offsets).view(-1).long()
        slots = find_slots(
            positions, self.block_requests, self.page_table, self.model.spec.page_size
        )
        batch = DeviceBatch(
            positions,
            slots,
            self.block_cu,
            self.anchor_positions,
            self.page_table,
            self.block_attention,
        )
        base, hidden = run_drafter_blocks(
            self.model, self.anchor_ids, self.num_drafts, self.pages[1], batch
        )
        model = self.model
        weights = HeadWeights(model.w1, model.w2, model.confidence_weight, model.confidence_bias)
        run_markov_block(
            self.drafts,
            base,
            self.anchor_ids,
            hidden if self.has_head else None,
            weights if self.has_head else HeadWeights(),
            self.draws,
        )
        ids = self.drafts.token_ids
        ids.copy_(torch.where(self.forced_ids >= 0, self.forced_ids, ids))

    def select(self) -> None:
        """Choose and pack the rows to verify."""
        if self.has_drafter:
            survivals = self.drafts.confidence.sigmoid().cumprod(dim=1)
        else:
            survivals = torch.zeros_like(self.drafts.confidence)
        run_select_drafts(
            self.selection,
            survivals,
            self.capacity,
            self.caps,
            self.anchor_ids,
            self.anchor_positions,
            self.drafts.token_ids,
        )

    def verify(self) -> torch.Tensor:
        """Run the target on the packed rows and accept; returns the taps."""
        chosen = self.selection
        positions = chosen.positions.long()
        slots = find_slots(
            positions, chosen.row_requests, self.page_table, self.model.spec.page_size
        )
        self.batch = DeviceBatch(
            positions,
            slots,
            chosen.cu_query_lens,
            self.anchor_positions,
            self.page_table,
            self.target_attention,
        )
        logits, taps = run_target(self.model, chosen.token_ids, self.pages[0], self.batch)
        run_accept_drafts(
            self.acceptance,
            logits=logits,
            scale=self.draws.scales,
            thresholds=None,
            cu_rows=chosen.cu_query_lens,
            draft_token_ids=self.drafts.token_ids,
            draft_lens=self.caps,
            drafts=None,
            sampled=self.zeros.bool(),
            rules=self.zeros,
            accept_uniforms=self.uniforms,
            final_uniforms=self.uniforms[:, 0].contiguous(),
            seeds=self.draws.seeds,
            anchor_positions=self.anchor_positions.long(),
        )
        return taps
