# SPDX-License-Identifier: Apache-2.0
"""Where the simulator gets drafted blocks from: a Beta model fitted to published acceptance, the
same with noisy over-confident confidences, or blocks recorded by `dspark evaluate --trace`.

Knows confidences and acceptance; nothing of costs, queues or policies.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.published_numbers import H20_NUM_DRAFTS, published
from trtllm_dspark.types import FloatArray, IntArray

Vector = npt.NDArray[np.float64]
EPSILON = 1e-6


@dataclass(frozen=True)
class SimulatedBlocks:
    """R drafted blocks: what the drafter says, and what full verification would find."""

    logits: FloatArray
    """[R, γ] confidence logits as the drafter reports them."""
    accepted_lens: IntArray
    """[R] drafts accepted if all were verified."""
    true_probs: Vector | None
    """[R, γ] true conditional acceptance probabilities, None where only outcomes are known."""


class AcceptanceModel(Protocol):
    """A source of blocks. `states` hold what lasts over the steps of one request."""

    @property
    def num_drafts(self) -> int:
        """γ"""
        ...

    def new_states(self, rng: np.random.Generator, count: int) -> Vector:
        """Draw the states [count] of new requests (or of new passages of old ones)."""
        ...

    def draw(self, rng: np.random.Generator, states: Vector) -> SimulatedBlocks:
        """Draft one block for each state [R]."""
        ...


@dataclass(frozen=True)
class BetaAcceptance:
    """The published fit: m ~ Beta(μκ, (1−μ)κ) per request, c ~ Beta(s·m, s·(1−m)) per position."""

    mean: float = 0.761
    """μ"""
    kappa: float = 20.0
    spread: float = 0.6
    """s: small means that the drafter knows well which of its drafts will be accepted."""
    num_drafts: int = H20_NUM_DRAFTS
    bias: float = 0.0
    """Added to the reported logits: positive = over-confident."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on the reported logits."""
    sharpness: float = 1.0
    """Factor on the true logits before bias and noise."""

    def __post_init__(self) -> None:
        require(0.0 < self.mean < 1.0, "mean", self.mean, "in (0, 1)")
        require(
            self.kappa > 0 and self.spread > 0, "kappa/spread", (self.kappa, self.spread), "> 0"
        )
        require(self.num_drafts >= 1, "num_drafts", self.num_drafts, "≥ 1")
        require(self.noise >= 0, "noise", self.noise, "≥ 0")

    def new_states(self, rng: np.random.Generator, count: int) -> Vector:
        """Draw m of `count` requests."""
        return rng.beta(self.mean * self.kappa, (1 - self.mean) * self.kappa, count)

    def draw(self, rng: np.random.Generator, states: Vector) -> SimulatedBlocks:
        """Draw confidences and outcomes; without bias and noise the confidences are true."""
        shape = (len(states), self.num_drafts)
        m = np.broadcast_to(np.clip(states, 1e-3, 1 - 1e-3)[:, None], shape)
        probs = np.clip(rng.beta(self.spread * m, self.spread * (1 - m)), EPSILON, 1 - EPSILON)
        hits = rng.random(shape) < probs
        logits = self.sharpness * np.log(probs / (1 - probs)) + self.bias
        if self.noise:
            logits = logits + rng.normal(0.0, self.noise, shape)
        accepted = np.logical_and.accumulate(hits, axis=1).sum(axis=1, dtype=np.int32)
        return SimulatedBlocks(logits.astype(np.float32), accepted, probs)

    def expected_length(self, num_verified: int | None = None) -> float:
        """Return E[committed tokens per block] with `num_verified` drafts verified (default γ)."""
        depth = self.num_drafts if num_verified is None else num_verified
        a, b = self.mean * self.kappa, (1 - self.mean) * self.kappa
        steps = np.arange(depth)
        return float(1.0 + np.cumprod((a + steps) / (a + b + steps)).sum())


def fitted_model(purpose: str = "throughput", num_drafts: int = H20_NUM_DRAFTS) -> BetaAcceptance:
    """Return the fit that belongs to the D-Cut page's throughputs or to its budget table."""
    fit = published("dcut_h20")["acceptance_fit"]
    key = f"mean_for_{purpose}"
    if key not in fit:
        raise ConfigError(f"no fit for {purpose!r}: choose throughput or budget_table")
    return BetaAcceptance(mean=fit[key], kappa=fit["kappa"], num_drafts=num_drafts)


def model_for_length(
    acceptance_length: float, num_drafts: int, kappa: float = 20.0
) -> BetaAcceptance:
    """Return the Beta model whose full verification commits `acceptance_length` tokens a block."""
    low, high = 1e-3, 1 - 1e-3
    for _ in range(60):
        middle = 0.5 * (low + high)
        found = BetaAcceptance(middle, kappa, num_drafts=num_drafts).expected_length()
        low, high = (middle, high) if found < acceptance_length else (low, middle)
    model = BetaAcceptance(0.5 * (low + high), kappa, num_drafts=num_drafts)
    if abs(model.expected_length() - acceptance_length) > 1e-3:
        raise ConfigError(
            f"acceptance length {acceptance_length} cannot be reached with γ = {num_drafts}: "
            f"it must lie between 1 and {num_drafts + 1}"
        )
    return model


@dataclass(frozen=True)
class MixedAcceptance:
    """Requests of several kinds, each kind equally likely; a state redrawn is of any kind."""

    parts: tuple[BetaAcceptance, ...]
    """They differ in `mean` and `kappa` only: those shape states, the rest shapes blocks."""

    def __post_init__(self) -> None:
        shapes = {dataclasses.replace(part, mean=0.5, kappa=1.0) for part in self.parts}
        require(len(shapes) == 1, "parts", self.parts, "alike but for mean and kappa")

    @property
    def num_drafts(self) -> int:
        """γ"""
        return self.parts[0].num_drafts

    def new_states(self, rng: np.random.Generator, count: int) -> Vector:
        """Draw a kind, then m, for each of `count` requests."""
        drawn = np.stack([part.new_states(rng, count) for part in self.parts])
        return drawn[rng.integers(0, len(self.parts), count), np.arange(count)]

    def draw(self, rng: np.random.Generator, states: Vector) -> SimulatedBlocks:
        """Draft a block of each request: a function of its m alone."""
        return self.parts[0].draw(rng, states)

    def expected_length(self) -> float:
        """Return E[committed tokens per block] with all drafts verified."""
        return float(np.mean([part.expected_length() for part in self.parts]))


class TraceAcceptance:
    """Recorded blocks: a request keeps to one prompt and gets its blocks in random order."""

    def __init__(self, logits: FloatArray, accepted_lens: IntArray, prompt_ids: IntArray) -> None:
        if not len(logits):
            raise ConfigError("the trace holds no blocks: record it with `dspark evaluate --trace`")
        order = np.argsort(prompt_ids, kind="stable")
        self.num_drafts: int = int(logits.shape[1])
        self._logits, self._accepted = logits[order], accepted_lens[order].astype(np.int32)
        _, self._starts, self._counts = np.unique(
            np.asarray(prompt_ids)[order], return_index=True, return_counts=True
        )

    @classmethod
    def load(cls, path: str) -> TraceAcceptance:
        """Read a file written by `dspark evaluate --trace` (npz)."""
        try:
            with np.load(path) as data:
                return cls(data["logits"], data["accepted_lens"], data["prompt_ids"])
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"{path} is no trace of `dspark evaluate`: {error}") from error

    def new_states(self, rng: np.random.Generator, count: int) -> Vector:
        """Choose a prompt for each request (each equally likely)."""
        return rng.integers(0, len(self._counts), count).astype(np.float64)

    def draw(self, rng: np.random.Generator, states: Vector) -> SimulatedBlocks:
        """Take a block of each request's prompt."""
        prompt = states.astype(np.int64)
        rows = self._starts[prompt] + (rng.random(len(prompt)) * self._counts[prompt]).astype(int)
        return SimulatedBlocks(self._logits[rows], self._accepted[rows], None)
