# SPDX-License-Identifier: Apache-2.0
"""One GPU through cuda-python: memory, a stream, copies, events and CUDA graphs. No torch.

Knows no engine. All work of an engine goes to its one stream; `follow` and `lead` order it with
somebody else's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trtllm_dspark.engines.tensorrt_engine_memory import Block, DeviceArray, Free, host_view
from trtllm_dspark.engines.tensorrt_gpu import find_gpu, import_cuda, num_gpus
from trtllm_dspark.errors import EngineError


def require_gpu() -> None:
    """EngineError where there is no GPU that CUDA's runtime can reach."""
    if not num_gpus(import_cuda()):
        raise EngineError(
            "a TensorRT engine needs an NVIDIA GPU and its driver to run, none was found: serve "
            "the model directory instead, or build with --backend torch"
        )


def open_device(name: str) -> Device:
    """The GPU of a device name like cuda or cuda:1; EngineError where there is none."""
    require_gpu()
    cuda = import_cuda()
    return Device(cuda, find_gpu(name, num_gpus(cuda)))


class Device:
    """A stream on one device, and what runs on it."""

    def __init__(self, cuda: Any, index: int = 0) -> None:
        self._cuda, self.index, self.name = cuda, index, f"cuda:{index}"
        self.activate()
        self._stream = self._call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._followed, self._led = self.make_event(), self.make_event()

    @property
    def stream(self) -> int:
        """Handle of the engines' stream."""
        return int(self._stream)

    def activate(self) -> None:
        """Make this the calling thread's device; every thread starts out on device 0."""
        self._call("cudaSetDevice", self.index)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Device memory, cleared on the stream; it lives as long as somebody holds the array."""
        wanted = DeviceArray(0, shape, dtype)
        num_bytes = max(wanted.num_bytes, 1)
        address = self._allocate("cudaMalloc", num_bytes)
        block = Block(address, self._freeing("cudaFree"))
        self._call("cudaMemsetAsync", address, 0, num_bytes, self._stream)
        return DeviceArray(address, shape, dtype, block)

    def host_zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Host memory that the device can copy from and to while the host goes on."""
        num_bytes = max(DeviceArray(0, shape, dtype).num_bytes, 1)
        address = self._allocate("cudaHostAlloc", num_bytes, self._cuda.cudaHostAllocDefault)
        array = host_view(address, shape, dtype, self._freeing("cudaFreeHost"))
        array[...] = 0
        return array

    def make_event(self) -> Any:
        """An event without timing."""
        return self._call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)

    def record(self, event: Any) -> None:
        """Mark this point of the stream."""
        self._call("cudaEventRecord", event, self._stream)

    def wait(self, event: Any) -> None:
        """Block the host until the event's point has been reached."""
        self._call("cudaEventSynchronize", event)

    def follow(self, stream: int) -> None:
        """Let this stream wait for what another has been asked to do so far."""
        self._call("cudaEventRecord", self._followed, stream)
        self._call("cudaStreamWaitEvent", self._stream, self._followed, 0)

    def lead(self, stream: int) -> None:
        """Let another stream wait for what this one has been asked to do so far."""
        self._call("cudaEventRecord", self._led, self._stream)
        self._call("cudaStreamWaitEvent", stream, self._led, 0)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between two addresses, device or pinned host, on the stream."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", target, source, num_bytes, kind, self._stream)

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

    def _allocate(self, name: str, num_bytes: int, *flags: int) -> int:
        try:
            return int(self._call(name, num_bytes, *flags))
        except EngineError as error:
            raise EngineError(
                f"{error} for {num_bytes} bytes: build with fewer pages (--num-pages), or leave "
                "more memory free"
            ) from error

    def _freeing(self, name: str) -> Free:
        """A call that gives memory back (CUDA waits for work that uses it); errors are past use."""
        release = getattr(self._cuda, name)
        return lambda address: (release(address), None)[1]

    def _call(self, name: str, *arguments: Any) -> Any:
        """One runtime call; its value, or EngineError with CUDA's name of the error."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise EngineError(f"{name} failed on {self.name}: {error.name}")
        return values[0] if values else None
