# SPDX-License-Identifier: Apache-2.0
"""What the rounds of `bench_policies.py` say: medians, paired ratios, and whether the bars are met.

Rates in, numbers and tables out; runs nothing. A round is {"num_requests", "round", "tokens_per_s":
{contender: rate}}: all contenders on the same prompts, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.timing import format_table, paired_ratio

PLAIN = "plain server"
FULL = "full verification"
ADAPTIVE = "adaptive"
MET, NOT_MET, NOT_APPLICABLE = "met", "not met", "does not apply"
BARS = {
    "best_rival": ("adaptive / best rival", 0.97),
    "plain": ("adaptive / plain server", 0.97),
    "full": ("adaptive / full verification, where that loses to the plain server", 1.25),
}
"""Key → (what is compared, least median of the paired ratio)."""


def summarize_policies(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record per number of requests, ascending."""
    sizes = sorted({row["num_requests"] for row in rounds})
    return [summarize_size(n, [r for r in rounds if r["num_requests"] == n]) for n in sizes]


def summarize_size(num_requests: int, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and ratios at one R. The rival is picked on even rounds and compared on odd ones.

    With one round there is no other half: it picks and compares, and `halves_differ` is False.
    """
    ordered = sorted(rounds, key=lambda row: row["round"])
    names = list(ordered[0]["tokens_per_s"])
    rates = {name: np.array([row["tokens_per_s"][name] for row in ordered]) for name in names}
    picked, compared = slice(0, None, 2), slice(1, None, 2)
    if len(ordered) == 1:
        compared = picked
    rivals = [name for name in names if name != ADAPTIVE]
    rival = max(rivals, key=lambda name: float(np.median(rates[name][picked])))
    against_rival = paired_ratio(rates[ADAPTIVE][compared], rates[rival][compared])
    result = {
        "num_requests": num_requests,
        "num_rounds": len(ordered),
        "halves_differ": len(ordered) > 1,
        "tokens_per_s": {name: float(np.median(values)) for name, values in rates.items()},
        "best_rival": rival,
        "num_compared_rounds": len(rates[rival][compared]),
        "adaptive_vs_best_rival": against_rival,
        "adaptive_vs_plain": paired_ratio(rates[ADAPTIVE], rates[PLAIN]),
        "adaptive_vs_full": paired_ratio(rates[ADAPTIVE], rates[FULL]),
        "full_vs_plain": paired_ratio(rates[FULL], rates[PLAIN]),
    }
    return {**result, "bars": judge_size(result)}


def judge_size(result: Mapping[str, Any]) -> dict[str, str]:
    """Each bar at one R, by the median of its paired ratio."""
    verdicts = {
        key: MET if result[f"adaptive_vs_{key}"]["median"] >= least else NOT_MET
        for key, (_, least) in BARS.items()
    }
    if result["full_vs_plain"]["median"] >= 1.0:
        verdicts["full"] = NOT_APPLICABLE
    return verdicts


def judge_policies(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each bar over all R: met where it is met at every R to which it applies."""
    judged = {}
    for key, (text, least) in BARS.items():
        verdicts = {str(row["num_requests"]): row["bars"][key] for row in results}
        applicable = [v for v in verdicts.values() if v != NOT_APPLICABLE]
        verdict = NOT_APPLICABLE if not applicable else NOT_MET if NOT_MET in applicable else MET
        judged[key] = {"compares": text, "least": least, "verdict": verdict, "by_size": verdicts}
    return judged


def render_policies(results: Sequence[Mapping[str, Any]]) -> str:
    """Three tables: tokens/s of every contender, paired ratios, bars."""
    parts = (render_rates(results), render_ratios(results), render_bars(results))
    return "\n\n".join(parts)


def render_rates(results: Sequence[Mapping[str, Any]]) -> str:
    """Median tokens/s; a row per contender, a column per R."""
    header = ("tokens/s, median", *(f"R={row['num_requests']}" for row in results))
    names = results[0]["tokens_per_s"]
    return format_table(
        header,
        [(name, *(f"{row['tokens_per_s'][name]:.1f}" for row in results)) for name in names],
    )


def render_ratios(results: Sequence[Mapping[str, Any]]) -> str:
    """Medians of paired ratios with their 95 % intervals; a row per R."""
    header = (
        "R", "full / plain", "adaptive / plain", "adaptive / full", "adaptive / best rival",
        "best rival", "rounds compared",
    )  # fmt: skip
    keys = ("full_vs_plain", "adaptive_vs_plain", "adaptive_vs_full", "adaptive_vs_best_rival")
    rows = [
        (
            row["num_requests"],
            *(_interval(row[key]) for key in keys),
            row["best_rival"],
            row["num_compared_rounds"],
        )
        for row in results
    ]
    return format_table(header, rows)


def render_bars(results: Sequence[Mapping[str, Any]]) -> str:
    """Met or not, overall and at every R."""
    header = ("bar", "at least", "overall", *(f"R={row['num_requests']}" for row in results))
    rows = [
        (bar["compares"], f"{bar['least']:.2f}", bar["verdict"], *bar["by_size"].values())
        for bar in judge_policies(results).values()
    ]
    return format_table(header, rows)


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low95']:.3f}, {ratio['high95']:.3f}]"
