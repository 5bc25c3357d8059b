# SPDX-License-Identifier: Apache-2.0
"""How well confidences foretell acceptance, per position, before and after calibration: ECE, Brier
score against the base rate, ROC-AUC, reliability bins, and bootstrap intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.evaluation.block_collection import CollectedBlocks
from trtllm_dspark.scheduling.block_statistics import judge_forecast
from trtllm_dspark.scheduling.logit_map import LogitMap
from trtllm_dspark.scheduling.reliability import Vector, reliability_bins

NUM_RESAMPLES = 200
INTERVAL = (2.5, 97.5)
SCORES = ("ece", "brier", "roc_auc")

Pairs = tuple[Vector, npt.NDArray[np.bool_], npt.NDArray[np.int64]]


def judge_positions(
    blocks: CollectedBlocks, mapping: LogitMap, rng: np.random.Generator
) -> dict[str, list[dict[str, Any]]]:
    """`joint`: Π c_1..c_k against "drafts 1..k accepted"; `own`: c_k where 1..k−1 were accepted."""
    samples = blocks.samples
    own = mapping.confidences(samples.logits)
    joint = np.cumprod(own, axis=1)
    report: dict[str, list[dict[str, Any]]] = {"joint": [], "own": []}
    for k in range(1, samples.num_drafts + 1):
        for name, predicted, rows in (
            ("joint", joint, samples.observed(k)),
            ("own", own, samples.reached(k)),
        ):
            events = samples.accepted_lens[rows] >= k
            pairs = (predicted[rows, k - 1], events, blocks.prompt_ids[rows])
            report[name].append({"position": k, **judge_pairs(pairs, rng)})
    return report


def judge_pairs(pairs: Pairs, rng: np.random.Generator) -> dict[str, Any]:
    """Scores with intervals, and the bins of a reliability diagram."""
    predicted, events, _ = pairs
    bins = reliability_bins(predicted, events)
    used = bins.counts > 0
    return {
        **asdict(judge_forecast(predicted, events)),
        **_intervals(pairs, rng),
        "bins": {
            "counts": bins.counts[used].tolist(),
            "predicted": bins.predicted[used].tolist(),
            "observed": bins.observed[used].tolist(),
        },
    }


def _intervals(pairs: Pairs, rng: np.random.Generator) -> dict[str, list[float]]:
    """95 % intervals when prompts are drawn again."""
    predicted, events, prompts = pairs
    order = np.argsort(prompts, kind="stable")
    _, starts, counts = np.unique(prompts[order], return_index=True, return_counts=True)
    found: dict[str, list[float]] = {name: [] for name in SCORES}
    for _ in range(NUM_RESAMPLES if len(starts) else 0):
        drawn = rng.integers(0, len(starts), len(starts))
        ends = np.repeat(np.cumsum(counts[drawn]) - counts[drawn], counts[drawn])
        places = (
            np.arange(int(counts[drawn].sum())) - ends + np.repeat(starts[drawn], counts[drawn])
        )
        rows = order[places]
        quality = judge_forecast(predicted[rows], events[rows])
        for name in SCORES:
            found[name].append(getattr(quality, name))
    return {f"{name}_ci95": _percentiles(values) for name, values in found.items()}


def _percentiles(values: Sequence[float]) -> list[float]:
    known = np.asarray(values)[~np.isnan(values)] if values else np.zeros(0)
    if not len(known):
        return [float("nan"), float("nan")]
    low, high = np.percentile(known, INTERVAL)
    return [float(low), float(high)]
