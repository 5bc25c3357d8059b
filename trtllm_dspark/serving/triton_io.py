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
    pb = backend()
    return pb.TritonError(error_message(error), getattr(pb.TritonError, status_name(error)))


def make_tensors(outputs: Outputs, wanted: Iterable[str]) -> list[Any]:
    """The wanted ones of `outputs` as backend tensors."""
    pb = backend()
    return [pb.Tensor(name, outputs[name]) for name in wanted if name in outputs]


def send_error(sender: Any, error: Any) -> None:
    """End a request with an error: ours, or the backend's own of a called model.

    The error goes before the final flag, not with it: a calling model would not see an error that
    comes with the final flag after other responses.
    """
    pb = backend()
    if isinstance(error, Exception):
        error = make_error(error)
    sender.send(pb.InferenceResponse(error=error))
    send_empty_final(sender)


def send_empty_final(sender: Any) -> None:
    """End a request without a further response."""
    sender.send(flags=backend().TRITONSERVER_RESPONSE_COMPLETE_FINAL)


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
        sender: Any,
        make_outputs: Callable[[TokenResponse], Outputs],
        wanted: Iterable[str],
    ) -> None:
        self._writer, self._sender = writer, sender
        self._make_outputs, self._wanted = make_outputs, tuple(wanted)
        self._is_over = False

    def send(self, response: TokenResponse, *, final: bool) -> None:
        """See `live_request.Responder`."""
        if not self._is_over:
            self._is_over = final
            self._writer.put(lambda: self._send(response, final))

    def fail(self, error: Exception) -> None:
        """See `live_request.Responder`."""
        if not self._is_over:
            self._is_over = True
            self._writer.put(lambda: send_error(self._sender, error))

    def is_cancelled(self) -> bool:
        """See `live_request.Responder`."""
        return not self._is_over and bool(self._sender.is_cancelled())

    def _send(self, response: TokenResponse, final: bool) -> None:
        pb = backend()
        try:
            tensors = make_tensors(self._make_outputs(response), self._wanted)
        except Exception as error:
            if final:
                send_error(self._sender, error)
            raise
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb.InferenceResponse(output_tensors=tensors), flags=flags)
