# SPDX-License-Identifier: Apache-2.0
"""One timer for everything: CUDA-graph replays between events, median and spread; and the
machine's measured copy bandwidth, which floors are computed from.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_bench.environment import Target

WARM_UP_CALLS = 3
NUM_REPLAYS = 15
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median_ms: float
    low_ms: float
    """Second-fastest replay."""
    high_ms: float
    """Second-slowest replay."""


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream and capture one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_call(
    call: Callable[[], object], target: Target, *, is_cold: bool = False, replays: int = NUM_REPLAYS
) -> Timing:
    """Time one call as a CUDA graph; `is_cold` overwrites the L2 cache before every replay.

    Interpreted, the call runs once and the wall clock says how long (a smoke test, not a number).
    """
    if not target.is_cuda:
        start = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - start) * 1e3
        return Timing(elapsed, elapsed, elapsed)
    graph = capture(call)
    flush = torch.empty(FLUSH_BYTES if is_cold else 1, dtype=torch.int8, device=target.device)
    samples = []
    for _ in range(replays + 2):
        flush.zero_()
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        samples.append(start_event.elapsed_time(end_event))
    ordered = sorted(samples[2:])
    return Timing(statistics.median(ordered), ordered[1], ordered[-2])


def measure_copy_bandwidth(target: Target) -> float:
    """Bytes per second of a device-to-device copy, reads and writes both counted."""
    size = (2 << 30) if target.is_cuda else (1 << 20)
    source = torch.zeros(size, dtype=torch.int8, device=target.device)
    sink = torch.empty_like(source)
    timing = time_call(lambda: sink.copy_(source), target)
    return 2.0 * size / (timing.median_ms * 1e-3)
