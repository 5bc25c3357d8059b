# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark: a contender at a load, with its ratio to plain decoding, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
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


def render_bench(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Speed and latency, then what the steps did; a line per load and contender."""
    return [render_speed(rows), render_steps(rows)]


def render_speed(rows: Sequence[dict[str, Any]]) -> Table:
    """Throughput with its paired ratio to plain decoding; p50/p95/p99 of latencies."""
    title = "steady state, medians over rounds; ratios paired, 95 %; TTFT and TPOT p50/p95/p99, ms"
    names = ("load", "policy", "tok/s", "× plain", "tok/s/user", "TTFT", "TPOT")
    view = _table(title, names)
    for row in rows:
        ratio = row["vs_plain"]
        view.add_row(
            f"{row['load']:g}",
            row["policy"],
            f"{row['tokens_per_s']:.1f}",
            f"{ratio['median']:.2f} ({ratio['low95']:.2f}–{ratio['high95']:.2f})",
            f"{row['tokens_per_s_user']:.1f}",
            _percentiles(row["first_token_ms"], 0),
            _percentiles(row["ms_per_token"], 1),
        )
    return view


def render_steps(rows: Sequence[dict[str, Any]]) -> Table:
    """Acceptance, how much was verified, milliseconds of a step and of its scheduling."""
    names = (
        "load", "policy", "length", "keep", "verified", "drafted", "step ms", "plan ms", "rungs"
    )  # fmt: skip
    view = _table("what the steps did", names)
    for row in rows:
        common = sorted(row["rungs"].items(), key=lambda item: -item[1])[:3]
        view.add_row(
            f"{row['load']:g}",
            row["policy"],
            f"{row['acceptance_length']:.2f}",
            f"{row['keep_ratio']:.2f}",
            f"{row['verified_per_request']:.2f}",
            f"{row['drafted_share']:.0%}",
            f"{row['step_ms']:.1f}",
            f"{row['scheduler_ms']:.2f}",
            " ".join(f"{rung}:{count}" for rung, count in common),
        )
    return view


def _table(title: str, names: Sequence[str]) -> Table:
    view = Table(title=title, box=box.SIMPLE, padding=0)
    for name in names:
        view.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    return view


def _percentiles(values: dict[str, float], digits: int) -> str:
    return "/".join(f"{values.get(p, float('nan')):.{digits}f}" for p in ("p50", "p95", "p99"))
