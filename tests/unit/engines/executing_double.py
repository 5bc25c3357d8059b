# SPDX-License-Identifier: Apache-2.0
"""CUDA and TensorRT for the host: real signatures, lazy streams, engines run by ONNX Runtime.

Nothing asked of a stream happens before somebody waits for it, and graphs replay the addresses and
shapes they were captured with. So a missing wait, a moved buffer or a wrong shape gives wrong
numbers, and a call that cuda-python or the bindings do not have fails. Fresh memory holds NaN, its
bounds are checked, and a thread must choose its device first. An "engine file" holds the path of an
exported graph and, where it has one profile only, "#" and which of them.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.engines.recording_double import Recorder
from trtllm_dspark.engines.build_profiles import Profile

TORCH_STREAM = 0
"""Host tensors: what torch does happens at once."""
ALIGNMENT = 256
Work = Callable[[], None]


class HostCuda:
    """cuda-python's runtime without a driver; knows one stream besides torch's."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[str] = []
        self._queue: list[Work | int] = []
        self._captured: list[Work] | None = None
        self._works: dict[int, list[Work]] = {}
        self._handles = itertools.count(1000)
        self._threads: set[int] = set()
        self.memory: dict[str, dict[int, Any]] = {"device": {}, "host": {}}
        """Allocations that were not given back, by address."""
        self._has_driver = real.cudaGetDeviceCount()[0] == real.cudaError_t.cudaSuccess

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        act = _ACTIONS.get(name)
        if act is None:
            if inspect.isroutine(real):
                raise NotImplementedError(f"the double does not know {name}")
            return real

        def call(*arguments: Any) -> tuple[Any, ...]:
            inspect.signature(real).bind(*arguments)
            if threading.get_ident() not in self._threads and name != "cudaSetDevice":
                raise AssertionError(f"{name} on a thread that has not chosen its device")
            if not self._has_driver:
                real(*arguments)  # refuses wrong types, then fails for want of a driver
            self.calls.append(name)
            values = act(self, *arguments)
            return (self._real.cudaError_t.cudaSuccess, *(() if values is None else (values,)))

        return call

    def submit(self, work: Work) -> None:
        """Ask it of the stream, or put it into the graph that is being captured."""
        (self._queue if self._captured is None else self._captured).append(work)

    def new(self, kind: str) -> Any:
        return getattr(self._real, kind)(next(self._handles))

    def drain(self, until: int | None = None) -> None:
        """Do what was asked of the stream, up to an event's last record."""
        if until is not None and until not in self._queue:
            return
        while self._queue:
            entry = self._queue.pop(0)
            if not isinstance(entry, int):
                entry()
            elif entry == until:
                return

    def allocate(self, where: str, size: int) -> int:
        """Aligned memory full of NaN (or −1)."""
        buffer = (ctypes.c_uint8 * (size + ALIGNMENT))()
        address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
        ctypes.memset(address, 0xFF, size)
        self.memory[where][address] = (buffer, size)
        return address

    def free(self, where: str, address: int) -> None:
        """Like CUDA: work that uses the memory is finished first."""
        self.drain()
        del self.memory[where][address]

    def find(self, address: int, count: int) -> str | None:
        """Where a range lies, None if it is torch's memory; a range that runs over fails."""
        for where, blocks in self.memory.items():
            for start, (_, size) in blocks.items():
                if start <= address < start + size:
                    assert address + count <= start + size, f"{count} bytes run over {size}"
                    return where
        return None

    def _memcpy(self, target: int, source: int, count: int, kind: Any, stream: Any) -> None:
        assert self.find(target, count) is not None
        self.find(source, count)
        self.submit(lambda: ctypes.memmove(target, source, count) and None)

    def _memset(self, target: int, value: int, count: int, stream: Any) -> None:
        assert self.find(target, count) == "device"
        self.submit(lambda: ctypes.memset(target, value, count) and None)

    def _record(self, event: Any, stream: Any) -> None:
        if int(stream) != TORCH_STREAM:
            self._queue = [entry for entry in self._queue if entry != int(event)]
            self._queue.append(int(event))

    def _wait_event(self, stream: Any, event: Any, flags: int) -> None:
        if int(stream) == TORCH_STREAM:
            self.drain(int(event))

    def _begin_capture(self, stream: Any, mode: Any) -> None:
        self._captured = []

    def _end_capture(self, stream: Any) -> Any:
        graph = self.new("cudaGraph_t")
        self._works[int(graph)], self._captured = self._captured or [], None
        return graph

    def _instantiate(self, graph: Any, flags: int) -> Any:
        launchable = self.new("cudaGraphExec_t")
        self._works[int(launchable)] = list(self._works[int(graph)])
        return launchable

    def _launch(self, graph: Any, stream: Any) -> None:
        for work in self._works[int(graph)]:
            self.submit(work)


_ACTIONS: dict[str, Callable[..., Any]] = {
    "cudaSetDevice": lambda cuda, index: cuda._threads.add(threading.get_ident()),
    "cudaMalloc": lambda cuda, size: cuda.allocate("device", size),
    "cudaFree": lambda cuda, address: cuda.free("device", address),
    "cudaHostAlloc": lambda cuda, size, flags: cuda.allocate("host", size),
    "cudaFreeHost": lambda cuda, address: cuda.free("host", address),
    "cudaMemsetAsync": HostCuda._memset,
    "cudaStreamCreateWithFlags": lambda cuda, flags: cuda.new("cudaStream_t"),
    "cudaEventCreateWithFlags": lambda cuda, flags: cuda.new("cudaEvent_t"),
    "cudaMemcpyAsync": HostCuda._memcpy,
    "cudaEventRecord": HostCuda._record,
    "cudaEventSynchronize": lambda cuda, event: cuda.drain(int(event)),
    "cudaStreamWaitEvent": HostCuda._wait_event,
    "cudaStreamSynchronize": lambda cuda, stream: cuda.drain(),
    "cudaStreamBeginCapture": HostCuda._begin_capture,
    "cudaStreamEndCapture": HostCuda._end_capture,
    "cudaGraphInstantiate": HostCuda._instantiate,
    "cudaGraphDestroy": lambda cuda, graph: cuda._works.pop(int(graph)) and None,
    "cudaGraphLaunch": HostCuda._launch,
}
_DATA_TYPES = {"tensor(float)": "FLOAT", "tensor(int32)": "INT32", "tensor(int64)": "INT64"}
_NUMPY = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}


def host_tensorrt(
    bindings: Any,
    cuda: HostCuda,
    profiles_of: dict[str, Sequence[Profile]],
    calls: list[tuple[Any, ...]],
) -> Any:
    """A module like the bindings; `profiles_of` holds the profiles of each graph, by file name."""

    def deserialize(plan: bytes) -> Any:
        text, _, only = plan.decode().partition("#")
        profiles = profiles_of[Path(text).name]
        held = [profiles[int(only)]] if only else profiles
        return make_engine(bindings, cuda, Path(text), held, calls)

    runtime = Recorder(bindings.Runtime, {"deserialize_cuda_engine": deserialize}, calls)
    shared = {
        name: getattr(bindings, name)
        for name in ("Logger", "TensorIOMode", "ExecutionContextAllocationStrategy")
    }
    name = "DynamicShapesKernelSpecializationStrategy"
    if hasattr(bindings, name):
        shared[name] = getattr(bindings, name)
    return types.SimpleNamespace(Runtime=lambda logger: runtime, __version__="0", **shared)


def make_engine(
    bindings: Any,
    cuda: HostCuda,
    path: Path,
    profiles: Sequence[Profile],
    calls: list[tuple[Any, ...]],
) -> Recorder:
    """An ICudaEngine whose contexts run the graph at `path`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    tensors = {value.name: value for value in [*session.get_inputs(), *session.get_outputs()]}
    names = list(tensors)
    inputs = {value.name for value in session.get_inputs()}
    mode = bindings.TensorIOMode
    answers = {
        "device_memory_size_v2": 4096,
        "num_io_tensors": len(names),
        "get_tensor_name": lambda index: names[index],
        "get_tensor_mode": lambda name: mode.INPUT if name in inputs else mode.OUTPUT,
        "get_tensor_dtype": lambda name: getattr(
            bindings.DataType, _DATA_TYPES[tensors[name].type]
        ),
        "get_tensor_shape": lambda name: [
            size if isinstance(size, int) else -1 for size in tensors[name].shape
        ],
        "get_aliased_input_tensor": lambda name: None,
        "create_runtime_config": lambda: Recorder(bindings.IRuntimeConfig, {}, calls),
        "create_execution_context": lambda settings: _make_context(
            bindings, cuda, session, profiles, calls
        ),
    }
    return Recorder(bindings.ICudaEngine, answers, calls)


def _make_context(
    bindings: Any,
    cuda: HostCuda,
    session: Any,
    profiles: Sequence[Profile],
    calls: list[tuple[Any, ...]],
) -> Recorder:
    shapes: dict[str, tuple[int, ...]] = {}
    addresses: dict[str, int] = {}
    chosen: list[Profile] = []

    def set_shape(name: str, shape: tuple[int, ...]) -> bool:
        allowed = chosen[-1].inputs.get(name)
        if allowed is not None and not all(
            low <= size <= high
            for low, size, high in zip(allowed.min, shape, allowed.max, strict=True)
        ):
            return False
        shapes[name] = shape
        return True

    def execute(stream: int) -> bool:
        known_shapes, known_addresses = dict(shapes), dict(addresses)
        cuda.submit(lambda: _run(cuda, session, known_shapes, known_addresses))
        return True

    answers = {
        "set_optimization_profile_async": lambda i, stream: chosen.append(profiles[i]) or True,
        "set_input_shape": set_shape,
        "set_tensor_address": lambda name, address: addresses.update({name: address}) or True,
        "infer_shapes": lambda: [v.name for v in session.get_inputs() if v.name not in shapes],
        "execute_async_v3": execute,
    }
    return Recorder(bindings.IExecutionContext, answers, calls)


def _run(
    cuda: HostCuda, session: Any, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]
) -> None:
    """Read inputs where they are bound, write outputs where they are bound: on the device."""

    def bound(value: Any, shape: tuple[int, ...]) -> np.ndarray:
        found = _memory(addresses[value.name], shape, _NUMPY[value.type])
        assert cuda.find(addresses[value.name], found.nbytes) == "device", value.name
        return found

    feed = {value.name: bound(value, shapes[value.name]).copy() for value in session.get_inputs()}
    outputs = session.get_outputs()
    for value, result in zip(outputs, session.run([o.name for o in outputs], feed), strict=True):
        bound(value, result.shape)[...] = result


def view_as_torch_would(array: Any) -> torch.Tensor:
    """A tensor over what the array says of itself (torch reads the same of CUDA arrays)."""
    said = array.__cuda_array_interface__
    assert (said["strides"], said["version"], said["data"][1]) == (None, 3, False)
    return torch.from_numpy(_memory(said["data"][0], said["shape"], np.dtype(said["typestr"])))


def _memory(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(block, np.uint8).view(dtype).reshape(shape)
