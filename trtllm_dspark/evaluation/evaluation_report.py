# SPDX-License-Identifier: Apache-2.0
"""Tables of an evaluation for the terminal, and the rows of a comparison of drafters. Numbers that
no block can tell (NaN, or null in JSON) are shown as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def render_evaluation(report: dict[str, Any]) -> list[Table]:
    """Acceptance per domain and set, survival, static thresholds, reliability per position."""
    return [
        render_acceptance(report),
        render_survival(report),
        render_thresholds(report),
        *render_reliability(report),
    ]


def render_acceptance(report: dict[str, Any]) -> Table:
    """Acceptance length with its interval; domains, their average, then sets."""
    drafter = report["drafter"]
    view = Table(title=f"{drafter['name']} ({drafter['head']}), {report['mode']}")
    view.add_column("prompts of")
    for name in ("number", "acceptance length", "95 %", "tokens/step"):
        view.add_column(name, justify="right")

    def add(name: str, row: dict[str, Any], *, is_last: bool = False) -> None:
        view.add_row(
            name,
            str(row.get("num_prompts", "")),
            _number(row["acceptance_length"]),
            _interval(row["acceptance_length_ci95"]),
            f"{row['tokens_per_step']:.3f}" if row.get("tokens_per_step") else "",
            end_section=is_last,
        )

    for name, row in report["domains"].items():
        add(name, row)
    add("macro average", report, is_last=True)
    for name, row in report["sets"].items():
        add(name, row)
    return view


def render_survival(report: dict[str, Any]) -> Table:
    """survival@k per domain and macro."""
    view = Table(title="survival@k", box=box.SIMPLE)
    view.add_column("k")
    for k in range(1, report["drafter"]["num_drafts"] + 1):
        view.add_column(str(k), justify="right")
    for name, row in {**report["domains"], "macro": report}.items():
        view.add_row(name, *map(_number, row["survival"]))
    return view


def render_thresholds(report: dict[str, Any]) -> Table:
    """What static thresholds would verify and accept: all prompts, then the rate per domain."""
    case = "after" if "after" in report["thresholds"] else "before"
    view = Table(title=f"stop before the first c_k < t, {case} calibration", box=box.SIMPLE)
    domains = {name: rows[case] for name, rows in report["domain_thresholds"].items()}
    for name in ("t", "verified", "length", "accepted", *domains):
        view.add_column(name, justify="right")
    for index, row in enumerate(report["thresholds"][case]):
        if index % 2 == 0:  # every 0.1; the JSON has them all
            rates = [row, *(rows[index] for rows in domains.values())]
            view.add_row(
                f"{row['threshold']:.1f}",
                f"{row['verified_per_block']:.2f}",
                f"{row['acceptance_length']:.3f}",
                *(_percent(found["acceptance_rate"]) for found in rates),
            )
    return view


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _interval(bounds: Sequence[float | None], digits: int = 2) -> str:
    low, high = (_number(bound, digits) for bound in bounds)
    return low if low == high == "–" else f"{low}–{high}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def render_reliability(report: dict[str, Any]) -> list[Table]:
    """ECE, Brier score against the base rate, ROC-AUC of the joint events."""
    tables = []
    for name, positions in report["reliability"].items():
        view = Table(title=f"drafts 1..k all accepted, confidences {name} calibration")
        for column in ("k", "blocks", "rate", "ECE", "95 %", "Brier", "base rate's", "ROC-AUC"):
            view.add_column(column, justify="right")
        for row in positions["joint"]:
            view.add_row(
                str(row["position"]),
                str(row["num_samples"]),
                _number(row["rate"]),
                _number(row["ece"]),
                _interval(row["ece_ci95"], 3),
                _number(row["brier"], 4),
                _number(row["base_brier"], 4),
                _number(row["roc_auc"]),
            )
        tables.append(view)
    return tables


def sweep_rows(reports: Sequence[dict[str, Any]], sweep: str | None) -> list[dict[str, Any]]:
    """One row per drafter: what it is, how it does, and its place in the sweep."""
    field = {"depth": "num_layers", "gamma": "num_drafts", None: None}[sweep]
    rows = [
        {
            "drafter": report["drafter"],
            "mode": report["mode"],
            "acceptance_length": report["acceptance_length"],
            "acceptance_length_ci95": report["acceptance_length_ci95"],
            "survival": report["survival"],
            "conditional": report["conditional"],
            "domains": {
                name: {key: row[key] for key in ("acceptance_length", "acceptance_length_ci95")}
                for name, row in report["domains"].items()
            },
            "sweep_value": None if field is None else report["drafter"][field],
        }
        for report in reports
    ]
    return sorted(rows, key=lambda row: row["sweep_value"] or 0)


def render_sweep(rows: Sequence[dict[str, Any]]) -> Table:
    """Drafters against one another on the same prompts."""
    view = Table(title="drafters on the same prompts")
    for name in ("drafter", "head"):
        view.add_column(name)
    domains = list(rows[0]["domains"])
    for name in ("layers", "γ", "macro", "95 %", *domains):
        view.add_column(name, justify="right")
    for row in rows:
        shape = row["drafter"]
        view.add_row(
            shape["name"],
            shape["head"],
            str(shape["num_layers"]),
            str(shape["num_drafts"]),
            _number(row["acceptance_length"]),
            _interval(row["acceptance_length_ci95"]),
            *(_number(row["domains"][name]["acceptance_length"]) for name in domains),
        )
    return view
