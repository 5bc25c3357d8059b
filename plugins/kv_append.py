# SPDX-License-Identifier: Apache-2.0
"""Launcher of `kv_append_`. Rows and slots come from the engine; slots are checked by `plan_*`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from dspark_plugins.heuristics import next_power_of_2
from dspark_plugins.kernels.kv_append import kv_append_kernel
from dspark_plugins.launch import page_bytes, require_tensor
from dspark_plugins.paging import Ints, check_slots

BLOCK_HEADS = 16


@dataclass(frozen=True)
class KvAppendPlan:
    """One engine call's shapes; shared by its layers."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6


def plan_kv_append(
    plan: KvAppendPlan, slots: Ints, *, num_pages: int, page_size: int
) -> KvAppendPlan:
    """Check the host's copy of the slots against the pool and return the plan."""
    if len(slots) != plan.num_rows:
        raise ValueError(f"{len(slots)} slots for {plan.num_rows} rows: there must be one per row")
    if plan.head_dim % 2:
        raise ValueError(f"head_dim {plan.head_dim} is odd: rotary embedding needs equal halves")
    check_slots(slots, num_pages=num_pages, page_size=page_size)
    return plan


def run_kv_append_(
    plan: KvAppendPlan,
    kv_pages: torch.Tensor,
    qkv: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write K/V of the rows into their slots, in place, and the rotated queries into q.

    kv_pages [num_pages, page_size, 2, num_kv_heads, head_dim]; qkv [N, (num_heads + 2 num_kv_heads)
    · head_dim]; rope [N, 2, head_dim/2] float32; slots [N] int64; q [N, num_heads, head_dim] is
    overwritten. fp8 pages hold x / kv_scales ([2] float32: K, V). Never synchronises.
    """
    rows, heads, kv_heads, dim = plan.num_rows, plan.num_heads, plan.num_kv_heads, plan.head_dim
    require_tensor("qkv", qkv, (rows, (heads + 2 * kv_heads) * dim), qkv.dtype)
    require_tensor("rope", rope, (rows, 2, dim // 2), torch.float32)
    require_tensor("slots", slots, (rows,), torch.int64)
    require_tensor("q", q, (rows, heads, dim), qkv.dtype)
    pages, is_fp8 = page_bytes(kv_pages)
    if is_fp8 and kv_scales is None:
        raise ValueError("kv_scales is None: fp8 pages need a [2] float32 tensor of K and V scales")
    if rows == 0:
        return q
    has_norm = q_norm is not None and k_norm is not None
    grid = (rows, triton.cdiv(heads + 2 * kv_heads, BLOCK_HEADS))
    kv_append_kernel[grid](
        pages,
        qkv,
        rope,
        slots,
        q_norm if has_norm else qkv,
        k_norm if has_norm else qkv,
        kv_scales if is_fp8 else rope,
        rows,
        pages,
        q,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        HAS_NORM=has_norm,
        EPS=plan.eps,
        IS_FP8=is_fp8,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=next_power_of_2(dim // 2),
        num_warps=4,
    )
    return q
