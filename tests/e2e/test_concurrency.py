# SPDX-License-Identifier: Apache-2.0
"""Two hundred mixed requests at once: each gets its own complete answer or its own clear error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.support import metrics, wait_until
from trtllm_dspark.serving.client import Answer, GrpcClient
from trtllm_dspark.serving.launcher import TritonServer

NUM_REQUESTS = 200
KINDS = ("short", "long", "cancelled", "invalid", "stopped")


def options_of(number: int) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    options: dict[str, Any] = {
        "text_input": f"request {number}: é",
        "max_tokens": 8,
        "stream": number % 2 == 0,
    }
    if kind == "long":
        options["max_tokens"] = 120
    elif kind == "cancelled":
        options["max_tokens"] = 8000
    elif kind == "invalid":
        options["temperature"] = -float(number)
    elif kind == "stopped":
        options.update(max_tokens=100, stop_words=["e"])
    return options


def send(client: GrpcClient, number: int, cancel_after: threading.Event | None = None) -> Answer:
    model = ("ensemble", "tensorrt_llm_bls")[number % 2]
    call = client.stream(options_of(number), model=model)
    if KINDS[number % len(KINDS)] == "cancelled":
        assert cancel_after is not None
        cancel_after.wait(0.002 * number)
        call.cancel()
    return call.gather()


def test_two_hundred_mixed_requests(server: TritonServer, client: GrpcClient) -> None:
    alone = {
        number: send(client, number).text
        for number in range(NUM_REQUESTS)
        if KINDS[number % len(KINDS)] in ("short", "long", "stopped") and number < 40
    }
    before = metrics(server)
    never = threading.Event()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda n: send(client, n, never), range(NUM_REQUESTS)))
    for number, answer in enumerate(answers):
        check(number, answer)
        if number in alone:
            assert answer.text == alone[number], f"request {number} differs in company"
    wait_until(
        lambda: (
            metrics(server).total("dspark_requests_total", reason="length")
            - before.total("dspark_requests_total", reason="length")
            >= 2 * NUM_REQUESTS // len(KINDS)
        ),
        "every short and long request counted",
    )


def check(number: int, answer: Answer) -> None:
    kind = KINDS[number % len(KINDS)]
    if kind == "invalid":
        assert answer.error == (
            f"temperature = {-float(number)} is not allowed: it must be a number ≥ 0 (0 = greedy)"
        )
    elif kind == "cancelled":
        assert answer.status == "CANCELLED"
    elif kind == "stopped":
        assert answer.error is None and "e" not in answer.text
        assert answer.finish_reason in ("stop", "length")
    else:
        assert answer.error is None and answer.finish_reason == "length"
        assert answer.last.number("num_output_tokens") == options_of(number)["max_tokens"]
