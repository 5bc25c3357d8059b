# SPDX-License-Identifier: Apache-2.0
"""Published metrics equal the loop's counters, whatever the snapshots in between."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest

from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.serving.metrics import ServerMetrics
from trtllm_dspark.serving.scrape import Metrics
from trtllm_dspark.types import EngineInfo, RequestStats

INFO = EngineInfo(100, 4, 64, 16, 33, (1, 2, 4), 2, "f", "cpu")


class Family:
    """The backend's metric API; values can be read back in Prometheus' own form."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
    values: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        return Value(self, ",".join(f'{k}="{v}"' for k, v in labels.items()))


class Value:
    def __init__(self, family: Family, labels: str) -> None:
        self.family, self.key = family, (family.name, labels)
        Family.values.setdefault(self.key, 0.0)

    def increment(self, value: float) -> None:
        assert self.family.kind == Family.COUNTER and value >= 0
        Family.values[self.key] += value

    def set(self, value: float) -> None:
        assert self.family.kind == Family.GAUGE
        Family.values[self.key] = value

    def observe(self, value: float) -> None:
        assert self.family.kind == Family.HISTOGRAM
        Family.values[self.key] += value


def read() -> Metrics:
    return Metrics("\n".join(f"{n}{{{labels}}} {v}" for (n, labels), v in Family.values.items()))


def make(num_steps: int) -> LoopStats:
    return LoopStats(
        num_steps=num_steps,
        num_verified_tokens=5 * num_steps,
        num_accepted_tokens=3 * num_steps,
        steps_per_rung=Counter({4: num_steps}),
        tokens_per_step=Counter({1: num_steps, 3: 2 * num_steps}),
        num_finished=Counter({"eos": num_steps}),
        step_ms_total=10.0 * num_steps,
        num_running=2,
        num_waiting=1,
        num_pages=32,
        num_free_pages=30,
    )


def test_counters_follow_the_loop_over_several_snapshots() -> None:
    Family.values = {}
    metrics = ServerMetrics(Family, INFO, "tensorrt_llm", "1")
    for num_steps in (0, 2, 2, 7):
        metrics.publish(make(num_steps))
    found = read()
    assert found.total("dspark_steps_total", model="tensorrt_llm", version="1") == 7
    assert found.total("dspark_verified_tokens_total") == 35
    assert found.total("dspark_accepted_tokens_total") == 21
    assert found.total("dspark_bucket_steps_total", rung="4") == 7
    assert found.total("dspark_requests_total", reason="eos") == 7
    assert round(found.total("dspark_step_seconds_sum", part="all"), 6) == 0.07


def test_a_request_is_counted_after_all_that_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    increment, observe = Value.increment, Value.observe
    for name, kept in (("increment", increment), ("observe", observe)):

        def noted(self: Value, value: float, kept: Any = kept) -> None:
            order.append(self.family.name)
            kept(self, value)

        monkeypatch.setattr(Value, name, noted)
    metrics = ServerMetrics(Family, INFO, "tensorrt_llm", "1")
    metrics.observe_finish(RequestStats(num_prompt_tokens=9), 60)
    metrics.observe_stats(make(2))
    metrics.start()
    metrics.close()
    assert order.index("dspark_requests_total") == len(order) - 1
    assert {"nv_llm_output_token_len", "dspark_accepted_tokens_per_step_sum"} < set(order)


def test_the_accepted_tokens_histogram_is_cumulative() -> None:
    Family.values = {}
    ServerMetrics(Family, INFO, "m", "1").publish(make(4))
    found, name = read(), "dspark_accepted_tokens_per_step"
    assert [found.total(f"{name}_bucket", le=le) for le in ("1", "2", "3", "+Inf")] == [
        4,
        4,
        12,
        12,
    ]
    assert (found.total(f"{name}_count"), found.total(f"{name}_sum")) == (12, 4 + 24)


def test_the_present_state_is_shown_in_both_families() -> None:
    Family.values = {}
    ServerMetrics(Family, INFO, "m", "1").publish(make(1))
    found = read()
    assert found.total("dspark_running_requests") == 2
    assert found.total("dspark_waiting_requests") == 1
    assert found.total("dspark_free_pages") == 30
    assert found.total("nv_trt_llm_request_metrics", request_type="active") == 3
    assert found.total("nv_trt_llm_request_metrics", request_type="max") == 4
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert found.total(blocks, kv_cache_block_type="used") == 2
    assert found.total(blocks, kv_cache_block_type="tokens_per") == 16


def test_lengths_of_finished_requests_are_observed_before_closing() -> None:
    Family.values = {}
    metrics = ServerMetrics(Family, INFO, "m", "1")
    metrics.start()
    metrics.observe_finish(RequestStats(num_prompt_tokens=12), 34)
    metrics.close()
    found = read()
    assert found.total("nv_llm_input_token_len") == 12
    assert found.total("nv_llm_output_token_len") == 34


def test_a_round_is_the_papers_equation_over_the_last_interval() -> None:
    Family.values = {}
    metrics = ServerMetrics(Family, INFO, "tensorrt_llm", "1")
    first = LoopStats(num_steps=10, draft_ms_total=100.0, verify_ms_total=1000.0)
    metrics.publish(first)
    assert not any("round" in name for name, _ in Family.values), "no decoding request, no tau"
    second = LoopStats(
        num_steps=20,
        draft_ms_total=140.0,
        plan_ms_total=5.0,
        verify_ms_total=1160.0,
        num_committed_tokens=60,
        tokens_per_step=Counter({3: 20}),
        num_decode_rows=40,
        num_block_rows=160,
        expected_tokens_total=58.0,
    )
    metrics.publish(second)
    metrics.publish(second)
    found, name = read(), "dspark_round_metrics"
    values = {k: found.total(name, round_type=k) for k in found.label_values(name, "round_type")}
    assert values == {
        "t_draft_ms": 4.0,
        "t_plan_ms": 0.5,
        "t_verify_ms": 16.0,
        "tau": 3.0,
        "token_ms": 20.5 / 3.0,
        "keep_ratio": 0.25,
    }
    assert found.total("dspark_expected_tokens_total") == 58.0


def test_live_calibration_gaps_and_the_fallback_reason_are_published() -> None:
    Family.values = {}
    metrics = ServerMetrics(Family, INFO, "tensorrt_llm", "1")
    metrics.publish(LoopStats())
    assert not read().names & {"dspark_calibration_gap", "dspark_policy_fallback"}
    gaps = {"greedy": [0.25, float("nan")]}
    metrics.publish(LoopStats(calibration_gaps=gaps, fallback_reason="no_table"))
    found = read()
    assert found.total("dspark_calibration_gap", mode="greedy", position="1") == 0.25
    assert found.label_values("dspark_calibration_gap", "position") == {"1"}
    assert found.total("dspark_policy_fallback", reason="no_table") == 1
