# SPDX-License-Identifier: Apache-2.0
"""Clients that go away give their slot and pages back, whatever way they came and went."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.e2e.conftest import MAX_NUM_REQUESTS
from tests.e2e.support import metrics, running, wait_until
from trtllm_dspark.serving.client import Answer, GrpcClient, StreamCall
from trtllm_dspark.serving.launcher import TritonServer

LONG: dict[str, Any] = {"text_input": "hello", "max_tokens": 8000}
MODELS = ("ensemble", "tensorrt_llm_bls")


def wait_running(server: TritonServer, count: int) -> None:
    wait_until(lambda: running(server) == count, f"{count} running requests")


def num_cancelled(server: TritonServer) -> float:
    return metrics(server).total("dspark_requests_total", reason="cancelled")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_cancelled_call_frees_its_slot(
    server: TritonServer, client: GrpcClient, model: str, stream: bool
) -> None:
    before = num_cancelled(server)
    call = client.stream({**LONG, "stream": stream}, model=model)
    wait_running(server, 1)
    call.cancel()
    wait_running(server, 0)
    wait_until(lambda: num_cancelled(server) == before + 1, "the cancellation counted")


def test_a_request_cancelled_before_its_first_token_leaves_nothing(
    server: TritonServer, client: GrpcClient
) -> None:
    before = num_cancelled(server)
    long = [client.stream({**LONG, "stream": True}) for _ in range(MAX_NUM_REQUESTS)]
    wait_running(server, MAX_NUM_REQUESTS)
    waiting = client.stream({**LONG, "stream": True})
    wait_until(lambda: metrics(server).total("dspark_waiting_requests") == 1, "one waits")
    waiting.cancel()
    wait_until(lambda: metrics(server).total("dspark_waiting_requests") == 0, "none waits")
    assert [e for e in waiting if e.outputs] == []
    for call in long:
        call.cancel()
    wait_until(
        lambda: num_cancelled(server) == before + MAX_NUM_REQUESTS + 1, "all cancellations counted"
    )


def test_a_call_cancelled_at_once_leaves_nothing(server: TritonServer, client: GrpcClient) -> None:
    for _ in range(10):
        client.stream({**LONG, "stream": True}).cancel()
    assert client.ask({"text_input": "x", "max_tokens": 3}).error is None


CLIENT = """
import sys
from trtllm_dspark.serving.client import GrpcClient
call = GrpcClient(sys.argv[1]).stream({"text_input": "hi", "max_tokens": 8000, "stream": True})
for event in call:
    print("event", flush=True)
"""


def test_a_client_killed_mid_stream_frees_its_slot(server: TritonServer) -> None:
    command = [sys.executable, "-c", CLIENT, server.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "event\n"
        wait_running(server, 1)
        process.send_signal(signal.SIGKILL)
    wait_running(server, 0)


def test_an_http_disconnect_frees_the_slot(server: TritonServer) -> None:
    body = json.dumps({**LONG, "stream": True}).encode()
    head = (
        f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((server.client_host, server.ports.http)) as connection:
        connection.sendall(head.encode() + body)
        assert b"200" in connection.recv(64)
        wait_running(server, 1)
    wait_running(server, 0)


@pytest.mark.parametrize("model", MODELS)
def test_stop_with_a_request_id_ends_that_request_only(
    server: TritonServer, client: GrpcClient, model: str
) -> None:
    answers: dict[str, Answer] = {}

    def gather(name: str, call: StreamCall) -> None:
        answers[name] = call.gather()

    calls = {
        "stopped": client.stream({**LONG, "stream": True}, model=model, request_id="17"),
        "other": client.stream({**LONG, "stream": True}, model=model, request_id="18"),
    }
    threads = [threading.Thread(target=gather, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    wait_running(server, 2)
    stop = client.ask(
        {"stop": True, "input_lengths": 1, "request_output_len": 1},
        model="tensorrt_llm",
        request_id="17",
    )
    assert stop.error is None and not stop.has_outputs
    threads[0].join()
    wait_running(server, 1)
    calls["other"].cancel()
    threads[1].join()
    stopped = answers["stopped"]
    assert stopped.error == "the request was stopped"
    assert answers["other"].error != stopped.error and answers["other"].text
