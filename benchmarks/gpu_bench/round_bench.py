# SPDX-License-Identifier: Apache-2.0
"""Whole rounds of a random-weight Qwen3-8B with its drafter under CUDA graphs.

Two tables: the round at a fixed batch over contexts and block sizes, with and without the head, and
the latency table C(requests, rung) with its plain rows. K/V pages are zeros: cost does not depend
on values.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gpu_bench.decode_round import DecodeRound
from gpu_bench.environment import Target
from gpu_bench.random_model import Model, allocate_pages, build_model
from gpu_bench.roofline import dense_work
from gpu_bench.shapes import QWEN3_8B, TINY
from gpu_bench.timing import time_call

Row = dict[str, Any]
Pages = tuple[list[torch.Tensor], list[torch.Tensor]]


class RoundBench:
    """One model and one pool of pages, reused by every cell."""

    def __init__(self, target: Target, max_requests: int, max_positions: int) -> None:
        self.target = target
        self.spec = QWEN3_8B if target.is_cuda else TINY
        dtype = torch.bfloat16 if target.is_cuda else torch.float32
        self.model: Model = build_model(self.spec, dtype, target.device, target.seed)
        self.pages_per_request = -(-max_positions // self.spec.page_size)
        num_pages = max_requests * self.pages_per_request + 1
        self.pages: Pages = (
            allocate_pages(self.spec, self.spec.num_layers, num_pages, self.model.embed),
            allocate_pages(self.spec, self.spec.drafter_layers, num_pages, self.model.embed),
        )

    def time_round(self, num_requests: int, rung: int, context_len: int, **options: Any) -> Row:
        """Median milliseconds of one captured round."""
        count = num_requests * self.pages_per_request
        table = np.random.default_rng(0).permutation(count).astype(np.int32) + 1
        page_table = torch.from_numpy(table.reshape(num_requests, -1)).to(self.target.device)
        step = DecodeRound(
            self.model, self.pages, page_table, rung=rung, context_len=context_len, **options
        )
        timing = time_call(step.run, self.target, replays=7)
        del step
        gc.collect()
        if self.target.is_cuda:
            torch.cuda.empty_cache()  # graphs take pools of their own
        return {
            "num_requests": num_requests,
            "rung": rung,
            "context_len": context_len,
            **options,
            "median_ms": timing.median_ms,
            "low_ms": timing.low_ms,
            "high_ms": timing.high_ms,
        }

    def weights_floor_ms(self, bandwidth: float, has_drafter: bool) -> float:
        """Time to read every weight once."""
        spec = self.spec
        layers = spec.num_layers + (spec.drafter_layers if has_drafter else 0)
        weights = layers * spec.layer_weights + spec.head_weights * (2 if has_drafter else 1)
        return dense_work(1, weights).floor_ms(bandwidth, 1e18)


def bench_block_sizes(bench: RoundBench) -> Iterator[Row]:
    """The round over contexts and block sizes, with and without the sequential head."""
    is_cuda = bench.target.is_cuda
    num_requests = 128 if is_cuda else 2
    for num_drafts in (4, 8, 12, 16) if is_cuda else (2,):
        for has_head in (True, False):
            for context_len in (512, 1024, 2048, 4096) if is_cuda else (16,):
                yield bench.time_round(
                    num_requests,
                    num_requests * (num_drafts + 1),
                    context_len,
                    num_drafts=num_drafts,
                    has_head=has_head,
                )


def average_contexts(rows: list[Row]) -> list[Row]:
    """Mean over contexts of every (γ, head) pair: the points of the paper's Figure 4, right."""
    cells: dict[tuple[int, bool], list[float]] = {}
    for row in rows:
        cells.setdefault((row["num_drafts"], row["has_head"]), []).append(row["median_ms"])
    return [
        {"num_drafts": drafts, "has_head": has_head, "mean_ms": sum(found) / len(found)}
        for (drafts, has_head), found in cells.items()
    ]


def bench_latency_table(bench: RoundBench, bandwidth: float) -> Iterator[Row]:
    """C(R, ρ): rung = R + ⌈ρ·R·γ⌉ for the ratios, and the rows without drafting."""
    is_cuda = bench.target.is_cuda
    num_drafts, context_len = (7, 1024) if is_cuda else (2, 16)
    for num_requests in (1, 2, 4, 8, 16, 32, 64) if is_cuda else (1, 2):
        for ratio in (0.0, 0.25, 0.5, 0.75, 1.0) if is_cuda else (0.0, 1.0):
            rung = num_requests + int(np.ceil(ratio * num_requests * num_drafts))
            row = bench.time_round(
                num_requests, rung, context_len, num_drafts=num_drafts, has_drafter=ratio > 0
            )
            yield {
                **row,
                "kind": "speculative" if ratio > 0 else "autoregressive",
                "ratio": ratio,
                "weights_floor_ms": bench.weights_floor_ms(bandwidth, ratio > 0),
            }
