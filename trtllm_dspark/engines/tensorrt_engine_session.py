# SPDX-License-Identifier: Apache-2.0
"""One deserialised engine file and its execution contexts, over `tensorrt` or `tensorrt_rtx`.

Contexts share one block of device memory and are used one at a time on one stream. Buffers and
shapes are the caller's. Not yet executed anywhere: see docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.engines.tensorrt_engine_buffers import TensorSpec
from trtllm_dspark.errors import EngineError

Allocate = Callable[[int], int]
"""Bytes → address of device memory, 256-byte aligned, that lives as long as the session."""


class EngineSession:
    """Deserialises once and makes contexts; a captured context is never bound anew."""

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
        self._settings = self._make_settings()
        self.specs = tuple(self._spec(i) for i in range(self._engine.num_io_tensors))
        """Inputs and outputs, in the engine's order."""

    def _spec(self, index: int) -> TensorSpec:
        engine = self._engine
        name = engine.get_tensor_name(index)
        return TensorSpec(
            name,
            engine.get_tensor_dtype(name).name,
            tuple(engine.get_tensor_shape(name)),
            engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT,
        )

    def _make_settings(self) -> Any:
        """How contexts are made. TensorRT-RTX compiles kernels when a shape is first seen; its
        default swaps them in behind a captured graph's back.
        """
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        specialization = getattr(self._trt, "DynamicShapesKernelSpecializationStrategy", None)
        if specialization is None:
            return strategy
        settings = self._engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(strategy)
        settings.dynamic_shapes_kernel_specialization_strategy = specialization.EAGER
        return settings

    def aliases(self) -> dict[str, str]:
        """Output → the input whose memory it must share, for outputs that have one."""
        outputs = [spec.name for spec in self.specs if not spec.is_input]
        found = {name: self._engine.get_aliased_input_tensor(name) for name in outputs}
        return {name: source for name, source in found.items() if source}

    def make_context(self, profile: int) -> Any:
        """A context of one profile, with the shared device memory."""
        context = self._engine.create_execution_context(self._settings)
        if context is None:
            raise EngineError(f"{self._path}: no execution context for profile {profile}")
        context.set_device_memory(self._memory, self._memory_bytes)
        if not context.set_optimization_profile_async(profile, self._stream):
            raise EngineError(f"{self._path} has no profile {profile}")
        return context

    def bind(
        self,
        context: Any,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
    ) -> None:
        """Set input shapes and every address, after which the context can be enqueued."""
        for spec in self.specs:
            name = spec.name
            if name not in addresses:
                raise EngineError(f"{self._path}: tensor {name!r} has no buffer")
            if spec.is_input and not context.set_input_shape(name, shapes[name]):
                raise EngineError(
                    f"{self._path}: shape {shapes[name]} of {name!r} is outside its profile"
                )
            if not context.set_tensor_address(name, addresses[name]):
                raise EngineError(f"{self._path}: the address of {name!r} was refused")
        missing = context.infer_shapes()
        if missing:
            raise EngineError(f"{self._path}: shapes or addresses are missing for {missing}")

    def can_capture(self, context: Any) -> bool:
        """Whether a bound context may be captured into a CUDA graph (TensorRT always may)."""
        ask = getattr(context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._stream))

    def enqueue(self, context: Any) -> None:
        """Run on the session's stream; does not wait."""
        if not context.execute_async_v3(self._stream):
            raise EngineError(f"{self._path}: enqueueing failed; the backend's log says why")
