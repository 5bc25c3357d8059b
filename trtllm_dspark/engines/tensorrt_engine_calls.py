# SPDX-License-Identifier: Apache-2.0
"""Calls of one model's engine: buffers and pages at fixed addresses, a CUDA graph per shape.

The first call with a key runs plainly and is captured; later ones are one copy and one launch.
Knows bindings, not steps: what goes into the arrays is `tensorrt_engine_inputs`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.engines.build_profiles import Profile
from trtllm_dspark.engines.graph_names import pages_out
from trtllm_dspark.engines.tensorrt_engine_buffers import (
    DEVICE_INPUTS,
    TensorSpec,
    is_in_place,
    largest_shape,
    locate_profile,
    page_specs,
    plan_staging,
    pool_of,
    staging_bytes,
    write_inputs,
)
from trtllm_dspark.engines.tensorrt_engine_device import Device
from trtllm_dspark.engines.tensorrt_engine_inputs import Arrays, GraphKey
from trtllm_dspark.engines.tensorrt_engine_memory import DeviceArray
from trtllm_dspark.engines.tensorrt_engine_session import EngineSession
from trtllm_dspark.errors import EngineError


@dataclass
class _Prepared:
    """A bound context and, where it could be captured, its graph."""

    session: EngineSession
    context: Any
    graph: Any | None = None


class EngineCalls:
    """Owns all device memory of one model's engine files but their weights.

    `keep_alive`: the sessions' scratch memory.
    """

    def __init__(
        self,
        sessions: Sequence[EngineSession],
        device: Device,
        profiles: Sequence[Profile],
        num_pages: int,
        keep_alive: Sequence[DeviceArray] = (),
    ) -> None:
        self._sessions, self._device, self._keep_alive = sessions, device, keep_alive
        specs = sessions[0].specs
        pages = page_specs(specs, num_pages)
        self.in_place = is_in_place(sessions[0].aliases(), len(pages))
        self._pools = [
            {p.name: device.zeros(p.shape, p.dtype) for p in pages}
            for _ in range(1 if self.in_place else 2)
        ]
        self._staged = plan_staging(specs, profiles, [p.name for p in pages])
        size = (staging_bytes(self._staged),)
        self._host: np.ndarray = device.host_zeros(size, "UINT8")
        self._inputs = device.zeros(size, "UINT8")
        self._copied = device.make_event()
        device.record(self._copied)
        self.buffers = self._allocate_buffers(specs, profiles)
        """Outputs, and inputs that are written on the device; rows of a call come first."""
        self._prepared: dict[tuple[GraphKey, int], _Prepared] = {}
        self._num_calls = 0

    def _allocate_buffers(
        self, specs: Sequence[TensorSpec], profiles: Sequence[Profile]
    ) -> dict[str, DeviceArray]:
        layers = range(len(self._pools[0]))
        skipped = {*self._staged, *self._pools[0], *(pages_out(i) for i in layers)}
        return {
            spec.name: self._device.zeros(largest_shape(spec, profiles), spec.dtype)
            for spec in specs
            if spec.name not in skipped
        }

    def spec(self, name: str) -> TensorSpec:
        """What the engine says of one tensor; EngineError where it has none of that name."""
        for spec in self._sessions[0].specs:
            if spec.name == name:
                return spec
        raise EngineError(f"the engine has no tensor {name!r}: build it again with this version")

    def run(self, key: GraphKey, arrays: Arrays) -> None:
        """Copy the arrays in and run; outputs are in `buffers` once the stream gets there."""
        self._stage(arrays)
        pools = pool_of(self._num_calls, self.in_place)
        prepared = self._prepared.get((key, pools[0]))
        if prepared is None:
            prepared = self._prepare(key, arrays, pools)
            self._prepared[key, pools[0]] = prepared
        elif prepared.graph is not None:
            self._device.launch(prepared.graph)
        else:
            prepared.session.enqueue(prepared.context)
        self._num_calls += 1

    def _stage(self, arrays: Arrays) -> None:
        """One copy of all host inputs; the block is written only after the last copy is over."""
        self._device.wait(self._copied)
        num_bytes = write_inputs(self._host, arrays, self._staged)
        self._device.copy(self._inputs.address, self._host.ctypes.data, num_bytes)
        self._device.record(self._copied)

    def _prepare(self, key: GraphKey, arrays: Arrays, pools: tuple[int, int]) -> _Prepared:
        """Bind a context for good, run it once, capture it."""
        file, profile = locate_profile(key.profile, len(self._sessions))
        session = self._sessions[file]
        context = session.make_context(profile)
        session.bind(context, self._shapes(key, arrays), self._addresses(pools))
        session.enqueue(context)
        prepared = _Prepared(session, context)
        if session.can_capture(context):
            prepared.graph = self._device.capture(lambda: session.enqueue(context))
        return prepared

    def _shapes(self, key: GraphKey, arrays: Arrays) -> dict[str, tuple[int, ...]]:
        shapes = {name: values.shape for name, values in arrays.items()}
        shapes.update({name: page.shape for name, page in self._pools[0].items()})
        for name in DEVICE_INPUTS:
            if name in self.buffers:
                shapes[name] = (key.context_rows, *self.buffers[name].shape[1:])
        return shapes

    def _addresses(self, pools: tuple[int, int]) -> dict[str, int]:
        start = self._inputs.address
        found = {name: start + place.offset for name, place in self._staged.items()}
        found.update({name: buffer.address for name, buffer in self.buffers.items()})
        for layer, (name, page) in enumerate(self._pools[pools[0]].items()):
            found[name] = page.address
            found[pages_out(layer)] = self._pools[pools[1]][name].address
        return found
