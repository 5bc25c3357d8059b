# SPDX-License-Identifier: Apache-2.0
"""`dspark serve`: renders the model repository, runs the server, drains on a signal.

Knows the order of things; where text goes is the caller's `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from trtllm_dspark.config import SystemConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime import check_config
from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import (
    RepositoryOptions,
    render_repository,
)

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


@contextlib.contextmanager
def running_server(
    config: SystemConfig,
    *,
    ports: Ports | None = None,
    host: str = "0.0.0.0",
    options: RepositoryOptions | None = None,
    work_dir: Path | None = None,
    ready_timeout_s: float = 600.0,
    report: Report = logger.info,
) -> Iterator[TritonServer]:
    """A server for `config` that is ready inside the block and drained at its end.

    `work_dir` receives the rendered repository and the log (a temporary directory by default).
    """
    if not (Path(config.model_dir) / "config.json").is_file():
        raise ConfigError(
            f"{config.model_dir!r} is no model directory (no config.json): make one with "
            "`dspark prepare`"
        )
    config = dataclasses.replace(config, buckets=check_config(config).buckets)
    options = options or RepositoryOptions()
    with contextlib.ExitStack() as stack:
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dspark-")))
        work_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="repository-", dir=work_dir))
        )
        repository = render_repository(config, scratch / "models", options)
        server = TritonServer(
            repository,
            ports=ports,
            host=host,
            work_dir=work_dir,
            exit_timeout_s=options.drain_timeout_s,
        )
        for note in server.port_notes:
            report(note)
        report(f"starting tritonserver; its log is {server.log_path}")
        stack.callback(server.close)
        server.start(ready_timeout_s)
        yield server


def describe_endpoints(server: TritonServer) -> list[str]:
    """One line for each endpoint, with an example."""
    return [
        f"HTTP     http://{server.http_url}/v2/models/ensemble/generate",
        f"gRPC     {server.grpc_url}",
        f"metrics  {server.metrics_url}",
        f'example  curl -d \'{{"text_input": "Hello", "max_tokens": 32}}\' '
        f"http://{server.http_url}/v2/models/ensemble/generate",
    ]


def serve(
    config: SystemConfig,
    *,
    ports: Ports | None = None,
    host: str = "0.0.0.0",
    options: RepositoryOptions | None = None,
    work_dir: Path | None = None,
    report: Report = logger.info,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain; 0, or 1 when the server ended by itself.

    Call it from the main thread: it handles signals.
    """
    with running_server(
        config, ports=ports, host=host, options=options, work_dir=work_dir, report=report
    ) as server:
        for line in describe_endpoints(server):
            report(line)
        return wait_for_signal(server, report)


def wait_for_signal(server: TritonServer, report: Report = logger.info) -> int:
    """Block until a signal (0) or until the server ends by itself (1)."""
    stop = threading.Event()
    with _handled(signal.SIGINT, stop), _handled(signal.SIGTERM, stop):
        while not stop.wait(0.2):
            if server.wait(0) is not None:
                report(f"the server ended by itself; the end of {server.log_path}:")
                report(server.log_tail())
                return 1
        report("draining: running requests finish, new ones are refused")
        server.stop()
    return 0


@contextlib.contextmanager
def _handled(number: signal.Signals, stop: threading.Event) -> Iterator[None]:
    previous = signal.signal(number, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(number, previous)
