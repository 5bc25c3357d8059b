# SPDX-License-Identifier: Apache-2.0
"""What a benchmark sends, and what it notes of every request: the same for every transport.

Closed loop: a fixed number of requests in flight, a new one when one ends. Open loop: Poisson
arrivals, drawn once, so that every contender gets the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.config import require


@dataclass(frozen=True)
class BenchRequest:
    """One request to send."""

    text: str
    """User turn; whoever sends it applies the chat template."""
    arrival_s: float | None = None
    """Seconds after the start (open loop); None = when a place is free (closed loop)."""


@dataclass(frozen=True)
class BenchLoad:
    """One round's requests."""

    requests: tuple[BenchRequest, ...]
    concurrency: int
    """Requests in flight (closed loop); the most that can be in flight otherwise."""
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_end: bool = False
    """Go on after end tokens: every answer has max_tokens."""

    @property
    def is_open(self) -> bool:
        """Whether requests arrive by themselves."""
        return bool(self.requests) and self.requests[0].arrival_s is not None


@dataclass
class RequestRecord:
    """When one request was sent and when its tokens came (one clock for all)."""

    start_s: float
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Tokens so far after each time."""
    end_s: float = float("nan")
    error: str | None = None

    def add(self, time_s: float, count: int) -> None:
        """Note that `count` tokens have come in all."""
        if count > (self.counts[-1] if self.counts else 0):
            self.times_s.append(time_s)
            self.counts.append(count)

    @property
    def first_token_ms(self) -> float:
        """Time to first token."""
        return 1e3 * (self.times_s[0] - self.start_s)

    @property
    def ms_per_token(self) -> float:
        """Time per output token after the first ones; NaN with one piece only."""
        count = self.counts[-1] - self.counts[0]
        return 1e3 * (self.times_s[-1] - self.times_s[0]) / count if count else float("nan")


def closed_load(
    texts: Sequence[str], concurrency: int, waves: int, rng: np.random.Generator, **fields: object
) -> BenchLoad:
    """`waves` × `concurrency` requests of texts drawn at random."""
    require(concurrency >= 1, "concurrency", concurrency, "≥ 1")
    require(waves >= 2, "waves", waves, "≥ 2 (the first one is the warm-up)")
    chosen = rng.integers(0, len(texts), concurrency * waves)
    requests = tuple(BenchRequest(texts[i]) for i in chosen)
    return BenchLoad(requests, concurrency, **fields)  # type: ignore[arg-type]


def open_load(
    texts: Sequence[str],
    arrivals_per_s: float,
    num_requests: int,
    limit: int,
    rng: np.random.Generator,
    **fields: object,
) -> BenchLoad:
    """Poisson arrivals; at most `limit` run at once, the others wait."""
    require(arrivals_per_s > 0, "arrivals", arrivals_per_s, "> 0")
    times = np.cumsum(rng.exponential(1.0 / arrivals_per_s, num_requests))
    chosen = rng.integers(0, len(texts), num_requests)
    requests = tuple(BenchRequest(texts[i], float(t)) for i, t in zip(chosen, times, strict=True))
    return BenchLoad(requests, limit, **fields)  # type: ignore[arg-type]
