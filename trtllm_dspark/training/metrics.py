# SPDX-License-Identifier: Apache-2.0
"""Expected calibration error and area under the ROC curve of probabilities; numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def expected_calibration_error(
    probabilities: npt.ArrayLike, outcomes: npt.ArrayLike, num_bins: int = 10
) -> float:
    """Σ_bins (n_b/n)·|mean outcome − mean probability|, equal-width bins; NaN without samples."""
    p = np.asarray(probabilities, dtype=np.float64)
    y = np.asarray(outcomes, dtype=np.float64)
    if not len(p):
        return float("nan")
    bins = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.bincount(bins, weights=y - p, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(p))


def area_under_roc(scores: npt.ArrayLike, outcomes: npt.ArrayLike) -> float:
    """Probability that a positive scores above a negative (ties half); NaN with one class."""
    s = np.asarray(scores, dtype=np.float64)
    y = np.asarray(outcomes, dtype=bool)
    num_positive, num_negative = int(y.sum()), int((~y).sum())
    if not num_positive or not num_negative:
        return float("nan")
    _, inverse, counts = np.unique(s, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = mean_ranks[inverse][y].sum()
    return float(
        (rank_sum - num_positive * (num_positive + 1) / 2.0) / (num_positive * num_negative)
    )
