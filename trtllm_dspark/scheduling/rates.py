# SPDX-License-Identifier: Apache-2.0
"""Memories of the policy `adaptive`: the long-run rate λ per requests bucket, what plain steps cost
beside drafted ones, and the budget that pays for probes. All are functions of finished steps and of
the latency table alone.
"""

from __future__ import annotations

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


NEAR_STEPS = 8
"""Steps between two times that may be compared."""
RECENT_STEPS = 4
"""Steps of a kind that its recent time averages, about."""
MAX_SURPRISE = 0.3
"""Natural logarithm, a factor of 1.35: what is further off was interrupted, it is not dearer."""


class CostRelation:
    """What plain steps cost in relation to drafted ones, as measured, over what the table says.

    A table is measured once, at one context length. Whether drafting pays hangs on the relation of
    two of its cells, and a few per cent of error there decide for the wrong side in every step.
    Only times close to each other are compared, where one kind of step follows the other, so that
    a machine (or a context) that changes as a whole changes nothing. Per requests bucket.
    """

    def __init__(
        self,
        num_buckets: int,
        half_life: float = 256.0,
        window: float = 32.0,
        prior_samples: float = 1.0,
    ) -> None:
        """`half_life`: steps after which a comparison is half the evidence it was; `window`:
        comparisons averaged at most; `prior_samples`: how many of them the table counts like.
        """
        self._keep = 0.5 ** (1.0 / half_life)
        self._window, self._prior_samples = window, prior_samples
        self._evidence = np.zeros(num_buckets)
        self._mean_log = np.zeros(num_buckets)
        self._last_kind = np.full(num_buckets, -1)
        self._recent = np.zeros((num_buckets, 2))
        """Logarithm of measured over table, of the last steps of a kind: plain, drafted."""
        self._age = np.full((num_buckets, 2), np.inf)
        """Steps since the last timed step of a kind."""

    def observe(self, bucket: int, drafted: bool, measured_ms: float, table_ms: float) -> None:
        """Add one finished step; a time of 0 is none: the step only makes the others older."""
        age, recent = self._age[bucket], self._recent[bucket]
        age += 1.0
        self._evidence[bucket] *= self._keep
        if not (measured_ms > 0.0 and table_ms > 0.0):
            return
        found = math.log(measured_ms / table_ms)
        kind, other = int(drafted), int(not drafted)
        if self._last_kind[bucket] == other and age[other] <= NEAR_STEPS:
            gap = float(found - recent[other])
            self._compare(bucket, -gap if drafted else gap)
        # A jump is a machine of another speed: its times are not averaged with those before.
        is_fresh = age[kind] > NEAR_STEPS or abs(found - recent[kind]) > MAX_SURPRISE
        recent[kind] = found if is_fresh else recent[kind] + (found - recent[kind]) / RECENT_STEPS
        age[kind] = 0.0
        self._last_kind[bucket] = kind

    def _compare(self, bucket: int, gap: float) -> None:
        surprise = min(max(gap - self._mean_log[bucket], -MAX_SURPRISE), MAX_SURPRISE)
        self._evidence[bucket] += 1.0
        self._mean_log[bucket] += surprise / min(self._evidence[bucket], self._window)

    def wants(self, bucket: int, drafted: bool, num_samples: float) -> bool:
        """Return whether fewer comparisons are known and a step of this kind would add one."""
        follows = self._last_kind[bucket] == int(not drafted)
        return bool(follows and self._evidence[bucket] < num_samples)

    def factor(self, bucket: int) -> float:
        """Return what a plain cell is to be multiplied by beside drafted cells; 1 = as measured."""
        known = float(self._evidence[bucket])
        return math.exp(known / (known + self._prior_samples) * float(self._mean_log[bucket]))


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

    def owe(self, price_ms: float) -> None:
        """Book a probe that is run now and paid for by the steps to come, before the next one."""
        self._credit_ms -= max(price_ms, 0.0)
