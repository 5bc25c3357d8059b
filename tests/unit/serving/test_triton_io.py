# SPDX-License-Identifier: Apache-2.0
"""Errors get their status; a sender gets one final flag and is never asked after it."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trtllm_dspark.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
    UnsupportedError,
)
from trtllm_dspark.serving.responses import TokenResponse, make_engine_outputs
from trtllm_dspark.serving.triton_io import (
    GuardedSender,
    ResponseWriter,
    SenderResponder,
    error_message,
    status_name,
)
from trtllm_dspark.types import FinishReason

FINAL = 1


class FakeError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "X"

    def __init__(self, message: str, code: str) -> None:
        self.text, self.code_name = message, code


class FakeResponse:
    def __init__(self, output_tensors: Any = (), error: Any = None) -> None:
        self.tensors = dict(output_tensors)
        self.error = error


class FakeSender:
    """Records what is sent, and fails as the server would when asked too late."""

    def __init__(self) -> None:
        self.sent: list[tuple[FakeResponse | None, int]] = []
        self.is_over = False

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        assert not self.is_over, "sent after the final flag"
        self.sent.append((response, flags))
        self.is_over = bool(flags & FINAL)

    def is_cancelled(self) -> bool:
        assert not self.is_over, "the server would crash"
        return False


@pytest.fixture(autouse=True)
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("triton_python_backend_utils")
    module.TritonError = FakeError  # type: ignore[attr-defined]
    module.InferenceResponse = FakeResponse  # type: ignore[attr-defined]
    module.Tensor = lambda name, array: (name, array)  # type: ignore[attr-defined]
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    yield


def respond() -> tuple[FakeSender, ResponseWriter, SenderResponder]:
    sender, writer = FakeSender(), ResponseWriter()
    responder = SenderResponder(
        writer, GuardedSender(sender), make_engine_outputs, ("output_ids", "finish_reason")
    )
    return sender, writer, responder


@pytest.mark.parametrize(
    "error, status",
    [
        (InvalidRequestError("x"), "INVALID_ARG"),
        (UnsupportedError("x"), "INVALID_ARG"),
        (QueueFullError("x"), "UNAVAILABLE"),
        (ShuttingDownError("x"), "UNAVAILABLE"),
        (RequestTimeoutError("x"), "UNAVAILABLE"),
        (RequestCancelledError("x"), "CANCELLED"),
        (EngineError("x"), "INTERNAL"),
        (ValueError("x"), "INTERNAL"),
    ],
)
def test_every_error_has_its_status(error: Exception, status: str) -> None:
    assert status_name(error) == status


def test_unforeseen_errors_are_told_by_number_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    message = error_message(KeyError("secret"))
    assert "secret" not in message and "incident" in message
    incident = message.split("incident ")[1][:8]
    assert incident in caplog.text and "secret" in caplog.text


def test_only_wanted_outputs_are_sent_and_the_last_carries_the_flag() -> None:
    sender, writer, responder = respond()
    responder.send(TokenResponse(token_ids=(5,)), final=False)
    responder.send(TokenResponse(token_ids=(6,), finish_reason=FinishReason.EOS), final=True)
    writer.close()
    assert [flags for _, flags in sender.sent] == [0, FINAL]
    tensors = sender.sent[1][0].tensors  # type: ignore[union-attr]
    assert set(tensors) == {"output_ids", "finish_reason"}
    assert tensors["output_ids"].tolist() == [[[6]]]
    assert tensors["finish_reason"].tolist() == [[b"eos"]]


def test_after_the_final_flag_nothing_is_sent_and_nobody_is_asked() -> None:
    sender, writer, responder = respond()
    responder.fail(RequestCancelledError("gone"))
    responder.fail(EngineError("again"))
    responder.send(TokenResponse(), final=True)
    writer.close()
    assert len(sender.sent) == 1 and sender.sent[0][1] == FINAL
    assert not responder.is_cancelled()


def test_asking_and_finishing_never_overlap() -> None:
    for _ in range(200):
        sender = FakeSender()
        guarded = GuardedSender(sender)
        asker = threading.Thread(target=lambda g=guarded: [g.is_cancelled() for _ in range(5)])
        asker.start()
        guarded.send([("x", np.zeros(1))], final=True)
        asker.join()
        assert len(sender.sent) == 1


def test_a_response_that_cannot_be_made_becomes_an_error_and_the_writer_goes_on() -> None:
    sender, writer = FakeSender(), ResponseWriter()

    def explode(response: TokenResponse) -> dict[str, Any]:
        raise RuntimeError("boom")

    SenderResponder(writer, GuardedSender(sender), explode, ("output_ids",)).send(
        TokenResponse(), final=False
    )
    done = threading.Event()
    writer.put(done.set)
    assert done.wait(10)
    assert sender.sent[0][0].error is not None  # type: ignore[union-attr]
    assert sender.sent[0][1] == FINAL
    writer.close()
