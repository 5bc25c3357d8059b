# SPDX-License-Identifier: Apache-2.0
"""Which dtype a device is fast at, measured once at load rather than guessed from a CPU flag."""

from __future__ import annotations

import logging
import statistics
import time

import torch
from torch.nn import functional

logger = logging.getLogger(__name__)

PROBE_ROWS, PROBE_IN, PROBE_OUT = 32, 576, 3072
"""A gated-MLP projection of a small model at a typical verification batch."""


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype for a configured name; 'auto' measures on the CPU and is logged."""
    if name != "auto":
        return {
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            "float16": torch.float16,
        }[name]
    if device != "cpu":
        return torch.bfloat16
    times_ms = {dtype: _time_linear_ms(dtype) for dtype in (torch.float32, torch.bfloat16)}
    faster = min(times_ms, key=lambda dtype: times_ms[dtype])
    logger.info(
        "dtype auto: a %d×%d×%d product takes %.3f ms in float32, %.3f ms in bfloat16; using %s",
        PROBE_ROWS,
        PROBE_IN,
        PROBE_OUT,
        times_ms[torch.float32],
        times_ms[torch.bfloat16],
        str(faster).removeprefix("torch."),
    )
    return faster


def _time_linear_ms(dtype: torch.dtype, repeats: int = 9) -> float:
    x = torch.ones(PROBE_ROWS, PROBE_IN, dtype=dtype)
    weight = torch.ones(PROBE_OUT, PROBE_IN, dtype=dtype)
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 3):
            started = time.perf_counter()
            functional.linear(x, weight)
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[3:])
