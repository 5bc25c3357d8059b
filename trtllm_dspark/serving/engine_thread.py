# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns the decoding loop: takes requests, steps, answers, cancels, drains.

Other threads only put commands into a queue. Every request gets exactly one last answer, whatever
happens. Knows responders and text, not tensors and not the server.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.errors import DSparkError, EngineError, RequestCancelledError, ShuttingDownError
from trtllm_dspark.serving.live_request import LiveRequest, Responder
from trtllm_dspark.serving.requests import EngineRequest
from trtllm_dspark.serving.text import TokenBytes
from trtllm_dspark.types import FinishReason, GenerationRequest, RequestOutput, RequestStats

logger = logging.getLogger(__name__)

FAILURE_PAUSE_S = 0.05
"""Wait after a failed step, so that a broken engine does not fill the log at full speed."""


class Loop(Protocol):
    """The part of `decoding.loop.DecodingLoop` that serving uses."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request or raise."""
        ...

    def cancel(self, request_id: str, reason: FinishReason = ...) -> None:
        """End a request now."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one decode step."""
        ...

    def stats(self) -> LoopStats:
        """Counters and present state."""
        ...


class Observer(Protocol):
    """Who wants to know; called from the engine thread, must not block."""

    def observe_stats(self, stats: LoopStats) -> None:
        """A fresh snapshot, a few times a second and whenever the loop runs out of work."""
        ...

    def observe_finish(self, stats: RequestStats, num_output_tokens: int) -> None:
        """One request got its last answer."""
        ...


@dataclass(frozen=True)
class _Add:
    request: EngineRequest
    responder: Responder


@dataclass(frozen=True)
class _End:
    """Cancel live requests: the one named, those with a client id or a handle, or all."""

    message: str
    live: LiveRequest | None = None
    client_id: str = ""
    handle: str = ""
    all: bool = False

    def matches(self, live: LiveRequest) -> bool:
        """Whether `live` is meant."""
        if self.live is not None:
            return live is self.live
        if self.handle:
            return live.request.handle == self.handle
        return self.all or (bool(self.client_id) and live.request.client_id == self.client_id)


class EngineThread:
    """Serves requests on one loop from one background thread."""

    def __init__(
        self,
        loop: Loop,
        tokenizer: TokenBytes,
        *,
        page_size: int = 1,
        observer: Observer | None = None,
        stats_interval_s: float = 0.25,
    ) -> None:
        self._loop, self._tokenizer, self._page_size = loop, tokenizer, page_size
        self._observer, self._stats_interval_s = observer, stats_interval_s
        self._commands: queue.SimpleQueue[_Add | _End | None] = queue.SimpleQueue()
        self._live: dict[str, LiveRequest] = {}
        self._watched: tuple[LiveRequest, ...] = ()
        self._stopped_handles: deque[str] = deque(maxlen=1024)
        """Stopped before they came: the stop of a caller may overtake its request."""
        self._sweep = threading.Event()
        self._admission = threading.Lock()
        self._is_draining = False
        self._last_stats_s = 0.0
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="dspark-cancel", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._publish_stats()
        self._thread.start()
        self._watcher.start()

    def submit(self, request: EngineRequest, responder: Responder) -> None:
        """Hand over a request; errors go to the responder. Any thread."""
        with self._admission:
            if not self._is_draining:
                self._commands.put(_Add(request, responder))
                return
        responder.fail(ShuttingDownError("the server is shutting down: send the request elsewhere"))

    def stop(self, *, client_id: str = "", handle: str = "") -> None:
        """Cancel the requests with this client id, or the one with this handle. Any thread."""
        self._commands.put(_End("the request was stopped", client_id=client_id, handle=handle))

    def drain(self, timeout_s: float) -> None:
        """Take no new requests, finish the live ones (cancel them after `timeout_s`), end."""
        with self._admission:
            self._is_draining = True
        self._commands.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._commands.put(_End("the server is shutting down", all=True))
            self._thread.join()
        self._sweep.set()
        self._watcher.join()

    def _run(self) -> None:
        while True:
            self._take_commands()
            if self._loop.has_work:
                self._step()
            elif self._is_draining and self._commands.empty():
                return

    def _take_commands(self) -> None:
        """Obey what waits in the queue; block only while there is nothing else to do."""
        if not self._loop.has_work and not self._is_draining:
            self._obey(self._commands.get())
        with contextlib.suppress(queue.Empty):
            while True:
                self._obey(self._commands.get_nowait())
        self._watched = tuple(self._live.values())

    def _obey(self, command: _Add | _End | None) -> None:
        if isinstance(command, _Add):
            self._add(command)
        elif isinstance(command, _End):
            self._end(command)

    def _end(self, command: _End) -> None:
        matching = [live for live in self._live.values() if command.matches(live)]
        for live in matching:
            self._loop.cancel(live.key, FinishReason.CANCELLED)
            self._forget(live, RequestCancelledError(command.message))
        if command.handle and not matching:
            self._stopped_handles.append(command.handle)

    def _add(self, command: _Add) -> None:
        if command.request.handle and command.request.handle in self._stopped_handles:
            self._stopped_handles.remove(command.request.handle)
            command.responder.fail(RequestCancelledError("the request was stopped"))
            return
        try:
            live = LiveRequest(command.request, command.responder, self._tokenizer, self._page_size)
            self._loop.add(command.request.generation)
        except DSparkError as error:
            command.responder.fail(error)
        except Exception:
            logger.exception("a request could not be added")
            command.responder.fail(EngineError("the engine could not take this request"))
        else:
            self._live[live.key] = live

    def _step(self) -> None:
        self._sweep.set()
        try:
            outputs = self._loop.step()
            for output in outputs:
                self._deliver(output)
        except Exception:
            logger.exception("a step failed; its requests are lost")
            self._fail_all()
            time.sleep(FAILURE_PAUSE_S)
        is_due = time.monotonic() - self._last_stats_s >= self._stats_interval_s
        if is_due or not self._loop.has_work:
            self._publish_stats()

    def _deliver(self, output: RequestOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        reason = live.take(output)
        if reason is FinishReason.STOP and output.finish_reason is None:
            self._loop.cancel(live.key, FinishReason.STOP)
        if reason is not None:
            self._forget(live)
            if self._observer is not None:
                self._observer.observe_finish(output.stats, live.stream.num_tokens)
        live.respond(reason, output)

    def _fail_all(self) -> None:
        for live in list(self._live.values()):
            with contextlib.suppress(Exception):
                self._loop.cancel(live.key, FinishReason.ERROR)
            self._forget(
                live, EngineError("the engine failed while it served this request: see its log")
            )

    def _forget(self, live: LiveRequest, error: Exception | None = None) -> None:
        del self._live[live.key]
        if error is not None:
            live.responder.fail(error)

    def _publish_stats(self) -> None:
        self._last_stats_s = time.monotonic()
        if self._observer is not None:
            self._observer.observe_stats(self._loop.stats())

    def _watch(self) -> None:
        """Ask beside each step which clients are gone (asking costs a round trip each)."""
        while True:
            self._sweep.wait()
            self._sweep.clear()
            if not self._thread.is_alive():
                return
            for live in self._watched:
                if live.responder.is_cancelled():
                    self._commands.put(_End("the request was cancelled", live=live))
