# SPDX-License-Identifier: Apache-2.0
"""Helpers of the end-to-end tests: HTTP calls, waiting for metrics, ids of prompts."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from trtllm_dspark.serving.launcher import TritonServer
from trtllm_dspark.serving.scrape import Metrics, read_metrics

PATIENCE_S = 60.0
"""How long a state may take to come about; no test asserts that anything is quick."""


def post(server: TritonServer, model: str, verb: str, body: dict[str, Any]) -> tuple[int, Any]:
    """POST to generate or generate_stream: status, and JSON or the list of streamed JSONs."""
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{model}/{verb}", json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if verb == "generate_stream":
        lines = [line for line in text.splitlines() if line.startswith("data: ")]
        return status, [json.loads(line.removeprefix("data: ")) for line in lines]
    return status, json.loads(text)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`, fail with `what` if it never holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came about: {what}"
        time.sleep(0.05)


def metrics(server: TritonServer) -> Metrics:
    """The server's metrics now."""
    return read_metrics(server.metrics_url)


def running(server: TritonServer) -> int:
    """Requests that hold a slot."""
    return int(metrics(server).total("dspark_running_requests"))


def wait_idle(server: TritonServer) -> None:
    """Wait until no slot and no page is held: nothing leaked."""

    def is_idle() -> bool:
        now = metrics(server)
        pages = now.total("dspark_pages")
        return (
            pages > 0
            and now.total("dspark_running_requests") == 0
            and now.total("dspark_waiting_requests") == 0
            and now.total("dspark_free_pages") == pages
        )

    wait_until(is_idle, "no running or waiting request and every page free")
