# SPDX-License-Identifier: Apache-2.0
"""Whether planning hides behind the device: the product's loop on a random-weight Qwen3-8B.

Per round: was the device still busy when the scheduler had settled the last step and decided the
next one; how long the device worked; how long the whole step took.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from gpu_bench.engine_models import EngineLimits, build_modules, make_engine, make_loop
from gpu_bench.environment import Target
from gpu_bench.shapes import QWEN3_8B, TINY
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.engines.protocol import PendingRound, RoundOutput, RoundStep
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.types import GenerationRequest, SamplingParams

Row = dict[str, Any]
NUM_WARM_UP_ROUNDS = 4


class TimedEngine(KernelEngine):
    """Notes for every round whether the host came to read before the device was done."""

    rounds_seen: list[tuple[bool, float]]

    def start_round(self, step: RoundStep) -> PendingRound:
        """Launch between two events."""
        if self.device.type != "cuda":
            return TimedRound(self, super().start_round(step), None)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        pending = super().start_round(step)
        events[1].record()
        return TimedRound(self, pending, events)


class TimedRound:
    """A round with its events."""

    def __init__(self, engine: TimedEngine, pending: PendingRound, events: Any) -> None:
        self.engine, self.pending, self.events = engine, pending, events

    def read(self) -> RoundOutput:
        """Read, and note how it stood before."""
        was_busy = self.events is not None and not self.events[1].query()
        output = self.pending.read()
        device_ms = 0.0
        if self.events is not None:
            self.events[1].synchronize()
            device_ms = self.events[0].elapsed_time(self.events[1])
        self.engine.rounds_seen.append((was_busy, device_ms))
        return output


def make_table(limits: EngineLimits) -> LatencyTable:
    """A table of the usual shape, flat and then rising, so that policies have work to do."""
    sizes = np.array(request_buckets(limits.buckets), float)
    rungs = build_ladder(limits.buckets, limits.num_drafts)
    step = np.add.outer(0.02 * sizes, 5.0 + 0.02 * np.maximum(np.array(rungs) - 64.0, 0.0))
    return LatencyTable(
        request_buckets=request_buckets(limits.buckets),
        rungs=rungs,
        step_ms=step,
        autoregressive_ms=4.8 + 0.02 * sizes,
        no_draft_ms=4.9 + 0.02 * sizes,
        draft_ms=0.8 + 0.01 * sizes,
        fingerprint="synthetic",
        num_drafts=limits.num_drafts,
    )


def bench_overlap(target: Target) -> list[Row]:
    """R = 1, 16, 64 under `prefix_async` (which drafts at every step)."""
    spec = QWEN3_8B if target.is_cuda else TINY
    limits = EngineLimits(64, 512, 1536, 7) if target.is_cuda else EngineLimits(2, 8, 40, 3)
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    modules = build_modules(spec, limits.num_drafts, dtype, target)
    engine = make_engine(modules, spec, limits, TimedEngine)
    assert isinstance(engine, TimedEngine)
    counts = (1, 16, 64) if target.is_cuda else (2,)
    return [_bench_requests(engine, limits, count, target) for count in counts]


def _bench_requests(engine: TimedEngine, limits: EngineLimits, count: int, target: Target) -> Row:
    generator = np.random.default_rng(target.seed)
    length, rounds = (1024, 24) if target.is_cuda else (4, 3)
    loop = make_loop(engine, "prefix_async", make_table(limits))
    params = SamplingParams(max_tokens=400 if target.is_cuda else 24, temperature=0.0)
    for index in range(count):
        prompt = generator.integers(0, engine.info.vocab_size, length).astype(np.int32)
        loop.add(GenerationRequest(str(index), prompt, params))
    engine.rounds_seen = []
    while len(engine.rounds_seen) < NUM_WARM_UP_ROUNDS * target.is_cuda + 1:
        loop.step()  # prompts first; the first rounds capture their graphs
    first, step_ms, plan_ms = len(engine.rounds_seen), [], []
    while len(engine.rounds_seen) < first + rounds:
        started = time.perf_counter()
        loop.step()
        step_ms.append((time.perf_counter() - started) * 1e3)
        if loop.last_outcome is not None:
            plan_ms.append(loop.last_outcome.plan_ms)
    for index in range(count):
        loop.cancel(str(index))
    while loop.has_work:
        loop.step()
    seen = engine.rounds_seen[first:]
    return {
        "num_requests": count,
        "context_len": length,
        "step_ms": statistics.median(step_ms),
        "device_ms": statistics.median(ms for _, ms in seen),
        "scheduler_ms": statistics.median(plan_ms or [0.0]),
        "share_hidden": sum(was_busy for was_busy, _ in seen) / len(seen),
    }
