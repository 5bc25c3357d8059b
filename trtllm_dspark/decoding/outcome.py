# SPDX-License-Identifier: Apache-2.0
"""What one step taught: the `StepOutcome` that policies, calibration and metrics read."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.decoding.acceptance import AcceptanceResult
from trtllm_dspark.scheduling.policy import BatchView
from trtllm_dspark.types import DraftBlock, FloatArray, IntArray, StepOutcome


@dataclass
class StepTimes:
    """Milliseconds of the parts of a step; each mark closes the part that ran until now."""

    draft_ms: float = 0.0
    plan_ms: float = 0.0
    verify_ms: float = 0.0

    def __post_init__(self) -> None:
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`."""
        now = time.perf_counter()
        setattr(self, f"{part}_ms", getattr(self, f"{part}_ms") + (now - self._last) * 1e3)
        self._last = now

    def skip(self) -> None:
        """Leave out what ran since the last mark: work of another step."""
        self._last = time.perf_counter()

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.draft_ms + self.plan_ms + self.verify_ms


def make_outcome(
    view: BatchView,
    block: DraftBlock,
    verify_lens: IntArray,
    survivals: FloatArray,
    result: AcceptanceResult,
    *,
    rung: int,
    times: StepTimes,
) -> StepOutcome:
    """Join plan and acceptance of the R decoding requests (the first rows of `result`)."""
    size = len(verify_lens)
    drafted = bool(block.draft_lens.any())
    counted = np.arange(survivals.shape[1])[None, :] < verify_lens[:, None]
    return StepOutcome(
        request_keys=view.request_keys,
        verify_lens=verify_lens,
        accepted_lens=result.accepted_lens[:size],
        draft_lens=block.draft_lens,
        confidence_logits=block.confidence_logits if drafted else None,
        modes=view.modes,
        dropped_accept_probs=result.dropped_accept_probs[:size],
        rung=rung,
        num_prefill_tokens=view.num_prefill_tokens,
        drafted=drafted,
        step_ms=times.step_ms,
        draft_ms=times.draft_ms,
        plan_ms=times.plan_ms,
        verify_ms=times.verify_ms,
        expected_tokens=size + float(np.where(counted, survivals, 0.0).sum()),
    )
