# SPDX-License-Identifier: Apache-2.0
"""Survivals of drafts from raw confidence logits: a_{r,j} = Π_{i≤j} c_{r,i}, calibrated per mode.

Knows calibrations and what verification revealed in older steps; knows nothing of latencies or of
token ids. A drafted slot never has survival 0, so that 0 means "not drafted" everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.calibration import Calibration
from trtllm_dspark.scheduling.logit_map import MAX_ABS_LOGIT
from trtllm_dspark.scheduling.online import OnlineCalibrator, OnlineConfig
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome

MIN_SURVIVAL = np.float32(1e-20)
"""Floor of the survival of a drafted slot: small enough never to matter, and not 0."""
PRIOR_HALF_LIFE = 256.0
"""Drafted blocks after which a block counts half in the prior."""
PRIOR_BLOCKS = 16.0
"""Blocks that the initial prior is worth: it gives way quickly."""
PRIOR_CONFIDENCE = 0.8
"""Confidence of a slot of which nothing is known yet: hopeful, so that drafting gets its chance."""


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
    """Turns confidence logits into survivals and remembers what verification revealed.

    Per mode: the lines of `calibration.json`, then the online correction. Everything it
    knows comes from finished steps, so survivals stay functions of the context and of the past.
    """

    def __init__(
        self,
        num_drafts: int,
        calibration: Calibration | None = None,
        online: OnlineConfig | None = None,
        *,
        learns: bool = True,
    ) -> None:
        """`learns` = False freezes it: calibration only, and a constant prior."""
        if num_drafts < 0:
            raise ConfigError(f"num_drafts = {num_drafts} is not allowed: it must be ≥ 0")
        if calibration is not None and calibration.num_drafts != num_drafts:
            raise ConfigError(
                f"the calibration is for γ = {calibration.num_drafts}, the drafter has "
                f"γ = {num_drafts}; run `dspark calibrate` with this drafter"
            )
        self.num_drafts = num_drafts
        self.calibration = calibration or Calibration(num_drafts)
        self._logit_maps = {mode: self.calibration.logit_map(mode) for mode in DraftMode}
        self.learns = learns
        self._online = {mode: OnlineCalibrator(num_drafts, online) for mode in DraftMode}
        self._mean_survival = {mode: self._initial_prior(mode) for mode in DraftMode}
        self._blocks = dict.fromkeys(DraftMode, PRIOR_BLOCKS)
        self._scales: dict[DraftMode, tuple[FloatArray, FloatArray]] = {}
        for mode in DraftMode:
            self._refresh(mode)

    def survivals(
        self, confidence_logits: FloatArray, draft_lens: IntArray, modes: Sequence[DraftMode]
    ) -> FloatArray:
        """Return current survivals [R, γ] float32, non-increasing along γ, 0 where not drafted."""
        drafted = check_logits(confidence_logits, draft_lens)
        return survivals_from_logits(self._corrected(confidence_logits, modes), drafted)

    def scales(self, modes: Sequence[DraftMode]) -> tuple[FloatArray, FloatArray]:
        """Return scale and offset [R, γ] of the logits: what a device needs to rank drafts."""
        rows = [self._scales[mode] for mode in modes]
        return np.stack([a for a, _ in rows]), np.stack([b for _, b in rows])

    def prior(self, mode: DraftMode) -> FloatArray:
        """Return the survivals [γ] that a request without any history is given.

        The mean calibrated survival of drafted blocks: all positions of a block are seen there,
        however few of them were verified.
        """
        return self._mean_survival[mode]

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step (later steps only)."""
        if not self.learns or outcome.confidence_logits is None or not outcome.drafted:
            return
        present = set(outcome.modes)
        for mode in present:
            rows = np.ones(len(outcome.modes), bool)
            if len(present) > 1:
                rows = np.fromiter((m is mode for m in outcome.modes), bool, len(outcome.modes))
            self._observe_mode(mode, outcome, rows & (outcome.draft_lens > 0))

    def drift_report(self) -> dict[str, dict[str, Any]]:
        """Return `OnlineCalibrator.drift_report` per mode that has evidence."""
        return {
            mode.value: online.drift_report()
            for mode, online in self._online.items()
            if online.evidence.any()
        }

    def _observe_mode(
        self, mode: DraftMode, outcome: StepOutcome, rows: npt.NDArray[np.bool_]
    ) -> None:
        if not rows.any() or outcome.confidence_logits is None:
            return
        logits = outcome.confidence_logits[rows]
        drafted = check_logits(logits, outcome.draft_lens[rows])
        survivals = survivals_from_logits(self._scale(logits, mode), drafted)
        self._learn_prior(mode, survivals)
        labels, weights = conditional_labels(outcome, rows, drafted)
        scaled = self._logit_maps[mode].apply(logits)
        self._online[mode].observe(np.where(drafted, scaled, 0.0), labels, weights)
        self._refresh(mode)

    def _learn_prior(self, mode: DraftMode, survivals: FloatArray) -> None:
        count = len(survivals)
        self._blocks[mode] = 0.5 ** (count / PRIOR_HALF_LIFE) * self._blocks[mode] + count
        share = np.float32(count / self._blocks[mode])
        mean = self._mean_survival[mode]
        self._mean_survival[mode] = mean + share * (survivals.mean(axis=0) - mean)

    def _corrected(self, logits: FloatArray, modes: Sequence[DraftMode]) -> FloatArray:
        if not len(modes):
            return logits
        if all(mode is modes[0] for mode in modes):
            return self._scale(logits, modes[0])
        rows = [self._scales[mode] for mode in modes]
        scale, offset = np.stack([a for a, _ in rows]), np.stack([b for _, b in rows])
        return np.clip(logits, -MAX_ABS_LOGIT, MAX_ABS_LOGIT) * scale + offset

    def _scale(self, logits: FloatArray, mode: DraftMode) -> FloatArray:
        scale, offset = self._scales[mode]
        return np.clip(logits, -MAX_ABS_LOGIT, MAX_ABS_LOGIT) * scale + offset

    def _refresh(self, mode: DraftMode) -> None:
        a, b = self._online[mode].corrections()
        fitted = self._logit_maps[mode]
        scale, offset = a * fitted.scale, a * fitted.offset + b
        self._scales[mode] = (scale.astype(np.float32), offset.astype(np.float32))

    def _initial_prior(self, mode: DraftMode) -> FloatArray:
        fitted = self.calibration.modes.get(mode)
        if fitted is not None and len(fitted.survival_rate) == self.num_drafts:
            return np.asarray(fitted.survival_rate, np.float32)
        return np.cumprod(np.full(self.num_drafts, PRIOR_CONFIDENCE), dtype=np.float32)


def conditional_labels(
    outcome: StepOutcome, rows: npt.NDArray[np.bool_], drafted: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return labels and weights [n, γ]: accepted at k given 1..k−1 accepted, where that is known.

    Verified positions up to the first rejection count 1; the first dropped draft counts with its
    acceptance probability where all verified drafts were accepted; the rest says nothing.
    Example, γ=3: ℓ=2, A=1 → labels [1, 0, ·]; ℓ=1, A=1, dropped .4 → labels [1, .4, ·].
    """
    verify, accepted = outcome.verify_lens[rows][:, None], outcome.accepted_lens[rows][:, None]
    dropped = outcome.dropped_accept_probs[rows][:, None].astype(np.float64)
    position = np.arange(drafted.shape[1])
    weights = (position < np.minimum(verify, accepted + 1)) & drafted
    labels = (position < accepted).astype(np.float64)
    free = (position == verify) & (accepted == verify) & drafted & ~np.isnan(dropped)
    labels = np.where(free, np.clip(dropped, 0.0, 1.0), labels)
    return labels, (weights | free).astype(np.float64)
