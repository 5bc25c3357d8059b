# SPDX-License-Identifier: Apache-2.0
"""What a simulation adds up to. Numbers only; how they are shown is the commands' business."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.types import StepOutcome


@dataclass(frozen=True)
class SimulationReport:
    """Totals of the counted steps."""

    tokens_per_s: float
    """Committed tokens of all requests per simulated second, idle time (open loop) included."""
    expected_tokens_per_s: float
    """The same with the expectation of acceptance in place of its outcome (less noisy)."""
    tokens_per_s_user: float
    """Tokens per second that one active request gets."""
    mean_active: float
    """Decoding requests, averaged over the same time."""
    acceptance_length: float
    """Committed tokens per drafting request and step, recovered/bonus token included."""
    verified_per_request: float
    """Drafts verified per request, over all steps."""
    keep_ratio: float
    """Verified rows / (R·D) over all steps."""
    drafted_share: float
    """Share of steps that drafted."""
    step_ms: float
    """Mean of the steps; idle time is none of it."""
    num_finished: int
    first_token_ms: dict[str, float] = field(default_factory=dict)
    ms_per_token: dict[str, float] = field(default_factory=dict)
    rungs: dict[int, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_waiting: int = 0

    def to_json_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        data = asdict(self)
        data["rungs"] = {str(k): v for k, v in sorted(self.rungs.items())}
        return data


class Tally:
    """Running sums over steps."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.num_steps = self.num_drafted_steps = 0
        self.ms = self.idle_ms = self.active_ms = 0.0
        self.tokens = self.expected = 0.0
        self.request_steps = self.verified = 0
        self.drafted_requests = self.drafted_tokens = 0
        self.rungs: Counter[int] = Counter()
        self._first: list[npt.NDArray[np.float64]] = []
        self._per_token: list[npt.NDArray[np.float64]] = []

    def add_step(self, outcome: StepOutcome, expected: float) -> None:
        """Count one step; `expected` are the tokens it commits in expectation."""
        count, accepted = len(outcome.verify_lens), int(outcome.accepted_lens.sum())
        self.num_steps += 1
        self.num_drafted_steps += int(outcome.drafted)
        self.ms += outcome.step_ms
        self.active_ms += outcome.step_ms * count
        self.tokens += count + accepted
        self.expected += expected
        self.request_steps += count
        self.verified += int(outcome.verify_lens.sum())
        drafted = outcome.draft_lens > 0
        self.drafted_requests += int(drafted.sum())
        self.drafted_tokens += int((outcome.accepted_lens[drafted] + 1).sum())
        self.rungs[outcome.rung] += 1

    def add_idle(self, milliseconds: float) -> None:
        """Count time in which there was no request."""
        self.idle_ms += milliseconds

    def add_requests(
        self, first_token_ms: npt.NDArray[np.float64], ms_per_token: npt.NDArray[np.float64]
    ) -> None:
        """Count requests that finished."""
        self._first.append(first_token_ms)
        self._per_token.append(ms_per_token)

    def report(self, num_preemptions: int, num_waiting: int) -> SimulationReport:
        """Return the totals."""
        elapsed_ms = max(self.ms + self.idle_ms, 1e-9)
        seconds = elapsed_ms / 1e3
        steps = max(self.num_steps, 1)
        request_steps = max(self.request_steps, 1)
        active = self.active_ms / elapsed_ms
        first = np.concatenate(self._first) if self._first else np.zeros(0)
        per_token = np.concatenate(self._per_token) if self._per_token else np.zeros(0)
        return SimulationReport(
            tokens_per_s=self.tokens / seconds,
            expected_tokens_per_s=self.expected / seconds,
            tokens_per_s_user=self.tokens / seconds / max(active, 1e-9),
            mean_active=active,
            acceptance_length=self.drafted_tokens / max(self.drafted_requests, 1),
            verified_per_request=self.verified / request_steps,
            keep_ratio=(self.verified + self.request_steps)
            / (request_steps * (self.num_drafts + 1)),
            drafted_share=self.num_drafted_steps / steps,
            step_ms=self.ms / steps,
            num_finished=len(first),
            first_token_ms=percentiles(first),
            ms_per_token=percentiles(per_token),
            rungs=dict(self.rungs),
            num_preemptions=num_preemptions,
            num_waiting=num_waiting,
        )


def percentiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return p50, p95 and p99 (empty without values)."""
    if not len(values):
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}
