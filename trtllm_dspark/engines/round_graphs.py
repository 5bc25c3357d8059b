# SPDX-License-Identifier: Apache-2.0
"""The captured round of every (requests bucket, rung): draft, select, verify, accept, append.

Verify lengths are chosen on the device from current survivals under the host's capacity, so that
nothing waits for the host between drafting and accepting. The host reads one block at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtllm_dspark.engines.drafter_graphs import draft_fields, fill_draft_inputs, run_draft
from trtllm_dspark.engines.kernel_drafter import DraftKind, KernelDrafter, KernelDrafts
from trtllm_dspark.engines.protocol import AcceptSampling, RoundOutput, RoundStep
from trtllm_dspark.engines.static_inputs import StaticBlock, fill
from trtllm_dspark.engines.step_limits import StepLimits, plan_rung
from trtllm_dspark.engines.target_graphs import TargetGraphs
from trtllm_dspark.engines.torch_graphs import Call, Capture, GraphSet
from trtllm_dspark.ops.filter_probs import inverse_temperatures
from trtllm_dspark.ops.kernels import thresholds_by_kernel
from trtllm_dspark.ops.ragged import RaggedBatch
from trtllm_dspark.ops.select_drafts import Selection, select_drafts
from trtllm_dspark.types import SCRATCH_PAGE

MIN_SURVIVAL = 1e-20
"""Floor of a drafted slot's survival: never 0, which means not drafted."""
MAX_ABS_LOGIT = 12.0
"""Bound of a calibrated logit, as in `scheduling.calibration`."""


@dataclass(frozen=True)
class RoundKey:
    """What a captured round depends on."""

    bucket: int
    rung: int
    kind: DraftKind
    is_filtered: bool
    """Whether some request's target distribution is filtered."""


class RoundGraphs:
    """Owns the static buffers of rounds; shares pages, weights and target shapes."""

    def __init__(
        self, drafter: KernelDrafter, target: TargetGraphs, limits: StepLimits, capture: Capture
    ) -> None:
        self.drafter, self.target, self.limits = drafter, target, limits
        self.graphs = GraphSet("round", capture)
        count, gamma = limits.info.max_num_requests, limits.info.num_drafts
        block = (count, gamma)
        self.inputs = StaticBlock(
            {
                **draft_fields(limits),
                "draft_caps": (torch.int32, (count,)),
                "capacity": (torch.int32, (1,)),
                "confidence_scale": (torch.float32, block),
                "confidence_offset": (torch.float32, block),
                "rules": (torch.int32, (count,)),
                "accept_scales": (torch.float32, (count,)),
                "accept_top_k": (torch.int32, (count,)),
                "accept_top_p": (torch.float32, (count,)),
                "accept_min_p": (torch.float32, (count,)),
                "accept_uniforms": (torch.float64, block),
                "final_uniforms": (torch.float64, (count,)),
            },
            target.device,
        )
        self.results = StaticBlock(
            {
                "token_ids": (torch.int32, block),
                "confidence": (torch.float32, block),
                "verify_lens": (torch.int32, (count,)),
                "accepted_lens": (torch.int32, (count,)),
                "next_token_ids": (torch.int32, (count,)),
                "dropped": (torch.float32, (count,)),
                "num_bad_rows": (torch.int32, (count,)),
            },
            target.device,
        )

    def start(self, step: RoundStep) -> StartedRound:
        """Replay the round of the step's bucket and rung, and queue the copy of its results."""
        count = len(step.draft_caps)
        bucket = self.limits.bucket_for(count)
        host = self.inputs.begin()
        kind = fill_draft_inputs(host, step.draft, self.limits, bucket)
        fill(host["draft_caps"][:bucket], step.draft_caps, padding=-1)
        host["capacity"][0] = step.capacity
        fill(host["confidence_scale"][:bucket], step.confidence_scale)
        fill(host["confidence_offset"][:bucket], step.confidence_offset)
        is_filtered = _fill_accept(host, step.accept, bucket)
        self.inputs.upload()
        key = RoundKey(bucket, step.rung, kind, is_filtered)
        self.graphs.run(key, lambda: self._make_call(key))
        self.results.download()
        return StartedRound(self.results, count)

    def _make_call(self, key: RoundKey) -> Call:
        inputs = {name: _of_bucket(name, x, key.bucket) for name, x in self.inputs.device.items()}
        results = {name: x[: key.bucket] for name, x in self.results.device.items()}

        def call() -> None:
            drafts = run_draft(self.drafter, self.limits, inputs, key.bucket, key.kind)
            chosen = self._select(inputs, drafts, key)
            hidden = self._verify(inputs, chosen, key)
            logits = self.target.model.lm_head(self.target.model.norm(hidden))
            accepted = accept_round(inputs, drafts, chosen, logits, key.is_filtered)
            results["token_ids"].copy_(drafts.token_ids)
            results["confidence"].copy_(drafts.confidence_logits)
            results["verify_lens"].copy_(chosen.verify_lens)
            results["accepted_lens"].copy_(accepted.accepted_lens)
            results["next_token_ids"].copy_(accepted.next_token_ids)
            results["dropped"].copy_(accepted.dropped_accept_probs)
            results["num_bad_rows"].copy_(count_bad_rows(logits, chosen))

        return call

    def _select(
        self, inputs: dict[str, torch.Tensor], drafts: KernelDrafts, key: RoundKey
    ) -> Selection:
        raw = drafts.confidence_logits.clamp(-MAX_ABS_LOGIT, MAX_ABS_LOGIT)
        logits = raw * inputs["confidence_scale"] + inputs["confidence_offset"]
        confidences = logits.clamp(-MAX_ABS_LOGIT, MAX_ABS_LOGIT).sigmoid()
        survivals = confidences.cumprod(dim=1).clamp_min(MIN_SURVIVAL)
        return select_drafts(
            survivals,
            inputs["capacity"],
            inputs["draft_caps"],
            inputs["anchor_ids"],
            inputs["anchor_positions"],
            drafts.token_ids,
            key.rung,
        )

    def _verify(
        self, inputs: dict[str, torch.Tensor], chosen: Selection, key: RoundKey
    ) -> torch.Tensor:
        """Run the target on the packed rows and make every one of them drafter context.

        Rows of rejected drafts become context too: nothing attends them before they are written
        again, since attention ends at the anchor.
        """
        target, positions = self.target, chosen.positions.long()
        page_size = self.limits.info.page_size
        slots = find_slots(positions, chosen.row_requests, inputs["page_table"], page_size)
        batch = RaggedBatch(
            positions=positions,
            slots=slots,
            cu_query_lens=chosen.cu_query_lens,
            context_lens=inputs["anchor_positions"],
            page_table=inputs["page_table"],
            page_size=page_size,
            kernel_plan=plan_rung(self.limits, target.heads, key.rung, key.bucket, target.device),
        )
        hidden, taps = target.model(chosen.token_ids, target.kv_pages, batch, target.tap_layers)
        self.drafter.append_context(taps, positions, slots)
        return hidden


class StartedRound:
    """A round on its way; `read` waits for it."""

    def __init__(self, results: StaticBlock, count: int) -> None:
        self._results, self._count = results, count

    def read(self) -> RoundOutput:
        """Wait, and copy what the host needs."""
        host = self._results.begin()
        found = {name: values[: self._count].copy() for name, values in host.items()}
        return RoundOutput(
            token_ids=found["token_ids"],
            confidence_logits=found["confidence"],
            verify_lens=found["verify_lens"],
            accepted_lens=found["accepted_lens"],
            next_token_ids=found["next_token_ids"],
            dropped_accept_probs=found["dropped"],
            is_finite=found["num_bad_rows"] == 0,
        )


def _of_bucket(name: str, x: torch.Tensor, bucket: int) -> torch.Tensor:
    """The part of a static input that a bucket reads (block rows are cut where they are used)."""
    return x if name in ("capacity", "block_positions", "block_slots") else x[:bucket]


def _fill_accept(host: dict[str, np.ndarray], accept: AcceptSampling, bucket: int) -> bool:
    is_greedy = (accept.temperature == 0.0) | (accept.top_k == 1)
    top_k = np.where(is_greedy, 0, accept.top_k)
    top_p, min_p = np.where(is_greedy, 1.0, accept.top_p), np.where(is_greedy, 0.0, accept.min_p)
    fill(host["rules"][:bucket], accept.rules)
    fill(host["accept_scales"][:bucket], inverse_temperatures(accept.temperature), padding=1)
    fill(host["accept_top_k"][:bucket], top_k)
    fill(host["accept_top_p"][:bucket], top_p, padding=1)
    fill(host["accept_min_p"][:bucket], min_p)
    fill(host["accept_uniforms"][:bucket], accept.accept_uniforms)
    fill(host["final_uniforms"][:bucket], accept.final_uniforms)
    return bool(((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)).any())


def find_slots(
    positions: torch.Tensor, requests: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots [N] int64 of packed rows; rows of no request (−1) go to the scratch page."""
    pages = page_table[requests.clamp(min=0).long(), positions // page_size].long()
    slots = pages * page_size + positions % page_size
    return torch.where(requests >= 0, slots, SCRATCH_PAGE * page_size)


def accept_round(
    inputs: dict[str, torch.Tensor],
    drafts: KernelDrafts,
    chosen: Selection,
    logits: torch.Tensor,
    is_filtered: bool,
) -> Any:
    """Accept the verified drafts of all requests in one launch; q stays in the drafter's logits."""
    from dspark_plugins.accept_drafts import (
        DraftDistributions,
        plan_accept_drafts,
        run_accept_drafts,
    )

    count, gamma = drafts.token_ids.shape
    given = None
    if drafts.logits is not None:
        given = DraftDistributions(drafts.logits, drafts.stats, drafts.thresholds)
    return run_accept_drafts(
        plan_accept_drafts(count, gamma, logits.shape[1], device=logits.device),
        logits=logits,
        scale=inputs["accept_scales"],
        thresholds=_row_thresholds(inputs, chosen, logits) if is_filtered else None,
        cu_rows=chosen.cu_query_lens,
        draft_token_ids=drafts.token_ids,
        draft_lens=torch.full_like(inputs["draft_caps"], gamma),
        drafts=given,
        sampled=inputs["modes"] != 0,
        rules=inputs["rules"],
        accept_uniforms=inputs["accept_uniforms"],
        final_uniforms=inputs["final_uniforms"],
        seeds=inputs["seeds"],
        anchor_positions=inputs["anchor_positions"].long(),
    )


def _row_thresholds(
    inputs: dict[str, torch.Tensor], chosen: Selection, logits: torch.Tensor
) -> torch.Tensor:
    """The filter pass over the packed rows; padding rows take request 0's, and are not read."""
    requests = chosen.row_requests.clamp(min=0).long()
    names = ("accept_scales", "accept_top_k", "accept_top_p", "accept_min_p")
    return thresholds_by_kernel(logits, *(inputs[name][requests] for name in names))


def count_bad_rows(logits: torch.Tensor, chosen: Selection) -> torch.Tensor:
    """[R] int32 rows of each request without a finite maximum."""
    is_bad = ~torch.isfinite(logits.amax(dim=1)) & (chosen.row_requests >= 0)
    counts = torch.zeros_like(chosen.verify_lens)
    return counts.index_add_(0, chosen.row_requests.clamp(min=0), is_bad.to(torch.int32))
