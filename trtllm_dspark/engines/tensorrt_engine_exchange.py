# SPDX-License-Identifier: Apache-2.0
"""How logits and taps leave an engine's memory and taps come back: the one place that knows torch.

The protocol hands both out as torch tensors, since acceptance and the drafter's bookkeeping are
written in torch. `HostCopies` needs no CUDA in torch: tensors over pinned host memory, copied on
the engine's stream. `TorchViews` copies nothing: where torch reaches the GPU it sees the engine's
own buffers, so that logits need not cross the bus and acceptance runs its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trtllm_dspark.engines.tensorrt_engine_device import Device
from trtllm_dspark.engines.tensorrt_engine_memory import DeviceArray

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
}


class Exchange(Protocol):
    """What the engine asks for; the calls come in the order begin, give or take, end."""

    name: str
    """Part of the engine's fingerprint: the two take different times."""

    def begin(self) -> None:
        """Let the engine's stream wait until the caller is done with what was given before."""
        ...

    def give(self, wanted: Sequence[tuple[DeviceArray, int]]) -> list[torch.Tensor]:
        """The first rows of each buffer, good until the next call that writes it."""
        ...

    def take(self, target: DeviceArray, rows: torch.Tensor) -> None:
        """Copy rows that were given earlier to the first rows of a buffer."""
        ...

    def end(self) -> None:
        """Let the caller go on: what was given holds values, what was taken may change."""
        ...


class HostCopies:
    """Tensors over pinned host memory, one block per buffer. `give` is copied when `end` is."""

    name = "host"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._given: dict[int, np.ndarray] = {}
        self._taken: dict[int, np.ndarray] = {}
        self._is_waited_for = False
        self._copied = device.make_event()
        device.record(self._copied)

    def begin(self) -> None:
        """Nothing to wait for: the caller works on copies."""

    def give(self, wanted: Sequence[tuple[DeviceArray, int]]) -> list[torch.Tensor]:
        """Queue the copies; `end` waits for them."""
        self._is_waited_for = True
        return [self._copy_out(buffer, num_rows) for buffer, num_rows in wanted]

    def _copy_out(self, buffer: DeviceArray, num_rows: int) -> torch.Tensor:
        host = self._block(self._given, buffer)
        num_bytes = buffer.rows(num_rows).num_bytes
        self._device.copy(host.ctypes.data, buffer.address, num_bytes)
        return as_tensor(host[:num_rows], buffer.dtype)

    def take(self, target: DeviceArray, rows: torch.Tensor) -> None:
        """Write the rows to a pinned block and queue its copy; waits for the last such copy."""
        host = self._block(self._taken, target)
        self._device.wait(self._copied)
        as_tensor(host[: len(rows)], target.dtype).copy_(rows)
        num_bytes = target.rows(len(rows)).num_bytes
        self._device.copy(target.address, host.ctypes.data, num_bytes)
        self._device.record(self._copied)

    def _block(self, blocks: dict[int, np.ndarray], buffer: DeviceArray) -> np.ndarray:
        """The pinned twin of a buffer."""
        if buffer.address not in blocks:
            blocks[buffer.address] = self._device.host_zeros(buffer.shape, buffer.dtype)
        return blocks[buffer.address]

    def end(self) -> None:
        """Wait for what was given; what was taken has been read already."""
        if self._is_waited_for:
            self._device.synchronize()
        self._is_waited_for = False


class TorchViews:
    """Torch tensors over the engine's own device memory; streams are ordered by events."""

    name = "device"

    def __init__(
        self,
        device: Device,
        torch_stream: Callable[[], int],
        view: Callable[[Any], torch.Tensor],
    ) -> None:
        self._device, self._torch_stream, self._view = device, torch_stream, view
        self._views: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """The stream waits for what torch has been asked to do so far."""
        self._device.follow(self._torch_stream())

    def give(self, wanted: Sequence[tuple[DeviceArray, int]]) -> list[torch.Tensor]:
        """Views of the rows."""
        for buffer, _ in wanted:
            if buffer.address not in self._views:
                self._views[buffer.address] = _retyped(self._view(buffer), buffer.dtype)
        return [self._views[buffer.address][:num_rows] for buffer, num_rows in wanted]

    def take(self, target: DeviceArray, rows: torch.Tensor) -> None:
        """Queue the copy from torch's memory; `end` keeps that memory from being reused."""
        rows = rows.contiguous()
        filled = target.rows(len(rows))
        self._device.copy(target.address, rows.data_ptr(), filled.num_bytes)

    def end(self) -> None:
        """Torch's stream waits for what this stream has been asked to do so far."""
        self._device.lead(self._torch_stream())


def make_exchange(device: Device) -> Exchange:
    """Views where torch itself reaches the engine's GPU, host copies elsewhere."""
    import torch

    index = device.index
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return HostCopies(device)

    def view(array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=torch.device("cuda", index))

    return TorchViews(device, lambda: int(torch.cuda.current_stream(index).cuda_stream), view)


def as_tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over the same host memory, in the type that TensorRT calls `dtype`."""
    import torch

    return _retyped(torch.from_numpy(values), dtype)


def _retyped(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Bits as what they are (BF16 has no type outside torch)."""
    import torch

    return tensor.view(getattr(torch, _TORCH_NAMES[dtype]))
