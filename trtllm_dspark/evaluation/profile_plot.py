# SPDX-License-Identifier: Apache-2.0
"""Plot of a latency table: milliseconds of a step over the tokens it runs, a line per bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.latency_table import LatencyTable


def plot_latency_table(table: LatencyTable, path: str | Path) -> None:
    """Write a PNG (needs matplotlib, extra `plots`)."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install -e '.[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for row, bucket in enumerate(table.request_buckets):
        measured = ~np.isnan(table.step_ms[row])
        rungs = np.asarray(table.rungs)[measured]
        (line,) = axes.plot(rungs, table.step_ms[row][measured], "o-", label=f"{bucket} requests")
        plain = table.no_draft_ms[row]
        axes.plot([bucket], [plain], "x", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens verified in the step (rung)")
    axes.set_ylabel("whole step [ms]; x = step without drafts")
    axes.set_title(f"C(requests, tokens), {table.machine.get('device', '')}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
