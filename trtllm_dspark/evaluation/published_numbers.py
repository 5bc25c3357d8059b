# SPDX-License-Identifier: Apache-2.0
"""Published measurements that the simulator is held against: D-Cut on one H20 (Tencent AngelSlim's
page) and the DSpark paper. Small JSON files shipped with the package; each names its source.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.latency_table import LatencyTable

NAMES = ("dcut_h20", "dspark_paper")
H20_BATCHES = (4, 8, 16, 32, 64)
"""Batch sizes of the D-Cut page."""
H20_NUM_DRAFTS = 15
"""γ of its drafter (blocks of 16 positions)."""
VERSIONS = ("new", "old")
"""Two published states of the D-Cut page: they differ in drafter and plain throughput."""


@cache
def published(name: str) -> dict[str, Any]:
    """Return one published file by name."""
    if name not in NAMES:
        raise ConfigError(f"no published numbers {name!r}: choose one of {', '.join(NAMES)}")
    path = resources.files("trtllm_dspark.evaluation") / "published" / f"{name}.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def h20_table(version: str = "new", num_drafts: int = H20_NUM_DRAFTS) -> LatencyTable:
    """Return the D-Cut page's costs as a latency table (its additive fit; 20 cells ≤ 0.065 ms off).

    The published cost includes drafting and the plain step is one of a server without a drafter;
    keeping a drafter's context up to date is not published and counted as nothing. `num_drafts`
    below 15 uses the same costs per token for a shorter block.
    """
    if version not in VERSIONS:
        raise ConfigError(f"version {version!r} of the H20 numbers: choose new or old")
    data = published("dcut_h20")
    fit = data["verify_cost_fit"]
    alpha = np.array([fit["alpha_ms"][str(b)] for b in H20_BATCHES])
    rungs = tuple(int(t) for t in fit["theta_ms"])
    step_ms = alpha[:, None] + np.array(list(fit["theta_ms"].values()))[None, :]
    step_ms[np.array(rungs)[None, :] < np.array(H20_BATCHES)[:, None]] = np.nan
    plain = np.array([data["autoregressive_step_ms"][version][str(b)] for b in H20_BATCHES])
    return LatencyTable(
        request_buckets=H20_BATCHES,
        rungs=rungs,
        step_ms=step_ms,
        autoregressive_ms=plain,
        no_draft_ms=plain,
        draft_ms=np.full(len(H20_BATCHES), np.nan),
        fingerprint="published-h20-qwen3-8b",
        num_drafts=num_drafts,
        machine={"device": "one H20, Qwen3-8B, published"},
    )


def h20_throughput(system: str, version: str = "new") -> dict[int, float]:
    """Return {batch size: published tokens per second} of one system, e.g. 'dflash_b16'."""
    rows = published("dcut_h20")["tokens_per_second"][version]
    if system not in rows:
        raise ConfigError(f"no published throughput of {system!r}: {', '.join(rows)}")
    return dict(zip(H20_BATCHES, rows[system], strict=True))
