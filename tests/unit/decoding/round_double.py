# SPDX-License-Identifier: Apache-2.0
"""An engine that runs whole rounds with the torch ops, and notes when it started and was read."""

from __future__ import annotations

import numpy as np
import torch

from trtllm_dspark.engines.protocol import ContextAppend, RoundOutput, RoundStep, TargetStep
from trtllm_dspark.engines.step_checks import check_round_step
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.ops.accept_drafts import accept_drafts
from trtllm_dspark.ops.filter_probs import filter_thresholds, inverse_temperatures
from trtllm_dspark.ops.select_drafts import Selection, select_drafts


class RoundDouble(TorchEngine):
    """Works at `start_round` and hands the result over at `read`, like a device that is fast."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.events: list[str] = []
        self.verify_lens: list[list[int]] = []
        self.poisoned_request: int | None = None

    def start_round(self, step: RoundStep) -> PendingDouble:
        self.events.append("start")
        check_round_step(step, self.info)
        drafted = self.run_drafter(step.draft)
        chosen = select(step, drafted.token_ids, drafted.confidence_logits)
        num_rows = int(chosen.cu_query_lens[-1])
        positions = chosen.positions[:num_rows].numpy()
        target = TargetStep(
            token_ids=chosen.token_ids[:num_rows].numpy(),
            positions=positions,
            cu_query_lens=chosen.cu_query_lens.numpy(),
            context_lens=step.draft.anchor_positions,
            page_table=step.draft.page_table,
            logit_rows=np.arange(num_rows, dtype=np.int32),
            rung=step.rung,
        )
        output = self.run_target(target)
        logits = output.logits.clone()
        if self.poisoned_request is not None:
            logits[int(chosen.cu_query_lens[self.poisoned_request])] = float("nan")
        rows = ContextAppend(output.taps, positions, target.cu_query_lens, target.page_table)
        self.append_context(rows)
        self.verify_lens.append(chosen.verify_lens.tolist())
        return PendingDouble(self.events, finish(step, drafted, chosen, logits))


class PendingDouble:
    """A round that is read once."""

    def __init__(self, events: list[str], output: RoundOutput) -> None:
        self.events, self.output = events, output

    def read(self) -> RoundOutput:
        self.events.append("read")
        return self.output


def select(step: RoundStep, token_ids: np.ndarray, confidence_logits: np.ndarray) -> Selection:
    """The op, on survivals from the step's own scale and offset."""
    logits = torch.from_numpy(confidence_logits * step.confidence_scale + step.confidence_offset)
    return select_drafts(
        logits.sigmoid().cumprod(dim=1),
        torch.tensor([step.capacity], dtype=torch.int32),
        torch.from_numpy(step.draft_caps),
        torch.from_numpy(step.draft.anchor_ids),
        torch.from_numpy(step.draft.anchor_positions),
        torch.from_numpy(token_ids),
        step.rung,
    )


def finish(step: RoundStep, drafted, chosen: Selection, logits: torch.Tensor) -> RoundOutput:
    """Accept with the op; rows that are not finite are accepted as zeros and reported."""
    accept, count = step.accept, len(step.draft_caps)
    requests = chosen.row_requests[: len(logits)].numpy()
    is_bad = ~torch.isfinite(logits.amax(dim=1)).numpy()
    logits = torch.nan_to_num(logits)
    gamma, sampling = drafted.token_ids.shape[1], step.draft.sampling
    accepted = accept_drafts(
        logits=logits,
        scale=torch.from_numpy(inverse_temperatures(accept.temperature)).float(),
        thresholds=filter_thresholds(
            logits,
            temperature=accept.temperature[requests],
            top_k=accept.top_k[requests],
            top_p=accept.top_p[requests],
            min_p=accept.min_p[requests],
        ),
        cu_rows=chosen.cu_query_lens,
        draft_token_ids=torch.from_numpy(drafted.token_ids),
        draft_lens=torch.full((count,), gamma, dtype=torch.int32),
        draft_probs=drafted.draft_probs,
        sampled=torch.from_numpy((sampling.temperature > 0) & (sampling.top_k != 1)),
        rules=torch.from_numpy(accept.rules),
        accept_uniforms=torch.from_numpy(accept.accept_uniforms),
        final_uniforms=torch.from_numpy(accept.final_uniforms),
        seeds=torch.from_numpy(sampling.seeds.view(np.int64)),
        anchor_positions=torch.from_numpy(step.draft.anchor_positions.astype(np.int64)),
    )
    return RoundOutput(
        token_ids=drafted.token_ids,
        confidence_logits=drafted.confidence_logits,
        verify_lens=chosen.verify_lens.numpy(),
        accepted_lens=accepted[0].numpy(),
        next_token_ids=accepted[1].numpy(),
        dropped_accept_probs=accepted[2].numpy(),
        is_finite=np.bincount(requests[is_bad], minlength=count)[:count] == 0,
    )
