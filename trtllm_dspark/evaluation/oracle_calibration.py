# SPDX-License-Identifier: Apache-2.0
"""What perfect recalibration would make of a drafter's confidences: per position an isotonic map of
the reported logit, fitted on the true outcomes of fully verified blocks. A yardstick for learning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.acceptance_models import SimulatedBlocks
from trtllm_dspark.scheduling.isotonic import fit_isotonic
from trtllm_dspark.scheduling.survival import SurvivalEstimator, check_logits
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome

NUM_GROUPS = 200
MIN_BLOCKS = 2000


class OracleEstimator(SurvivalEstimator):
    """Survivals from isotonic maps of the logits; learns nothing while it runs."""

    def __init__(self, blocks: SimulatedBlocks) -> None:
        num_drafts = blocks.logits.shape[1]
        super().__init__(num_drafts, learns=False)
        self._maps = [
            fit_map(blocks.logits[reached, k], blocks.accepted_lens[reached] > k)
            for k in range(num_drafts)
            for reached in [blocks.accepted_lens >= k]
        ]
        rates = [(blocks.accepted_lens > k).mean() for k in range(num_drafts)]
        self._rates = np.asarray(rates, np.float32)

    def survivals(
        self, confidence_logits: FloatArray, draft_lens: IntArray, modes: Sequence[DraftMode]
    ) -> FloatArray:
        """Return recalibrated survivals [R, γ], 0 where not drafted."""
        drafted = check_logits(confidence_logits, draft_lens)
        confidences = np.stack(
            [np.interp(confidence_logits[:, k], x, y) for k, (x, y) in enumerate(self._maps)],
            axis=1,
        )
        products = np.maximum(np.cumprod(confidences.astype(np.float32), axis=1), 1e-20)
        return np.where(drafted, products, 0.0).astype(np.float32)

    def prior(self, mode: DraftMode) -> FloatArray:
        """Return the true mean survivals [γ]."""
        return self._rates

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""


def fit_map(
    logits: FloatArray, accepted: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return (logits, probabilities) of the isotonic map, over groups of equal size."""
    if len(logits) < MIN_BLOCKS:
        raise ConfigError(
            f"{len(logits)} blocks reach a position: an isotonic map needs {MIN_BLOCKS} or more"
        )
    order = np.argsort(logits, kind="stable")
    groups = np.array_split(order, min(NUM_GROUPS, len(logits) // 100))
    x = np.array([logits[g].mean(dtype=np.float64) for g in groups])
    y = np.array([accepted[g].mean() for g in groups])
    return x, fit_isotonic(y)
