# SPDX-License-Identifier: Apache-2.0
"""Figures of an evaluation report: survival@k and conditional@k, static thresholds, reliability
diagrams, and drafters over depth or γ. Reads the JSON form, so that figures can be drawn again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_dspark.evaluation.throughput_plots import new_axes, save

RELIABILITY_POSITIONS = (1, 2, 3, 5, 7)


def plot_evaluation(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write every figure that the report has data for; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [
        plot_curves(report, "survival", directory / "survival.png"),
        plot_curves(report, "conditional", directory / "conditional.png"),
        plot_thresholds(report, directory / "thresholds.png"),
        plot_domain_thresholds(report, directory / "thresholds_domains.png"),
        *(
            plot_reliability(report, name, directory / f"reliability_{name}.png")
            for name in report["reliability"]
        ),
    ]
    if report.get("sweep"):
        files.append(plot_sweep(report, directory / f"{report['sweep']}.png"))
    return files


def plot_curves(report: dict[str, Any], name: str, path: Path) -> Path:
    """survival@k or conditional@k per domain, with 95 % intervals, and the macro average."""
    figure, axes = new_axes()
    rows = {**report["domains"], "macro average": report}
    positions = range(1, len(report[name]) + 1)
    for label, row in rows.items():
        values = _numbers(row[name])
        low, high = ([_number(pair[side]) for pair in row[f"{name}_ci95"]] for side in (0, 1))
        (line,) = axes.plot(positions, values, "o-", label=label)
        axes.fill_between(positions, low, high, alpha=0.12, color=line.get_color())
    axes.set_xlabel("position k")
    axes.set_ylabel(f"{name}@k")
    axes.set_ylim(0, 1)
    save(figure, axes, str(path))
    return path


def plot_thresholds(report: dict[str, Any], path: Path) -> Path:
    """All prompts, before and after calibration."""
    lines = {f"{name} calibration": rows for name, rows in report["thresholds"].items()}
    return _plot_threshold_lines(lines, "threshold on c_k", path)


def plot_domain_thresholds(report: dict[str, Any], path: Path) -> Path:
    """A line per domain, with calibrated confidences where there are any."""
    case = "after" if "after" in report["thresholds"] else "before"
    lines = {domain: rows[case] for domain, rows in report["domain_thresholds"].items()}
    return _plot_threshold_lines(lines, f"threshold on c_k, {case} calibration", path)


def _plot_threshold_lines(
    lines: dict[str, list[dict[str, Any]]], axis_label: str, path: Path
) -> Path:
    """Acceptance rate and drafts verified per block against the static threshold."""
    figure, axes = new_axes()
    right = axes.twinx()
    for label, rows in lines.items():
        values = [row["threshold"] for row in rows]
        rates = _numbers([row["acceptance_rate"] for row in rows])
        (line,) = axes.plot(values, rates, "o-", label=label)
        verified = [row["verified_per_block"] for row in rows]
        right.plot(values, verified, ":", color=line.get_color())
    axes.set_xlabel(axis_label)
    axes.set_ylabel("accepted / verified drafts")
    right.set_ylabel("drafts verified per block (dotted)")
    save(figure, axes, str(path))
    return path


def plot_reliability(report: dict[str, Any], name: str, path: Path) -> Path:
    """Observed against predicted survival, a line per position."""
    figure, axes = new_axes(width=5.0)
    axes.plot([0, 1], [0, 1], "k:", linewidth=1)
    for row in report["reliability"][name]["joint"]:
        if row["position"] in RELIABILITY_POSITIONS and row["num_samples"]:
            label = f"k = {row['position']}: ECE {row['ece']:.3f}"
            if row["roc_auc"] is not None:
                label += f", AUC {row['roc_auc']:.2f}"
            axes.plot(row["bins"]["predicted"], row["bins"]["observed"], "o-", label=label)
    axes.set_xlabel(f"predicted survival, {name} calibration")
    axes.set_ylabel("observed survival")
    save(figure, axes, str(path))
    return path


def plot_sweep(report: dict[str, Any], path: Path) -> Path:
    """Macro acceptance length over layers or γ, a line per kind of head; unknown ones left out."""
    figure, axes = new_axes()
    rows = [row for row in report["drafters"] if row["acceptance_length"] is not None]
    for head in dict.fromkeys(row["drafter"]["head"] for row in rows):
        own = [row for row in rows if row["drafter"]["head"] == head]
        values = [row["acceptance_length"] for row in own]
        bounds = [_numbers(row["acceptance_length_ci95"]) for row in own]
        below = [v - low for v, (low, _) in zip(values, bounds, strict=True)]
        above = [high - v for v, (_, high) in zip(values, bounds, strict=True)]
        places = [row["sweep_value"] for row in own]
        axes.errorbar(places, values, (below, above), fmt="o-", capsize=3, label=f"head {head}")
    axes.set_xticks(sorted({row["sweep_value"] for row in rows}))  # layers and drafts are whole
    axes.set_xlabel({"depth": "drafter layers", "gamma": "drafts per block γ"}[report["sweep"]])
    axes.set_ylabel("acceptance length, macro average")
    save(figure, axes, str(path))
    return path


def _numbers(values: list[float | None]) -> list[float]:
    return [_number(value) for value in values]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
