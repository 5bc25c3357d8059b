# SPDX-License-Identifier: Apache-2.0
"""Numbers of one round from its request records: throughput in the steady state, latencies.

Closed loop: from the moment when the first wave has its first tokens, as long as at least 85 % of
the places are taken. Open loop, where nobody keeps places taken: from the moment when as many
requests as 85 % of those that the load usually has in flight are there, to the last arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.bench_load import BenchLoad, RequestRecord
from trtllm_dspark.evaluation.simulation_report import percentiles

STEADY_SHARE = 0.85


@dataclass(frozen=True)
class Window:
    """The steady state of a round."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s


def steady_window(records: Sequence[RequestRecord], load: BenchLoad) -> Window:
    """Find the steady state; refuse rounds that have none."""
    good = [record for record in records if record.times_s and record.error is None]
    if len(good) < 2:
        raise ConfigError(f"{len(good)} of {len(records)} requests were answered: cannot measure")
    if load.is_open:
        window = _open_window(good, load.concurrency)
    else:
        first_wave = sorted(good, key=lambda record: record.start_s)[: load.concurrency]
        begin = max(record.times_s[0] for record in first_wave)
        window = Window(begin, _last_time_busy(good, STEADY_SHARE * load.concurrency))
    if window.seconds <= 0:
        raise ConfigError(
            "the round has no steady state: send more requests (--waves, --num-requests) or "
            "longer answers (--max-tokens)"
        )
    return window


def _open_window(records: Sequence[RequestRecord], limit: int) -> Window:
    """The ramp is cut off; what the arrivals' chance does afterwards belongs to the load.

    Usual is the mean in flight over the later half of the arrivals. More than `limit` do not run
    at once: under overload the window begins with a batch that is 85 % full.
    """
    starts = sorted(record.start_s for record in records)
    middle, last = starts[(len(starts) - 1) // 2], starts[-1]
    events = [(r.start_s, 1) for r in records] + [(r.end_s, -1) for r in records]
    times, changes = np.array(sorted(events)).T
    active = np.minimum(np.cumsum(changes), limit)
    seconds = np.diff(np.clip(times, middle, last), append=last)
    usual = float((active * seconds).sum()) / max(last - middle, 1e-9)
    return Window(float(times[np.argmax(active >= STEADY_SHARE * usual)]), last)


def _last_time_busy(records: Sequence[RequestRecord], least: float) -> float:
    """Last moment at which at least `least` requests were in flight."""
    for end in sorted((record.end_s for record in records), reverse=True):
        if sum(record.start_s < end <= record.end_s for record in records) >= least:
            return end
    return float("-inf")


def measure_round(records: Sequence[RequestRecord], load: BenchLoad) -> dict[str, Any]:
    """Throughput of the steady state; latencies of requests sent in it."""
    window = steady_window(records, load)
    good = [record for record in records if record.times_s and record.error is None]
    tokens = sum(_tokens_in(record, window) for record in good)
    busy_s = sum(
        max(0.0, min(record.end_s, window.end_s) - max(record.start_s, window.begin_s))
        for record in good
    )
    later = [r for r in good if window.begin_s <= r.start_s <= window.end_s] or good
    per_token = np.array([record.ms_per_token for record in later])
    return {
        "tokens_per_s": tokens / window.seconds,
        "tokens_per_s_user": tokens / max(busy_s, 1e-9),
        "mean_active": busy_s / window.seconds,
        "steady_s": window.seconds,
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "first_token_ms": [record.first_token_ms for record in later],
        "ms_per_token": per_token[~np.isnan(per_token)].tolist(),
    }


def _tokens_in(record: RequestRecord, window: Window) -> int:
    times = np.asarray(record.times_s)
    grown = np.diff(record.counts, prepend=0)
    return int(grown[(times > window.begin_s) & (times <= window.end_s)].sum())


def summarize_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one contender; percentiles over all their requests."""

    def median(name: str) -> float:
        values = [row[name] for row in rounds if row.get(name) is not None]
        return float(np.median(values)) if values else float("nan")

    rungs: dict[str, int] = {}
    for row in rounds:
        for rung, count in row["rungs"].items():
            rungs[rung] = rungs.get(rung, 0) + count
    names = (
        "tokens_per_s", "tokens_per_s_user", "mean_active", "acceptance_length", "keep_ratio",
        "verified_per_request", "drafted_share", "step_ms", "scheduler_ms", "draft_ms",
    )  # fmt: skip
    return {
        **{name: median(name) for name in names},
        **{
            name: percentiles(np.concatenate([np.asarray(row[name], float) for row in rounds]))
            for name in ("first_token_ms", "ms_per_token")
        },
        "rungs": dict(sorted(rungs.items(), key=lambda item: int(item[0]))),
        "num_failed": sum(row["num_failed"] for row in rounds),
        "num_rounds": len(rounds),
    }


def paired_ratio(
    numerator: Sequence[float], denominator: Sequence[float], seed: int = 0
) -> dict[str, float]:
    """Median ratio of rounds that ran side by side, with a 95 % bootstrap interval."""
    ratios = np.asarray(numerator, float) / np.asarray(denominator, float)
    rng = np.random.default_rng(seed)
    draws = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low95": float(low), "high95": float(high)}
