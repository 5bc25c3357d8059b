# SPDX-License-Identifier: Apache-2.0
"""The policy seam and its registry. Policies are pure functions of survivals and a latency table;
an object holds only what older steps taught it. Nothing here knows torch, engines or requests.

One step asks twice: `decide` before drafting (older knowledge only) and `plan` after it (current
survivals, as far as the policy declares to see them). `observe` closes the step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.policy_options import PolicyResources
from trtllm_dspark.types import DraftMode, FloatArray, IntArray, StepOutcome


class Sees(str, enum.Enum):
    """What a policy's verify lengths may depend on (the losslessness argument rests on it)."""

    NOTHING = "nothing"
    OLD_SURVIVALS = "old_survivals"
    """Survivals at least two steps old decide capacity."""
    CURRENT_RANKING = "current_ranking"
    """{ℓ_r ≥ k} depends on current survivals of slots ≤ k only through ranking (fixed capacity)."""
    CURRENT_EARLY_STOP = "current_early_stop"
    """Current survivals in descending order, with a stop that never looks past the candidate."""
    CURRENT_ALL = "current_all"
    """A global search over current survivals: lossless only with greedy drafts."""
    OWN_PROBABILITY = "own_probability"
    """A score that contains the candidate's own probability: lossless only with greedy drafts."""


@dataclass(frozen=True)
class BatchView:
    """What is known of the R decoding requests before anything is drafted in this step."""

    request_keys: tuple[int, ...]
    """Stable over steps, unique among live requests."""
    modes: tuple[DraftMode, ...]
    draft_caps: IntArray
    """[R] drafts that may be verified: min of γ, num_draft_tokens, tokens wanted − 1, room, pages.
    """
    num_drafts: int
    """γ"""
    num_prefill_tokens: int
    """Prefill rows that ride in the same step."""
    rungs: tuple[int, ...]
    """The ladder."""
    max_num_tokens: int


@dataclass(frozen=True)
class DraftDecision:
    """Outcome of `decide`."""

    draft_mask: npt.NDArray[np.bool_]
    """[R] requests worth drafting for; all False = a plain step."""
    capacity: int | None = None
    """Drafts to verify over all requests when already decided; None = `plan` decides."""
    is_probe: bool = False


class Policy(Protocol):
    """See the module docstring. Implementations live in `scheduling/policies/`."""

    name: str
    sees: frozenset[Sees]
    covers: frozenset[DraftMode]
    """Modes under which the policy is lossless; other sampling requests are drafted greedily."""

    def decide(self, view: BatchView) -> DraftDecision:
        """Choose the requests to draft for, from older knowledge only."""
        ...

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return verify_lens [R] ≤ draft_caps from current survivals [R, γ] (0 = not drafted)."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step."""
        ...


PolicyFactory = Callable[[dict[str, Any], PolicyResources], Policy]
_FACTORIES: dict[str, PolicyFactory] = {}
_EVALUATION_ONLY: set[str] = set()


def register_policy(
    name: str, *, evaluation_only: bool = False
) -> Callable[[PolicyFactory], PolicyFactory]:
    """Register a factory that takes the policy's options and the system's resources.

    `evaluation_only` marks baselines that look ahead by design and must not be served.
    """

    def add(factory: PolicyFactory) -> PolicyFactory:
        _FACTORIES[name] = factory
        if evaluation_only:
            _EVALUATION_ONLY.add(name)
        return factory

    return add


def policy_names(*, servable: bool = False) -> tuple[str, ...]:
    """Every registered name, sorted; `servable` leaves evaluation-only baselines out."""
    return tuple(sorted(n for n in _FACTORIES if not (servable and n in _EVALUATION_ONLY)))


def create_policy(
    name: str, options: dict[str, Any] | None = None, resources: PolicyResources | None = None
) -> Policy:
    """Build a policy by name; an unknown name lists the choices.

    `resources` carries the latency table and the estimator; without a table policies trim nothing.
    """
    if name not in _FACTORIES:
        raise ConfigError(f"policy {name!r} is unknown: choose one of {', '.join(policy_names())}")
    return _FACTORIES[name](dict(options or {}), resources or PolicyResources())
