# SPDX-License-Identifier: Apache-2.0
"""Buckets and the shared ladder: coverage, sharing, padding and refusals."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.config import BucketConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.buckets import (
    build_ladder,
    grid_total,
    request_buckets,
    round_up_rung,
    rung_for,
)

GRID = BucketConfig(max_num_requests=64, max_num_tokens=1024)


def test_the_ladder_of_a_small_grid_is_known() -> None:
    config = BucketConfig(max_num_requests=2, max_num_tokens=32, ratios=(0.5, 1.0))
    assert build_ladder(config, 3) == (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)


def test_grid_totals_round_drafts_up_and_not_floating_noise() -> None:
    assert grid_total(1, 0.25, 7) == 1 + 2
    assert grid_total(4, 0.75, 15) == 4 + 45
    assert grid_total(10, 0.1, 7) == 10 + 7  # 0.1·10·7 is 7.000000000000001 in floating point


def test_every_grid_total_and_every_plain_step_has_a_rung_at_most_a_quarter_larger() -> None:
    ladder = build_ladder(GRID, 15)
    for requests in request_buckets(GRID):
        for total in (requests, *(grid_total(requests, r, 15) for r in GRID.ratios)):
            assert total <= rung_for(ladder, total) <= max(total, 1.25 * total)


def test_the_grid_of_seven_buckets_and_four_ratios_needs_26_rungs_for_32_totals() -> None:
    totals = {b for b in request_buckets(GRID)}
    totals |= {grid_total(b, r, 15) for b in request_buckets(GRID) for r in GRID.ratios}
    decode = [rung for rung in build_ladder(GRID, 15) if rung <= grid_total(64, 1.0, 15)]
    assert (len(totals), len(decode)) == (32, 26)


@pytest.mark.parametrize("num_drafts", [7, 15])
def test_most_rungs_serve_more_than_one_requests_bucket(num_drafts: int) -> None:
    ladder = build_ladder(GRID, num_drafts)
    users = {
        rung: sum(b <= rung <= b * (num_drafts + 1) for b in request_buckets(GRID))
        for rung in ladder
        if rung <= grid_total(64, 1.0, num_drafts)
    }
    assert sum(1 for count in users.values() if count > 1) >= 0.7 * len(users)
    assert sum(users.values()) >= 2.5 * len(users)


def test_the_worst_decode_step_pays_28_percent_padding_and_a_grid_total_15() -> None:
    ladder = build_ladder(GRID, 15)

    def worst(totals: Iterable[int]) -> tuple[float, int, int]:
        runs = ((n, rung_for(ladder, n)) for n in totals)
        return max(((rung - n) / rung, n, rung) for n, rung in runs)

    assert worst(range(1, 1025)) == (pytest.approx(0.2846, abs=1e-4), 641, 896)
    totals = [grid_total(b, r, 15) for b in request_buckets(GRID) for r in GRID.ratios]
    assert worst(totals) == (pytest.approx(0.15), 544, 640)


def test_the_last_rung_is_max_num_tokens_even_where_grid_totals_exceed_it() -> None:
    for limit in (64, 65, 100, 1000):
        ladder = build_ladder(BucketConfig(max_num_requests=64, max_num_tokens=limit), 15)
        assert ladder[-1] == limit
        assert list(ladder) == sorted(set(ladder))


def test_without_a_drafter_only_plain_and_prefill_rungs_remain() -> None:
    config = BucketConfig(max_num_requests=4, max_num_tokens=16)
    assert build_ladder(config, 0) == (1, 2, 4, 6, 8, 12, 16)


def test_requests_buckets_end_with_the_limit_and_go_on_doubling() -> None:
    assert request_buckets(BucketConfig(max_num_requests=6)) == (1, 2, 4, 6)
    assert request_buckets(BucketConfig(max_num_requests=300)) == (
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        300,
    )
    assert request_buckets(BucketConfig(max_num_requests=1)) == (1,)


@pytest.mark.parametrize("wanted", [0, -1, 9])
def test_a_total_outside_the_ladder_is_refused_with_the_allowed_range(wanted: int) -> None:
    with pytest.raises(ConfigError, match=f"num_tokens = {wanted} fits no rung: allowed is 1 to 8"):
        rung_for((1, 2, 4, 8), wanted)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8]))
def test_rounding_is_idempotent_monotone_and_bounded(tokens: int, per_octave: int) -> None:
    rounded = round_up_rung(tokens, per_octave)
    assert tokens <= rounded <= tokens * (1 + 1 / per_octave)
    assert round_up_rung(rounded, per_octave) == rounded
    assert round_up_rung(tokens + 1, per_octave) >= rounded


@given(st.integers(1, 80), st.integers(0, 16), st.integers(0, 600))
def test_every_ladder_ascends_and_covers_plain_steps(requests: int, drafts: int, more: int) -> None:
    config = BucketConfig(max_num_requests=requests, max_num_tokens=requests + more)
    ladder = build_ladder(config, drafts)
    assert list(ladder) == sorted(set(ladder)) and ladder[-1] == config.max_num_tokens
    assert all(rung_for(ladder, r) <= 1.25 * r for r in request_buckets(config))
