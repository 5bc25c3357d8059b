# SPDX-License-Identifier: Apache-2.0
"""The requests of a simulation: arrivals, queue, admission under K/V limits, growth, pre-emption.

Arrays over the active requests, oldest first. Knows nothing of drafts beyond their number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import require
from trtllm_dspark.evaluation.acceptance_models import AcceptanceModel

Ints = npt.NDArray[np.int64]
COLUMNS = ("key", "wanted", "prompt_left", "cached", "state", "arrival_ms", "first_ms", "made")


@dataclass(frozen=True)
class Workload:
    """What arrives. Lengths are uniform over [first, last]."""

    concurrency: int = 32
    """Closed loop: as many requests are always in the system. Ignored with `arrivals_per_s`."""
    arrivals_per_s: float | None = None
    """Open loop: Poisson arrivals."""
    prompt_tokens: tuple[int, int] = (0, 0)
    output_tokens: tuple[int, int] = (64, 512)
    difficulty_steps: float = 64.0
    """Mean steps after which a request's acceptance is drawn anew; 0 = it lasts for all of it."""

    def __post_init__(self) -> None:
        require(self.concurrency >= 1, "concurrency", self.concurrency, "≥ 1")
        rate = self.arrivals_per_s
        require(rate is None or rate > 0, "arrivals_per_s", rate, "> 0, or None for a closed loop")
        low, high = self.prompt_tokens
        require(0 <= low <= high, "prompt_tokens", self.prompt_tokens, "0 ≤ first ≤ last")
        low, high = self.output_tokens
        require(2 <= low <= high, "output_tokens", self.output_tokens, "2 ≤ first ≤ last")


@dataclass(frozen=True)
class Limits:
    """What the server can hold."""

    max_num_requests: int = 4096
    max_num_tokens: int = 1 << 16
    """Rows of one step at most, prefill included."""
    num_kv_tokens: int = 0
    """Tokens whose K/V fit; 0 = no limit."""

    def __post_init__(self) -> None:
        require(1 <= self.max_num_requests <= 4096, "max_num_requests", self.max_num_requests,
                "between 1 and 4096")  # fmt: skip
        require(self.max_num_tokens >= self.max_num_requests, "max_num_tokens",
                self.max_num_tokens, "≥ max_num_requests")  # fmt: skip
        require(self.num_kv_tokens >= 0, "num_kv_tokens", self.num_kv_tokens, "≥ 0")


class ActiveRequests:
    """Columns over active requests, oldest first, and the queue behind them."""

    def __init__(
        self, workload: Workload, limits: Limits, model: AcceptanceModel, rng: np.random.Generator
    ) -> None:
        self.workload, self.limits, self.model, self.rng = workload, limits, model, rng
        self.rows = {name: np.zeros(0) for name in COLUMNS}
        self.waiting: deque[dict[str, float]] = deque()
        self.num_preemptions = 0
        self.num_finished = 0
        self._next_key = 0
        self._next_arrival_ms = 0.0

    def __len__(self) -> int:
        return len(self.rows["key"])

    @property
    def next_arrival_ms(self) -> float:
        """When the next request arrives (open loop)."""
        return self._next_arrival_ms

    def arrive(self, now_ms: float) -> None:
        """Queue what has arrived by now."""
        rate = self.workload.arrivals_per_s
        if rate is None:
            while len(self) + len(self.waiting) < self.workload.concurrency:
                self.waiting.append(self._new_request(now_ms))
            return
        while self._next_arrival_ms <= now_ms:
            self.waiting.append(self._new_request(self._next_arrival_ms))
            self._next_arrival_ms += self.rng.exponential(1e3 / rate)

    def admit(self, block_tokens: int) -> None:
        """Admit from the queue, oldest first, while slots and K/V last."""
        used = float(self.rows["cached"].sum() + self.rows["prompt_left"].sum())
        used += block_tokens * len(self)
        admitted: list[dict[str, float]] = []
        while self.waiting and len(self) + len(admitted) < self.limits.max_num_requests:
            used += self.waiting[0]["prompt_left"] + block_tokens
            nobody = len(self) + len(admitted) == 0
            if self.limits.num_kv_tokens and used > self.limits.num_kv_tokens and not nobody:
                break
            admitted.append(self.waiting.popleft())
        if admitted:
            self.rows = {
                name: np.append(values, [a[name] for a in admitted])
                for name, values in self.rows.items()
            }

    def preempt(self, block_tokens: int) -> None:
        """Send the youngest back to the queue while this step's rows would not fit."""
        limit = self.limits.num_kv_tokens
        while limit and len(self) > 1:
            used = self.rows["cached"].sum() + block_tokens * len(self)
            if used <= limit:
                return
            youngest = {name: float(values[-1]) for name, values in self.rows.items()}
            youngest["prompt_left"] += youngest["cached"]
            youngest["cached"] = 0.0
            self.waiting.appendleft(youngest)
            self.keep(np.arange(len(self)) < len(self) - 1)
            self.num_preemptions += 1

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Drop the rows that are not in `mask`."""
        self.rows = {name: values[mask] for name, values in self.rows.items()}

    def redraw_states(self) -> None:
        """Now and then a request comes to another passage, of another difficulty."""
        mean_steps = self.workload.difficulty_steps
        if mean_steps <= 0:
            return
        changed = self.rng.random(len(self)) < 1.0 / mean_steps
        if changed.any():
            self.rows["state"][changed] = self.model.new_states(self.rng, int(changed.sum()))

    def _new_request(self, arrival_ms: float) -> dict[str, float]:
        low, high = self.workload.prompt_tokens
        prompt = int(self.rng.integers(low, high + 1))
        low, high = self.workload.output_tokens
        fields = {
            "key": float(self._next_key),
            "wanted": float(self.rng.integers(low, high + 1)),
            "prompt_left": float(prompt),
            "cached": 0.0,
            "state": float(self.model.new_states(self.rng, 1)[0]),
            "arrival_ms": arrival_ms,
            "first_ms": np.nan,
            "made": 0.0,
        }
        self._next_key += 1
        return fields
