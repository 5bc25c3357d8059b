# SPDX-License-Identifier: Apache-2.0
"""Two memories of the policy `adaptive`: the long-run rate λ per requests bucket, and the budget
that pays for probes. Both are functions of finished steps and of the latency table alone.
"""

from __future__ import annotations

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


class ProbeBudget:
    """Lets a plain run afford a drafted step now and then: at most `share` of its time.

    Every plain step earns `share` of its cost; a probe costs what the cheapest drafted step takes
    beyond a plain one. The counter knows costs only, never drafts, so probing is lossless.
    """

    def __init__(self, share: float) -> None:
        require(0.0 <= share <= 0.02, "probe_share", share, "between 0 and 0.02")
        self._share = share
        self._credit_ms = 0.0

    def spend(self, plain_ms: float, probe_ms: float) -> bool:
        """Book one step of a plain run; return whether this step is to be a probe."""
        price = max(probe_ms - plain_ms, 0.0)
        self._credit_ms = min(self._credit_ms + self._share * plain_ms, price + plain_ms)
        if self._share == 0.0 or self._credit_ms < price:
            return False
        self._credit_ms -= price
        return True
