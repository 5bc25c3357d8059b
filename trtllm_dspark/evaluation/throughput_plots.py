# SPDX-License-Identifier: Apache-2.0
"""Plots of sweeps over load: throughput against tokens/s per user, verified drafts against load.

Rows are dictionaries with load, policy, tokens_per_s, tokens_per_s_user, verified_per_request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_dspark.errors import ConfigError


def new_axes(width: float = 7.0) -> tuple[Any, Any]:
    """A figure and its axes (needs matplotlib, extra `plots`)."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install -e '.[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, 4.5))
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, axes: Any, path: str) -> None:
    """Write a PNG and close the figure."""
    from matplotlib import pyplot

    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_pareto(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Aggregate throughput against tokens/s per user, a line per policy, a point per load."""
    figure, axes = new_axes()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        axes.plot(
            [r["tokens_per_s_user"] for r in own],
            [r["tokens_per_s"] for r in own],
            "o-",
            label=policy,
        )
        for row in own:
            point = (row["tokens_per_s_user"], row["tokens_per_s"])
            axes.annotate(f"{row['load']:g}", point, (5, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("tokens/s per user (numbers: load)")
    axes.set_ylabel("tokens/s, all requests")
    save(figure, axes, path)


def plot_budget(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Verified drafts per request against load."""
    figure, axes = new_axes()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        axes.plot(
            [r["load"] for r in own], [r["verified_per_request"] for r in own], "o-", label=policy
        )
    loads = sorted({row["load"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xlabel("load (requests, or requests/s)")
    axes.set_ylabel("drafts verified per request and step")
    save(figure, axes, path)
