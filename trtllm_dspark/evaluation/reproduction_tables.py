# SPDX-License-Identifier: Apache-2.0
"""Tables of `dspark simulate --reproduce`: published numbers beside the simulator's, made row by
row, so that progress can be shown. The numbers themselves come from `reproduction.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from trtllm_dspark.evaluation.progress import ProgressReport
from trtllm_dspark.evaluation.published_numbers import (
    H20_BATCHES,
    h20_table,
    h20_throughput,
    published,
)
from trtllm_dspark.evaluation.reproduction import (
    NUM_STEPS,
    accepted_at_depth,
    accepted_by_survival,
    dspark_budget,
    full_verification_tokens_per_s,
    noisy_tokens_per_s,
    optimum_tokens_per_s,
    published_dcut_budget,
    simulate_h20,
)
from trtllm_dspark.evaluation.roofline import Roofline

BUDGET_LOADS = (4, 8, 16, 32, 64, 128)
RATIOS = (0.25, 0.5, 0.75, 1.0)
ABLATION = {
    "dflash_b16": "fixed",
    "fixed_75": "fixed_ratio-0.75",
    "fixed_50": "fixed_ratio-0.5",
    "dcut_b16": "ratio_bucket",
}
"""Published system → our policy."""


@dataclass(frozen=True)
class ReproducedTable:
    """A title, the columns after the first, and how the row of a key is made."""

    title: str
    key: str
    columns: tuple[str, ...]
    keys: tuple[Any, ...]
    make_row: Callable[[Any], Sequence[float]]
    digits: int = 0


def _throughput(batch: int) -> list[float]:
    systems = ("autoregressive", "eagle3", "dflash_b16", "dcut_b16")
    steps = {"fixed": 800, "best_uniform": 800, "adaptive": NUM_STEPS}
    return [h20_throughput(system)[batch] for system in systems] + [
        simulate_h20(policy, batch, count).expected_tokens_per_s for policy, count in steps.items()
    ]


def _optimum(batch: int) -> list[float]:
    ours = simulate_h20("adaptive", batch, NUM_STEPS).expected_tokens_per_s
    return [ours / optimum_tokens_per_s(batch, samples) for samples in (1, 8)]


def _noise(batch: int) -> list[float]:
    online = noisy_tokens_per_s(batch, "online")
    perfect = simulate_h20("adaptive", batch, NUM_STEPS).expected_tokens_per_s
    return [online / noisy_tokens_per_s(batch, "oracle"), online / perfect]


def _budget_keys() -> tuple[tuple[str, str], ...]:
    table = published("dcut_h20")["budget_table_bs32_accepted_incl_anchor"]
    return tuple(
        (kind, name) for kind in ("uniform_depth", "top_by_survival") for name in table[kind]
    )


def _budget(key: tuple[str, str]) -> list[float]:
    kind, name = key
    rows, theirs = published("dcut_h20")["budget_table_bs32_accepted_incl_anchor"][kind][name]
    ours = accepted_at_depth(int(name)) if kind == "uniform_depth" else accepted_by_survival(rows)
    return [rows, theirs, ours, ours / theirs]


def _full(batch: int) -> list[float]:
    theirs, ours = h20_throughput("dflash_b16")[batch], full_verification_tokens_per_s(batch)
    return [theirs, ours, ours / theirs]


def _ablation(batch: int) -> list[float]:
    theirs = [h20_throughput(system, "old")[batch] for system in ABLATION]
    ours = [
        simulate_h20(policy, batch, 400, "old").expected_tokens_per_s
        for policy in ABLATION.values()
    ]
    return theirs + ours


def _experts(key: str) -> list[float]:
    """Cost of verifying 64 requests against that of a quarter of their rows, γ = 15."""
    rows = [round(ratio * 1024) for ratio in RATIOS]
    if key == "dense, published":
        costs = [h20_table().step_cost(64, count) for count in rows]
    elif key == "experts, published":
        other = published("dcut_h20")["other_models_tokens_per_second_new"]
        costs = other["qwen3.5-35b-a3b_tp4_moe"]["verify_cost_ms_bs64_at_25_50_75_100_percent_tp2"]
    else:
        line = Roofline("h20", key, num_drafts=15)
        costs = [line.step_ms(64, count) for count in rows]
    return [cost / costs[0] for cost in costs]


def _dspark_budget(load: int) -> list[float]:
    ours = [dspark_budget(load, policy) for policy in ("prefix_async", "adaptive")]
    return [*ours, published_dcut_budget(load) if load in H20_BATCHES else math.nan]


def tables() -> dict[str, ReproducedTable]:
    """Every table by the name that `--reproduce` takes."""
    from_depth = ("rows", "published", "simulated", "ratio")
    return {
        "throughput": ReproducedTable(
            "tokens/s, Qwen3-8B on one H20: published | simulated", "requests",
            ("plain", "EAGLE-3", "DFlash-B16", "D-Cut-B16", "| fixed", "best_uniform", "adaptive"),
            H20_BATCHES, _throughput,
        ),
        "optimum": ReproducedTable(
            "adaptive / long-run optimum", "requests", ("1 sample", "8 samples"),
            H20_BATCHES, _optimum, 3,
        ),
        "noise": ReproducedTable(
            "noisy confidences after online calibration", "requests",
            ("/ isotonic oracle", "/ perfect confidences"), H20_BATCHES, _noise, 3,
        ),
        "budget-table": ReproducedTable(
            "tokens accepted, 32 requests, anchor included", "verified", from_depth,
            _budget_keys(), _budget, 3,
        ),
        "full": ReproducedTable(
            "tokens/s of full verification", "requests", ("published", "expected", "ratio"),
            H20_BATCHES, _full, 3,
        ),
        "ablation": ReproducedTable(
            "tokens/s, older page: published | simulated", "requests",
            ("full", "75 %", "50 %", "D-Cut", "| full", "75 %", "50 %", "D-Cut"),
            H20_BATCHES, _ablation,
        ),
        "experts": ReproducedTable(
            "cost against a quarter of the rows, 64 requests", "model",
            tuple(f"{ratio:.0%}" for ratio in RATIOS),
            ("dense, published", "experts, published", "qwen3-8b", "qwen3-30b-a3b"), _experts, 2,
        ),
        "dspark-budget": ReproducedTable(
            "tokens verified per request and step, anchor included: γ = 7 | published, γ = 15",
            "requests", ("prefix_async", "adaptive", "| D-Cut-B16"),
            BUDGET_LOADS, _dspark_budget, 1,
        ),
    }  # fmt: skip


NAMES = tuple(tables())


def reproduce(name: str) -> Table:
    """Make one table, with progress on stderr."""
    table = tables()[name]
    view = Table(title=table.title)
    for column in (table.key, *table.columns):
        view.add_column(column, justify="right")
    with ProgressReport(name, len(table.keys)) as progress:
        for key in table.keys:
            label = " ".join(key) if isinstance(key, tuple) else str(key)
            view.add_row(label, *(_shown(value, table.digits) for value in table.make_row(key)))
            progress.advance()
    return view


def _shown(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"
