# SPDX-License-Identifier: Apache-2.0
"""The `tensorrt_llm` model: token ids in, text-stable groups of tokens out.

Joins the Python backend to the engine thread; decides nothing about text, sampling or scheduling.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from trtllm_dspark.errors import UnsupportedError
from trtllm_dspark.runtime import System, build_system
from trtllm_dspark.serving.engine_link import (
    STOP,
    LinkRequest,
    LinkResponder,
    LinkServer,
    link_path,
)
from trtllm_dspark.serving.engine_thread import EngineThread
from trtllm_dspark.serving.inputs import (
    read_bool,
    refuse_unknown_parameters,
)
from trtllm_dspark.serving.metrics import ServerMetrics
from trtllm_dspark.serving.model_parameters import (
    ENGINE_PARAMETERS,
    ModelParameters,
    parse_model_args,
    read_system_config,
)
from trtllm_dspark.serving.requests import EngineRequest, RequestDefaults, read_request
from trtllm_dspark.serving.responses import Outputs, TokenResponse, make_engine_outputs
from trtllm_dspark.serving.triton_io import (
    GuardedSender,
    ResponseWriter,
    SenderResponder,
    backend,
    configure_logging,
    error_message,
    read_tensors,
    status_name,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOGITS = ("context_logits", "generation_logits")


def read_defaults(parameters: ModelParameters, system: System) -> RequestDefaults:
    """What requests get where they say nothing."""
    tokenizer = system.tokenizer
    specials = {tokenizer.decode([i], skip_special=False): i for i in tokenizer.special_ids}
    return RequestDefaults(
        end_ids=tokenizer.eos_ids,
        vocab_size=system.info.vocab_size,
        max_tokens=system.info.max_seq_len - 1,
        exclude_input=parameters.flag("exclude_input_in_output", False),
        skip_special=parameters.flag("skip_special_tokens", True),
        special_tokens=specials,
    )


def load_aside(load: Callable[[], T]) -> T:
    """Return `load()`, run on a thread that ends with it.

    OpenMP keeps the workers of every thread that ran a parallel region. Were those of the loading
    thread still there beside the engine thread's, there would be more of them than processors, and
    OpenMP would then let workers sleep between regions instead of spinning: on two cores a step
    of one request took 56 ms instead of 35.
    """
    with ThreadPoolExecutor(1, "dspark-load") as pool:
        return pool.submit(load).result()


class EngineModel:
    """What `tensorrt_llm/1/model.py` exposes as TritonPythonModel."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the system; the server is ready only when this has returned."""
        configure_logging()
        pb = backend()
        config, self._parameters = parse_model_args(args)
        self._parameters.log_unused(ENGINE_PARAMETERS)
        system = load_aside(lambda: build_system(read_system_config(self._parameters)))
        self._defaults = read_defaults(self._parameters, system)
        self._logits_dtypes = {
            name: pb.triton_string_to_numpy(pb.get_output_config_by_name(config, name)["data_type"])
            for name in _LOGITS
        }
        self._metrics = ServerMetrics(
            pb.MetricFamily, system.info, args["model_name"], args["model_version"]
        )
        self._writer = ResponseWriter()
        self._engine = EngineThread(
            system.loop,
            system.tokenizer,
            page_size=system.info.page_size,
            observer=self._metrics,
        )
        self._metrics.start()
        self._engine.start()
        self._link = LinkServer(link_path(args["model_name"]), self._serve_link)

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine thread; answers come from other threads."""
        for request in requests:
            responder = SenderResponder(
                self._writer,
                GuardedSender(request.get_response_sender()),
                self._make_outputs,
                request.requested_output_names(),
            )
            try:
                self._take(request, responder)
            except Exception as error:
                responder.fail(error)

    def finalize(self) -> None:
        """Finish live requests, then end every thread."""
        self._link.close()
        self._engine.drain(self._parameters.number("drain_timeout_s", 30))
        self._writer.close()
        self._metrics.close()

    def _take(self, request: Any, responder: SenderResponder) -> None:
        tensors = read_tensors(request)
        refuse_unknown_parameters(request.parameters())
        if read_bool(tensors, "stop"):
            if not request.request_id():
                raise UnsupportedError("stop needs the id of the request that is to be stopped")
            self._engine.stop(client_id=request.request_id())
            self._writer.put(responder.end)
            return
        parsed = read_request(
            tensors,
            self._defaults,
            client_id=request.request_id(),
            timeout_us=request.timeout(),
        )
        self._check_streaming(parsed)
        self._engine.submit(parsed, responder)

    def _serve_link(self, connection: Connection) -> None:
        """Serve one request of a text model, until the text model stops it or leaves."""
        asked: LinkRequest = connection.recv()
        handle = uuid.uuid4().hex
        responder = LinkResponder(
            self._writer.put,
            connection,
            self._make_outputs,
            lambda error: (status_name(error), error_message(error)),
            asked.wanted,
        )
        try:
            parsed = read_request(
                asked.tensors,
                self._defaults,
                client_id=asked.request_id,
                handle=handle,
                timeout_us=asked.timeout_us,
            )
            self._check_streaming(parsed)
        except Exception as error:
            responder.fail(error)
        else:
            self._engine.submit(parsed, responder)
        try:
            while connection.recv() == STOP:
                self._engine.stop(handle=handle)
        except (EOFError, OSError):
            self._engine.stop(handle=handle)

    def _check_streaming(self, request: EngineRequest) -> None:
        if request.text.streaming and not self._parameters.is_decoupled:
            raise UnsupportedError(
                "streaming = true is not possible: this server was configured with "
                "decoupled_mode false"
            )

    def _make_outputs(self, response: TokenResponse) -> Outputs:
        outputs = make_engine_outputs(response)
        for name, dtype in self._logits_dtypes.items():
            outputs[name] = outputs[name].astype(dtype)
        return outputs
