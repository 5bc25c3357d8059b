# SPDX-License-Identifier: Apache-2.0
"""Survivals of drafts from raw confidence logits: a_{r,j} = Π_{i≤j} c_{r,i}, calibrated per mode.

Knows calibrations and what verification revealed in older steps; knows nothing of latencies or of
token ids. A drafted slot never has survival 0, so that 0 means "not drafted" everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome

MIN_SURVIVAL = np.float32(1e-20)
"""Floor of the survival of a drafted slot: small enough never to matter, and not 0."""
MAX_ABS_LOGIT = 12.0
"""Calibrated logits are clipped here: no confidence is taken for a certainty."""
PRIOR_CONFIDENCE = 0.7
"""Neutral confidence of a slot of which nothing is known yet."""


def check_logits(confidence_logits: FloatArray, draft_lens: IntArray) -> npt.NDArray[np.bool_]:
    """Return the [R, γ] mask of drafted slots; refuse NaN there and draft lengths outside 0..γ."""
    num_requests, num_drafts = confidence_logits.shape
    if draft_lens.shape != (num_requests,):
        raise ConfigError(f"draft_lens has shape {draft_lens.shape}, expected ({num_requests},)")
    if num_requests and (draft_lens.min() < 0 or draft_lens.max() > num_drafts):
        raise ConfigError(f"draft_lens {draft_lens.tolist()} must lie in 0..γ = {num_drafts}")
    drafted: npt.NDArray[np.bool_] = np.arange(num_drafts) < draft_lens[:, None]
    if np.isnan(confidence_logits, where=drafted, out=np.zeros(drafted.shape, bool)).any():
        row = int(np.flatnonzero((np.isnan(confidence_logits) & drafted).any(axis=1))[0])
        raise ConfigError(
            f"confidence logits of batch row {row} hold NaN: they must be numbers; "
            f"check the drafter's confidence head and its dtype"
        )
    return drafted


def survivals_from_logits(logits: FloatArray, drafted: npt.NDArray[np.bool_]) -> FloatArray:
    """Return cumulative products of sigmoids [R, γ] float32, 0 where not drafted.

    Example, R=3, γ=2, all logits 0, draft_lens [2, 1, 0]: [[.5, .25], [.5, 0], [0, 0]].
    """
    clipped = np.clip(logits, -MAX_ABS_LOGIT, MAX_ABS_LOGIT)
    confidences = 1.0 / (1.0 + np.exp(-clipped, dtype=np.float32))
    products = np.maximum(np.cumprod(confidences, axis=1, dtype=np.float32), MIN_SURVIVAL)
    return np.where(drafted, products, np.float32(0.0))


class SurvivalEstimator:
    """Turns confidence logits into survivals and remembers what verification revealed."""

    def __init__(self, num_drafts: int) -> None:
        if num_drafts < 0:
            raise ConfigError(f"num_drafts = {num_drafts} is not allowed: it must be ≥ 0")
        self.num_drafts = num_drafts

    def survivals(
        self, confidence_logits: FloatArray, draft_lens: IntArray, modes: Sequence[DraftMode]
    ) -> FloatArray:
        """Return current survivals [R, γ] float32, non-increasing along γ, 0 where not drafted."""
        return survivals_from_logits(confidence_logits, check_logits(confidence_logits, draft_lens))

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step (later steps only)."""

    def prior(self, mode: DraftMode) -> FloatArray:
        """Return the survivals [γ] that a request without any history is given."""
        return np.cumprod(np.full(self.num_drafts, PRIOR_CONFIDENCE), dtype=np.float32)
