# SPDX-License-Identifier: Apache-2.0
"""The models `ensemble` and `tensorrt_llm_bls`: text in, text out. They tokenise as `preprocessing`
is configured to and reach the engine by `engine_link`. One thread per running request, one that
watches for cancelled clients. (A server-side ensemble cannot pass a cancellation on to a step that
runs; this can.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from trtllm_dspark.errors import RequestCancelledError, RequestTimeoutError
from trtllm_dspark.serving.engine_link import (
    EngineCall,
    LinkFailure,
    LinkRequest,
    LinkResponse,
    link_path,
)
from trtllm_dspark.serving.inputs import (
    Tensors,
    read_text,
    read_words,
    refuse_batches,
    refuse_unknown_parameters,
    refuse_unsupported,
)
from trtllm_dspark.serving.model_parameters import parse_model_args
from trtllm_dspark.serving.preprocessing_model import load_preprocessor
from trtllm_dspark.serving.tensors import BLS_INPUTS, InputSpec, find_refused
from trtllm_dspark.serving.triton_io import (
    GuardedSender,
    configure_logging,
    make_status_error,
    make_tensors,
    read_tensors,
)

logger = logging.getLogger(__name__)

TEXT_PARAMETERS = ("tensorrt_llm_model_name", "preprocessing_model_name", "max_threads")
DEFAULT_MAX_THREADS = 64
"""Requests in the engine at once."""
CANCEL_POLL_S = 0.02
"""How often running requests are asked whether their client is gone."""

_REFUSED = find_refused(BLS_INPUTS)
_SPECS: dict[str, InputSpec] = {spec.name: spec for spec in BLS_INPUTS}
_PREPROCESSING_NAMES = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "apply_chat_template": "APPLY_CHAT_TEMPLATE",
}
_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
}


@dataclass(eq=False)
class TextCall:
    """One running request of a text model."""

    tensors: Mapping[str, npt.NDArray]
    sender: GuardedSender
    request_id: str
    timeout_us: int
    wanted: tuple[str, ...]
    arrival_s: float = field(default_factory=time.monotonic)
    engine: EngineCall | None = None
    """Its request at the engine, once there is one."""
    is_stopped: bool = False
    """The client was seen to be gone."""

    def start(self) -> int:
        """Leave the queue; returns the microseconds left of the time-out (0 = none)."""
        if self.is_stopped:
            raise RequestCancelledError("the request was cancelled")
        if not self.timeout_us:
            return 0
        left_us = self.timeout_us - int(1e6 * (time.monotonic() - self.arrival_s))
        if left_us <= 0:
            timeout_s = self.timeout_us / 1e6
            raise RequestTimeoutError(f"the request ran into its time-out of {timeout_s:g} s")
        return left_us


def check_text_inputs(tensors: Tensors) -> None:
    """Refuse what needs no tokenizer to be refused, under the names that the client used."""
    refuse_batches(tensors, "text_input")
    refuse_unsupported(tensors, _REFUSED)
    read_text(tensors, "text_input")
    for name in ("stop_words", "bad_words", "embedding_bias_words"):
        read_words(tensors, name)


def engine_inputs(tensors: Tensors) -> dict[str, npt.NDArray]:
    """Options that go to the engine model as they are, under its names, batch dimension first."""
    return {
        _SPECS[name].text_name: with_batch(array)
        for name, array in tensors.items()
        if _SPECS[name].text_name and name not in _REFUSED
    }


def with_batch(array: npt.NDArray) -> npt.NDArray:
    """[1, n] form of a request's vector or scalar."""
    return array.reshape(1, -1)


class TextModel:
    """What `ensemble/1/model.py` and `tensorrt_llm_bls/1/model.py` expose as TritonPythonModel."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read parameters and start the threads."""
        configure_logging()
        _, parameters = parse_model_args(args)
        parameters.log_unused(TEXT_PARAMETERS)
        self._engine_path = link_path(parameters.text("tensorrt_llm_model_name", "tensorrt_llm"))
        name = parameters.text("preprocessing_model_name", "preprocessing")
        self._preprocessor = load_preprocessor(parameters.sibling(name))
        num_threads = parameters.number("max_threads", DEFAULT_MAX_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, "dspark-text")
        self._calls: set[TextCall] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="dspark-cancel", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Give each request a thread; answers come from there."""
        for request in requests:
            sender = GuardedSender(request.get_response_sender())
            try:
                refuse_unknown_parameters(request.parameters())
                call = TextCall(
                    tensors=read_tensors(request),
                    sender=sender,
                    request_id=request.request_id(),
                    timeout_us=request.timeout(),
                    wanted=tuple(request.requested_output_names()),
                )
                check_text_inputs(call.tensors)
                with self._lock:
                    self._calls.add(call)
                self._pool.submit(self._serve, call)
            except Exception as error:
                sender.fail(error)

    def finalize(self) -> None:
        """Finish what runs, then end the threads."""
        self._pool.shutdown(wait=True)
        self._is_closed.set()
        self._watcher.join()

    def _serve(self, call: TextCall) -> None:
        try:
            timeout_us = call.start()
            self._forward(call, self._preprocess(call), timeout_us)
        except Exception as error:
            call.sender.fail(error)
        finally:
            with self._lock:
                self._calls.discard(call)

    def _preprocess(self, call: TextCall) -> dict[str, npt.NDArray]:
        """Outputs of `preprocessing` under the engine's names."""
        inputs = {
            name: with_batch(call.tensors[text_name])
            for text_name, name in _PREPROCESSING_NAMES.items()
            if text_name in call.tensors
        }
        found = self._preprocessor.run(inputs)
        return {name: found[key] for key, name in _FROM_PREPROCESSING.items()}

    def _forward(self, call: TextCall, prompt: Mapping[str, npt.NDArray], timeout_us: int) -> None:
        """Ask the engine and pass each of its responses on, the last with the final flag."""
        tensors = {**engine_inputs(call.tensors), **prompt}
        request = LinkRequest(
            tensors={name: array for name, array in tensors.items() if array.size},
            request_id=call.request_id,
            timeout_us=timeout_us,
            wanted=_engine_outputs(call.wanted),
        )
        call.engine = EngineCall(self._engine_path, request)
        try:
            if call.is_stopped:
                call.engine.stop()
            is_over = False
            while not is_over:
                is_over = self._pass_on(call, call.engine.receive())
        finally:
            call.engine.close()

    def _pass_on(self, call: TextCall, message: LinkResponse | LinkFailure) -> bool:
        """Send one response of the engine; whether it was the last."""
        if isinstance(message, LinkFailure):
            call.sender.fail(make_status_error(message.code, message.message))
            return True
        outputs = dict(message.outputs)
        outputs["text_output"] = outputs["output_text"].reshape(-1)
        call.sender.send(make_tensors(outputs, call.wanted), final=message.is_final)
        return message.is_final

    def _watch(self) -> None:
        """Ask all calls in turn, at most a fifth of the time: each question is a round trip."""
        pause_s = CANCEL_POLL_S
        while not self._is_closed.wait(pause_s):
            started = time.monotonic()
            with self._lock:
                calls = [call for call in self._calls if not call.is_stopped]
            for call in calls:
                self._check(call)
            pause_s = max(CANCEL_POLL_S, 4 * (time.monotonic() - started))

    def _check(self, call: TextCall) -> None:
        """Stop a call whose client is gone."""
        try:
            if call.sender.is_cancelled():
                call.is_stopped = True
                if call.engine is not None:
                    call.engine.stop()
        except Exception:
            logger.exception("a cancelled request could not be stopped")


def _engine_outputs(wanted: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*wanted, "output_text", "finish_reason"} - {"text_output"}))
