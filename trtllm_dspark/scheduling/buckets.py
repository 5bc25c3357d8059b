# SPDX-License-Identifier: Apache-2.0
"""The requests buckets and the shared ladder of token rungs (design §5). Pure arithmetic on
`BucketConfig` and γ: knows no engine, no latency and no policy.

A step runs exactly one rung. Grid totals are rounded up to at most four rungs per octave;
any requests bucket may run any rung of the shared ladder; policies fill it with drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from trtllm_dspark.config import BucketConfig
from trtllm_dspark.errors import ConfigError

RUNGS_PER_OCTAVE = 4
"""Rungs between n and 2n where the grid asks for them: a rung is at most 25 % above its total."""
PREFILL_RUNGS_PER_OCTAVE = 2
"""Rungs per octave above the largest decode total, for steps that carry prefill chunks."""


def request_buckets(config: BucketConfig) -> tuple[int, ...]:
    """Return the requests buckets in use, ascending; the last is `max_num_requests` itself.

    Buckets above the limit are dropped; doubling goes on from the last one where they end early.
    """
    limit = config.max_num_requests
    buckets = [b for b in config.request_buckets if b < limit]
    while buckets and buckets[-1] * 2 < limit:
        buckets.append(buckets[-1] * 2)
    return (*buckets, limit)


def rung_for(rungs: Sequence[int], num_tokens: int) -> int:
    """Return the smallest rung that holds `num_tokens` rows (≥ 1): the one that runs.

    Example: rungs (1, 2, 4, 8): 3 → 4, 8 → 8, 9 → ConfigError.
    """
    return _ceiling(rungs, num_tokens, "num_tokens", "rung")


def grid_total(num_requests: int, ratio: float, num_drafts: int) -> int:
    """Return R + ⌈ρ·R·(D−1)⌉, the rows of one grid cell before rounding to the ladder."""
    return num_requests + math.ceil(round(ratio * num_requests * num_drafts, 9))


def round_up_rung(num_tokens: int, per_octave: int = RUNGS_PER_OCTAVE) -> int:
    """Return the smallest ladder value ≥ `num_tokens`: `per_octave` values per octave.

    Example with 4 per octave: 1..8 stay, 9 → 10, 11 → 12, 18 → 20, 25 → 28, 57 → 64.
    """
    octave = 1 << (num_tokens.bit_length() - 1)
    step = max(1, octave // per_octave)
    return -(-num_tokens // step) * step


def build_ladder(config: BucketConfig, num_drafts: int) -> tuple[int, ...]:
    """Return the token rungs, ascending; the last is `max_num_tokens`.

    Holds a rung for every grid total R + ⌈ρ·R·(D−1)⌉ and for plain decoding (R rows), then prefill
    rungs up to `max_num_tokens`. `num_drafts` = 0 (no drafter) leaves the plain and prefill rungs.
    """
    if num_drafts < 0:
        raise ConfigError(f"num_drafts = {num_drafts} is not allowed: it must be ≥ 0")
    limit = config.max_num_tokens
    totals = {r for r in request_buckets(config)}
    for num_requests in request_buckets(config):
        totals.update(grid_total(num_requests, ratio, num_drafts) for ratio in config.ratios)
    rungs = {min(round_up_rung(total), limit) for total in totals}
    value = max(rungs)
    while value < limit:
        value = min(round_up_rung(value + 1, PREFILL_RUNGS_PER_OCTAVE), limit)
        rungs.add(value)
    return tuple(sorted(rungs))


def _ceiling(values: Sequence[int], wanted: int, name: str, noun: str) -> int:
    index = bisect_left(values, wanted)
    if wanted < 1 or index == len(values):
        largest = values[-1] if values else None
        raise ConfigError(
            f"{name} = {wanted} fits no {noun}: allowed is 1 to {largest}; "
            f"raise the limits of BucketConfig and rebuild the ladder"
        )
    return values[index]
