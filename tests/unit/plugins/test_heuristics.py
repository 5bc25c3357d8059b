# SPDX-License-Identifier: Apache-2.0
"""Tile and split heuristics, and the host-side checks of pages, as pure functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dspark_plugins.heuristics import (
    MAX_SPLITS,
    PARTIAL_BYTES_LIMIT,
    SPLIT_ALIGN,
    Machine,
    choose_attention_tiles,
    choose_num_splits,
    choose_vocabulary_tile,
    count_tiles,
    next_power_of_2,
)
from dspark_plugins.paging import check_page_table, check_slots

H200 = Machine(num_sms=132, capability=90)


def splits(kv_lens: list[int], *, rows: int, machine: Machine = H200) -> int:
    return choose_num_splits(
        total_kv_rows=sum(kv_lens),
        max_kv_rows=max(kv_lens, default=0),
        num_rows=rows,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        machine=machine,
    )


@pytest.mark.parametrize(
    ("kv_lens", "rows", "expected"),
    [
        ([32768], 8, 33),  # one long context: 8 heads · 33 splits fill 264 programs
        ([512] * 256, 2048, 1),  # many short ones fill the machine by themselves
        ([200], 8, 1),  # shorter than the least split
        ([32768] + [512] * 63, 512, 17),  # the long one of a mixed batch is cut to its share
        ([], 0, 1),
        ([1 << 20], 1, 33),
    ],
)
def test_splits_follow_the_total_work(kv_lens: list[int], rows: int, expected: int) -> None:
    assert splits(kv_lens, rows=rows) == expected


def test_splits_have_an_upper_bound() -> None:
    assert splits([1 << 20], rows=1, machine=replace(H200, num_sms=1000)) == MAX_SPLITS


def test_partials_stay_within_their_limit() -> None:
    rows = 4096
    count = splits([65536] * 4, rows=rows, machine=replace(H200, num_sms=10000))
    assert count == PARTIAL_BYTES_LIMIT // (rows * 32 * 129 * 4) == 3


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("q_per_kv", [1, 3, 4, 7, 8, 32])
@pytest.mark.parametrize("query_len", [1, 2, 8, 17, 512])
def test_tiles_hold_whole_head_groups(query_len: int, q_per_kv: int, capability: int) -> None:
    tiles = choose_attention_tiles(query_len, q_per_kv, 128, capability)
    assert tiles.block_m // q_per_kv >= 1
    assert tiles.block_m in (16, 32, 64, 128)
    assert tiles.block_m >= min(query_len * q_per_kv, 128)
    assert SPLIT_ALIGN % tiles.block_n == 0


@pytest.mark.parametrize(("capability", "block_n"), [(80, 32), (90, 64), (100, 64), (120, 32)])
def test_fp8_pages_are_decoded_in_narrower_tiles_where_operands_lie_in_registers(
    capability: int, block_n: int
) -> None:
    assert choose_attention_tiles(8, 4, 128, capability, is_fp8=True).block_n == block_n
    assert choose_attention_tiles(8, 4, 128, capability).block_n == 64


def test_tile_starts_leave_room_for_every_request() -> None:
    # request r starts at tile cu[r] // block_q + r: its tiles must end before the next one starts
    generator = np.random.default_rng(0)
    for _ in range(200):
        block_q = int(generator.integers(1, 9))
        lens = generator.integers(0, 30, size=6)
        cu = np.concatenate([[0], np.cumsum(lens)])
        starts = cu[:-1] // block_q + np.arange(6)
        ends = starts + -(-lens // block_q)
        assert (ends[:-1] <= starts[1:]).all()
        assert ends[-1] <= count_tiles(int(cu[-1]), 6, 4, 4 * block_q)


@pytest.mark.parametrize(("requests", "rows", "warps"), [(1, 16, 4), (20, 32, 4), (300, 64, 8)])
def test_vocabulary_tiles_grow_with_the_batch(requests: int, rows: int, warps: int) -> None:
    tile = choose_vocabulary_tile(requests, 256)
    assert (tile.num_requests, tile.num_tokens, tile.num_warps) == (rows, 128, warps)
    assert choose_vocabulary_tile(requests, 512).num_tokens == 64


def test_powers_of_two_round_up() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]


def test_tables_of_the_wrong_shape_are_refused() -> None:
    table = np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"page_table has shape \(2, 3\)"):
        check_page_table(table, np.array([1, 2, 3]), num_pages=4, page_size=8)
    check_page_table(table, np.array([24, 0]), num_pages=1, page_size=8)
    with pytest.raises(ValueError, match="request 0 has 25 K/V rows, 4 pages of 8"):
        check_page_table(table, np.array([25, 0]), num_pages=1, page_size=8)


def test_no_slots_are_fine() -> None:
    check_slots(np.array([], np.int64), num_pages=1, page_size=1)
