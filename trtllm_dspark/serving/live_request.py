# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the engine thread: its text, and what is still to be sent.

Turns loop outputs (tokens of a step) into responses. Only the engine thread touches it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Protocol

from trtllm_dspark.errors import (
    DSparkError,
    EngineError,
    RequestCancelledError,
    RequestTimeoutError,
)
from trtllm_dspark.serving.requests import EngineRequest
from trtllm_dspark.serving.responses import TokenResponse
from trtllm_dspark.serving.text import TextGroup, TextStream, TokenBytes, decode_tokens
from trtllm_dspark.types import FinishReason, RequestOutput, RequestStats


class Responder(Protocol):
    """Where one request's answers go. Exactly one call is the last: send(final=True) or fail."""

    def send(self, response: TokenResponse, *, final: bool) -> None:
        """Send new tokens; must not block."""
        ...

    def fail(self, error: Exception) -> None:
        """End the request with an error; must not block."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client is gone; called from another thread than the others."""
        ...


class LiveRequest:
    """State of one request between submission and its last response."""

    def __init__(
        self, request: EngineRequest, responder: Responder, tokenizer: TokenBytes, page_size: int
    ) -> None:
        self.request, self.responder = request, responder
        self.stream = TextStream(
            tokenizer, request.text.stop_strings, skip_special=request.text.skip_special
        )
        self._decode = partial(decode_tokens, tokenizer, skip_special=request.text.skip_special)
        self._page_size = page_size
        self._groups: list[TextGroup] = []
        self._cum_log_prob = 0.0

    @property
    def key(self) -> str:
        """The id under which the loop knows it."""
        return self.request.generation.request_id

    def take(self, output: RequestOutput) -> FinishReason | None:
        """Take a step's tokens; returns why the request is over, None while it is not."""
        self._groups.append(self.stream.push(output.new_token_ids, output.log_probs))
        if not self.stream.is_stopped and output.finish_reason is not None:
            self._groups.append(self.stream.finish())
        return FinishReason.STOP if self.stream.is_stopped else output.finish_reason

    def respond(self, reason: FinishReason | None, output: RequestOutput) -> None:
        """Send what is due after `take`: new groups when streaming, all at the end otherwise."""
        if reason in _FAILURES:
            self.responder.fail(output.error or self._failure(reason))
            return
        is_final = reason is not None
        if is_final or (self.request.text.streaming and any(g.token_ids for g in self._groups)):
            self.responder.send(self._response(reason, output.stats), final=is_final)

    def _failure(self, reason: FinishReason | None) -> DSparkError:
        if reason is FinishReason.TIMEOUT:
            timeout = self.request.generation.timeout_s or 0.0
            return RequestTimeoutError(f"the request ran into its time-out of {timeout:.2g} s")
        if reason is FinishReason.CANCELLED:
            return RequestCancelledError("the request was cancelled")
        return EngineError("the engine failed while it served this request")

    def _response(self, reason: FinishReason | None, stats: RequestStats) -> TokenResponse:
        groups, self._groups = self._groups, []
        log_probs = tuple(p for group in groups for p in group.log_probs)
        self._cum_log_prob += sum(log_probs)
        options = self.request.text
        text = "".join(group.text for group in groups)
        prompt = None
        if not options.streaming and not options.exclude_input:
            prompt = self.request.generation.prompt_token_ids
            text = self._decode(prompt.tolist()) + text
        return TokenResponse(
            token_ids=tuple(i for group in groups for i in group.token_ids),
            log_probs=log_probs,
            cum_log_prob=self._cum_log_prob,
            text=text,
            finish_reason=reason,
            num_output_tokens=self.stream.num_tokens,
            prompt_token_ids=prompt,
            stats=dataclasses.replace(stats),
            return_perf_metrics=options.return_perf_metrics,
            page_size=self._page_size,
        )


_FAILURES = (FinishReason.TIMEOUT, FinishReason.CANCELLED, FinishReason.ERROR)
