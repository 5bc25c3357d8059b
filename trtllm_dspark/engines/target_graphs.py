# SPDX-License-Identifier: Apache-2.0
"""The captured target step of every rung, on inputs and outputs that the rungs share.

A step fills the static inputs, replays its rung and reads views of the static outputs; nothing is
allocated and nothing waits. Knows packed rows, not requests.
"""

from __future__ import annotations

import torch

from trtllm_dspark.engines.protocol import TargetOutput, TargetStep
from trtllm_dspark.engines.static_inputs import StaticBlock, fill
from trtllm_dspark.engines.step_limits import StepLimits, plan_rung
from trtllm_dspark.engines.torch_graphs import Call, Capture, GraphSet
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.kv_append import HeadShape
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots


class TargetGraphs:
    """Owns the static buffers of target steps; pages and weights belong to the engine."""

    def __init__(
        self,
        model: TargetModel,
        limits: StepLimits,
        kv_pages: list[torch.Tensor],
        tap_layers: tuple[int, ...],
        capture: Capture,
    ) -> None:
        config, info = model.config, limits.info
        self.model, self.limits, self.kv_pages = model, limits, kv_pages
        self.tap_layers = tap_layers
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.device = model.embed_tokens.weight.device
        self.graphs = GraphSet("target step", capture)
        rows, requests = info.rungs[-1], info.max_num_requests
        self.inputs = StaticBlock(
            {
                "token_ids": (torch.int64, (rows,)),
                "positions": (torch.int64, (rows,)),
                "slots": (torch.int64, (rows,)),
                "logit_rows": (torch.int64, (limits.max_decode_rows,)),
                "cu_query_lens": (torch.int32, (requests + 1,)),
                "context_lens": (torch.int32, (requests,)),
                "page_table": (torch.int32, (requests, limits.table_width)),
            },
            self.device,
        )
        shape = (limits.max_decode_rows, config.vocab_size)
        self.logits = torch.zeros(shape, dtype=torch.float32, device=self.device)
        width = len(tap_layers) * config.hidden_size
        dtype = model.embed_tokens.weight.dtype
        self.taps = torch.zeros((rows if width else 0, width), dtype=dtype, device=self.device)

    def fits(self, step: TargetStep) -> bool:
        """Whether the graphs hold this step (prompts scored row by row want too many logits)."""
        return (
            len(step.context_lens) <= self.limits.info.max_num_requests
            and step.page_table.shape[1] <= self.limits.table_width
            and len(step.logit_rows) <= min(step.rung, self.limits.max_decode_rows)
        )

    def run(self, step: TargetStep) -> TargetOutput:
        """Replay the step's rung; the outputs are good until the next target step."""
        num_rows, rung = len(step.token_ids), step.rung
        host = self.inputs.begin()
        slots = flatten_slots(
            step.positions, step.cu_query_lens, step.page_table, self.limits.info.page_size
        )
        for name, values in (
            ("token_ids", step.token_ids),
            ("positions", step.positions),
            ("slots", slots),
        ):
            fill(host[name][:rung], values)
        fill(host["logit_rows"], step.logit_rows)
        fill(host["cu_query_lens"], step.cu_query_lens, padding=num_rows)
        fill(host["context_lens"], step.context_lens)
        fill(host["page_table"], step.page_table)
        self.inputs.upload()
        self.graphs.run(rung, lambda: self._make_call(rung))
        taps = self.taps[:num_rows] if self.tap_layers else None
        return TargetOutput(self.logits[: len(step.logit_rows)], taps)

    def _make_call(self, rung: int) -> Call:
        inputs, num_logits = self.inputs.device, min(rung, self.limits.max_decode_rows)

        def call() -> None:
            batch = self.ragged_batch(rung)
            token_ids = inputs["token_ids"][:rung]
            hidden, taps = self.model(token_ids, self.kv_pages, batch, self.tap_layers)
            rows = inputs["logit_rows"][:num_logits]
            logits = self.model.compute_logits(hidden.index_select(0, rows))
            self.logits[:num_logits].copy_(logits)
            if taps is not None:
                self.taps[:rung].copy_(taps)

        return call

    def ragged_batch(self, rung: int) -> RaggedBatch:
        """The static inputs as the ops take them; allocates the attention's partials."""
        inputs, info = self.inputs.device, self.limits.info
        plan = plan_rung(self.limits, self.heads, rung, info.max_num_requests, self.device)
        return RaggedBatch(
            positions=inputs["positions"][:rung],
            slots=inputs["slots"][:rung],
            cu_query_lens=inputs["cu_query_lens"],
            context_lens=inputs["context_lens"],
            page_table=inputs["page_table"],
            page_size=info.page_size,
            kernel_plan=plan,
        )
