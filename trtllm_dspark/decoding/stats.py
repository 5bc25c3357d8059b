# SPDX-License-Identifier: Apache-2.0
"""Cumulative counters of a decoding loop, and a snapshot of its state. Plain numbers only."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trtllm_dspark.types import FinishReason, StepOutcome


@dataclass
class LoopStats:
    """Counters since start; the `num_running` … `num_free_pages` group is filled by `snapshot`."""

    num_drafts: int = 0
    """γ of the loop's drafter."""
    num_steps: int = 0
    num_drafted_steps: int = 0
    num_drafted_tokens: int = 0
    num_verified_tokens: int = 0
    """Verified drafts."""
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    """Accepted drafts plus recovered/bonus tokens of decoding requests."""
    num_decode_rows: int = 0
    """Σ (1 + ℓ_r)."""
    num_block_rows: int = 0
    """Σ R·D over all steps, plain ones included: what full verification would have run."""
    num_prefill_tokens: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    steps_per_rung: Counter[int] = field(default_factory=Counter)
    tokens_per_step: Counter[int] = field(default_factory=Counter)
    """Histogram of committed tokens per decoding request and step."""
    step_ms_total: float = 0.0
    draft_ms_total: float = 0.0
    plan_ms_total: float = 0.0
    verify_ms_total: float = 0.0
    expected_tokens_total: float = 0.0
    """Tokens that the survivals in use promised; beside `num_committed_tokens`."""
    num_greedily_drafted_requests: int = 0
    """Sampling requests drafted greedily because the policy does not cover sampled drafts."""
    fallback_reason: str = ""
    """Why the policy cannot trim (no_table, refused_table), "" when it can."""
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_preemptions: int = 0
    calibration_gaps: dict[str, list[float]] = field(default_factory=dict)
    """By draft mode and position: observed − predicted acceptance of late; NaN without evidence."""

    def record(self, outcome: StepOutcome) -> None:
        """Add one step."""
        size = len(outcome.verify_lens)
        verified = int(outcome.verify_lens.sum())
        self.num_steps += 1
        self.num_drafted_steps += int(outcome.drafted)
        self.num_drafted_tokens += int(outcome.draft_lens.sum())
        self.num_verified_tokens += verified
        self.num_accepted_tokens += int(outcome.accepted_lens.sum())
        self.num_committed_tokens += int(outcome.accepted_lens.sum()) + size
        self.num_decode_rows += verified + size
        self.num_block_rows += size * (1 + self.num_drafts)
        self.num_prefill_tokens += outcome.num_prefill_tokens
        self.steps_per_rung[outcome.rung] += 1
        self.tokens_per_step.update((outcome.accepted_lens + 1).tolist())
        self.step_ms_total += outcome.step_ms
        self.draft_ms_total += outcome.draft_ms
        self.plan_ms_total += outcome.plan_ms
        self.verify_ms_total += outcome.verify_ms
        self.expected_tokens_total += outcome.expected_tokens

    def record_finish(self, reason: FinishReason) -> None:
        """Count one request that ended."""
        self.num_finished[reason.value] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean committed tokens per decoding request and step."""
        steps = sum(self.tokens_per_step.values())
        return self.num_committed_tokens / steps if steps else 0.0

    @property
    def keep_ratio(self) -> float:
        """Verified rows / (R·D), over all steps."""
        return self.num_decode_rows / self.num_block_rows if self.num_block_rows else 0.0

    def snapshot(self, **state: Any) -> LoopStats:
        """A copy with the present state filled in."""
        fresh = copy.deepcopy(self)
        for name, value in state.items():
            setattr(fresh, name, value)
        return fresh
