# SPDX-License-Identifier: Apache-2.0
"""Launcher of `select_drafts`: one program over all survivals, with reusable outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspark_plugins.heuristics import next_power_of_2
from dspark_plugins.kernels.select_drafts import select_drafts_kernel
from dspark_plugins.launch import require_tensor

MAX_CELLS = 32768
"""Survivals one program can hold: 1024 requests of 32 drafts."""


@dataclass(frozen=True)
class SelectPlan:
    """Shapes and output buffers, reused by every call (a later call overwrites them)."""

    num_requests: int
    num_drafts: int
    rung: int
    verify_lens: torch.Tensor
    """[R] int32"""
    cu_query_lens: torch.Tensor
    """[R+1] int32"""
    token_ids: torch.Tensor
    """[rung] int32"""
    positions: torch.Tensor
    """[rung] int32"""
    row_requests: torch.Tensor
    """[rung] int32, −1 on padding rows"""


def plan_select_drafts(
    num_requests: int, num_drafts: int, *, rung: int, device: torch.device
) -> SelectPlan:
    """Allocate the outputs of calls for `num_requests` requests (padding requests included)."""
    cells = next_power_of_2(num_requests) * next_power_of_2(num_drafts)
    if cells > MAX_CELLS:
        raise ValueError(
            f"{num_requests} requests of {num_drafts} drafts are {cells} survivals (rounded up): "
            f"one program holds at most {MAX_CELLS}; select in smaller batches"
        )

    def allocate(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    return SelectPlan(
        num_requests,
        num_drafts,
        rung,
        verify_lens=allocate(num_requests),
        cu_query_lens=allocate(num_requests + 1),
        token_ids=allocate(rung),
        positions=allocate(rung),
        row_requests=allocate(rung),
    )


def run_select_drafts(
    plan: SelectPlan,
    survivals: torch.Tensor,
    capacity: torch.Tensor,
    caps: torch.Tensor,
    anchor_ids: torch.Tensor,
    anchor_positions: torch.Tensor,
    draft_ids: torch.Tensor,
) -> SelectPlan:
    """Fill the plan's outputs. Never synchronises; rows beyond the rung are dropped.

    survivals [R, γ] float32; capacity [1], caps, anchor_ids, anchor_positions [R] and draft_ids
    [R, γ] int32. caps −1 = an absent request: verify_lens 0 and no rows.
    """
    requests, drafts = plan.num_requests, plan.num_drafts
    require_tensor("survivals", survivals, (requests, drafts), torch.float32)
    require_tensor("draft_ids", draft_ids, (requests, drafts), torch.int32)
    require_tensor("capacity", capacity, (1,), torch.int32)
    for name, x in (("caps", caps), ("anchor_ids", anchor_ids), ("positions", anchor_positions)):
        require_tensor(name, x, (requests,), torch.int32)
    cells = next_power_of_2(requests) * next_power_of_2(drafts)
    select_drafts_kernel[(1,)](
        survivals,
        capacity,
        caps,
        anchor_ids,
        anchor_positions,
        draft_ids,
        requests,
        plan.rung,
        plan.verify_lens,
        plan.cu_query_lens,
        plan.token_ids,
        plan.positions,
        plan.row_requests,
        NUM_DRAFTS=drafts,
        BLOCK_DRAFTS=next_power_of_2(drafts),
        BLOCK_REQUESTS=next_power_of_2(requests),
        BLOCK_ROWS=1024,
        num_warps=min(max(cells // 1024, 4), 16),
    )
    return plan
