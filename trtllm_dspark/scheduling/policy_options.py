# SPDX-License-Identifier: Apache-2.0
"""What a policy is built from besides its own options: the latency table and the estimator of this
system. Knows how options are checked, not what any policy does with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtllm_dspark.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_dspark.scheduling.latency_table import LatencyTable
    from trtllm_dspark.scheduling.survival import SurvivalEstimator


@dataclass(frozen=True)
class PolicyResources:
    """Objects of the running system that a policy may read."""

    table: LatencyTable | None = None
    """A table that may be trusted (`usable_table`), or None: policies then verify everything."""
    estimator: SurvivalEstimator | None = None
    """Gives the survivals of requests without history; None = a neutral prior."""


def refuse_unknown_options(policy: str, options: dict[str, Any], allowed: Sequence[str]) -> None:
    """Raise `ConfigError` naming the options that `policy` does not have."""
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        known = ", ".join(allowed) if allowed else "none"
        raise ConfigError(f"policy {policy!r} has no options {unknown}; it has: {known}")
