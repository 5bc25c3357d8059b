# SPDX-License-Identifier: Apache-2.0
"""Named arrays with fixed addresses on host and device: what a captured graph reads and writes.

The host fills numpy views, one asynchronous copy moves the whole block. Knows names and shapes, not
what they mean. A block may be filled again only when its last copy is done: `begin` waits for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT = 16
Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class StaticBlock:
    """One contiguous block on the device, its (pinned) twin on the host, and views by name."""

    def __init__(self, fields: Fields, device: torch.device) -> None:
        offsets, size = {}, 0
        for name, (dtype, shape) in fields.items():
            offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None
        self.host: dict[str, np.ndarray] = {}
        """Views that the host fills or reads."""
        self.device: dict[str, torch.Tensor] = {}
        """Views at addresses that never change."""
        for name, (dtype, shape) in fields.items():
            part = slice(offsets[name], offsets[name] + math.prod(shape) * dtype.itemsize)
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.device[name] = self._device[part].view(dtype).view(shape)

    def begin(self) -> dict[str, np.ndarray]:
        """Return the host's views once the last upload has left them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.host

    def upload(self) -> None:
        """Queue the copy of the whole block to the device; does not wait."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def download(self) -> None:
        """Queue the copy of the whole block to the host; `begin` waits for it."""
        self._host.copy_(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def fill(target: np.ndarray, values: np.ndarray, padding: int | float = 0) -> None:
    """Write values at the start of every axis of target and padding elsewhere."""
    if values.shape != target.shape:
        target.fill(padding)
    target[tuple(slice(n) for n in values.shape)] = values
