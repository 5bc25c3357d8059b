# SPDX-License-Identifier: Apache-2.0
"""How long one scheduling decision takes: `adaptive` against a plain Python heap version of
DSpark's Algorithm 1 that admits all R·γ drafts, paired round by round, and the growth with R.

Run: python benchmarks/bench_scheduler.py --json scheduler.json
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import (
    Spread,
    describe_run,
    format_table,
    paired_ratio,
    time_interleaved_us,
    write_report,
)
from trtllm_dspark.config import BucketConfig
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Policy
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftMode, FloatArray

RATIOS = (0.25, 0.5, 0.75, 1.0)
STEP_MS = 55.2
"""D-Cut's published step at R = 64 with a quarter of the drafts (Qwen3-8B, one H20): far smaller
than any step at R = 256, so the share of the step that is reported is an upper bound."""


def build_table(max_num_requests: int, num_drafts: int) -> LatencyTable:
    """Return a table of the published shape: flat at first, then linear in tokens and requests."""
    buckets = tuple(1 << i for i in range(max_num_requests.bit_length()))
    config = BucketConfig(
        max_num_requests=max_num_requests,
        max_num_tokens=max_num_requests * (num_drafts + 1),
        request_buckets=tuple(b for b in buckets if b <= max_num_requests),
        ratios=RATIOS,
    )
    rungs, sizes = build_ladder(config, num_drafts), np.array(request_buckets(config), float)
    step = np.add.outer(0.4 * sizes, 8.0 + 0.105 * np.maximum(np.array(rungs) - 32.0, 0.0))
    plain = 7.3 + 0.18 * sizes
    return LatencyTable(
        request_buckets=request_buckets(config),
        rungs=rungs,
        step_ms=step,
        autoregressive_ms=plain,
        no_draft_ms=plain * 1.005,
        draft_ms=1.4 + 0.04 * sizes,
        fingerprint="synthetic",
        num_drafts=num_drafts,
    )


def make_survivals(num_requests: int, num_drafts: int, seed: int) -> FloatArray:
    """Return survivals of requests that differ: m ~ Beta(16.6, 3.4), c ~ Beta(0.6m, 0.6(1−m))."""
    rng = np.random.default_rng(seed)
    m = rng.beta(16.6, 3.4, num_requests)[:, None] * np.ones(num_drafts)
    return np.cumprod(rng.beta(0.6 * m, 0.6 * (1.0 - m)).clip(1e-4, 1.0), axis=1).astype(np.float32)


def make_view(table: LatencyTable, num_requests: int, num_drafts: int) -> BatchView:
    """Return a batch without prefill and without caps below γ."""
    return BatchView(
        request_keys=tuple(range(num_requests)),
        modes=(DraftMode.GREEDY_TARGET,) * num_requests,
        draft_caps=np.full(num_requests, num_drafts, np.int32),
        num_drafts=num_drafts,
        num_prefill_tokens=0,
        rungs=table.rungs,
        max_num_tokens=table.rungs[-1],
    )


class Setup:
    """A policy with a warm history, and what one call of each kind needs."""

    def __init__(self, table: LatencyTable, num_requests: int, num_drafts: int) -> None:
        self.table = table
        self.view = make_view(table, num_requests, num_drafts)
        # A plain run of an unchanged batch is not thought over at each step: what is timed is the
        # whole decision, so a prompt row comes and goes.
        self.views = (self.view, dataclasses.replace(self.view, num_prefill_tokens=1))
        self.num_decisions = 0
        self.survivals = [make_survivals(num_requests, num_drafts, seed) for seed in range(8)]
        resources = PolicyResources(table, SurvivalEstimator(num_drafts))
        self.policy: Policy = create_policy("adaptive", {}, resources)
        self.step = 0
        self.decision = DraftDecision(self.view.draft_caps > 0, 0)
        for _ in range(16):
            self.decide()
            self.plan()

    def decide(self) -> None:
        """One decision, before drafting."""
        self.num_decisions += 1
        self.decision = self.policy.decide(self.views[self.num_decisions % 2])

    def plan(self) -> None:
        """Rank the current survivals of an everybody-drafted step."""
        self.step += 1
        everybody = DraftDecision(self.view.draft_caps > 0, max(self.decision.capacity or 0, 64))
        self.policy.plan(self.view, everybody, self.survivals[self.step % 8])

    def heap(self) -> int:
        """DSpark's Algorithm 1 as one writes it down: a heap over the requests' next drafts."""
        survivals, num_drafts = self.survivals[0].tolist(), self.view.num_drafts
        num_requests, table = len(survivals), self.table
        waiting = [(-survivals[r][0], 0, r) for r in range(num_requests)]
        heapq.heapify(waiting)
        lens, tokens, admitted, best = [0] * num_requests, float(num_requests), 0, 0.0
        while waiting:
            negative, position, request = heapq.heappop(waiting)
            tokens -= negative
            admitted += 1
            theta = tokens / table.step_cost(num_requests, num_requests + admitted)
            best = max(best, theta)  # no early stop: all R·γ drafts are admitted
            lens[request] = position + 1
            if position + 1 < num_drafts:
                entry = (-survivals[request][position + 1], position + 1, request)
                heapq.heappush(waiting, entry)
        return sum(lens)


def run_main_case(num_requests: int, num_drafts: int, num_rounds: int) -> dict[str, Any]:
    """Time decide, plan and the heap on one case, paired."""
    setup = Setup(build_table(num_requests, num_drafts), num_requests, num_drafts)
    functions: dict[str, Callable[[], Any]] = {
        "adaptive": setup.decide,
        "plan": setup.plan,
        "heap": setup.heap,
    }
    samples = time_interleaved_us(
        functions, num_rounds=num_rounds, repeats={"adaptive": 10, "plan": 10}
    )
    spreads = {name: Spread.of(values) for name, values in samples.items()}
    return {
        "num_requests": num_requests,
        "num_drafts": num_drafts,
        "ratios": RATIOS,
        "request_buckets": setup.table.request_buckets,
        "num_rungs": len(setup.table.rungs),
        "capacity": setup.decision.capacity,
        "num_drafted": int(np.count_nonzero(setup.decision.draft_mask)),
        "adaptive_us": spreads["adaptive"].median,
        "plan_us": spreads["plan"].median,
        "heap_us": spreads["heap"].median,
        "heap_over_adaptive": paired_ratio(samples["heap"], samples["adaptive"]),
        "share_of_step_percent": 100 * spreads["adaptive"].median / (1e3 * STEP_MS),
        "step_ms_of_that_share": STEP_MS,
        "spread_us": spreads,
    }


def run_growth(num_drafts: int, largest: int, num_rounds: int) -> list[dict[str, Any]]:
    """Time one decision and one plan for R = 1, 4, 16, … `largest`."""
    table, rows = build_table(largest, num_drafts), []
    num_requests = 1
    while num_requests <= largest:
        setup = Setup(table, num_requests, num_drafts)
        samples = time_interleaved_us(
            {"adaptive": setup.decide, "plan": setup.plan},
            num_rounds=num_rounds,
            repeats={"adaptive": 5, "plan": 5},
        )
        medians = {name: Spread.of(values).median for name, values in samples.items()}
        rows.append(
            {
                "num_requests": num_requests,
                "adaptive_us": medians["adaptive"],
                "plan_us": medians["plan"],
            }
        )
        num_requests *= 4
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run, print two tables, optionally write JSON. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--num-drafts", type=int, default=15)
    parser.add_argument("--num-rounds", type=int, default=200)
    parser.add_argument("--largest", type=int, default=4096, help="last R of the growth table")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(argv)
    case = run_main_case(options.num_requests, options.num_drafts, options.num_rounds)
    growth = run_growth(options.num_drafts, options.largest, options.num_rounds)
    ratio = case["heap_over_adaptive"]
    cells = [f"{case[name]:.0f}" for name in ("adaptive_us", "plan_us", "heap_us")]
    cells.append(f"{ratio['median']:.1f} [{ratio['low95']:.1f}, {ratio['high95']:.1f}]")
    print(
        format_table(
            ("R", "γ", "decide µs", "plan µs", "heap µs", "heap / decide [95 %]"),
            [(case["num_requests"], case["num_drafts"], *cells)],
        )
    )
    print()
    print(
        format_table(
            ("R", "decide µs", "plan µs"),
            [
                (row["num_requests"], f"{row['adaptive_us']:.0f}", f"{row['plan_us']:.0f}")
                for row in growth
            ],
        )
    )
    write_report(options.json, {**case, "growth": growth, "run": describe_run()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
