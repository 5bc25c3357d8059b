# SPDX-License-Identifier: Apache-2.0
"""The `Engine` protocol in PyTorch: target, K/V pages and, optionally, a drafter on one device.

Every step runs exactly one rung: rows are padded up to it and padding rows point at the scratch
page. It knows shapes and pages, not requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trtllm_dspark.engines.protocol import (
    ContextAppend,
    DrafterOutput,
    DrafterStep,
    DraftSampling,
    TargetOutput,
    TargetStep,
)
from trtllm_dspark.engines.step_checks import (
    check_drafter_step,
    check_pages,
    check_target_step,
)
from trtllm_dspark.errors import EngineError
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.attention import plan_attention
from trtllm_dspark.ops.huge_pages import back_pages
from trtllm_dspark.ops.markov import SlotSampling
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots
from trtllm_dspark.types import EngineInfo, IntArray


class TorchEngine:
    """Runs one model with torch. Not thread-safe: one thread drives it."""

    def __init__(
        self, model: TargetModel, info: EngineInfo, drafter: DSparkModel | None = None
    ) -> None:
        self.info = info
        self.model = model
        self.drafter = drafter
        self.tap_layers = () if drafter is None else drafter.config.target_layer_ids
        config = model.config
        self.q_per_kv = config.num_heads // config.num_kv_heads
        self.dtype = model.embed_tokens.weight.dtype
        self.device = model.embed_tokens.weight.device
        self.kv_pages = self._allocate_pages(
            config.num_layers, config.num_kv_heads, config.head_dim
        )
        self.drafter_pages: list[torch.Tensor] = []
        if drafter is not None:
            shape = drafter.config
            self.drafter_pages = self._allocate_pages(
                shape.num_layers, shape.num_kv_heads, shape.head_dim
            )

    def _allocate_pages(self, num_layers: int, num_heads: int, dim: int) -> list[torch.Tensor]:
        shape = (self.info.num_pages, self.info.page_size, 2, num_heads, dim)
        pages = [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(num_layers)
        ]
        if self.device.type == "cpu":
            back_pages(pages)
        return pages

    @torch.inference_mode()
    def run_target(self, step: TargetStep) -> TargetOutput:
        """Append K/V of the new rows; return logits of `logit_rows` and taps of all real rows."""
        check_target_step(step, self.info)
        num_rows = len(step.token_ids)
        batch = self._batch(
            _padded(step.positions, step.rung),
            step.cu_query_lens,
            step.context_lens,
            step.page_table,
            q_per_kv=self.q_per_kv,
        )
        token_ids = self._put(_padded(step.token_ids, step.rung))
        hidden, taps = self.model(token_ids, self.kv_pages, batch, self.tap_layers)
        rows = self._put(step.logit_rows.astype(np.int64))
        logits = self.model.compute_logits(hidden.index_select(0, rows))
        return TargetOutput(logits, None if taps is None else taps[:num_rows])

    @torch.inference_mode()
    def append_context(self, rows: ContextAppend) -> None:
        """Write the drafter's K/V of new context rows (no drafting)."""
        drafter = self._require_drafter("append_context")
        check_pages(rows.page_table, self.info)
        positions = rows.positions.astype(np.int64)
        slots = flatten_slots(positions, rows.cu_row_lens, rows.page_table, self.info.page_size)
        drafter.append_context(
            rows.taps, self._put(positions), self._put(slots), self.drafter_pages
        )

    @torch.inference_mode()
    def run_drafter(self, step: DrafterStep) -> DrafterOutput:
        """Draft one block per request."""
        drafter = self._require_drafter("run_drafter")
        check_drafter_step(step, self.info)
        count, length = len(step.anchor_ids), drafter.block_len
        positions = (step.anchor_positions[:, None] + np.arange(length)).reshape(-1)
        shape = drafter.config
        batch = self._batch(
            positions.astype(np.int64),
            np.arange(0, (count + 1) * length, length, dtype=np.int32),
            step.anchor_positions,
            step.page_table,
            q_per_kv=shape.num_heads // shape.num_kv_heads,
            is_causal=False,
        )
        anchors = self._put(step.anchor_ids.astype(np.int64))
        drafted = drafter.draft(
            anchors, self.drafter_pages, batch, _slot_sampling(step.sampling, step.anchor_positions)
        )
        return DrafterOutput(
            drafted.token_ids.cpu().numpy().astype(np.int32),
            drafted.confidence_logits.float().cpu().numpy(),
            drafted.draft_probs,
        )

    def _require_drafter(self, call: str) -> DSparkModel:
        if self.drafter is None:
            raise EngineError(f"{call} was called on an engine loaded without a drafter")
        return self.drafter

    def _batch(
        self,
        positions: np.ndarray,
        cu_query_lens: IntArray,
        context_lens: IntArray,
        page_table: IntArray,
        *,
        q_per_kv: int,
        is_causal: bool = True,
    ) -> RaggedBatch:
        slots = flatten_slots(positions, cu_query_lens, page_table, self.info.page_size)
        return RaggedBatch(
            positions=self._put(positions),
            slots=self._put(slots),
            cu_query_lens=self._put(cu_query_lens),
            context_lens=self._put(context_lens),
            page_table=self._put(page_table),
            page_size=self.info.page_size,
            is_causal=is_causal,
            **self._plan_attention(
                (cu_query_lens, context_lens, page_table), len(positions), q_per_kv, is_causal
            ),
        )

    def _plan_attention(
        self,
        lengths: tuple[IntArray, IntArray, IntArray],
        num_rows: int,
        q_per_kv: int,
        is_causal: bool,
    ) -> dict[str, Any]:
        """The plan that a batch's attention runs by, as the `RaggedBatch` field it belongs to.

        `lengths`: cu_query_lens, context_lens and page_table; `num_rows` with padding.
        """
        plan = plan_attention(
            *lengths,
            self.info.page_size,
            q_per_kv=q_per_kv,
            dtype=self.dtype,
            is_causal=is_causal,
        )
        return {"plan": plan}

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _slot_sampling(sampling: DraftSampling, anchor_positions: IntArray) -> SlotSampling | None:
    """The drafter's view of the sampling parameters; None when every request is greedy."""
    slots = SlotSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seeds=sampling.seeds,
        anchor_positions=anchor_positions,
        coupled=sampling.coupled,
    )
    return None if slots.is_greedy.all() else slots


def _padded(values: IntArray, rung: int) -> np.ndarray:
    padded = np.zeros(rung, np.int64)
    padded[: len(values)] = values
    return padded
