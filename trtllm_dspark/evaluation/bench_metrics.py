# SPDX-License-Identifier: Apache-2.0
"""Step statistics of a server over the steady state of a round, from scrapes of its metrics.

A watch scrapes while the round runs, because only afterwards is it known when the steady state
was. Knows the names of the server's counters; nothing of requests or streams.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from trtllm_dspark.errors import ServerError
from trtllm_dspark.evaluation.bench_measure import Window
from trtllm_dspark.serving.scrape import Metrics, read_metrics

logger = logging.getLogger(__name__)

SCRAPE_INTERVAL_S = 0.25
METRICS_DELAY_S = 0.6
"""The server publishes its counters a few times a second: what it shows may be so old."""


@dataclass(frozen=True)
class Scrape:
    """The counters as shown between two moments (time.perf_counter)."""

    asked_s: float
    answered_s: float
    metrics: Metrics


class MetricsWatch:
    """Context manager: scrapes in a thread of its own from entry to exit."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scrapes: list[Scrape] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-watch", daemon=True)

    def __enter__(self) -> MetricsWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            asked_s = time.perf_counter()
            try:
                metrics = read_metrics(self.url)
            except ServerError as error:
                logger.warning("a scrape is left out: %s", error)
            else:
                self.scrapes.append(Scrape(asked_s, time.perf_counter(), metrics))
            self._stop.wait(SCRAPE_INTERVAL_S)


def describe_window(scrapes: list[Scrape], window: Window) -> dict[str, Any]:
    """What the server's steps did inside the window; {"rungs": {}} where it is too short to tell.

    The first scrape may show counters as old as METRICS_DELAY_S, so it is asked for that much
    after the window began; the last one is answered before it ended.
    """
    inside = [
        scrape
        for scrape in scrapes
        if scrape.asked_s >= window.begin_s + METRICS_DELAY_S and scrape.answered_s <= window.end_s
    ]
    if len(inside) < 2:
        logger.warning(
            "a steady state of %.1f s is too short for step statistics: send more requests "
            "(--waves, --num-requests) or longer answers (--max-tokens)",
            window.seconds,
        )
        return {"rungs": {}}
    return {
        "steps_s": inside[-1].asked_s - inside[0].asked_s,
        **describe_metrics(inside[0].metrics, inside[-1].metrics),
    }


def describe_metrics(before: Metrics, after: Metrics) -> dict[str, Any]:
    """What the server's steps did between two scrapes."""

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    steps = max(1.0, grown("dspark_steps_total"))
    requests = max(1.0, grown("dspark_accepted_tokens_per_step_count"))
    blocks = grown("dspark_block_rows_total")
    name = "dspark_bucket_steps_total"
    rungs = {rung: round(grown(name, rung=rung)) for rung in after.label_values(name, "rung")}

    def step_ms(part: str) -> float:
        return 1e3 * grown("dspark_step_seconds_sum", part=part) / steps

    return {
        "acceptance_length": grown("dspark_committed_tokens_total") / requests,
        "keep_ratio": grown("dspark_decode_rows_total") / blocks if blocks else 0.0,
        "verified_per_request": grown("dspark_verified_tokens_total") / requests,
        "drafted_share": grown("dspark_drafted_steps_total") / steps,
        "step_ms": step_ms("all"),
        "draft_ms": step_ms("draft"),
        "scheduler_ms": step_ms("plan"),
        "rungs": {rung: count for rung, count in rungs.items() if count},
    }
