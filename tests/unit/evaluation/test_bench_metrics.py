# SPDX-License-Identifier: Apache-2.0
"""Step statistics of a steady state from counters that a server shows late and now and then."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from trtllm_dspark.evaluation import bench_metrics
from trtllm_dspark.evaluation.bench_measure import Window
from trtllm_dspark.evaluation.bench_metrics import MetricsWatch, Scrape, describe_window
from trtllm_dspark.serving.scrape import Metrics

DELAY_S = bench_metrics.METRICS_DELAY_S


def counters(num_steps: int, tokens_per_step: int) -> str:
    """What a server shows after `num_steps` steps of 4 requests, γ = 3, one draft verified each."""
    return f"""# HELP dspark_steps_total text
dspark_steps_total{{model="m"}} {num_steps}
dspark_drafted_steps_total {num_steps}
dspark_accepted_tokens_per_step_count {4 * num_steps}
dspark_committed_tokens_total {4 * num_steps * tokens_per_step}
dspark_decode_rows_total {8 * num_steps}
dspark_block_rows_total {16 * num_steps}
dspark_verified_tokens_total {4 * num_steps}
dspark_step_seconds_sum{{part="all"}} {0.05 * num_steps}
dspark_step_seconds_sum{{part="draft"}} {0.01 * num_steps}
dspark_step_seconds_sum{{part="plan"}} {0.001 * num_steps}
dspark_bucket_steps_total{{rung="8"}} {num_steps}
dspark_bucket_steps_total{{rung="16"}} 3
"""


def scrape(time_s: float, num_steps: int, tokens_per_step: int = 2) -> Scrape:
    return Scrape(time_s, time_s + 0.01, Metrics(counters(num_steps, tokens_per_step)))


def test_ramps_are_left_out_and_what_is_shown_late_counts_when_it_happened() -> None:
    """The scrapes at 10.7 and 19.9 tell of 10–20 s: the others show, or may show, ramps."""
    scrapes = [
        scrape(9.0, 10, tokens_per_step=9), scrape(10.3, 100, tokens_per_step=9),
        scrape(10.0 + DELAY_S + 0.1, 200), scrape(15.0, 300), scrape(19.9, 400),
        scrape(19.995, 800, tokens_per_step=9), scrape(21.0, 900, tokens_per_step=9),
    ]  # fmt: skip
    found = describe_window(scrapes, Window(10.0, 20.0))
    assert found["steps_s"] == pytest.approx(9.9 - DELAY_S - 0.1)
    assert found["rungs"] == {"8": 200}
    assert found["acceptance_length"] == pytest.approx(2.0)
    assert found["keep_ratio"] == pytest.approx(0.5)
    assert found["verified_per_request"] == pytest.approx(1.0)
    times = [found[name] for name in ("step_ms", "draft_ms", "scheduler_ms")]
    assert times == pytest.approx([50, 10, 1])
    assert found["drafted_share"] == 1.0


def test_a_steady_state_too_short_for_two_scrapes_has_no_step_statistics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scrapes = [scrape(t, round(10 * t)) for t in (0.0, 0.5, 1.0, 1.5, 2.0)]
    assert describe_window(scrapes, Window(0.8, 1.8)) == {"rungs": {}}
    assert "--waves" in caplog.text


class _Endpoint(BaseHTTPRequestHandler):
    """Fails once, then shows one more step at every scrape."""

    num_scrapes = 0

    def do_GET(self) -> None:
        type(self).num_scrapes += 1
        body = counters(self.num_scrapes, 2).encode()
        self.send_response(503 if self.num_scrapes == 1 else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def test_a_watch_scrapes_until_its_end_and_survives_a_scrape_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_metrics, "SCRAPE_INTERVAL_S", 0.001)
    server = HTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    enough = threading.Event()
    try:
        with MetricsWatch(f"http://127.0.0.1:{server.server_port}/metrics") as watch:
            while len(watch.scrapes) < 3:
                enough.wait(0.005)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    steps = [found.metrics.total("dspark_steps_total") for found in watch.scrapes]
    assert steps == list(range(2, len(steps) + 2))
    assert all(found.answered_s > found.asked_s for found in watch.scrapes)
    assert not watch._thread.is_alive()
