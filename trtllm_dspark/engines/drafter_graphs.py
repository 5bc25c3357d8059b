# SPDX-License-Identifier: Apache-2.0
"""The captured drafting call of every requests bucket, and the captured context rows of every rung.

Drafting is keyed by (bucket, how drafts are drawn). Knows anchors and pages, not requests.
"""

from __future__ import annotations

import numpy as np
import torch

from trtllm_dspark.engines.kernel_drafter import DraftDraws, DraftKind, KernelDrafter, KernelDrafts
from trtllm_dspark.engines.protocol import ContextAppend, DrafterOutput, DrafterStep, DraftSampling
from trtllm_dspark.engines.static_inputs import Fields, StaticBlock, fill
from trtllm_dspark.engines.step_limits import StepLimits, plan_blocks
from trtllm_dspark.engines.torch_graphs import Call, Capture, GraphSet
from trtllm_dspark.ops.filter_probs import inverse_temperatures
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots

GREEDY_MODE, KEYED_MODE, COUPLED_MODE = 0, 1, 2
"""How one request's drafts are drawn, as the kernels count."""


def draft_fields(limits: StepLimits) -> Fields:
    """The static inputs of a drafting call."""
    count = limits.info.max_num_requests
    per_request = {
        "anchor_ids": torch.int32,
        "anchor_positions": torch.int32,
        "modes": torch.int32,
        "seeds": torch.int64,
        "scales": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
    }
    rows = count * limits.block_len
    return {
        **{name: (dtype, (count,)) for name, dtype in per_request.items()},
        "block_positions": (torch.int64, (rows,)),
        "block_slots": (torch.int64, (rows,)),
        "page_table": (torch.int32, (count, limits.table_width)),
    }


def fill_draft_inputs(
    host: dict[str, np.ndarray], step: DrafterStep, limits: StepLimits, bucket: int
) -> DraftKind:
    """Write a step into the host's views; padding requests draft on the scratch page."""
    count, length = len(step.anchor_ids), limits.block_len
    positions = (step.anchor_positions[:, None] + np.arange(length)).reshape(-1)
    cu = np.arange(0, (count + 1) * length, length, dtype=np.int32)
    slots = flatten_slots(positions, cu, _widened(step.page_table, limits), limits.info.page_size)
    fill(host["anchor_ids"][:bucket], step.anchor_ids)
    fill(host["anchor_positions"][:bucket], step.anchor_positions)
    fill(host["block_positions"][: bucket * length], positions)
    fill(host["block_slots"][: bucket * length], slots)
    fill(host["page_table"], step.page_table)
    return _fill_sampling(host, step.sampling, bucket)


def _widened(page_table: np.ndarray, limits: StepLimits) -> np.ndarray:
    """The table with scratch pages up to the limit: blocks of requests that must not draft."""
    missing = limits.table_width - page_table.shape[1]
    return np.pad(page_table, ((0, 0), (0, max(missing, 0))))


def _fill_sampling(host: dict[str, np.ndarray], sampling: DraftSampling, bucket: int) -> DraftKind:
    is_greedy = (sampling.temperature == 0.0) | (sampling.top_k == 1)
    modes = np.where(is_greedy, GREEDY_MODE, np.where(sampling.coupled, COUPLED_MODE, KEYED_MODE))
    fill(host["modes"][:bucket], modes)
    fill(host["seeds"][:bucket], sampling.seeds.view(np.int64))
    fill(host["scales"][:bucket], inverse_temperatures(sampling.temperature), padding=1)
    fill(host["top_k"][:bucket], np.where(is_greedy, 0, sampling.top_k))
    fill(host["top_p"][:bucket], np.where(is_greedy, 1.0, sampling.top_p), padding=1)
    fill(host["min_p"][:bucket], np.where(is_greedy, 0.0, sampling.min_p))
    if is_greedy.all():
        return DraftKind.GREEDY
    part = slice(0, len(is_greedy))
    filters = (host["top_k"][part] > 0) | (host["top_p"][part] < 1) | (host["min_p"][part] > 0)
    return DraftKind.FILTERED if filters.any() else DraftKind.SAMPLED


def run_draft(
    drafter: KernelDrafter,
    limits: StepLimits,
    inputs: dict[str, torch.Tensor],
    bucket: int,
    kind: DraftKind,
) -> KernelDrafts:
    """Draft for the first `bucket` requests of the static inputs; launches only."""
    device = inputs["anchor_ids"].device
    rows = bucket * limits.block_len
    cu = torch.arange(bucket + 1, dtype=torch.int32, device=device) * limits.block_len
    batch = RaggedBatch(
        positions=inputs["block_positions"][:rows],
        slots=inputs["block_slots"][:rows],
        cu_query_lens=cu,
        context_lens=inputs["anchor_positions"][:bucket],
        page_table=inputs["page_table"][:bucket],
        page_size=limits.info.page_size,
        is_causal=False,
        kernel_plan=plan_blocks(limits, drafter.shape, bucket, device),
    )
    anchors = inputs["anchor_ids"][:bucket]
    hidden = drafter.run_blocks(anchors, batch)
    return drafter.draft(anchors, hidden, draft_draws(inputs, bucket), kind)


def draft_draws(inputs: dict[str, torch.Tensor], bucket: int) -> DraftDraws:
    """How the first `bucket` requests draw."""
    names = ("scales", "modes", "seeds", "anchor_positions", "top_k", "top_p", "min_p")
    return DraftDraws(**{name: inputs[name][:bucket] for name in names})


class DrafterGraphs:
    """Owns the static buffers of drafting calls and of context rows."""

    def __init__(
        self, drafter: KernelDrafter, limits: StepLimits, tap_width: int, capture: Capture
    ) -> None:
        self.drafter, self.limits = drafter, limits
        weight = drafter.model.fc.weight
        self.device = weight.device
        self.blocks = GraphSet("drafting call", capture)
        self.rows = GraphSet("context rows", capture)
        self.inputs = StaticBlock(draft_fields(limits), self.device)
        shape = (limits.info.max_num_requests, drafter.model.config.num_drafts)
        self.results = StaticBlock(
            {"token_ids": (torch.int32, shape), "confidence": (torch.float32, shape)}, self.device
        )
        self.probs = torch.zeros(0, device=self.device)
        """[max_num_requests, γ, V] once somebody samples."""
        most = limits.info.rungs[-1]
        self.row_inputs = StaticBlock(
            {"positions": (torch.int64, (most,)), "slots": (torch.int64, (most,))}, self.device
        )
        self.taps = torch.zeros((most, tap_width), dtype=weight.dtype, device=self.device)

    def run(self, step: DrafterStep) -> DrafterOutput:
        """Draft one block per request and wait for it: the caller plans on what it reads."""
        count, bucket = len(step.anchor_ids), self.limits.bucket_for(len(step.anchor_ids))
        kind = fill_draft_inputs(self.inputs.begin(), step, self.limits, bucket)
        if kind is not DraftKind.GREEDY and not self.probs.numel():
            shape = (*self.results.device["token_ids"].shape, self.limits.info.vocab_size)
            self.probs = torch.zeros(shape, device=self.device)
        self.inputs.upload()
        self.blocks.run((bucket, kind), lambda: self._make_call(bucket, kind))
        self.results.download()
        found = self.results.begin()
        return DrafterOutput(
            found["token_ids"][:count].copy(),
            found["confidence"][:count].copy(),
            None if kind is DraftKind.GREEDY else self.probs[:count],
        )

    def _make_call(self, bucket: int, kind: DraftKind) -> Call:
        inputs, results = self.inputs.device, self.results.device

        def call() -> None:
            drafts = run_draft(self.drafter, self.limits, inputs, bucket, kind)
            results["token_ids"][:bucket].copy_(drafts.token_ids)
            results["confidence"][:bucket].copy_(drafts.confidence_logits)
            if kind is not DraftKind.GREEDY:
                self.probs[:bucket].copy_(drafts.probs(inputs["scales"][:bucket]))

        return call

    def append(self, rows: ContextAppend) -> None:
        """Write context rows, in parts of at most the last rung; does not wait."""
        page_size, most = self.limits.info.page_size, self.limits.info.rungs[-1]
        slots = flatten_slots(rows.positions, rows.cu_row_lens, rows.page_table, page_size)
        for start in range(0, len(slots), most):
            part = slice(start, start + most)
            self._append_part(rows.taps[part], rows.positions[part], slots[part])

    def _append_part(self, taps: torch.Tensor, positions: np.ndarray, slots: np.ndarray) -> None:
        rung = next(n for n in self.limits.info.rungs if n >= len(slots))
        host = self.row_inputs.begin()
        fill(host["positions"][:rung], positions)
        fill(host["slots"][:rung], slots)
        self.row_inputs.upload()
        self.taps[: len(slots)].copy_(taps)
        self.rows.run(rung, lambda: self._make_append(rung))

    def _make_append(self, rung: int) -> Call:
        inputs = self.row_inputs.device

        def call() -> None:
            positions, slots = inputs["positions"][:rung], inputs["slots"][:rung]
            self.drafter.append_context(self.taps[:rung], positions, slots)

        return call
