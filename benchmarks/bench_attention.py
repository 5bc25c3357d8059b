# SPDX-License-Identifier: Apache-2.0
"""CPU attention over paged K/V: the native kernel against gathered pages and torch, paired.

Shapes are SmolLM2's (30 layers, 9 query and 3 K/V heads of 64); a run is all layers of one step,
planning included, every layer with K/V of its own.

Run: python benchmarks/bench_attention.py --json attention.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import (
    Spread,
    describe_run,
    format_table,
    paired_ratio,
    time_interleaved_us,
    write_report,
)
from trtllm_dspark.ops import native_attention
from trtllm_dspark.ops.attention import AttentionPlan, attend_grouped, plan_attention

CASES = ((1, 200, 1), (1, 200, 8), (8, 200, 8), (96, 180, 1), (4, 0, 128), (1, 0, 512))
"""(requests, context rows, new rows each)"""
LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 30, 9, 3, 64, 32
SCALE = HEAD_DIM**-0.5

Attend = Callable[[torch.Tensor, torch.Tensor, AttentionPlan, float], torch.Tensor]


def make_runs(case: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """One function per way of attending, on the same random tensors and scattered pages."""
    requests, context, new = case
    pages = -(-(context + new) // PAGE_SIZE)
    shape = (requests * pages + 1, PAGE_SIZE, 2, KV_HEADS, HEAD_DIM)
    layers = [torch.randn(shape).to(dtype) for _ in range(LAYERS)]
    q = torch.randn(requests * new, HEADS, HEAD_DIM).to(dtype)
    order = np.random.default_rng(0).permutation(requests * pages) + 1
    table = order.reshape(requests, pages).astype(np.int32)
    cu_query_lens = np.arange(0, requests * new + 1, new, dtype=np.int32)
    contexts = np.full(requests, context, np.int32)

    def run(attend: Attend) -> None:
        plan = plan_attention(
            cu_query_lens, contexts, table, PAGE_SIZE, q_per_kv=HEADS // KV_HEADS, dtype=dtype
        )
        for kv_pages in layers:
            attend(q, kv_pages, plan, SCALE)

    return {
        "native": lambda: run(native_attention.run),
        "torch": lambda: run(attend_grouped),
    }


def bench_case(case: tuple[int, int, int], dtype: torch.dtype, num_rounds: int) -> dict[str, Any]:
    """Times and their paired ratio."""
    samples = time_interleaved_us(make_runs(case, dtype), num_rounds=num_rounds)
    return {
        "case": dict(zip(("requests", "context", "new_rows"), case, strict=True)),
        "us": {name: vars(Spread.of(values)) for name, values in samples.items()},
        "torch_over_native": paired_ratio(samples["torch"], samples["native"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write everything here")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    probe = torch.zeros(1, HEADS, HEAD_DIM, dtype=dtype)
    if not native_attention.can_run(probe, probe):
        parser.error("the native kernel does not exist here: install a C compiler (cc)")
    results = [bench_case(case, dtype, arguments.rounds) for case in CASES]
    write_report(arguments.json, {"run": describe_run(), "results": results})
    header = ("requests", "context", "new rows", "native ms", "torch ms", "torch / native")
    rows = []
    for result in results:
        ratio, times = result["torch_over_native"], result["us"]
        milliseconds = [f"{times[name]['median'] / 1e3:.2f}" for name in ("native", "torch")]
        interval = f"{ratio['median']:.2f} [{ratio['low95']:.2f}, {ratio['high95']:.2f}]"
        rows.append((*map(str, result["case"].values()), *milliseconds, interval))
    print(format_table(header, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
