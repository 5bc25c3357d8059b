# SPDX-License-Identifier: Apache-2.0
"""The correction that keeps learning at run time: per draft position a logistic c = σ(a·z + b) of
the drafter's (temperature-scaled) confidence logit, fitted online with exponential forgetting.

What it counts, and why that is unbiased: at position k only blocks whose drafts 1..k−1 were
accepted, because c_k is a conditional probability; whether k was verified was decided from logits
of positions ≤ k, which the regression conditions on, so neither truncation nor the selection by
survival tilts it. The first dropped draft adds a soft label: its acceptance probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import require

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OnlineConfig:
    """How fast and how boldly the online estimator learns."""

    half_life: float = 2000.0
    """Observations at a position after which an observation counts half."""
    min_evidence: float = 50.0
    """Effective observations below which a position's correction is not used."""
    prior_strength: float = 8.0
    """Precision of the neutral prior (a = 1, b = 0), in units of the logistic's information."""
    scale_range: tuple[float, float] = (0.05, 5.0)
    """Bounds of a: the ranking of drafts never turns round."""
    max_offset: float = 6.0
    """Bound of |b|."""

    def __post_init__(self) -> None:
        require(self.half_life > 0, "half_life", self.half_life, "> 0")
        require(self.min_evidence >= 0, "min_evidence", self.min_evidence, "≥ 0")
        require(self.prior_strength > 0, "prior_strength", self.prior_strength, "> 0")


class OnlineCalibrator:
    """Corrections (a_k, b_k) of one mode, γ positions, and running sums for the drift report."""

    def __init__(self, num_drafts: int, config: OnlineConfig | None = None) -> None:
        self.config = config or OnlineConfig()
        self._mean = np.tile([1.0, 0.0], (num_drafts, 1))
        self._information = np.zeros((num_drafts, 2, 2))
        self._evidence = np.zeros(num_drafts)
        self._predicted = np.zeros(num_drafts)
        self._observed = np.zeros(num_drafts)
        self._squared_error = np.zeros(num_drafts)

    @property
    def evidence(self) -> Matrix:
        """[γ] effective number of observations (after forgetting)."""
        return self._evidence.copy()

    def corrections(self) -> tuple[Matrix, Matrix]:
        """Return (a, b), [γ] each; (1, 0) before there is enough evidence.

        A position with too little evidence takes the correction of the nearest shallower one that
        has enough: deep positions are reached rarely, and miscalibration is seldom theirs alone.
        """
        enough = self._evidence >= self.config.min_evidence
        source = np.maximum.accumulate(np.where(enough, np.arange(len(enough)), -1))
        used = np.where((source >= 0)[:, None], self._mean[source], [1.0, 0.0])
        return used[:, 0], used[:, 1]

    def observe(self, logits: Matrix, labels: Matrix, weights: Matrix) -> None:
        """Learn from n blocks: labels in [0, 1] [n, γ], weights 1 where position k was reached.

        One penalised Newton step per call on the summed log-likelihood: older evidence enters as
        the quadratic around the current mean, the neutral prior is never forgotten.
        """
        z = np.where(weights > 0, logits, 0.0)
        y = np.where(weights > 0, labels, 0.0)
        counts = weights.sum(axis=0)
        keep = 0.5 ** (counts / self.config.half_life)
        p = 1.0 / (1.0 + np.exp(-(self._mean[:, 0] * z + self._mean[:, 1])))
        self._count(p, y, weights, keep, counts)
        residual, curvature = weights * (y - p), weights * p * (1.0 - p)
        gradient = np.stack([(residual * z).sum(0), residual.sum(0)], axis=-1)
        cross = (curvature * z).sum(0)
        hessian = np.empty((len(keep), 2, 2))
        hessian[:, 0, 0] = (curvature * z * z).sum(0)
        hessian[:, 0, 1] = hessian[:, 1, 0] = cross
        hessian[:, 1, 1] = curvature.sum(0)
        self._step(gradient, hessian, keep)

    def _count(self, p: Matrix, y: Matrix, weights: Matrix, keep: Matrix, counts: Matrix) -> None:
        self._evidence = keep * self._evidence + counts
        self._predicted = keep * self._predicted + (weights * p).sum(0)
        self._observed = keep * self._observed + (weights * y).sum(0)
        self._squared_error = keep * self._squared_error + (weights * (p - y) ** 2).sum(0)

    def _step(self, gradient: Matrix, hessian: Matrix, keep: Matrix) -> None:
        prior = self.config.prior_strength * 0.25 * np.eye(2)
        self._information = keep[:, None, None] * self._information + hessian
        pull = (self._mean - [1.0, 0.0]) @ prior
        gradient = gradient - (1.0 - keep)[:, None] * pull
        step = np.linalg.solve(prior + self._information, gradient[..., None])[..., 0]
        self._mean = self._mean + np.clip(step, -0.5, 0.5)
        low, high = self.config.scale_range
        np.clip(self._mean[:, 0], low, high, out=self._mean[:, 0])
        bound = self.config.max_offset
        np.clip(self._mean[:, 1], -bound, bound, out=self._mean[:, 1])

    def drift_report(self) -> dict[str, Any]:
        """Return per position: evidence, mean prediction and observation, gap, Brier, (a, b).

        Predictions are those made before each observation, corrections included: a lasting gap
        means that the drafter or the traffic changes faster than `half_life`. NaN without evidence.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            predicted, observed = self._predicted / self._evidence, self._observed / self._evidence
            brier = self._squared_error / self._evidence
        return {
            "evidence": self._evidence.tolist(),
            "predicted": predicted.tolist(),
            "observed": observed.tolist(),
            "gap": (observed - predicted).tolist(),
            "brier": brier.tolist(),
            "scale": self._mean[:, 0].tolist(),
            "offset": self._mean[:, 1].tolist(),
        }
