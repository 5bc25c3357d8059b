# SPDX-License-Identifier: Apache-2.0
"""The `Engine` protocol in PyTorch: target, K/V pages and, optionally, a drafter on one device.

Every step runs exactly one rung: rows are padded up to it and padding rows point at the scratch
page. It knows shapes and pages, not requests.
"""

from __future__ import annotations

import numpy as np
import torch

from trtllm_dspark.engines.protocol import (
    ContextAppend,
    DrafterOutput,
    DrafterStep,
    TargetOutput,
    TargetStep,
)
from trtllm_dspark.errors import EngineError
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.attention import plan_attention
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots
from trtllm_dspark.types import EngineInfo, IntArray


class TorchEngine:
    """Runs one model with torch. Not thread-safe: one thread drives it."""

    def __init__(
        self, model: TargetModel, info: EngineInfo, tap_layers: tuple[int, ...] = ()
    ) -> None:
        self.info = info
        self.model = model
        self.tap_layers = tap_layers
        config = model.config
        self.q_per_kv = config.num_heads // config.num_kv_heads
        self.dtype = model.embed_tokens.weight.dtype
        self.device = model.embed_tokens.weight.device
        self.kv_pages = [
            torch.zeros(
                info.num_pages,
                info.page_size,
                2,
                config.num_kv_heads,
                config.head_dim,
                dtype=self.dtype,
                device=self.device,
            )
            for _ in range(config.num_layers)
        ]

    @torch.inference_mode()
    def run_target(self, step: TargetStep) -> TargetOutput:
        """Append K/V of the new rows; return logits of `logit_rows` and taps of all real rows."""
        check_target_step(step, self.info)
        num_rows = len(step.token_ids)
        token_ids = _padded(step.token_ids, step.rung)
        batch = self._batch(step)
        hidden, taps = self.model(
            torch.from_numpy(token_ids).to(self.device), self.kv_pages, batch, self.tap_layers
        )
        rows = torch.from_numpy(step.logit_rows.astype(np.int64)).to(self.device)
        logits = self.model.compute_logits(hidden.index_select(0, rows))
        return TargetOutput(logits, None if taps is None else taps[:num_rows])

    def _batch(self, step: TargetStep) -> RaggedBatch:
        positions = _padded(step.positions, step.rung)
        slots = flatten_slots(positions, step.cu_query_lens, step.page_table, self.info.page_size)
        plan = plan_attention(
            step.cu_query_lens,
            step.context_lens,
            step.page_table,
            self.info.page_size,
            q_per_kv=self.q_per_kv,
            dtype=self.dtype,
        )

        def put(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x).to(self.device)

        return RaggedBatch(
            positions=put(positions),
            slots=put(slots),
            cu_query_lens=put(step.cu_query_lens),
            context_lens=put(step.context_lens),
            page_table=put(step.page_table),
            page_size=self.info.page_size,
            plan=plan,
        )

    def append_context(self, rows: ContextAppend) -> None:
        """Refuse: this engine was loaded without a drafter."""
        raise EngineError(
            "append_context was called on an engine that was loaded without a drafter"
        )

    def run_drafter(self, step: DrafterStep) -> DrafterOutput:
        """Refuse: this engine was loaded without a drafter."""
        raise EngineError("run_drafter was called on an engine that was loaded without a drafter")


def _padded(values: IntArray, rung: int) -> np.ndarray:
    padded = np.zeros(rung, np.int64)
    padded[: len(values)] = values
    return padded


def check_target_step(step: TargetStep, info: EngineInfo) -> None:
    """Refuse a step whose shapes or ids cannot run, with the value found and what is allowed."""
    num_rows = len(step.token_ids)
    if step.rung not in info.rungs:
        raise EngineError(f"rung {step.rung} is not on the ladder {info.rungs}")
    if num_rows > step.rung or int(step.cu_query_lens[-1]) != num_rows:
        raise EngineError(
            f"{num_rows} rows, cu_query_lens[-1] = {int(step.cu_query_lens[-1])}, rung {step.rung}:"
            " rows and prefix sums must agree and fit the rung"
        )
    _check_range("token ids", step.token_ids, info.vocab_size, "the vocabulary")
    _check_range("page ids", step.page_table, info.num_pages, "the page pool")


def _check_range(name: str, values: IntArray, size: int, what: str) -> None:
    if not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= size:
        raise EngineError(f"{name} from {low} to {high} are outside {what} of {size}")
