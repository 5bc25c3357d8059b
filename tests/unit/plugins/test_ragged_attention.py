# SPDX-License-Identifier: Apache-2.0
"""`ragged_verify_attention` and its reduce in the interpreter against float64 attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dspark_plugins.heuristics import AttentionTiles
from dspark_plugins.ragged_attention import (
    AttentionPlan,
    AttentionShape,
    plan_ragged_attention,
    run_ragged_attention,
)

from tests.unit.plugins.paged_batches import POISON, PagedBatch, attend, make_paged_batch

SCALE = 0.31
CPU = torch.device("cpu")
SMALL_TILES = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=2)


def plan_batch(
    batch: PagedBatch,
    num_splits: int,
    is_causal: bool,
    window: int,
    tiles: AttentionTiles,
    *,
    is_fp8: bool = False,
) -> AttentionPlan:
    num_pages, page_size, _, kv_heads, dim = batch.kv_pages.shape
    heads = (batch.q.shape[1], kv_heads, dim)
    shape = AttentionShape(
        *heads, page_size, num_pages, is_causal=is_causal, window=window, is_fp8=is_fp8
    )
    plan = plan_ragged_attention(
        shape,
        batch.cu_query_lens,
        np.asarray(batch.context_lens, np.int32),
        batch.page_table,
        num_rows=batch.num_rows,
        device=CPU,
        num_splits=num_splits,
    )
    plan = replace(plan, tiles=tiles, split_align=tiles.block_n)
    plan.partials.fill_(POISON)
    plan.lse.fill_(POISON)
    return plan


def run_batch(
    batch: PagedBatch,
    num_splits: int = 1,
    *,
    is_causal: bool = True,
    window: int = 0,
    tiles: AttentionTiles = SMALL_TILES,
    kv_pages: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    is_fp8 = kv_pages is not None and kv_pages.dtype == torch.float8_e4m3fn
    return run_ragged_attention(
        plan_batch(batch, num_splits, is_causal, window, tiles, is_fp8=is_fp8),
        batch.q,
        batch.kv_pages if kv_pages is None else kv_pages,
        torch.from_numpy(batch.page_table),
        torch.from_numpy(batch.cu_query_lens),
        torch.tensor(batch.context_lens, dtype=torch.int32),
        SCALE,
        torch.full_like(batch.q, POISON),
        kv_scales,
    )


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


RAGGED: dict[str, tuple[list[int], list[int]]] = {
    "three requests": ([3, 1, 4], [10, 7, 0]),
    "one request of one row": ([1], [0]),
    "one long request": ([2], [45]),
    "a request without new rows": ([2, 0, 3], [5, 9, 1]),
    "requests without anything": ([0, 1, 0], [0, 4, 0]),
    "all full": ([4, 4, 4], [4, 12, 20]),
    "page boundaries": ([1, 1, 1, 2], [7, 8, 15, 15]),
    "more rows than one tile": ([11, 5], [3, 16]),
}


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("case", RAGGED)
def test_ragged_rows_attend_to_their_own_pages_only(case: str, num_splits: int) -> None:
    batch = make_paged_batch(*RAGGED[case])
    assert_close(run_batch(batch, num_splits), attend(batch, SCALE))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (9, 3), (8, 2), (8, 1), (7, 1)])
def test_head_groups_are_packed_into_tile_rows(heads: int, kv_heads: int) -> None:
    batch = make_paged_batch([3, 6], [9, 2], heads=heads, kv_heads=kv_heads)
    assert_close(run_batch(batch, 2), attend(batch, SCALE))


@pytest.mark.parametrize("dim", [24, 64, 128])
def test_head_widths_need_not_fill_a_block(dim: int) -> None:
    batch = make_paged_batch([2, 3], [9, 17], heads=2, kv_heads=1, dim=dim)
    assert_close(run_batch(batch, 2), attend(batch, SCALE), 1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_blocks_may_span_pages_or_lie_within_one(page_size: int) -> None:
    batch = make_paged_batch([2, 3], [21, 30], page_size=page_size)
    assert_close(run_batch(batch, 2), attend(batch, SCALE))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_drafter_block_sees_all_of_its_rows(num_splits: int) -> None:
    batch = make_paged_batch([4, 4, 2], [13, 0, 20])
    expected = attend(batch, SCALE, is_causal=False)
    assert_close(run_batch(batch, num_splits, is_causal=False), expected)
    assert not torch.allclose(expected, attend(batch, SCALE), atol=1e-2)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [1, 16, 33])
def test_a_window_hides_older_rows(window: int, is_causal: bool) -> None:
    batch = make_paged_batch([3, 6, 1], [40, 2, 33], heads=2, kv_heads=1)
    expected = attend(batch, SCALE, is_causal=is_causal, window=window)
    assert_close(run_batch(batch, 3, is_causal=is_causal, window=window), expected)


@pytest.mark.parametrize("num_splits", [2, 9])
def test_splits_beyond_a_requests_rows_are_neither_written_nor_read(num_splits: int) -> None:
    batch = make_paged_batch([2, 1, 5], [60, 3, 30], heads=2, kv_heads=1)
    assert_close(run_batch(batch, num_splits), attend(batch, SCALE))


def test_every_padding_row_is_zero() -> None:
    batch = make_paged_batch([3, 1], [6, 2], padding=9)
    out = run_batch(batch, 2)
    assert (out[4:] == 0).all()


def test_an_empty_batch_writes_zeros() -> None:
    batch = make_paged_batch([], [], padding=4)
    assert (run_batch(batch) == 0).all()
    assert run_batch(make_paged_batch([], [], padding=0)).shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_stay_within_their_rounding(dtype: torch.dtype) -> None:
    batch = make_paged_batch([3, 1, 4], [10, 7, 0], dtype=dtype)
    out = run_batch(batch, 2)
    assert out.dtype == dtype
    # bfloat16: the interpreter truncates where the GPU rounds, twice the error
    assert_close(out, attend(batch, SCALE), 2e-3 if dtype == torch.float16 else 3e-2)


def test_fp8_pages_are_read_with_their_scales() -> None:
    batch = make_paged_batch([3, 1, 4], [10, 7, 0], dtype=torch.float16)
    scales = torch.tensor([0.5, 0.125])
    stored = (batch.kv_pages.float() / scales[None, None, :, None, None]).nan_to_num(448.0)
    stored = stored.clamp(-448, 448).to(torch.float8_e4m3fn)
    read = stored.float() * scales[None, None, :, None, None]
    out = run_batch(batch, 2, kv_pages=stored, kv_scales=scales)
    assert_close(out, attend(batch, SCALE, pages=read), 2e-3)
    with pytest.raises(ValueError, match="need a \\[2\\] float32 tensor"):
        run_batch(batch, kv_pages=stored)


def test_a_plan_for_other_pages_is_refused() -> None:
    # sm_80 and sm_120 decode fp8 in narrower tiles: those are the ones compiled ahead of time
    batch = make_paged_batch([2], [5])
    plan = plan_batch(batch, 1, True, 0, SMALL_TILES, is_fp8=True)
    with pytest.raises(ValueError, match=r"kv_pages are torch.float32, .* is_fp8 = True"):
        run_ragged_attention(
            plan,
            batch.q,
            batch.kv_pages,
            torch.from_numpy(batch.page_table),
            torch.from_numpy(batch.cu_query_lens),
            torch.tensor(batch.context_lens, dtype=torch.int32),
            SCALE,
            torch.empty_like(batch.q),
        )


@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_tile_height_changes_nothing_but_rounding(block_m: int) -> None:
    batch = make_paged_batch([9, 2], [4, 11])
    tiles = replace(SMALL_TILES, block_m=block_m)
    assert_close(run_batch(batch, tiles=tiles), attend(batch, SCALE))


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0]])
def test_a_request_is_the_same_bit_for_bit_in_any_arrangement(order: list[int]) -> None:
    batch = make_paged_batch([3, 1, 4], [40, 7, 0])
    base = run_batch(batch, 2).split([3, 1, 4, 3])
    rows = batch.q.split([3, 1, 4, 3])
    moved = replace(
        batch,
        query_lens=[batch.query_lens[i] for i in order],
        context_lens=[batch.context_lens[i] for i in order],
        page_table=np.ascontiguousarray(batch.page_table[order]),
        q=torch.cat([rows[i] for i in order] + [torch.zeros(20, *batch.q.shape[1:])]),
        num_rows=28,
    )
    out = run_batch(moved, 2).split([batch.query_lens[i] for i in order] + [20])
    for place, request in enumerate(order):
        assert torch.equal(out[place], base[request])


def plan_with(batch: PagedBatch, **changes: Any) -> AttentionPlan:
    return plan_batch(replace(batch, **changes), 1, True, 0, SMALL_TILES)


def test_page_ids_outside_the_pool_are_refused_on_the_host() -> None:
    batch = make_paged_batch([2, 1], [5, 9])
    for bad in (batch.kv_pages.shape[0], -1):
        table = batch.page_table.copy()
        table[1, 0] = bad
        with pytest.raises(ValueError, match=r"page ids run from .* the pages of the pool"):
            plan_with(batch, page_table=table)


def test_a_table_that_is_too_narrow_is_refused() -> None:
    batch = make_paged_batch([2, 1], [5, 9])
    with pytest.raises(ValueError, match="request 1 has 10 K/V rows, 2 pages of 8"):
        plan_with(batch, page_table=batch.page_table[:, :1])


def test_broken_lengths_are_refused() -> None:
    batch = make_paged_batch([2, 1], [5, 9])
    with pytest.raises(ValueError, match="the batch has 2 rows"):
        plan_with(batch, num_rows=2)
    with pytest.raises(ValueError, match="never decrease"):
        plan_with(batch, query_lens=[2, -1])
    with pytest.raises(ValueError, match="must not be negative"):
        plan_with(batch, context_lens=[-1, 9])
