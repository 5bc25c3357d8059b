# SPDX-License-Identifier: Apache-2.0
"""Latency tables and calibrations in the JSON forms of other servers: SGLang's steps-per-second and
additive tables, its temperatures, and TensorRT-LLM's table and `sts_temperatures`.

Those forms know neither plain rows nor a drafted subset; what is read from them has NaN there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_dspark.config import require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.isotonic import Grid, fit_additive
from trtllm_dspark.scheduling.latency_table import LatencyTable

MINIMUM_PREDICTED_GAIN = 0.04
"""TensorRT-LLM's own default for its table."""


def table_to_sglang_additive(table: LatencyTable) -> dict[str, Any]:
    """Return SGLang's additive form: T = bias + alpha[requests] + theta[tokens], in seconds."""
    fit = fit_additive(table.step_ms)
    measured = ~np.isnan(table.step_ms)
    buckets, rungs = measured.any(axis=1), measured.any(axis=0)
    return {
        "bias_seconds": fit.bias / 1e3,
        "bs_probes": [b for b, ok in zip(table.request_buckets, buckets, strict=True) if ok],
        "alpha_seconds": (fit.alpha[buckets] / 1e3).tolist(),
        "m_probes": [t for t, ok in zip(table.rungs, rungs, strict=True) if ok],
        "theta_seconds": (fit.theta[rungs] / 1e3).tolist(),
    }


def table_to_sglang_steps(table: LatencyTable) -> dict[str, Any]:
    """Return {sample_batch_tokens, sample_steps_per_sec, max_batch_tokens}: one curve over tokens.

    Each rung stands for the smallest requests bucket that fills it with full blocks or fewer.
    """
    rows = [_representative_row(table, rung) for rung in table.rungs]
    costs = [float(table.costs[row, column]) for column, row in enumerate(rows)]
    return {
        "sample_batch_tokens": list(table.rungs),
        "sample_steps_per_sec": [1e3 / cost for cost in costs],
        "max_batch_tokens": table.rungs[-1],
    }


def table_to_tensorrt_llm(
    table: LatencyTable, minimum_predicted_gain: float = MINIMUM_PREDICTED_GAIN
) -> dict[str, Any]:
    """Return TensorRT-LLM's {token_counts, step_time_ms, fixed_overhead_ms, batch_sizes, …}."""
    additive = table_to_sglang_additive(table)
    return {
        "token_counts": additive["m_probes"],
        "step_time_ms": [1e3 * value for value in additive["theta_seconds"]],
        "fixed_overhead_ms": 1e3 * additive["bias_seconds"],
        "batch_sizes": additive["bs_probes"],
        "batch_overhead_ms": [1e3 * value for value in additive["alpha_seconds"]],
        "minimum_predicted_gain": minimum_predicted_gain,
    }


def table_from_json_form(
    data: dict[str, Any],
    *,
    request_buckets: Sequence[int],
    num_drafts: int,
    fingerprint: str,
) -> LatencyTable:
    """Read any of the four forms; `request_buckets` serves the form that knows only tokens."""
    if data.get("format") == "dspark-latency-table":
        return LatencyTable.from_json_dict(data)
    if "sample_batch_tokens" in data:
        tokens = _vector(data, "sample_batch_tokens")
        curve = 1e3 / _vector(data, "sample_steps_per_sec")
        return _table(np.tile(curve, (len(request_buckets), 1)), request_buckets, tokens,
                      num_drafts, fingerprint)  # fmt: skip
    if "theta_seconds" in data:
        grid = 1e3 * (float(data["bias_seconds"]) + np.add.outer(
            _vector(data, "alpha_seconds"), _vector(data, "theta_seconds")))  # fmt: skip
        return _table(grid, data["bs_probes"], data["m_probes"], num_drafts, fingerprint)
    if "step_time_ms" in data:
        grid = float(data.get("fixed_overhead_ms", 0.0)) + np.add.outer(
            np.asarray(data.get("batch_overhead_ms") or [0.0], float), _vector(data, "step_time_ms")
        )
        sizes = data.get("batch_sizes") or request_buckets[-1:]
        return _table(grid, sizes, data["token_counts"], num_drafts, fingerprint)
    raise ConfigError(
        f"a latency table with keys {sorted(data)} has no known form: dspark's own, SGLang's "
        f"(sample_batch_tokens or theta_seconds) or TensorRT-LLM's (step_time_ms)"
    )


def temperatures_to_sglang(
    temperatures: Sequence[float],
    *,
    dataset: str,
    num_samples: int,
    ece_before: Sequence[float],
    ece_after: Sequence[float],
) -> dict[str, Any]:
    """Return SGLang's sequential-temperature-scaling JSON."""
    return {
        "temperatures": [float(t) for t in temperatures],
        "dataset": dataset,
        "num_samples": num_samples,
        "ece_before": [float(e) for e in ece_before],
        "ece_after": [float(e) for e in ece_after],
    }


def temperatures_to_tensorrt_llm(temperatures: Sequence[float]) -> dict[str, Any]:
    """Return TensorRT-LLM's key for the temperatures, positions 1..γ in order."""
    return {"sts_temperatures": [float(t) for t in temperatures]}


def temperatures_from_json_form(data: dict[str, Any]) -> tuple[float, ...]:
    """Read `temperatures` (SGLang) or `sts_temperatures` (TensorRT-LLM); each must be > 0."""
    found = data.get("temperatures", data.get("sts_temperatures"))
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f"a calibration with keys {sorted(data)} has no list of temperatures: allowed are "
            f"'temperatures' (SGLang) and 'sts_temperatures' (TensorRT-LLM)"
        )
    positive = all(isinstance(t, (int, float)) and t > 0 for t in found)
    require(positive, "temperatures", found, "positive numbers")
    return tuple(float(t) for t in found)


def _representative_row(table: LatencyTable, rung: int) -> int:
    for row, bucket in enumerate(table.request_buckets):
        if bucket * (table.num_drafts + 1) >= rung:
            return row
    return len(table.request_buckets) - 1


def _vector(data: dict[str, Any], key: str) -> Grid:
    if key not in data:
        raise ConfigError(f"the latency table lacks the key {key!r}; it has {sorted(data)}")
    values = np.asarray(data[key], dtype=np.float64)
    require(values.ndim == 1 and len(values) > 0, key, data[key], "a list of numbers")
    return values


def _table(
    grid: Grid,
    buckets: Sequence[int],
    rungs: Sequence[float] | Grid,
    num_drafts: int,
    fingerprint: str,
) -> LatencyTable:
    unknown = np.full(len(buckets), np.nan)
    return LatencyTable(
        request_buckets=tuple(int(b) for b in buckets),
        rungs=tuple(int(t) for t in rungs),
        step_ms=grid,
        autoregressive_ms=unknown,
        no_draft_ms=unknown,
        draft_ms=unknown,
        fingerprint=fingerprint,
        num_drafts=num_drafts,
    )
