# SPDX-License-Identifier: Apache-2.0
"""The shared timer of all benchmarks: interleaved rounds, medians with their spread, paired ratios
with an interval, and what a reader must know of the run (command, revision, versions, machine).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("numpy", "torch", "triton", "transformers", "tritonclient", "trtllm-dspark")


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of `num_runs` timings, all in one unit."""

    median: float
    p10: float
    p90: float
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise timings (one or more)."""
        low, middle, high = np.percentile(np.asarray(values, float), [10, 50, 90])
        return cls(float(middle), float(low), float(high), len(values))


def time_interleaved_us(
    functions: Mapping[str, Callable[[], Any]],
    *,
    num_rounds: int,
    num_warmup: int = 3,
    repeats: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Return microseconds per call, `num_rounds` values per function.

    Every round calls each function, in an order that rotates, so that drift of the machine and
    the neighbours' load hit all alike. With `repeats` a round's value is the median of so many
    single calls.
    """
    names, samples = list(functions), {name: [] for name in functions}  # type: ignore[var-annotated]
    for index in range(num_warmup + num_rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            singles = []
            for _ in range((repeats or {}).get(name, 1)):
                started = time.perf_counter_ns()
                functions[name]()
                singles.append((time.perf_counter_ns() - started) / 1e3)
            if index >= num_warmup:
                samples[name].append(float(np.median(singles)))
    return samples


def paired_ratio(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0
) -> dict[str, float]:
    """Return the median ratio of paired rounds with a 95 % bootstrap interval."""
    ratios = np.asarray(numerator, float) / np.asarray(denominator, float)
    rng = np.random.default_rng(seed)
    draws = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low95": float(low), "high95": float(high)}


def describe_run() -> dict[str, Any]:
    """Return argv, git revision, versions and machine of this run, for the JSON report."""
    return {
        "argv": sys.argv,
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "cpu": _cpu_model(),
            "num_cpus": os.cpu_count(),
            "load_average": list(os.getloadavg()),
            "platform": platform.platform(),
        },
    }


def write_report(path: str | Path | None, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, dataclasses included; None writes nothing."""
    if path is not None:
        text = json.dumps(report, indent=1, default=_to_json)
        Path(path).write_text(text + "\n", encoding="utf-8")


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table, columns padded to line up."""
    cells = [[str(value) for value in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(v.ljust(w) for v, w in zip(row, widths)) + " |" for row in cells]  # noqa: B905
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _to_json(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return asdict(value)


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
