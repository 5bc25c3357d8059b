# SPDX-License-Identifier: Apache-2.0
"""One deserialised engine file and its execution contexts, over `tensorrt` or `tensorrt_rtx`.

Contexts share one block of device memory and are used one at a time on one stream. Buffers and
shapes are the caller's. Not yet executed anywhere: see docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.errors import EngineError

Allocate = Callable[[int], int]
"""Bytes → address of device memory, 256-byte aligned, that lives as long as the session."""


class EngineSession:
    """Deserialises once; one context per optimization profile, made when first used."""

    def __init__(self, trt: Any, path: Path, stream: int, allocate: Allocate) -> None:
        self._trt, self._path, self._stream = trt, path, stream
        self._logger = trt.Logger(trt.Logger.Severity.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(
                f"{path} cannot be deserialised on this machine: engines are locked to the "
                "backend's version and to the GPU they were built for; build again here"
            )
        self._memory_bytes = int(self._engine.device_memory_size_v2)
        self._memory = allocate(max(self._memory_bytes, 1))
        self._contexts: dict[int, Any] = {}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Inputs and outputs, in the engine's order."""
        engine = self._engine
        return tuple(engine.get_tensor_name(i) for i in range(engine.num_io_tensors))

    def is_input(self, name: str) -> bool:
        """Whether the tensor is read, not written."""
        mode: bool = self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        return mode

    def context(self, profile: int) -> Any:
        """The context of one profile, with the shared device memory."""
        if profile not in self._contexts:
            strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self._engine.create_execution_context(strategy)
            if context is None:
                raise EngineError(f"{self._path}: no execution context for profile {profile}")
            context.set_device_memory(self._memory, self._memory_bytes)
            if not context.set_optimization_profile_async(profile, self._stream):
                raise EngineError(f"{self._path} has no profile {profile}")
            self._contexts[profile] = context
        return self._contexts[profile]

    def bind(
        self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> Any:
        """Set input shapes and every address; returns the context, ready to be enqueued."""
        context = self.context(profile)
        for name in self.tensor_names:
            if name not in addresses:
                raise EngineError(f"{self._path}: tensor {name!r} has no buffer")
            if self.is_input(name) and not context.set_input_shape(name, shapes[name]):
                raise EngineError(
                    f"{self._path}: shape {shapes[name]} of {name!r} is outside profile {profile}"
                )
            if not context.set_tensor_address(name, addresses[name]):
                raise EngineError(f"{self._path}: the address of {name!r} was refused")
        missing = context.infer_shapes()
        if missing:
            raise EngineError(f"{self._path}: shapes or addresses are missing for {missing}")
        return context

    def enqueue(self, context: Any) -> None:
        """Run on the session's stream; does not wait."""
        if not context.execute_async_v3(self._stream):
            raise EngineError(f"{self._path}: enqueueing failed; the backend's log says why")
