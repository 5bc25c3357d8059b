# SPDX-License-Identifier: Apache-2.0
"""The Python backend's objects ⇄ ours: tensors, errors with status codes, response senders.

The only module that touches `triton_python_backend_utils`, which exists inside a model process
only and is therefore looked up when needed.
"""

from __future__ import annotations

import importlib
import logging
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy.typing as npt

from trtllm_dspark.errors import (
    DSparkError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
)
from trtllm_dspark.serving.responses import Outputs, TokenResponse

logger = logging.getLogger(__name__)

_CODES: tuple[tuple[type[DSparkError], str], ...] = (
    (InvalidRequestError, "INVALID_ARG"),
    (QueueFullError, "UNAVAILABLE"),
    (ShuttingDownError, "UNAVAILABLE"),
    (RequestTimeoutError, "UNAVAILABLE"),
    (RequestCancelledError, "CANCELLED"),
)


def backend() -> Any:
    """The Python backend's utility module."""
    return importlib.import_module("triton_python_backend_utils")


def configure_logging() -> None:
    """Send this package's log lines to the server's log."""
    root = logging.getLogger("trtllm_dspark")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)


def read_tensors(request: Any) -> dict[str, npt.NDArray]:
    """A request's inputs by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def status_name(error: Exception) -> str:
    """Name of the status code that an error is answered with."""
    return next((name for kind, name in _CODES if isinstance(error, kind)), "INTERNAL")


def error_message(error: Exception) -> str:
    """One sentence for the client; what was not foreseen gets an id and goes to the log."""
    if isinstance(error, DSparkError):
        return str(error)
    incident = uuid.uuid4().hex[:8]
    logger.error("incident %s", incident, exc_info=error)
    return f"the server failed while it served this request (incident {incident}): see its log"


def make_error(error: Exception) -> Any:
    """The backend's error object for an exception."""
    return make_status_error(status_name(error), error_message(error))


def make_status_error(code: str, message: str) -> Any:
    """The backend's error object for a status code by name."""
    pb = backend()
    return pb.TritonError(message, getattr(pb.TritonError, code))


def make_tensors(outputs: Outputs, wanted: Iterable[str]) -> list[Any]:
    """The wanted ones of `outputs` as backend tensors."""
    pb = backend()
    return [pb.Tensor(name, outputs[name]) for name in wanted if name in outputs]


class GuardedSender:
    """A response sender that may be asked `is_cancelled` at any time.

    The server crashes when it is asked about a request that has its final flag already; the lock
    keeps the question and the final flag apart. Only the first final flag is sent.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_over = False

    def send(self, tensors: list[Any], *, final: bool) -> None:
        """Send output tensors."""
        self._send(backend().InferenceResponse(output_tensors=tensors), final)

    def fail(self, error: Any) -> None:
        """End the request with an error: an exception, or the backend's error object."""
        if isinstance(error, Exception):
            error = make_error(error)
        self._send(backend().InferenceResponse(error=error), True)

    def end(self) -> None:
        """End the request without a further response."""
        self._send(None, True)

    def is_cancelled(self) -> bool:
        """Whether the client is gone; False once the request is over."""
        with self._lock:
            return not self._is_over and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        flags = backend().TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            if self._is_over:
                return
            self._is_over = final
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)


class ResponseWriter:
    """Sends responses from one thread of its own, in order: sending waits for the server."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dspark-writer", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Queue one send."""
        self._jobs.put(job)

    def close(self) -> None:
        """Send what waits, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                job()
            except Exception:
                logger.exception("a response could not be sent")


class SenderResponder:
    """A `live_request.Responder` on a response sender; exactly one final flag, errors included."""

    def __init__(
        self,
        writer: ResponseWriter,
        sender: GuardedSender,
        make_outputs: Callable[[TokenResponse], Outputs],
        wanted: Iterable[str],
    ) -> None:
        self._writer, self._sender = writer, sender
        self._make_outputs, self._wanted = make_outputs, tuple(wanted)

    def send(self, response: TokenResponse, *, final: bool) -> None:
        """See `live_request.Responder`."""
        self._writer.put(lambda: self._send(response, final))

    def fail(self, error: Exception) -> None:
        """See `live_request.Responder`."""
        self._writer.put(lambda: self._sender.fail(error))

    def end(self) -> None:
        """End without a response; blocks, for the writer's thread."""
        self._sender.end()

    def is_cancelled(self) -> bool:
        """See `live_request.Responder`."""
        return self._sender.is_cancelled()

    def _send(self, response: TokenResponse, final: bool) -> None:
        try:
            tensors = make_tensors(self._make_outputs(response), self._wanted)
        except Exception as error:
            self._sender.fail(error)
            raise
        self._sender.send(tensors, final=final)
