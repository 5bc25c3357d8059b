# SPDX-License-Identifier: Apache-2.0
"""The report: one JSON with everything, and the same as tables on the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_report(out_dir: Path, report: dict[str, Any]) -> Path:
    """Write gpu_check.json and gpu_check.txt; returns the JSON's path."""
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "gpu_check.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    (out_dir / "gpu_check.txt").write_text(format_report(report))
    return path


def format_table(rows: Iterable[Row], columns: tuple[str, ...]) -> str:
    """Aligned text; missing values are blank."""
    lines = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("checks", ("name", "error", "tolerance", "ok")),
    (
        "kernels",
        (
            "op",
            "num_requests",
            "context_len",
            "query_len",
            "num_drafts",
            "num_splits",
            "median_ms",
            "floor_ms",
            "share_of_bandwidth",
        ),
    ),
    ("block_sizes", ("num_drafts", "has_head", "mean_ms")),
    (
        "latency_table",
        ("kind", "num_requests", "ratio", "rung", "median_ms", "weights_floor_ms"),
    ),
    ("loop", ("num_compared", "num_wrong", "num_rounds", "num_committed")),
    ("engine", ("model", "num_compared", "num_wrong", "num_rounds", "skipped")),
    (
        "overlap",
        ("num_requests", "context_len", "step_ms", "device_ms", "scheduler_ms", "share_hidden"),
    ),
    ("bars", ("bar", "value", "wanted", "ok")),
)


def format_report(report: dict[str, Any]) -> str:
    """Every section that has rows."""
    parts = [json.dumps(report["machine"], indent=1)]
    if report["is_interpreted"]:
        parts.append("interpreted on the CPU: times below say nothing about a GPU")
    for name, columns in SECTIONS:
        if report.get(name):
            parts.append(f"{name}\n{format_table(report[name], columns)}")
    return "\n\n".join(parts) + "\n"


def judge_bars(report: dict[str, Any]) -> list[Row]:
    """The bars of docs/gpu.md that this report can decide; empty when interpreted."""
    if report["is_interpreted"]:
        return []
    bars = []
    bound = [
        row["share_of_bandwidth"]
        for row in report["kernels"]
        if row["op"] == "ragged_verify_attention" and row["bytes"] >= 256e6
    ]
    if bound:
        bars.append(_bar("attention, least share of copy bandwidth (≥ 256 MB)", min(bound), 0.75))
    table = {
        (row["num_requests"], row["ratio"]): row["median_ms"] for row in report["latency_table"]
    }
    head = [
        row["median_ms"]
        for row in report["kernels"]
        if row["op"] == "markov block" and row["num_requests"] == 64 and row["num_drafts"] == 7
    ]
    if head and (64, 1.0) in table:
        share = head[0] / table[64, 1.0]
        bars.append(_bar("Markov head, share of the round at R = 64", share, 0.013, is_upper=True))
        ratio = table[64, 1.0] / table[64, 0.25]
        bars.append({"bar": "full / 25 % round at R = 64 (2.42 on H20)", "value": ratio})
    hidden = [row["share_hidden"] for row in report.get("overlap", []) if row["num_requests"] == 64]
    if hidden:
        bars.append(_bar("scheduler hidden behind the device at R = 64", hidden[0], 1.0))
    return bars


def _bar(name: str, value: float, wanted: float, is_upper: bool = False) -> Row:
    ok = value <= wanted if is_upper else value >= wanted
    return {"bar": name, "value": value, "wanted": wanted, "ok": ok}
