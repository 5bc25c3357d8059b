# SPDX-License-Identifier: Apache-2.0
"""Calibration of confidences: fitted from full or truncated verification, stored per mode.

One temperature per draft position, left to right: a 1-D grid minimises the expected calibration
error of the cumulative product with the earlier positions frozen (DSpark §4). Beside it a line
(slope and offset) per position, which the server applies. Knows samples and files; the estimator
that keeps learning at run time is `online.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import from_json_dict, load_json, require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.logit_map import LogitMap, clip_logits, fit_lines, sigmoid
from trtllm_dspark.scheduling.reliability import (
    Vector,
    brier_score,
    expected_calibration_error,
    roc_auc,
)
from trtllm_dspark.types import DraftMode, FloatArray, IntArray

FORMAT = "dspark-calibration"
VERSION = 1
MIN_SAMPLES = 200
"""Blocks that must have been verified at a position before its temperature is fitted."""
TEMPERATURE_GRID = np.unique(np.append(np.geomspace(0.2, 8.0, 75), 1.0))


@dataclass(frozen=True)
class BlockSamples:
    """n drafted blocks of one mode, with what verification said about them.

    Example, n=3, γ=2, verify_lens [2, 2, 1], accepted_lens [2, 0, 1]: position 1 is known in all
    three blocks, position 2 in the first two (the third was not verified that far).
    """

    logits: FloatArray
    """[n, γ] raw confidence logits."""
    verify_lens: IntArray
    """[n] drafts fed to the target."""
    accepted_lens: IntArray
    """[n] drafts accepted, ≤ verify_lens."""

    def __post_init__(self) -> None:
        n = len(self.logits)
        shapes = (self.verify_lens.shape, self.accepted_lens.shape)
        require(shapes == ((n,), (n,)), "verify_lens/accepted_lens", shapes, f"of shape ({n},)")
        require(self.logits.ndim == 2, "logits.ndim", self.logits.ndim, "2 ([n, γ])")
        require(
            bool(np.all(self.accepted_lens <= self.verify_lens)),
            "accepted_lens",
            "larger than verify_lens in some block",
            "≤ verify_lens",
        )

    @property
    def num_drafts(self) -> int:
        """γ"""
        return int(self.logits.shape[1])

    def observed(self, position: int) -> npt.NDArray[np.bool_]:
        """Return [n]: blocks that say whether drafts 1..`position` are all accepted, without bias.

        A block verified less far is left out even when an earlier rejection settles the event:
        counting its failures and not its successes would bias the rate.
        """
        return self.verify_lens >= position

    def reached(self, position: int) -> npt.NDArray[np.bool_]:
        """Return [n]: observed blocks whose drafts 1..`position`−1 were accepted (conditional)."""
        return self.observed(position) & (self.accepted_lens >= position - 1)


@dataclass(frozen=True)
class ModeCalibration:
    """What was fitted for one mode and what it achieved; lists run over positions 1..γ.

    `…_after` is what the server applies: the lines where they were fitted, else the temperatures.
    """

    temperatures: tuple[float, ...]
    num_samples: int
    dataset: str = ""
    slopes: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    ece_before: tuple[float, ...] = ()
    ece_temperatures: tuple[float, ...] = ()
    """With the temperatures alone, the form that other servers read."""
    ece_after: tuple[float, ...] = ()
    brier_before: tuple[float, ...] = ()
    brier_after: tuple[float, ...] = ()
    roc_auc: tuple[float, ...] = ()
    survival_rate: tuple[float, ...] = ()
    """Share of observed blocks whose first k drafts were accepted."""
    conditional_rate: tuple[float, ...] = ()
    """Accepted at k given 1..k−1 accepted."""

    def __post_init__(self) -> None:
        positive = bool(self.temperatures) and all(t > 0 for t in self.temperatures)
        require(positive, "temperatures", self.temperatures, "positive, one per position")
        lengths = (len(self.slopes), len(self.offsets))
        allowed = (0, len(self.temperatures))
        are_lines = lengths[0] == lengths[1] and lengths[0] in allowed
        require(are_lines, "slopes/offsets: lengths", lengths, f"both one of {allowed}")
        require(all(a > 0 for a in self.slopes), "slopes", self.slopes, "positive")

    @property
    def logit_map(self) -> LogitMap:
        """What the server does to raw logits."""
        if self.slopes:
            return LogitMap(np.array(self.slopes, np.float32), np.array(self.offsets, np.float32))
        scale = (1.0 / np.array(self.temperatures)).astype(np.float32)
        return LogitMap(scale, np.zeros_like(scale))


def cumulative_survivals(logits: npt.ArrayLike, temperatures: npt.ArrayLike) -> Vector:
    """Return Π_{i≤k} σ(z_i / T_i) [n, γ] float64 (logits clipped at ±12)."""
    scaled = np.asarray(logits, np.float64) / np.asarray(temperatures, np.float64)
    return np.cumprod(sigmoid(clip_logits(scaled)), axis=1)


def fit_mode(
    samples: BlockSamples, *, dataset: str = "", min_samples: int = MIN_SAMPLES
) -> ModeCalibration:
    """Fit a temperature and a line per position; refuse positions with too few blocks."""
    counts = [int(samples.observed(k).sum()) for k in range(1, samples.num_drafts + 1)]
    if min(counts, default=0) < min_samples:
        raise ConfigError(
            f"too few samples to calibrate: blocks verified up to positions 1..γ number {counts}, "
            f"at least {min_samples} are needed at each; collect more with full verification"
        )
    if np.isnan(samples.logits).any():
        raise ConfigError("confidence logits hold NaN: check the drafter's confidence head")
    temperatures: list[float] = []
    for position in range(1, samples.num_drafts + 1):
        temperatures.append(_fit_position(samples, temperatures, position))
    return _report(samples, temperatures, _fit_lines(samples), dataset)


def _fit_lines(samples: BlockSamples) -> LogitMap:
    """A line per position from the conditional events: accepted at k given 1..k−1 accepted."""
    positions = range(1, samples.num_drafts + 1)
    reached = [samples.reached(k) for k in positions]
    return fit_lines(
        [samples.logits[rows, k - 1] for k, rows in zip(positions, reached, strict=True)],
        [samples.accepted_lens[rows] >= k for k, rows in zip(positions, reached, strict=True)],
    )


def _fit_position(samples: BlockSamples, earlier: list[float], position: int) -> float:
    """Return the grid temperature of least ECE of the product; ties go to the one nearest to 1."""
    rows = samples.observed(position)
    events = samples.accepted_lens[rows] >= position
    prefix = np.ones(int(rows.sum()))
    if earlier:
        prefix = cumulative_survivals(samples.logits[rows, : position - 1], earlier)[:, -1]
    logits = samples.logits[rows, position - 1].astype(np.float64)
    best = (np.inf, np.inf, 1.0)
    for temperature in TEMPERATURE_GRID:
        confidences = sigmoid(clip_logits(logits / temperature))
        ece = expected_calibration_error(prefix * confidences, events)
        best = min(best, (round(ece, 9), abs(np.log(temperature)), float(temperature)))
    return best[2]


def _report(
    samples: BlockSamples, temperatures: list[float], lines: LogitMap, dataset: str
) -> ModeCalibration:
    neutral = cumulative_survivals(samples.logits, np.ones(samples.num_drafts))
    scaled = cumulative_survivals(samples.logits, temperatures)
    applied = np.cumprod(lines.confidences(samples.logits), axis=1)
    columns: dict[str, list[float]] = {}
    for position in range(1, samples.num_drafts + 1):
        rows, k = samples.observed(position), position - 1
        events = samples.accepted_lens[rows] >= position
        reached = samples.accepted_lens[samples.reached(position)] >= position
        before, after = neutral[rows, k], applied[rows, k]
        for name, value in (
            ("ece_before", expected_calibration_error(before, events)),
            ("ece_temperatures", expected_calibration_error(scaled[rows, k], events)),
            ("ece_after", expected_calibration_error(after, events)),
            ("brier_before", brier_score(before, events)),
            ("brier_after", brier_score(after, events)),
            ("roc_auc", roc_auc(after, events)),
            ("survival_rate", float(events.mean())),
            ("conditional_rate", float(reached.mean()) if len(reached) else float("nan")),
        ):
            columns.setdefault(name, []).append(value)
    return ModeCalibration(
        temperatures=tuple(temperatures),
        num_samples=len(samples.logits),
        dataset=dataset,
        slopes=tuple(map(float, lines.scale)),
        offsets=tuple(map(float, lines.offset)),
        **{name: tuple(values) for name, values in columns.items()},
    )


@dataclass(frozen=True)
class Calibration:
    """`calibration.json`: one `ModeCalibration` per mode; a mode without one is neutral."""

    num_drafts: int
    modes: Mapping[DraftMode, ModeCalibration] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mode, fitted in self.modes.items():
            found = len(fitted.temperatures)
            allowed = f"γ = {self.num_drafts} values"
            require(found == self.num_drafts, f"{mode.value}.temperatures: length", found, allowed)

    def logit_map(self, mode: DraftMode) -> LogitMap:
        """Return what a mode's logits go through, neutral where it was not fitted."""
        fitted = self.modes.get(mode)
        return fitted.logit_map if fitted else LogitMap.neutral(self.num_drafts)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the documented JSON form (docs/scheduling.md); NaN is written as null."""
        modes = {mode.value: _nan_to_none(asdict(fitted)) for mode, fitted in self.modes.items()}
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_drafts": self.num_drafts,
            "modes": modes,
            "provenance": self.provenance,
        }

    @classmethod
    def from_json_dict(cls, data: dict[str, Any], where: str = "calibration") -> Calibration:
        """Read the documented JSON form; wrong formats, modes and keys are named."""
        found = (data.get("format"), data.get("version"))
        require(
            found == (FORMAT, VERSION), f"{where}: format, version", found, f"{FORMAT}, {VERSION}"
        )
        num_drafts = data.get("num_drafts")
        is_number = isinstance(num_drafts, int) and num_drafts >= 1
        require(is_number, f"{where}: num_drafts", num_drafts, "an integer ≥ 1")
        known = [mode.value for mode in DraftMode]
        modes = {}
        for name, fitted in data.get("modes", {}).items():
            require(name in known, f"{where}: mode", name, f"one of {', '.join(known)}")
            clean = {key: _none_to_nan(value) for key, value in fitted.items()}
            modes[DraftMode(name)] = from_json_dict(ModeCalibration, clean, f"{where}: {name}")
        return cls(int(data["num_drafts"]), modes, data.get("provenance", {}))

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        text = json.dumps(self.to_json_dict(), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file written by `save`."""
        return cls.from_json_dict(load_json(path), str(path))


def _nan_to_none(fields: dict[str, Any]) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        return None if isinstance(value, float) and np.isnan(value) else value

    return {k: [clean(x) for x in v] if isinstance(v, tuple) else v for k, v in fields.items()}


def _none_to_nan(value: Any) -> Any:
    return [float("nan") if x is None else x for x in value] if isinstance(value, list) else value
