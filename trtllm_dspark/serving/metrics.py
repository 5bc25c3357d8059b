# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the engine model: upstream's families where they make sense, and dspark_*.

Takes snapshots from the engine thread and publishes differences from a thread of its own, because
each update is a round trip to the server process. Knows the metric API only by its shape.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.types import EngineInfo, RequestStats

logger = logging.getLogger(__name__)

LENGTH_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]
"""Upstream's buckets of nv_llm_input_token_len and nv_llm_output_token_len."""

_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("dspark_steps_total", "num_steps", "Decode steps run"),
    ("dspark_drafted_steps_total", "num_drafted_steps", "Steps in which the drafter ran"),
    ("dspark_drafted_tokens_total", "num_drafted_tokens", "Drafts proposed"),
    ("dspark_verified_tokens_total", "num_verified_tokens", "Drafts verified by the target"),
    ("dspark_accepted_tokens_total", "num_accepted_tokens", "Verified drafts accepted"),
    ("dspark_committed_tokens_total", "num_committed_tokens", "Accepted + recovered/bonus tokens"),
    ("dspark_decode_rows_total", "num_decode_rows", "Rows that decoding requests verified"),
    ("dspark_block_rows_total", "num_block_rows", "Rows that full verification would have run"),
    ("dspark_prefill_tokens_total", "num_prefill_tokens", "Prompt tokens computed"),
    ("dspark_preemptions_total", "num_preemptions", "Requests pre-empted and recomputed"),
    (
        "dspark_expected_tokens_total",
        "expected_tokens_total",
        "Tokens that the survivals in use promised; compare dspark_committed_tokens_total",
    ),
    (
        "dspark_greedily_drafted_requests_total",
        "num_greedily_drafted_requests",
        "Sampling requests drafted greedily because the policy does not cover sampled drafts",
    ),
)
_TIMES: tuple[tuple[str, str], ...] = (
    ("all", "step_ms_total"),
    ("draft", "draft_ms_total"),
    ("plan", "plan_ms_total"),
    ("verify", "verify_ms_total"),
)


class ServerMetrics:
    """Publishes loop statistics; an `engine_thread.Observer`.

    `family_class` is `pb_utils.MetricFamily`: called with name, description and kind, it gives
    objects whose `Metric(labels=…)` can `increment`, `set` or `observe`.
    """

    def __init__(self, family_class: Any, info: EngineInfo, model: str, version: str) -> None:
        self._class, self._info = family_class, info
        self._labels = {"model": model, "version": version}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._previous = LoopStats()
        self._inbox: queue.SimpleQueue[LoopStats | tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dspark-metrics", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def close(self) -> None:
        """Publish what waits and end."""
        self._inbox.put(None)
        self._thread.join()

    def observe_stats(self, stats: LoopStats) -> None:
        """See `engine_thread.Observer`."""
        self._inbox.put(stats)

    def observe_finish(self, stats: RequestStats, num_output_tokens: int) -> None:
        """See `engine_thread.Observer`."""
        self._inbox.put((stats.num_prompt_tokens, num_output_tokens))

    def _run(self) -> None:
        while True:
            item = self._inbox.get()
            if item is None:
                return
            try:
                if isinstance(item, LoopStats):
                    self.publish(item)
                else:
                    self._publish_lengths(*item)
            except Exception:
                logger.exception("metrics could not be published")

    def publish(self, stats: LoopStats) -> None:
        """Bring every metric from the last snapshot to this one."""
        old, self._previous = self._previous, stats
        for name, field, text in _COUNTERS:
            self._add(name, text, getattr(stats, field) - getattr(old, field))
        for rung, count in (stats.steps_per_rung - old.steps_per_rung).items():
            text = "Steps by the token total they were padded up to"
            self._add("dspark_bucket_steps_total", text, count, {"rung": str(rung)})
        for part, field in _TIMES:
            seconds = (getattr(stats, field) - getattr(old, field)) / 1e3
            text = "Seconds spent in steps; the count is dspark_steps_total"
            self._add("dspark_step_seconds_sum", text, seconds, {"part": part})
        counts = stats.tokens_per_step - old.tokens_per_step
        self._publish_accepted(counts)
        self._publish_round(old, stats, counts)
        self._publish_calibration(stats)
        self._publish_state(old, stats)
        self._publish_ends(old, stats)

    def _publish_ends(self, old: LoopStats, new: LoopStats) -> None:
        """Last, so that whoever sees a request counted sees all that it did counted."""
        for reason, count in (new.num_finished - old.num_finished).items():
            self._add("dspark_requests_total", "Requests by end", count, {"reason": reason})

    def _publish_accepted(self, counts: Counter[int]) -> None:
        """A Prometheus histogram kept in counters: thousands of observations in one update."""
        name = "dspark_accepted_tokens_per_step"
        text = "Tokens committed per decoding request and step, recovered/bonus token included"
        for bound in range(1, self._info.num_drafts + 2):
            below = sum(count for tokens, count in counts.items() if tokens <= bound)
            self._add(f"{name}_bucket", text, below, {"le": str(bound)})
        total = sum(counts.values())
        self._add(f"{name}_bucket", text, total, {"le": "+Inf"})
        self._add(f"{name}_count", text, total)
        self._add(f"{name}_sum", text, sum(t * count for t, count in counts.items()))

    def _publish_round(self, old: LoopStats, new: LoopStats, counts: Counter[int]) -> None:
        """Equation 1 of the DSpark paper over the last interval: (T_draft + T_verify) / τ."""
        num_steps = new.num_steps - old.num_steps
        if not num_steps or not counts:
            return
        per_step = {
            kind: (getattr(new, f"{kind}_ms_total") - getattr(old, f"{kind}_ms_total")) / num_steps
            for kind in ("draft", "plan", "verify")
        }
        tau = sum(tokens * count for tokens, count in counts.items()) / sum(counts.values())
        rows = new.num_block_rows - old.num_block_rows
        kept = (new.num_decode_rows - old.num_decode_rows) / rows if rows else 1.0
        self._set_group(
            "dspark_round_metrics",
            "Means of the last interval, milliseconds per step and tokens per request and step",
            "round_type",
            {
                "t_draft_ms": per_step["draft"],
                "t_plan_ms": per_step["plan"],
                "t_verify_ms": per_step["verify"],
                "tau": tau,
                "token_ms": sum(per_step.values()) / tau,
                "keep_ratio": kept,
            },
        )

    def _publish_calibration(self, stats: LoopStats) -> None:
        for mode, gaps in stats.calibration_gaps.items():
            for position, gap in enumerate(gaps, start=1):
                if not math.isnan(gap):
                    text = "Observed minus predicted acceptance of late, given the drafts before"
                    labels = {"mode": mode, "position": str(position)}
                    self._set("dspark_calibration_gap", text, gap, labels)
        if stats.fallback_reason:
            text = "1 where the policy cannot trim, with the reason"
            self._set("dspark_policy_fallback", text, 1, {"reason": stats.fallback_reason})

    def _publish_state(self, old: LoopStats, new: LoopStats) -> None:
        num_used = new.num_pages - new.num_free_pages
        for name, value, text in (
            ("dspark_running_requests", new.num_running, "Requests that hold a slot"),
            ("dspark_waiting_requests", new.num_waiting, "Requests that wait for a slot"),
            ("dspark_free_pages", new.num_free_pages, "K/V pages that are free"),
            ("dspark_pages", new.num_pages, "K/V pages of the pool"),
        ):
            self._set(name, text, value)
        self._set_group(
            "nv_trt_llm_request_metrics",
            "TRT LLM request metrics",
            "request_type",
            {
                "active": new.num_running + new.num_waiting,
                "max": self._info.max_num_requests,
                "scheduled": new.num_running,
                "waiting": new.num_waiting,
            },
        )
        self._set_group(
            "nv_trt_llm_kv_cache_block_metrics",
            "TRT LLM KV cache block metrics",
            "kv_cache_block_type",
            {
                "max": new.num_pages,
                "free": new.num_free_pages,
                "used": num_used,
                "tokens_per": self._info.page_size,
                "fraction": num_used / new.num_pages if new.num_pages else 0.0,
            },
        )
        num_steps = max(new.num_steps - old.num_steps, 1)
        self._set_group(
            "nv_trt_llm_inflight_batcher_metrics",
            "TRT LLM inflight_batcher-specific metrics",
            "inflight_batcher_specific_metric",
            {
                "total_context_tokens": (new.num_prefill_tokens - old.num_prefill_tokens)
                / num_steps,
                "generation_requests": new.num_running,
            },
        )
        self._set_group(
            "nv_trt_llm_general_metrics",
            "General TRT LLM metrics",
            "general_type",
            {"iteration_counter": new.num_steps, "timestamp": int(time.time() * 1e6)},
        )

    def _publish_lengths(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        for name, kind, value in (
            ("nv_llm_input_token_len", "total_input_tokens", num_prompt_tokens),
            ("nv_llm_output_token_len", "total_output_tokens", num_output_tokens),
        ):
            labels = {"response_metric_type": kind}
            self._metric(name, "TRT LLM response metrics", "HISTOGRAM", labels).observe(value)

    def _set_group(
        self, name: str, text: str, label: str, values: Mapping[str, int | float]
    ) -> None:
        for kind, value in values.items():
            self._set(name, text, value, {label: kind})

    def _set(
        self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None
    ) -> None:
        self._metric(name, text, "GAUGE", labels or {}).set(float(value))

    def _add(
        self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None
    ) -> None:
        """Increase a counter; a counter that exists from the start shows 0."""
        metric = self._metric(name, text, "COUNTER", labels or {})
        if value:
            metric.increment(float(value))

    def _metric(self, name: str, text: str, kind: str, labels: Mapping[str, str]) -> Any:
        key = (name, tuple(sorted(labels.items())))
        if key not in self._metrics:
            if name not in self._families:
                self._families[name] = self._class(
                    name=name, description=text, kind=getattr(self._class, kind)
                )
            arguments: dict[str, Any] = {"labels": {**self._labels, **labels}}
            if kind == "HISTOGRAM":
                arguments["buckets"] = LENGTH_BUCKETS
            self._metrics[key] = self._families[name].Metric(**arguments)
        return self._metrics[key]
