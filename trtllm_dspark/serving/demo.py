# SPDX-License-Identifier: Apache-2.0
"""`dspark demo`: starts the server, sends several prompts at once over gRPC, shows what comes.

On a terminal the answers grow side by side; elsewhere each is printed when it is complete.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trtllm_dspark.config import SystemConfig
from trtllm_dspark.serving.client import Answer, GrpcClient, StreamEvent
from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import RepositoryOptions
from trtllm_dspark.serving.scrape import Metrics, read_metrics
from trtllm_dspark.serving.server import describe_endpoints, running_server, wait_for_signal

PROMPTS = (
    "What is the capital of France? Then name its river.",
    "Count from one to twenty in words.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers, then one that subtracts two numbers.",
)
"""Two of them repeat themselves: that is where look-up drafts are accepted."""


@dataclass(frozen=True)
class DemoSummary:
    """What the run measured."""

    num_requests: int
    num_output_tokens: int
    wall_s: float
    acceptance_length: float
    """Mean committed tokens per decode step and request, recovered/bonus token included."""
    keep_ratio: float
    """Verified rows / rows of full verification, plain steps included; 1 without a drafter."""
    steps_per_bucket: Mapping[int, int]
    """Steps by the token total they were padded up to."""
    first_token_ms: float
    """Median over the requests, as the client sees it."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests per second of the run."""
        return self.num_output_tokens / self.wall_s if self.wall_s else 0.0


def run_demo(
    config: SystemConfig,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 64,
    ports: Ports | None = None,
    host: str = "127.0.0.1",
    options: RepositoryOptions | None = None,
    work_dir: Path | None = None,
    keep: bool = False,
    console: Console | None = None,
) -> int:
    """Run the demonstration on a prepared model; 0, or 1 when an answer failed.

    `keep` leaves the server running until a signal. Call it from the main thread.
    """
    console = console or Console()

    def report(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    options = options or RepositoryOptions(apply_chat_template=True)
    with running_server(
        config, ports=ports, host=host, options=options, work_dir=work_dir, report=report
    ) as server:
        answers, summary = send_prompts(server, prompts, max_tokens, console)
        console.print(summary_table(summary))
        failed = [answer for answer in answers if answer.error is not None]
        for answer in failed:
            report(f"failed: {answer.error}")
        if keep:
            for line in describe_endpoints(server):
                report(line)
            report("serving until Ctrl-C")
            return max(wait_for_signal(server, report), int(bool(failed)))
        report("draining the server")
    return int(bool(failed))


def send_prompts(
    server: TritonServer, prompts: Sequence[str], max_tokens: int, console: Console
) -> tuple[list[Answer], DemoSummary]:
    """Send all prompts at once, show the answers, and measure."""
    before = read_metrics(server.metrics_url)
    requests = [{"text_input": p, "max_tokens": max_tokens, "stream": True} for p in prompts]
    board = AnswerBoard(prompts, console)
    start = time.perf_counter()
    with GrpcClient(server.grpc_url) as client, board:
        answers = client.ask_many(requests, on_event=board.add)
    wall_s = time.perf_counter() - start
    after = wait_for_metrics(server.metrics_url, before, len(prompts))
    return answers, summarise(answers, wall_s, before, after)


def wait_for_metrics(url: str, before: Metrics, num_finished: int) -> Metrics:
    """A scrape that counts the requests just finished (updates come a few times a second)."""
    deadline = time.monotonic() + 3.0
    while True:
        now = read_metrics(url)
        done = now.total("dspark_requests_total") - before.total("dspark_requests_total")
        if done >= num_finished or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def summarise(
    answers: Sequence[Answer], wall_s: float, before: Metrics, after: Metrics
) -> DemoSummary:
    """Numbers of one run from its answers and the metrics around it."""

    def grown(name: str) -> float:
        return after.total(name) - before.total(name)

    good = [answer for answer in answers if answer.error is None and answer.has_outputs]
    first = [1e3 * (answer.events[0].time_s - answer.start_s) for answer in good]
    steps = grown("dspark_accepted_tokens_per_step_count")
    blocks = grown("dspark_block_rows_total")
    return DemoSummary(
        num_requests=len(answers),
        num_output_tokens=sum(int(answer.last.number("num_output_tokens")) for answer in good),
        wall_s=wall_s,
        acceptance_length=grown("dspark_committed_tokens_total") / steps if steps else 0.0,
        keep_ratio=grown("dspark_decode_rows_total") / blocks if blocks else 1.0,
        steps_per_bucket=bucket_steps(before, after),
        first_token_ms=statistics.median(first) if first else float("nan"),
    )


def bucket_steps(before: Metrics, after: Metrics) -> dict[int, int]:
    """Steps of the run by bucket, smallest bucket first; buckets that did not run are left out."""
    name = "dspark_bucket_steps_total"
    steps = {
        int(rung): round(after.total(name, rung=rung) - before.total(name, rung=rung))
        for rung in after.label_values(name, "rung")
    }
    return {rung: count for rung, count in sorted(steps.items()) if count}


def summary_table(summary: DemoSummary) -> Table:
    """The summary as a table."""
    table = Table(title="summary", show_header=False)
    for name, value in (
        ("requests at once", str(summary.num_requests)),
        ("output tokens", str(summary.num_output_tokens)),
        ("time", f"{summary.wall_s:.2f} s"),
        ("throughput", f"{summary.tokens_per_s:.1f} tokens/s"),
        ("mean acceptance length", f"{summary.acceptance_length:.2f} tokens per step"),
        ("keep ratio", f"{summary.keep_ratio:.2f}"),
        ("steps per token bucket", describe_buckets(summary.steps_per_bucket)),
        ("time to first token (median)", f"{summary.first_token_ms:.0f} ms"),
    ):
        table.add_row(name, value)
    return table


def describe_buckets(steps: Mapping[int, int]) -> str:
    """`16: 40, 32: 3`."""
    return ", ".join(f"{rung}: {count}" for rung, count in steps.items()) or "none"


class AnswerBoard:
    """Shows growing answers; `add` may be called from several threads."""

    def __init__(self, prompts: Sequence[str], console: Console) -> None:
        self._prompts, self._console = prompts, console
        self._texts = [""] * len(prompts)
        self._lock = threading.Lock()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=12)

    def add(self, index: int, event: StreamEvent) -> None:
        """Take one event of one request."""
        with self._lock:
            self._texts[index] += event.text
            if self._live is None and event.is_final:
                self._console.print(self._panel(index))

    def __enter__(self) -> AnswerBoard:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self) -> Group:
        with self._lock:
            return Group(*(self._panel(index) for index in range(len(self._prompts))))

    def _panel(self, index: int) -> Panel:
        return Panel(Text(self._texts[index]), title=Text(self._prompts[index]), title_align="left")
