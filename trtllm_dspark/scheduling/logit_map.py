# SPDX-License-Identifier: Apache-2.0
"""A straight line per draft position between raw confidence logits and calibrated ones.

A temperature alone cannot mend a head that is right about the order and wrong about the level,
such as one trained on 1 − TV whose drafts are the arg-max of a sampled target. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.types import FloatArray

MAX_ABS_LOGIT = 12.0
"""Calibrated logits are clipped here: no confidence is taken for a certainty."""
MIN_SLOPE = 0.05
"""A fitted line keeps the head's order, however little the order told."""
PRIOR_WEIGHT = 2.0
"""Strength of the pull towards slope 1 and offset 0: few events move little."""
_STEPS = 50


@dataclass(frozen=True)
class LogitMap:
    """c_k = σ(scale_k · z_k + offset_k), [γ] each."""

    scale: FloatArray
    offset: FloatArray

    @classmethod
    def neutral(cls, num_drafts: int) -> LogitMap:
        """Leaves logits as they are."""
        return cls(np.ones(num_drafts, np.float32), np.zeros(num_drafts, np.float32))

    def apply(self, logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """[n, γ] raw → calibrated logits; both are clipped at ±12, as where lines are fitted."""
        raw = clip_logits(np.asarray(logits, np.float64))
        return clip_logits(raw * self.scale + self.offset)

    def confidences(self, logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """[n, γ] raw logits → c_k."""
        return sigmoid(self.apply(logits))


def clip_logits(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Logits within ±12."""
    return np.clip(logits, -MAX_ABS_LOGIT, MAX_ABS_LOGIT)


def sigmoid(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 / (1 + e^−z)."""
    return 1.0 / (1.0 + np.exp(-logits))


def fit_lines(
    logits: Sequence[npt.NDArray[np.floating]], events: Sequence[npt.NDArray[np.bool_]]
) -> LogitMap:
    """The most likely line of each position, given its logits and whether each was accepted."""
    lines = [fit_line(z, y) for z, y in zip(logits, events, strict=True)]
    slopes, offsets = np.array(lines, np.float32).reshape(-1, 2).T
    return LogitMap(slopes, offsets)


def fit_line(
    logits: npt.NDArray[np.floating], events: npt.NDArray[np.bool_]
) -> tuple[float, float]:
    """Slope and offset of a logistic regression (Newton's method, damped by the prior)."""
    z = clip_logits(logits.astype(np.float64))
    features = np.stack([z, np.ones(len(z))], axis=1)
    neutral = np.array([1.0, 0.0])
    line = neutral.copy()
    for _ in range(_STEPS):
        predicted = sigmoid(features @ line)
        gradient = features.T @ (events - predicted) - PRIOR_WEIGHT * (line - neutral)
        weights = predicted * (1.0 - predicted)
        curvature = (features * weights[:, None]).T @ features + PRIOR_WEIGHT * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        line += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-9:
            break
    if line[0] < MIN_SLOPE:
        return MIN_SLOPE, _fit_offset(z * MIN_SLOPE, float(np.mean(events)))
    return float(line[0]), float(line[1])


def _fit_offset(logits: npt.NDArray[np.float64], rate: float) -> float:
    """The offset at which the mean confidence is `rate` (bisection); one logit or more."""
    low, high = -2 * MAX_ABS_LOGIT, 2 * MAX_ABS_LOGIT
    for _ in range(60):
        middle = (low + high) / 2
        is_low = sigmoid(logits + middle).mean() < rate
        low, high = (middle, high) if is_low else (low, middle)
    return (low + high) / 2
