# SPDX-License-Identifier: Apache-2.0
"""Launcher of `ragged_verify_attention` + `ragged_verify_reduce`: tiles, splits, partial buffers.

A plan made from lengths fits one call; `plan_attention_bounds` makes one that fits every call up to
its bounds (what a captured graph needs). Under one plan a request's result does not depend, bit for
bit, on the other requests, their order or the padding; other tiles or splits round differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from dspark_plugins.heuristics import (
    SPLIT_ALIGN,
    AttentionTiles,
    choose_attention_tiles,
    choose_num_splits,
    count_tiles,
    next_power_of_2,
)
from dspark_plugins.kernels.ragged_attention import (
    ragged_verify_attention_kernel,
    ragged_verify_reduce_kernel,
)
from dspark_plugins.launch import LOG2_E, dot_dtype, machine_of, page_bytes, require_tensor
from dspark_plugins.paging import Ints, check_page_table, check_ragged_lengths


@dataclass(frozen=True)
class AttentionShape:
    """What stays the same over a model's calls."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    is_causal: bool = True
    window: int = 0
    """0 = none; row i of a request sees keys in (context_len + i − window, …]."""
    is_fp8: bool = False
    """Pages hold fp8 e4m3: decoded blocks take registers, so that tiles are narrower."""

    @property
    def q_per_kv(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionPlan:
    """Launch shape and partial buffers of calls over num_rows rows, shared by the layers."""

    shape: AttentionShape
    tiles: AttentionTiles
    num_rows: int
    num_requests: int
    num_splits: int
    partials: torch.Tensor
    """[num_splits, num_rows, num_heads, head_dim] float32"""
    lse: torch.Tensor
    """[num_splits, num_rows, num_heads] float32, base 2"""
    split_align: int = SPLIT_ALIGN

    def __post_init__(self) -> None:
        """Blocks must start on multiples of block_n, or a block could straddle two pages."""
        if self.split_align % self.tiles.block_n:
            raise ValueError(
                f"split_align {self.split_align} is no multiple of block_n {self.tiles.block_n}"
            )


def plan_ragged_attention(
    shape: AttentionShape,
    cu_query_lens: Ints,
    context_lens: Ints,
    page_table: Ints,
    *,
    num_rows: int,
    device: torch.device,
    num_splits: int | None = None,
) -> AttentionPlan:
    """Plan one call from the host's lengths and page table, checking them (ValueError).

    Example with three requests on rung 16: cu_query_lens [0, 3, 4, 8], context_lens [10, 7, 0],
    num_rows 16; rows 8..15 are padding and come out as zeros.
    """
    check_ragged_lengths(cu_query_lens, context_lens, num_rows)
    query_lens = np.diff(cu_query_lens)
    kv_lens = context_lens + query_lens
    check_page_table(page_table, kv_lens, num_pages=shape.num_pages, page_size=shape.page_size)
    return plan_attention_bounds(
        shape,
        num_rows=num_rows,
        num_requests=len(context_lens),
        max_query_len=int(query_lens.max(initial=1)),
        max_kv_rows=int(kv_lens.max(initial=0)),
        total_kv_rows=int(kv_lens.sum()),
        device=device,
        num_splits=num_splits,
    )


def plan_attention_bounds(
    shape: AttentionShape,
    *,
    num_rows: int,
    num_requests: int,
    max_query_len: int,
    max_kv_rows: int,
    total_kv_rows: int,
    device: torch.device,
    num_splits: int | None = None,
) -> AttentionPlan:
    """Plan for every call of at most these rows and requests; the K/V sizes only steer speed."""
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"{shape.num_heads} query heads do not divide into {shape.num_kv_heads} K/V heads"
        )
    machine = machine_of(device)
    tiles = choose_attention_tiles(
        max_query_len, shape.q_per_kv, shape.head_dim, machine.capability, is_fp8=shape.is_fp8
    )
    splits = num_splits or choose_num_splits(
        total_kv_rows=total_kv_rows,
        max_kv_rows=max_kv_rows,
        num_rows=num_rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        machine=machine,
    )
    cells = (splits, num_rows, shape.num_heads)
    partials = torch.empty((*cells, shape.head_dim), dtype=torch.float32, device=device)
    lse = torch.empty(cells, dtype=torch.float32, device=device)
    return AttentionPlan(shape, tiles, num_rows, num_requests, splits, partials, lse)


def with_window(plan: AttentionPlan, window: int) -> AttentionPlan:
    """The same plan and buffers for layers with another sliding window."""
    return replace(plan, shape=replace(plan.shape, window=window))


def run_ragged_attention(
    plan: AttentionPlan,
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [N, num_heads, d] over the pages of one layer into out; padding rows become zeros.

    page_table [R, P], cu_query_lens [R+1], context_lens [R] are int32 on the device. fp8 pages are
    read as value · kv_scales ([2] float32: K, V). Launches two kernels, never synchronises.
    """
    shape, rows = plan.shape, (plan.num_rows, plan.shape.num_heads, plan.shape.head_dim)
    pool = (shape.num_pages, shape.page_size, 2, shape.num_kv_heads, shape.head_dim)
    pages, is_fp8 = page_bytes(kv_pages)
    if is_fp8 != shape.is_fp8:
        raise ValueError(
            f"kv_pages are {kv_pages.dtype}, the plan's shape says is_fp8 = {shape.is_fp8}: plan "
            "with the pages' own kind, tiles depend on it"
        )
    if is_fp8 and kv_scales is None:
        raise ValueError("kv_scales is None: fp8 pages need a [2] float32 tensor of K and V scales")
    require_tensor("q", q, rows, q.dtype)
    require_tensor("out", out, rows, q.dtype)
    require_tensor("kv_pages", kv_pages, pool, q.dtype, torch.float8_e4m3fn)
    require_tensor("page_table", page_table, (plan.num_requests, page_table.shape[1]), torch.int32)
    require_tensor("cu_query_lens", cu_query_lens, (plan.num_requests + 1,), torch.int32)
    require_tensor("context_lens", context_lens, (plan.num_requests,), torch.int32)
    if plan.num_rows == 0:
        return out
    if plan.num_requests == 0:
        return out.zero_()
    scales = kv_scales if is_fp8 else None
    _launch_attention(plan, q, pages, page_table, cu_query_lens, context_lens, scale, scales)
    _launch_reduce(plan, cu_query_lens, context_lens, out)
    return out


def _launch_attention(
    plan: AttentionPlan,
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    kv_scales: torch.Tensor | None,
) -> None:
    shape, tiles = plan.shape, plan.tiles
    num_tiles = count_tiles(plan.num_rows, plan.num_requests, shape.q_per_kv, tiles.block_m)
    ragged_verify_attention_kernel[(num_tiles, shape.num_kv_heads, plan.num_splits)](
        q,
        pages,
        page_table,
        cu_query_lens,
        context_lens,
        plan.lse if kv_scales is None else kv_scales,
        plan.num_rows,
        plan.num_requests,
        page_table.shape[1],
        plan.num_splits,
        plan.partials,
        plan.lse,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=shape.page_size,
        SCALE_LOG2=scale * LOG2_E,
        IS_CAUSAL=shape.is_causal,
        WINDOW=shape.window,
        IS_FP8=kv_scales is not None,
        SPLIT_ALIGN=plan.split_align,
        DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(next_power_of_2(shape.head_dim), 16),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _launch_reduce(
    plan: AttentionPlan, cu_query_lens: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor
) -> None:
    shape = plan.shape
    block_heads = min(next_power_of_2(shape.num_heads), 8)
    ragged_verify_reduce_kernel[(plan.num_rows, triton.cdiv(shape.num_heads, block_heads))](
        plan.partials,
        plan.lse,
        cu_query_lens,
        context_lens,
        plan.num_rows,
        plan.num_requests,
        plan.num_splits,
        out,
        NUM_HEADS=shape.num_heads,
        HEAD_DIM=shape.head_dim,
        WINDOW=shape.window,
        SPLIT_ALIGN=plan.split_align,
        BLOCK_H=block_heads,
        BLOCK_D=next_power_of_2(shape.head_dim),
        num_warps=4,
    )
