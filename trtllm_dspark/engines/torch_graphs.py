# SPDX-License-Identifier: Apache-2.0
"""Captured calls: what runs on static buffers once is replayed as a whole ever after.

On CUDA that is one graph per key, all in one memory pool (results leave a graph in static buffers,
so that graphs may share it). Without CUDA the call itself runs again. Knows no model and no step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)
Call = Callable[[], None]


class Capture(Protocol):
    """Turns a call on static buffers into one that replays it."""

    def __call__(self, call: Call) -> Call:
        """`call` must read nothing on the host and return nothing; it may run now."""
        ...


class CudaCapture:
    """Captures with `torch.cuda.graph`; every graph shares one pool and one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None

    def __call__(self, call: Call) -> Call:
        """Warm up on a side stream (kernels compile there), then capture."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                call()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                call()
        self.pool = self.pool or graph.pool()
        return graph.replay


def run_again(call: Call) -> Call:
    """No capture: a replay is another call."""
    return call


def choose_capture(device: torch.device) -> Capture:
    """Graphs on CUDA, calls elsewhere."""
    return CudaCapture(device) if device.type == "cuda" else run_again


class GraphSet:
    """Replays by key, captured when a key is first asked for."""

    def __init__(self, name: str, capture: Capture) -> None:
        self.name, self.capture = name, capture
        self._replays: dict[Hashable, Call] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, key: Hashable, make_call: Callable[[], Call]) -> None:
        """Replay `key`; `make_call` builds the call the first time."""
        replay = self._replays.get(key)
        if replay is None:
            replay = self._replays[key] = self.capture(make_call())
            logger.info("captured %s %s (%d in all)", self.name, key, len(self._replays))
        replay()
