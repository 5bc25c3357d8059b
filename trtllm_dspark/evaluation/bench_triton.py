# SPDX-License-Identifier: Apache-2.0
"""Runs a load through Triton: gRPC streaming, one stream per request, a server per contender.

All servers stay up for the whole run, so that rounds can be interleaved; an idle one costs next to
nothing. Step statistics come from scrapes of the server's metrics inside the steady state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.config import SchedulerConfig, SystemConfig
from trtllm_dspark.evaluation.bench_inprocess import PLAIN, contender_name
from trtllm_dspark.evaluation.bench_load import BenchLoad, BenchRequest, RequestRecord
from trtllm_dspark.evaluation.bench_measure import measure_round, steady_window
from trtllm_dspark.evaluation.bench_metrics import MetricsWatch, describe_window
from trtllm_dspark.serving.client import GrpcClient, StreamEvent
from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import RepositoryOptions
from trtllm_dspark.serving.server import running_server


@dataclass(frozen=True)
class ServerContender:
    """A running server."""

    name: str
    grpc_url: str
    metrics_url: str
    stack: contextlib.ExitStack

    def run_round(self, load: BenchLoad) -> dict[str, Any]:
        """Run one round and measure it."""
        watch = MetricsWatch(self.metrics_url)
        with GrpcClient(self.grpc_url) as client, watch:
            records = _RoundRun(client, load).run()
        row = measure_round(records, load)
        return {**row, **describe_window(watch.scrapes, steady_window(records, load))}

    def close(self) -> None:
        """Drain and stop the server."""
        self.stack.close()


def make_server_contenders(
    config: SystemConfig, drafters: list[str], policies: list[str], options: dict[str, Any]
) -> list[ServerContender]:
    """Start a plain server, then one for every policy with every drafter."""
    cache = dataclasses.replace(config.cache, enable_prefix_reuse=False)
    config = dataclasses.replace(config, cache=cache)
    wanted = [(PLAIN, "none", SchedulerConfig(PLAIN))]
    for drafter in drafters:
        for policy in policies:
            name = contender_name(policy, drafter, drafters)
            wanted.append((name, drafter, SchedulerConfig(policy, options.get(policy, {}))))
    found: list[ServerContender] = []
    try:
        for name, drafter, scheduler in wanted:
            own = dataclasses.replace(config, drafter=drafter, scheduler=scheduler)
            found.append(_start(name, own))
    except BaseException:
        for contender in found:
            contender.close()
        raise
    return found


def _start(name: str, config: SystemConfig) -> ServerContender:
    stack = contextlib.ExitStack()
    server = stack.enter_context(
        running_server(
            config,
            ports=Ports(0, 0, 0),
            host="127.0.0.1",
            options=RepositoryOptions(apply_chat_template=True),
        )
    )
    return ServerContender(name, server.grpc_url, server.metrics_url, stack)


class _RoundRun:
    """One round against one server."""

    def __init__(self, client: GrpcClient, load: BenchLoad) -> None:
        self.client, self.load = client, load
        self.waiting = deque(load.requests)
        self.records: list[RequestRecord] = []
        self.lock = threading.Lock()

    def run(self) -> list[RequestRecord]:
        """Send everything; returns when the last answer is complete."""
        self.begin_s = time.perf_counter()
        if self.load.is_open:
            with ThreadPoolExecutor(len(self.load.requests)) as pool:
                list(pool.map(self._send_when_due, self.load.requests))
        else:
            with ThreadPoolExecutor(self.load.concurrency) as pool:
                list(pool.map(lambda _: self._keep_sending(), range(self.load.concurrency)))
        return self.records

    def _keep_sending(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    return
                request = self.waiting.popleft()
            self._send(request, time.perf_counter())

    def _send_when_due(self, request: BenchRequest) -> None:
        due_s = self.begin_s + (request.arrival_s or 0.0)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        self._send(request, due_s)

    def _send(self, request: BenchRequest, start_s: float) -> None:
        record = RequestRecord(start_s)
        with self.lock:
            self.records.append(record)
        options: dict[str, object] = {
            "text_input": request.text,
            "max_tokens": self.load.max_tokens,
            "temperature": self.load.temperature,
            "stream": True,
        }
        if self.load.ignore_end:
            options["end_id"] = -1
        answer = self.client.stream(options).gather(lambda event: _note(record, event))
        record.end_s = time.perf_counter()
        record.error = answer.error


def _note(record: RequestRecord, event: StreamEvent) -> None:
    if "num_output_tokens" in event.outputs:
        record.add(event.time_s, int(event.number("num_output_tokens")))
