# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark: a contender at a load, with its ratio to plain decoding, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from trtllm_dspark.evaluation.bench_measure import paired_ratio, summarize_rounds


def summarize_bench(rounds: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per load and contender; the first name is what ratios are against."""
    rows = []
    for load in sorted({entry["load"] for entry in rounds}):
        own = [entry["contenders"] for entry in rounds if entry["load"] == load]
        plain = [entry[names[0]]["tokens_per_s"] for entry in own]
        for name in names:
            found = [entry[name] for entry in own]
            ratio = paired_ratio([row["tokens_per_s"] for row in found], plain)
            rows.append(
                {"load": load, "policy": name, "vs_plain": ratio, **summarize_rounds(found)}
            )
    return rows


def render_bench(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per load and contender."""
    view = Table(title="medians over rounds, steady state; ratios paired, 95 % interval")
    names = (
        "load", "policy", "tok/s", "× plain", "tok/s/user", "TTFT p50", "TPOT p50", "p95", "p99",
        "length", "keep", "verified", "step ms", "plan ms",
    )  # fmt: skip
    for name in names:
        view.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        ratio, tpot = row["vs_plain"], row["ms_per_token"]
        view.add_row(
            f"{row['load']:g}",
            row["policy"],
            f"{row['tokens_per_s']:.1f}",
            f"{ratio['median']:.2f} [{ratio['low95']:.2f}, {ratio['high95']:.2f}]",
            f"{row['tokens_per_s_user']:.1f}",
            f"{row['first_token_ms'].get('p50', float('nan')):.0f}",
            *(f"{tpot.get(p, float('nan')):.1f}" for p in ("p50", "p95", "p99")),
            f"{row['acceptance_length']:.2f}",
            f"{row['keep_ratio']:.2f}",
            f"{row['verified_per_request']:.2f}",
            f"{row['step_ms']:.1f}",
            f"{row['scheduler_ms']:.2f}",
        )
    return view
