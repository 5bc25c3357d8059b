# SPDX-License-Identifier: Apache-2.0
"""A byte tokenizer, a deterministic loop and recording responders for tests of serving."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.errors import InvalidRequestError, QueueFullError
from trtllm_dspark.serving.responses import TokenResponse
from trtllm_dspark.types import FinishReason, GenerationRequest, RequestOutput, RequestStats

END, BOS = 256, 257


class ByteTokenizer:
    """Token i < 256 is byte i; further tokens can be added as byte strings."""

    def __init__(self, extra: dict[int, bytes] | None = None) -> None:
        self.special_ids = frozenset({END, BOS})
        self._extra = {END: b"<end>", BOS: b"<bos>", **(extra or {})}

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self._extra[token_id]


@dataclass
class _Running:
    request: GenerationRequest
    script: list[int]
    stats: RequestStats
    position: int = 0


class ToyLoop:
    """Gives every request the bytes of its prompt again, a few a step, then an end.

    A slot is held from `add` on; `max_queue_size` bounds requests beyond `num_slots`.
    """

    def __init__(
        self, tokens_per_step: int = 2, num_slots: int = 2, max_queue_size: int = 0
    ) -> None:
        self.tokens_per_step, self.num_slots = tokens_per_step, num_slots
        self.max_queue_size = max_queue_size
        self.live: dict[str, _Running] = {}
        self.ended: list[RequestOutput] = []
        self.cancelled: list[tuple[str, FinishReason]] = []
        self.threads: set[int] = set()
        self.fail_next_step: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.ended)

    def add(self, request: GenerationRequest) -> None:
        self.threads.add(threading.get_ident())
        if len(request.prompt_token_ids) == 0:
            raise InvalidRequestError("the prompt is empty: send at least one token")
        if self.max_queue_size and len(self.live) - self.num_slots >= self.max_queue_size:
            raise QueueFullError("the queue is full")
        stats = RequestStats(num_prompt_tokens=len(request.prompt_token_ids))
        self.live[request.request_id] = _Running(request, request.prompt_token_ids.tolist(), stats)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        running = self.live.pop(request_id, None)
        if running is not None:
            self.cancelled.append((request_id, reason))
            self.ended.append(RequestOutput(request_id, (), None, reason, running.stats))

    def step(self) -> list[RequestOutput]:
        self.gate.wait(10)
        if self.fail_next_step is not None:
            error, self.fail_next_step = self.fail_next_step, None
            raise error
        outputs, self.ended = self.ended, []
        for key in list(self.live)[: self.num_slots]:
            outputs.append(self._advance(key))
        return outputs

    def _advance(self, key: str) -> RequestOutput:
        running = self.live[key]
        timeout = running.request.timeout_s
        if timeout is not None and time.monotonic() - running.request.priority_time_s > timeout:
            del self.live[key]
            return RequestOutput(key, (), None, FinishReason.TIMEOUT, running.stats)
        limit = min(len(running.script), running.request.params.max_tokens)
        new = tuple(running.script[running.position : limit][: self.tokens_per_step])
        running.position += len(new)
        running.stats.num_output_tokens += len(new)
        running.stats.num_steps += 1
        reason = None
        if running.position >= limit:
            reason = FinishReason.EOS if limit == len(running.script) else FinishReason.LENGTH
            del self.live[key]
        log_probs = (
            tuple(-float(t) for t in new) if running.request.params.return_log_probs else None
        )
        return RequestOutput(key, new, log_probs, reason, running.stats)

    def stats(self) -> LoopStats:
        return LoopStats(
            num_running=min(len(self.live), self.num_slots),
            num_waiting=max(len(self.live) - self.num_slots, 0),
        )


@dataclass
class Recorder:
    """A responder that keeps what it is given."""

    responses: list[TokenResponse] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    num_finals: int = 0
    is_gone: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def send(self, response: TokenResponse, *, final: bool) -> None:
        self.responses.append(response)
        self._end(final)

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self._end(True)

    def is_cancelled(self) -> bool:
        return self.is_gone

    def wait(self) -> Recorder:
        assert self.done.wait(10), "no final answer came"
        return self

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    def _end(self, final: bool) -> None:
        if final:
            self.num_finals += 1
            self.done.set()
