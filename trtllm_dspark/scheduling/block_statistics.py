# SPDX-License-Identifier: Apache-2.0
"""What blocks add up to: acceptance length, survival@k, conditional@k, and how well probabilities
foretell acceptance. Knows `BlockSamples`; knows no prompts, files or modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.scheduling.calibration import BlockSamples
from trtllm_dspark.scheduling.reliability import (
    Vector,
    brier_score,
    expected_calibration_error,
    roc_auc,
)


@dataclass(frozen=True)
class BlockCounts:
    """Sums over blocks; sums of sums are sums again, so they can be grouped and resampled."""

    num_full: Vector
    """[...] blocks that were verified at all γ positions."""
    full_tokens: Vector
    """[...] tokens that those committed, the recovered or bonus token included."""
    observed: Vector
    """[..., γ] blocks observed at position k."""
    survived: Vector
    """[..., γ] of these, blocks whose first k drafts were accepted."""
    reached: Vector
    """[..., γ] observed blocks whose first k−1 drafts were accepted."""

    @property
    def acceptance_length(self) -> Vector:
        """[...] mean tokens committed per fully verified block, recovered/bonus included."""
        return divide(self.full_tokens, self.num_full)

    @property
    def survival(self) -> Vector:
        """[..., γ] survival@k"""
        return divide(self.survived, self.observed)

    @property
    def conditional(self) -> Vector:
        """[..., γ] conditional@k: accepted at k given 1..k−1 accepted."""
        return divide(self.survived, self.reached)

    def resample(self, weights: Vector) -> BlockCounts:
        """Sum over the first axis with weights [B, n]: fields become [B, ...]."""
        return BlockCounts(*(weights @ values for values in vars(self).values()))


def divide(top: Vector, bottom: Vector) -> Vector:
    """top / bottom, NaN where nothing was counted."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(bottom > 0, top / bottom, np.nan))


def count_blocks(samples: BlockSamples, groups: npt.NDArray[np.int64], num: int) -> BlockCounts:
    """Counts per group (fields [num], [num, γ]); groups [n] in 0..num−1."""
    full = samples.verify_lens >= samples.num_drafts

    def total(rows: npt.NDArray[np.bool_]) -> Vector:
        return np.bincount(groups[rows], minlength=num).astype(np.float64)

    def total_by_position(masks: list[npt.NDArray[np.bool_]]) -> Vector:
        return np.stack([total(mask) for mask in masks], axis=1)

    positions = range(1, samples.num_drafts + 1)
    observed = [samples.observed(k) for k in positions]
    weights = samples.accepted_lens[full] + 1.0
    tokens = np.bincount(groups[full], weights=weights, minlength=num).astype(np.float64)
    return BlockCounts(
        num_full=total(full),
        full_tokens=tokens,
        observed=total_by_position(observed),
        survived=total_by_position(
            [o & (samples.accepted_lens >= k) for o, k in zip(observed, positions, strict=True)]
        ),
        reached=total_by_position([samples.reached(k) for k in positions]),
    )


@dataclass(frozen=True)
class ForecastQuality:
    """How well probabilities foretell events."""

    num_samples: int
    rate: float
    """Share of events."""
    ece: float
    brier: float
    base_brier: float
    """Brier score of always saying `rate`."""
    roc_auc: float


def judge_forecast(predicted: Vector, events: npt.NDArray[np.bool_]) -> ForecastQuality:
    """Compare probabilities [n] with events [n]; NaN where there is nothing to compare."""
    rate = float(events.mean()) if len(events) else float("nan")
    return ForecastQuality(
        num_samples=len(events),
        rate=rate,
        ece=expected_calibration_error(predicted, events),
        brier=brier_score(predicted, events),
        base_brier=rate * (1.0 - rate),
        roc_auc=roc_auc(predicted, events),
    )
