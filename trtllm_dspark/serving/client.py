# SPDX-License-Identifier: Apache-2.0
"""A small gRPC client: one stream per request over one connection, answers as they arrive.

For the demonstration, benchmarks and tests; a stream of its own tells each request's errors apart
and can be cancelled alone. Imports tritonclient when it is used.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.serving.tensors import BLS_INPUTS, ENGINE_INPUTS

_NUMPY = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "UINT8": np.uint8,
    "FP16": np.float16,
    "FP32": np.float32,
}
_DATATYPES = {spec.name: spec.datatype for spec in (*ENGINE_INPUTS, *BLS_INPUTS)}


@dataclass(frozen=True)
class StreamEvent:
    """One response or error of one request."""

    request_id: str
    time_s: float
    """time.perf_counter at arrival."""
    outputs: Mapping[str, npt.NDArray] = field(default_factory=dict)
    is_final: bool = False
    error: str | None = None
    status: str | None = None
    """Name of the gRPC status where the call itself ended with an error."""

    @property
    def text(self) -> str:
        """text_output, or output_text of the engine model; "" where there is none."""
        for name in ("text_output", "output_text"):
            if name in self.outputs:
                return bytes(self.outputs[name].reshape(-1)[0]).decode("utf-8")
        return ""

    def number(self, name: str) -> float:
        """A one-element output."""
        return float(self.outputs[name].reshape(-1)[0])


@dataclass
class Answer:
    """All that one request was answered with."""

    request_id: str
    start_s: float = 0.0
    text: str = ""
    events: list[StreamEvent] = field(default_factory=list)
    error: str | None = None
    status: str | None = None

    @property
    def has_outputs(self) -> bool:
        """Whether any response came."""
        return any(event.outputs for event in self.events)

    @property
    def last(self) -> StreamEvent:
        """The last event that carries outputs."""
        return next(e for e in reversed(self.events) if e.outputs)

    @property
    def finish_reason(self) -> str:
        """Why the request ended, as the server says it; "" after an error."""
        if self.error is not None or not self.has_outputs:
            return ""
        return bytes(self.last.outputs["finish_reason"].reshape(-1)[0]).decode()


def make_arrays(options: Mapping[str, object]) -> dict[str, npt.NDArray]:
    """Options as arrays with a batch dimension; names and types are those of the models."""
    arrays: dict[str, npt.NDArray] = {}
    for name, value in options.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
            continue
        dtype = _NUMPY[_DATATYPES[name]]
        items = value if isinstance(value, (list, tuple)) else [value]
        items = [v.encode("utf-8") if isinstance(v, str) else v for v in items]
        arrays[name] = np.array([items], dtype)
    return arrays


class StreamCall:
    """One request on its own stream: iterate over its events, or cancel it."""

    def __init__(self, client: GrpcClient, request: Any, timeout_s: float | None) -> None:
        self.request_id = str(request.id)
        self.start_s = time.perf_counter()
        self._client = client
        # Without triton_grpc_error metadata, which brings status codes: tritonserver 2.51 then
        # now and then dies (signal 11) when a stream ends with an error.
        self._call = client.stub.ModelStreamInfer(iter([request]), timeout=timeout_s)

    def __iter__(self) -> Iterator[StreamEvent]:
        try:
            for response in self._call:
                yield self._event(response)
        except self._client.grpc.RpcError as error:
            yield StreamEvent(
                self.request_id,
                time.perf_counter(),
                is_final=True,
                error=error.details() or error.code().name,
                status=error.code().name,
            )

    def cancel(self) -> None:
        """Drop the request, as a client that disconnects does."""
        self._call.cancel()

    def gather(self, on_event: Callable[[StreamEvent], None] | None = None) -> Answer:
        """Wait for the whole answer."""
        answer = Answer(self.request_id, self.start_s)
        for event in self:
            answer.events.append(event)
            answer.text += event.text
            if event.error is not None:
                answer.error, answer.status = event.error, event.status
            if on_event is not None:
                on_event(event)
        return answer

    def _event(self, response: Any) -> StreamEvent:
        now = time.perf_counter()
        if response.error_message:
            return StreamEvent(self.request_id, now, is_final=True, error=response.error_message)
        inner = response.infer_response
        return StreamEvent(
            self.request_id,
            now,
            self._client.read_outputs(inner),
            inner.parameters["triton_final_response"].bool_param,
        )


class GrpcClient:
    """A connection to one server; may be shared by threads."""

    def __init__(self, url: str, model: str = "ensemble") -> None:
        self.model = model
        self.grpc: Any = importlib.import_module("grpc")
        self._messages: Any = importlib.import_module("tritonclient.grpc.service_pb2")
        self._utils: Any = importlib.import_module("tritonclient.utils")
        stubs: Any = importlib.import_module("tritonclient.grpc.service_pb2_grpc")
        infer: Any = importlib.import_module("tritonclient.grpc").InferResult
        self._result_class = infer
        self._channel = self.grpc.insecure_channel(
            url,
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self.stub = stubs.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        options: Mapping[str, object],
        *,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        timeout_us: int = 0,
        parameters: Mapping[str, str | int | bool] | None = None,
        model: str | None = None,
        call_timeout_s: float | None = None,
    ) -> StreamCall:
        """Send one request; `timeout_us` is the server's, `call_timeout_s` the client's own."""
        request = self._messages.ModelInferRequest(
            model_name=model or self.model,
            id=uuid.uuid4().hex if request_id is None else request_id,
        )
        for name, array in make_arrays(options).items():
            self._add_input(request, name, array)
        for name in outputs:
            request.outputs.add().name = name
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        if timeout_us:
            request.parameters["timeout"].int64_param = timeout_us
        for key, value in (parameters or {}).items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(request.parameters[key], kind, value)
        return StreamCall(self, request, call_timeout_s)

    def ask(self, options: Mapping[str, object], **arguments: Any) -> Answer:
        """Send one request and wait for all of its answer."""
        return self.stream(options, **arguments).gather()

    def ask_many(
        self,
        requests: Sequence[Mapping[str, object]],
        on_event: Callable[[int, StreamEvent], None] | None = None,
        **arguments: Any,
    ) -> list[Answer]:
        """Send all at once; answers in that order. `on_event` is called from several threads."""

        def run(index: int) -> Answer:
            call = self.stream(requests[index], **arguments)
            return call.gather(None if on_event is None else lambda e: on_event(index, e))

        with ThreadPoolExecutor(max(len(requests), 1)) as pool:
            return list(pool.map(run, range(len(requests))))

    def read_outputs(self, response: Any) -> dict[str, npt.NDArray]:
        """Output tensors of a response by name."""
        result = self._result_class(response)
        return {output.name: result.as_numpy(output.name) for output in response.outputs}

    def close(self) -> None:
        """Close the connection; what runs is cancelled."""
        self._channel.close()

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _add_input(self, request: Any, name: str, array: npt.NDArray) -> None:
        tensor = request.inputs.add()
        tensor.name, tensor.datatype = name, self._utils.np_to_triton_dtype(array.dtype)
        tensor.shape.extend(array.shape)
        if array.dtype == np.object_:
            data = self._utils.serialize_byte_tensor(array)
            request.raw_input_contents.append(data.item() if data.size else b"")
        else:
            request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
