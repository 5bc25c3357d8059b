# SPDX-License-Identifier: Apache-2.0
"""Memories of the policy `adaptive`: the long-run rate λ per requests bucket, what plain steps cost
beside drafted ones, and the budget that pays for probes. All are functions of finished steps and of
the latency table alone.
"""

from __future__ import annotations

import enum
import math

import numpy as np

from trtllm_dspark.config import require


class RunningRate:
    """λ in tokens per table millisecond, per requests bucket: a ratio of sums with forgetting.

    A sum of ratios would overrate steps that are cheap and poor. Costs are the table's, not the
    clock's, so that λ · C compares like with like when the whole machine drifts.
    """

    def __init__(self, num_buckets: int, half_life: float, prior_steps: float) -> None:
        require(half_life > 0, "rate_half_life", half_life, "> 0 steps")
        require(prior_steps > 0, "rate_prior_steps", prior_steps, "> 0 steps")
        self._keep = 0.5 ** (1.0 / half_life)
        self._prior_steps = prior_steps
        self._tokens = np.zeros(num_buckets)
        self._costs = np.zeros(num_buckets)

    def observe(self, bucket: int, num_tokens: float, cost_ms: float) -> None:
        """Add one finished step of this requests bucket."""
        self._tokens[bucket] = self._keep * self._tokens[bucket] + num_tokens
        self._costs[bucket] = self._keep * self._costs[bucket] + cost_ms

    def rate(self, bucket: int, forecast: float, cost_ms: float) -> float:
        """Return λ; `forecast` counts like `prior_steps` steps of `cost_ms` each."""
        weight = self._prior_steps * cost_ms
        return float((self._tokens[bucket] + weight * forecast) / (self._costs[bucket] + weight))


MAX_SURPRISE = 0.3
"""Natural logarithm: a step three times as long as usual was interrupted, it is not dearer."""


class Timed(enum.IntEnum):
    """Kinds of steps whose measured times are compared."""

    PLAIN = 0
    DRAFTED = 1


class CostRelation:
    """What plain steps cost in relation to drafted ones, as measured, over what the table says.

    A table is measured once, at one context length. Whether drafting pays hangs on the relation of
    two of its cells, and a few per cent of error there decide for the wrong side in every step.
    Only the relation is learnt, per requests bucket: a machine that slows down as a whole changes
    nothing. Steps without a time (0) teach nothing.
    """

    def __init__(
        self,
        num_buckets: int,
        half_life: float = 256.0,
        window: float = 32.0,
        prior_steps: float = 4.0,
    ) -> None:
        """`half_life`: steps of any kind after which a timed step is half the evidence it was;
        `window`: steps of one kind averaged at most; `prior_steps`: what the table counts.
        """
        self._keep = 0.5 ** (1.0 / half_life)
        self._window, self._prior_steps = window, prior_steps
        self._evidence = np.zeros((num_buckets, len(Timed)))
        self._mean_log = np.zeros((num_buckets, len(Timed)))

    def observe(self, bucket: int, kind: Timed, measured_ms: float, table_ms: float) -> None:
        """Add one finished step; one that took far longer than its like counts as somewhat so."""
        if not (measured_ms > 0.0 and table_ms > 0.0):
            return
        evidence, mean = self._evidence[bucket], self._mean_log[bucket]
        surprise = math.log(measured_ms / table_ms) - mean[kind]
        if evidence[kind] >= self._prior_steps:
            surprise = min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
        evidence *= self._keep
        evidence[kind] += 1.0
        mean[kind] += surprise / min(evidence[kind], self._window)

    def lacks(self, bucket: int, kind: Timed, num_steps: float) -> bool:
        """Return whether fewer than `num_steps` of this kind are known, though steps are timed."""
        known = self._evidence[bucket]
        return bool(known.any() and known[kind] < num_steps)

    def factor(self, bucket: int) -> float:
        """Return what a plain cell is to be multiplied by beside drafted cells; 1 = as measured."""
        known = float(self._evidence[bucket].min())
        if known == 0.0:
            return 1.0
        plain, drafted = self._mean_log[bucket].tolist()
        return math.exp(known / (known + self._prior_steps) * (plain - drafted))


class ProbeBudget:
    """Lets a run of one kind of step afford the other kind now and then: `share` of its time.

    Every step earns `share` of its cost; a probe costs what the other step gives away. The counter
    knows costs only, never drafts, so probing is lossless.
    """

    def __init__(self, share: float) -> None:
        require(0.0 <= share <= 0.02, "probe_share", share, "between 0 and 0.02")
        self._share = share
        self._credit_ms = 0.0

    def spend(self, step_ms: float, price_ms: float) -> bool:
        """Book one step of `step_ms`; return whether this one is to be a probe for `price_ms`."""
        price = max(price_ms, 0.0)
        self._credit_ms = min(self._credit_ms + self._share * step_ms, price + step_ms)
        if self._share == 0.0 or self._credit_ms < price:
            return False
        self._credit_ms -= price
        return True
