# SPDX-License-Identifier: Apache-2.0
"""One GPU: memory from torch; stream, copies, events and CUDA graphs through cuda-python.

Knows no engine. All work of an engine goes to its one stream; `torch_stream` is where the caller's
own torch operations run, and `enter`/`leave` order the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from trtllm_dspark.errors import EngineError


def import_cuda() -> Any:
    """cuda-python's runtime API; EngineError with what to install where it is missing."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EngineError(
            f"running TensorRT engines needs cuda-bindings ({error}): install the extra rtx or "
            "tensorrt"
        ) from error


def require_gpu() -> None:
    """EngineError where there is no GPU that torch can reach."""
    if not torch.cuda.is_available():
        raise EngineError(
            "a TensorRT engine needs an NVIDIA GPU (and a torch built with CUDA) to run, none was "
            "found: serve the model directory instead, or build with --backend torch"
        )


def open_device(name: str) -> Device:
    """The GPU of a device name like cuda or cuda:1; EngineError where there is none."""
    require_gpu()
    device = torch.device("cuda" if name == "cpu" else name)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Device(
        import_cuda(),
        torch.device("cuda", index),
        lambda: int(torch.cuda.current_stream(index).cuda_stream),
    )


class Device:
    """A stream on one device, and what runs on it."""

    def __init__(self, cuda: Any, device: torch.device, torch_stream: Callable[[], int]) -> None:
        self._cuda, self.device, self._torch_stream = cuda, device, torch_stream
        self._call("cudaSetDevice", device.index or 0)
        self._stream = self._call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._entered, self._left = self.make_event(), self.make_event()

    @property
    def stream(self) -> int:
        """Handle of the engines' stream."""
        return int(self._stream)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Device memory; the caller keeps it alive."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from and to while the host goes on."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def make_event(self) -> Any:
        """An event without timing."""
        return self._call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)

    def record(self, event: Any) -> None:
        """Mark this point of the stream."""
        self._call("cudaEventRecord", event, self._stream)

    def wait(self, event: Any) -> None:
        """Block the host until the event's point has been reached."""
        self._call("cudaEventSynchronize", event)

    def enter(self) -> None:
        """Let the stream wait for what torch has been asked to do so far."""
        self._call("cudaEventRecord", self._entered, self._torch_stream())
        self._call("cudaStreamWaitEvent", self._stream, self._entered, 0)

    def leave(self) -> None:
        """Let torch's stream wait for what this stream has been asked to do so far."""
        self._call("cudaEventRecord", self._left, self._stream)
        self._call("cudaStreamWaitEvent", self._torch_stream(), self._left, 0)

    def copy(self, target: torch.Tensor, source: torch.Tensor, num_bytes: int) -> None:
        """Copy the first bytes of one contiguous tensor to another, on the stream."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        addresses = target.data_ptr(), source.data_ptr()
        self._call("cudaMemcpyAsync", *addresses, num_bytes, kind, self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """What `enqueue` asks of the stream, as a graph that can be launched; nothing runs."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            enqueue()
        finally:
            graph = self._call("cudaStreamEndCapture", self._stream)
        launchable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        return launchable

    def launch(self, graph: Any) -> None:
        """Run a captured graph on the stream."""
        self._call("cudaGraphLaunch", graph, self._stream)

    def synchronize(self) -> None:
        """Block the host until the stream has done everything."""
        self._call("cudaStreamSynchronize", self._stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        """One runtime call; its value, or EngineError with CUDA's name of the error."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise EngineError(f"{name} failed on {self.device}: {error.name}")
        return values[0] if values else None
