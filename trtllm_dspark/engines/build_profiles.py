# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles of the two engines, one per rung or requests bucket.

Pure arithmetic on the ladder; knows neither TensorRT nor models. The same numbers size the buffers
of the engine at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dspark.config import require

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """Allowed shapes of one input in one profile."""

    min: Shape
    opt: Shape
    max: Shape


@dataclass(frozen=True)
class Profile:
    """One optimization profile: input name → range (inputs without dynamic axes are left out)."""

    name: str
    inputs: dict[str, Range]


@dataclass(frozen=True)
class EngineLimits:
    """The limits that fix every shape of an engine directory; written to its config.json."""

    rungs: tuple[int, ...]
    """Ascending; one target profile each."""
    request_buckets: tuple[int, ...]
    """Ascending, the last is max_batch_size; one drafting profile each."""
    num_drafts: int
    """γ of the drafter, 0 without one."""
    block_len: int
    """Rows of one drafter block; 0 without a drafter."""
    max_seq_len: int
    page_size: int
    num_pages: int
    """K/V pages, the scratch page included."""

    def __post_init__(self) -> None:
        require(bool(self.rungs) and self.rungs[0] >= 1, "rungs", self.rungs, "one or more, ≥ 1")
        require(
            list(self.rungs) == sorted(set(self.rungs)),
            "rungs",
            self.rungs,
            "ascending, no repeats",
        )
        buckets = self.request_buckets
        require(
            bool(buckets) and list(buckets) == sorted(set(buckets)) and buckets[0] >= 1,
            "request_buckets",
            buckets,
            "ascending, without repetition, ≥ 1",
        )
        require(self.num_pages >= 2, "num_pages", self.num_pages, "≥ 2 (one is scratch)")

    @property
    def max_num_requests(self) -> int:
        """Requests of one step at most (max_batch_size)."""
        return self.request_buckets[-1]

    @property
    def max_num_tokens(self) -> int:
        """Rows of one step at most."""
        return self.rungs[-1]

    @property
    def max_table_width(self) -> int:
        """Pages of the longest sequence, its drafts included."""
        return math.ceil((self.max_seq_len + self.block_len + 1) / self.page_size)

    def requests_on(self, rung: int) -> int:
        """Request rows of a target call on this rung (every request has a row or more)."""
        return min(rung, self.max_num_requests)

    def logit_rows_on(self, rung: int) -> int:
        """Rows whose logits a target call on this rung computes."""
        return min(rung, self.max_num_requests * (self.num_drafts + 1))

    def short_query_len(self, rung: int) -> int:
        """Longest query of a step without prefill chunks on this rung."""
        return min(rung, self.num_drafts + 1)


def target_profiles(limits: EngineLimits) -> list[Profile]:
    """One profile per rung; only the longest query and the table's width vary inside one.

    Example, rung 24 of 4 requests with γ = 7: 24 rows, 4 requests, queries of 1..24 rows.
    """
    return [_target_profile(limits, rung) for rung in limits.rungs]


def _target_profile(limits: EngineLimits, rung: int) -> Profile:
    requests, width = limits.requests_on(rung), limits.max_table_width
    return Profile(
        f"rung {rung}",
        {
            "token_ids": _fixed(rung),
            "positions": _fixed(rung),
            "slots": _fixed(rung),
            "cu_query_lens": _fixed(requests + 1),
            "context_lens": _fixed(requests),
            "page_table": Range((requests, 1), (requests, width), (requests, width)),
            "query_offsets": Range((1,), (limits.short_query_len(rung),), (rung,)),
            "logit_rows": _fixed(limits.logit_rows_on(rung)),
        },
    )


def drafter_profiles(limits: EngineLimits, tap_width: int) -> list[Profile]:
    """Drafting profiles, one per requests bucket, and last the one of context appends.

    A drafting call also takes the context rows of its requests' last step; an append runs with one
    block that points at the scratch page.
    """
    width = limits.max_table_width
    profiles = []
    for requests in limits.request_buckets:
        rows = requests * (limits.num_drafts + 1)
        profiles.append(
            Profile(
                f"{requests} requests",
                {
                    "taps": Range((1, tap_width), (rows, tap_width), (rows, tap_width)),
                    "row_positions": Range((1,), (rows,), (rows,)),
                    "row_slots": Range((1,), (rows,), (rows,)),
                    "anchor_ids": _fixed(requests),
                    "anchor_positions": _fixed(requests),
                    "page_table": Range((requests, 1), (requests, width), (requests, width)),
                },
            )
        )
    return [*profiles, _append_profile(limits.max_num_tokens, tap_width, width)]


def _append_profile(most: int, tap_width: int, width: int) -> Profile:
    return Profile(
        f"append {most}",
        {
            "taps": Range((1, tap_width), (most, tap_width), (most, tap_width)),
            "row_positions": Range((1,), (most,), (most,)),
            "row_slots": Range((1,), (most,), (most,)),
            "anchor_ids": _fixed(1),
            "anchor_positions": _fixed(1),
            "page_table": Range((1, 1), (1, 1), (1, width)),
        },
    )


def _fixed(*shape: int) -> Range:
    return Range(shape, shape, shape)


def ceiling_index(values: Sequence[int], wanted: int, what: str) -> int:
    """Index of the smallest value ≥ `wanted`: (1, 2, 4), 3 → 2; ConfigError where there is none."""
    for index, value in enumerate(values):
        if value >= wanted:
            return index
    require(False, what, wanted, f"at most {values[-1]}")
    raise AssertionError
