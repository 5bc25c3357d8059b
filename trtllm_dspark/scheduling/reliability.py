# SPDX-License-Identifier: Apache-2.0
"""How well probabilities foretell events: reliability bins, expected calibration error, Brier score
and ROC-AUC. Vectors in, numbers out; knows nothing of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import ConfigError

Vector = npt.NDArray[np.float64]
NUM_BINS = 15


@dataclass(frozen=True)
class ReliabilityBins:
    """Equal-width bins over [0, 1]; empty bins have count 0 and NaN means."""

    counts: npt.NDArray[np.int64]
    predicted: Vector
    """Mean probability per bin."""
    observed: Vector
    """Share of events per bin."""

    @property
    def ece(self) -> float:
        """Σ (count / n) · |observed − predicted|."""
        used = self.counts > 0
        gaps = np.abs(self.observed[used] - self.predicted[used])
        return float(np.average(gaps, weights=self.counts[used])) if used.any() else float("nan")


def reliability_bins(
    predicted: npt.ArrayLike, observed: npt.ArrayLike, num_bins: int = NUM_BINS
) -> ReliabilityBins:
    """Sort pairs into equal-width bins. `observed` may be soft (acceptance probabilities)."""
    p, y = _pairs(predicted, observed)
    index = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(index, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        mean_p = np.bincount(index, weights=p, minlength=num_bins) / counts
        mean_y = np.bincount(index, weights=y, minlength=num_bins) / counts
    return ReliabilityBins(counts, mean_p, mean_y)


def expected_calibration_error(
    predicted: npt.ArrayLike, observed: npt.ArrayLike, num_bins: int = NUM_BINS
) -> float:
    """Return the ECE over equal-width bins (NaN without samples)."""
    return reliability_bins(predicted, observed, num_bins).ece


def brier_score(predicted: npt.ArrayLike, observed: npt.ArrayLike) -> float:
    """Return the mean squared error of the probabilities (NaN without samples)."""
    p, y = _pairs(predicted, observed)
    return float(np.mean((p - y) ** 2)) if len(p) else float("nan")


def roc_auc(scores: npt.ArrayLike, events: npt.ArrayLike) -> float:
    """Return P(score of an event > score of a non-event), ties ½; NaN with one class only."""
    s, y = np.asarray(scores, np.float64), np.asarray(events, bool)
    num_events, num_others = int(y.sum()), int((~y).sum())
    if num_events == 0 or num_others == 0:
        return float("nan")
    _, inverse, counts = np.unique(s, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mean_rank[inverse.ravel()][y].sum())
    return (rank_sum - num_events * (num_events + 1) / 2.0) / (num_events * num_others)


def _pairs(predicted: npt.ArrayLike, observed: npt.ArrayLike) -> tuple[Vector, Vector]:
    p, y = np.asarray(predicted, np.float64).ravel(), np.asarray(observed, np.float64).ravel()
    if p.shape != y.shape:
        raise ConfigError(f"{p.size} probabilities and {y.size} observations: must be as many")
    if p.size and not (p.min() >= 0.0 and p.max() <= 1.0):
        raise ConfigError(f"probabilities range over {p.min()}..{p.max()}: allowed is [0, 1]")
    return p, y
