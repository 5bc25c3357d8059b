# SPDX-License-Identifier: Apache-2.0
"""How the text models reach the engine model: a Unix socket between processes of one server.

Calls between models through the server break on tritonserver 2.51 when clients cancel (slots that
are never freed, a server that dies), so requests travel here instead. One connection is one
request; a connection that closes is a request that is stopped. Knows messages, not their meaning.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy.typing as npt

from trtllm_dspark.errors import EngineError
from trtllm_dspark.serving.responses import Outputs, TokenResponse

logger = logging.getLogger(__name__)

STOP = "stop"
BACKLOG = 512


@dataclass(frozen=True)
class LinkRequest:
    """What a text model asks of the engine."""

    tensors: Mapping[str, npt.NDArray]
    """Inputs of `tensorrt_llm`, batch dimension first."""
    request_id: str
    timeout_us: int
    wanted: tuple[str, ...]
    """Outputs of `tensorrt_llm` to send back."""


@dataclass(frozen=True)
class LinkResponse:
    """Some outputs; the last response of a request is final."""

    outputs: Outputs
    is_final: bool


@dataclass(frozen=True)
class LinkFailure:
    """The end of a request by an error: status code and message for the client."""

    code: str
    message: str


def link_path(engine_model: str) -> Path:
    """Socket of an engine model: the models of one server have the same parent process."""
    directory = Path(tempfile.gettempdir()) / f"dspark-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid() or directory.stat().st_mode & 0o077:
        raise EngineError(
            f"{directory} is open to other users: remove it, only this user may talk to the engine"
        )
    return directory / f"{os.getppid()}-{engine_model}.sock"


class LinkServer:
    """Accepts connections and gives each to `serve` in a thread of its own."""

    def __init__(self, path: Path, serve: Callable[[Connection], None]) -> None:
        path.unlink(missing_ok=True)
        self._path, self._serve = path, serve
        self._listener = Listener(str(path), "AF_UNIX", backlog=BACKLOG)
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="dspark-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further connections."""
        self._is_closed = True
        with Client(str(self._path), "AF_UNIX"):
            pass  # wakes the accepting thread
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError:
                logger.exception("a text model could not be connected")
                continue
            name = f"dspark-link-{connection.fileno()}"
            threading.Thread(target=self._run, args=(connection,), name=name, daemon=True).start()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except (EOFError, OSError):
            pass  # the text model is gone; the request was stopped
        except Exception:
            logger.exception("a text model's request could not be served")
        finally:
            connection.close()


class LinkResponder:
    """A `live_request.Responder` on a connection. Sends come from one writer thread, in order."""

    def __init__(
        self,
        put: Callable[[Callable[[], None]], None],
        connection: Connection,
        make_outputs: Callable[[TokenResponse], Outputs],
        describe: Callable[[Exception], tuple[str, str]],
        wanted: Iterable[str],
    ) -> None:
        self._put, self._connection = put, connection
        self._make_outputs, self._describe, self._wanted = make_outputs, describe, tuple(wanted)

    def send(self, response: TokenResponse, *, final: bool) -> None:
        """See `live_request.Responder`."""

        def job() -> None:
            outputs = self._make_outputs(response)
            chosen = {name: outputs[name] for name in self._wanted if name in outputs}
            self._send(LinkResponse(chosen, final))

        self._put(job)

    def fail(self, error: Exception) -> None:
        """See `live_request.Responder`."""
        self._put(lambda: self._send(LinkFailure(*self._describe(error))))

    def is_cancelled(self) -> bool:
        """A connection that closes stops its request: there is nothing to ask."""
        return False

    def _send(self, message: LinkResponse | LinkFailure) -> None:
        try:
            self._connection.send(message)
        except OSError:
            logger.debug("a text model left before its request ended")


class EngineCall:
    """One request at the engine, from the text model's side."""

    def __init__(self, path: Path, request: LinkRequest) -> None:
        """Send the request; EngineError when no engine listens."""
        self._lock = threading.Lock()
        try:
            self._connection = Client(str(path), "AF_UNIX")
            self._connection.send(request)
        except OSError as error:
            raise EngineError(f"no engine listens at {path}: {error.strerror}") from error

    def receive(self) -> LinkResponse | LinkFailure:
        """Wait for the next message; EngineError when the engine is gone."""
        try:
            message: LinkResponse | LinkFailure = self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError("the engine ended while it served this request") from error
        return message

    def stop(self) -> None:
        """Ask the engine to end the request; any thread, also after its end."""
        with self._lock:
            if not self._connection.closed:
                try:
                    self._connection.send(STOP)
                except OSError:
                    logger.debug("the engine ended before its request was stopped")

    def close(self) -> None:
        """Leave; a request that still runs is stopped."""
        with self._lock:
            self._connection.close()
