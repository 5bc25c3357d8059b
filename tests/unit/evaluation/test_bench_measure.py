# SPDX-License-Identifier: Apache-2.0
"""Steady states, throughput and latencies of hand-made request records, and paired ratios."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.bench_load import (
    BenchLoad,
    BenchRequest,
    RequestRecord,
    closed_load,
    open_load,
)
from trtllm_dspark.evaluation.bench_measure import (
    measure_round,
    paired_ratio,
    steady_window,
    summarize_rounds,
)


def record(start: float, first: float, end: float, count: int) -> RequestRecord:
    """Evenly spaced tokens from `first` to `end`."""
    found = RequestRecord(start)
    for index, time_s in enumerate(np.linspace(first, end, count)):
        found.add(float(time_s), index + 1)
    found.end_s = end
    return found


def load(count: int, concurrency: int, arrivals: list[float] | None = None) -> BenchLoad:
    times = arrivals or [None] * count
    return BenchLoad(tuple(BenchRequest("x", t) for t in times), concurrency)


def test_the_steady_state_begins_with_the_first_waves_tokens_and_ends_when_places_empty() -> None:
    records = [
        record(0, 1.0, 5.0, 9), record(0, 2.0, 4.0, 5), record(4, 4.5, 9.0, 10),
        record(5, 5.5, 7.0, 4),
    ]  # fmt: skip
    window = steady_window(records, load(4, 2))
    assert (window.begin_s, window.end_s) == (2.0, 7.0)  # one place of two is 50 %
    row = measure_round(records, load(4, 2))
    # After 2.0 up to 7.0: 6 of the first, 4 of the second, 6 of the third, all 4 of the fourth.
    assert row["tokens_per_s"] == pytest.approx((6 + 4 + 6 + 4) / 5)
    assert row["mean_active"] == pytest.approx((3 + 2 + 3 + 2) / 5)
    assert row["tokens_per_s_user"] == pytest.approx(row["tokens_per_s"] / row["mean_active"])
    # The first wave is the warm-up: its times to first token are not reported.
    assert row["first_token_ms"] == [pytest.approx(500), pytest.approx(500)]


def test_85_percent_of_the_places_are_enough_and_less_is_not() -> None:
    records = [record(0, 1, 10, 10) for _ in range(17)] + [record(0, 1, 5, 5) for _ in range(3)]
    assert steady_window(records, load(20, 20)).end_s == 10
    records[0].end_s = 8.0
    assert steady_window(records, load(20, 20)).end_s == 8.0


def test_an_open_loop_is_measured_from_its_usual_number_in_flight_to_the_last_arrival() -> None:
    arrivals = [0.0, 1.0, 2.0, 4.0]
    records = [record(t, t + 0.5, t + 2, 4) for t in arrivals]
    # In flight: 1, from 1.0 on 2, from 3.0 on 1; over the later half (from 1.0) 5/3.
    window = steady_window(records, load(4, 8, arrivals))
    assert (window.begin_s, window.end_s) == (1.0, 4.0)
    alone = [record(t, t + 0.5, t + 0.9, 4) for t in arrivals]
    assert steady_window(alone, load(4, 8, arrivals)).begin_s == 0.0  # no ramp to cut off


def test_85_percent_of_the_usual_number_in_flight_are_enough_and_less_is_not() -> None:
    """A new request a second, each for 20 seconds: 20 are usual, 17 begin the steady state."""
    arrivals = [float(t) for t in range(80)]
    records = [record(t, t + 1, t + 20, 4) for t in arrivals]
    assert steady_window(records, load(80, 64, arrivals)).begin_s == 16.0


def test_an_overloaded_open_loop_is_steady_when_85_percent_of_the_batch_are_taken() -> None:
    """The queue grows until the end: what waits does not run."""
    arrivals = [float(t) for t in range(60)]
    records = [record(t, 100 + t, 200 + t, 4) for t in arrivals]
    assert steady_window(records, load(60, 20, arrivals)).begin_s == 16.0
    assert steady_window(records, load(60, 10, arrivals)).begin_s == 8.0


def test_failed_requests_are_counted_and_a_round_without_steady_state_is_refused() -> None:
    records = [record(0, 1, 5, 9), record(0, 1, 5, 9), RequestRecord(0.0, error="no")]
    assert measure_round(records, load(3, 2))["num_failed"] == 1
    with pytest.raises(ConfigError, match="cannot measure"):
        measure_round(records[1:], load(2, 2))
    with pytest.raises(ConfigError, match="steady state"):
        measure_round([record(0, 1, 1, 1), record(0, 1, 1, 1)], load(2, 2))


def test_latencies_count_tokens_not_pieces() -> None:
    found = RequestRecord(0.0)
    for time_s, count in ((1.0, 1), (2.0, 4), (2.5, 4), (3.0, 5)):
        found.add(time_s, count)
    assert found.first_token_ms == 1000
    assert found.ms_per_token == pytest.approx(2000 / 4)
    assert found.times_s == [1.0, 2.0, 3.0]


def test_loads_are_functions_of_the_generator() -> None:
    texts = ["a", "b", "c"]
    same = [closed_load(texts, 4, 3, np.random.default_rng(2)) for _ in range(2)]
    assert same[0] == same[1] and len(same[0].requests) == 12 and not same[0].is_open
    found = open_load(texts, 5.0, 2000, 8, np.random.default_rng(3))
    gaps = np.diff([r.arrival_s for r in found.requests])
    assert found.is_open and np.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.15)  # exponential: as wide as its mean
    with pytest.raises(ConfigError, match="waves"):
        closed_load(texts, 4, 1, np.random.default_rng(0))


def test_ratios_are_paired_round_by_round() -> None:
    found = paired_ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert found == {"median": 2.0, "low95": 2.0, "high95": 2.0}


def test_a_summary_takes_medians_of_rounds_and_percentiles_of_requests() -> None:
    rows = [
        {"tokens_per_s": v, "first_token_ms": [v, v], "ms_per_token": [v], "rungs": {"8": 2},
         "num_failed": 0}
        for v in (1.0, 2.0, 9.0)
    ]  # fmt: skip
    found = summarize_rounds(rows)
    assert found["tokens_per_s"] == 2.0 and found["rungs"] == {"8": 6}
    assert found["first_token_ms"]["p50"] == 2.0 and found["ms_per_token"]["p99"] > 8.0
