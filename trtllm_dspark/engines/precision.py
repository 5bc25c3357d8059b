# SPDX-License-Identifier: Apache-2.0
"""Which dtype a device is fast at, measured once at load rather than guessed from a CPU flag."""

from __future__ import annotations

import logging
import time

import torch

from trtllm_dspark.ops.linear import Linear

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
    times_ms = _time_linear_ms((torch.float32, torch.bfloat16))
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


def _time_linear_ms(dtypes: tuple[torch.dtype, ...], repeats: int = 25) -> dict[torch.dtype, float]:
    """Best of interleaved runs for each dtype (a busy machine disturbs the minimum least)."""
    best = dict.fromkeys(dtypes, float("inf"))
    layers = {}
    for dtype in dtypes:
        layer = Linear(PROBE_IN, PROBE_OUT)
        layer.weight.data = torch.ones(PROBE_OUT, PROBE_IN, dtype=dtype)
        layer.pack_()
        layers[dtype] = (layer, torch.ones(PROBE_ROWS, PROBE_IN, dtype=dtype))
    with torch.inference_mode():
        for _ in range(repeats):
            for dtype, (layer, x) in layers.items():
                started = time.perf_counter()
                layer(x)
                best[dtype] = min(best[dtype], (time.perf_counter() - started) * 1e3)
    return best
