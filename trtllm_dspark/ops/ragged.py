# SPDX-License-Identifier: Apache-2.0
"""The ragged batch that every op of one engine call shares: device tensors plus the CPU's plan.

Rows of request r are cu_query_lens[r]:cu_query_lens[r+1]; its K/V rows live in page_table[r] at
absolute positions. Example with three requests, page size 4: query lengths 3, 1, 4 and context
lengths 10, 7, 0 give cu_query_lens [0, 3, 4, 8] and slots page_table[r][pos // 4] * 4 + pos % 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_dspark.types import SCRATCH_PAGE, IntArray

if TYPE_CHECKING:
    import torch

    from trtllm_dspark.ops.attention import AttentionPlan


@dataclass(frozen=True)
class RaggedBatch:
    """Inputs of `kv_append_` and `ragged_verify_attention` for N rows (padding included)."""

    positions: torch.Tensor
    """[N] int64 absolute positions; 0 on padding rows."""
    slots: torch.Tensor
    """[N] int64 page_id * page_size + offset; the scratch page on padding rows."""
    cu_query_lens: torch.Tensor
    """[R+1] int32"""
    context_lens: torch.Tensor
    """[R] int32 K/V rows before this call."""
    page_table: torch.Tensor
    """[R, P] int32"""
    page_size: int
    is_causal: bool = True
    plan: AttentionPlan | None = None
    """CPU only: what attention needs on the host, made once per call, shared by all layers."""
    kernel_plan: Any = None
    """`dspark_plugins` launch shape and buffers of the attention kernels; where it is set they run.
    """

    @property
    def num_rows(self) -> int:
        """N, padding included."""
        return self.positions.shape[0]


def flatten_slots(
    positions: np.ndarray, cu_query_lens: IntArray, page_table: IntArray, page_size: int
) -> np.ndarray:
    """Slot of every row: [N] int64. Rows beyond cu_query_lens[-1] get the scratch page's slot 0."""
    num_real = int(cu_query_lens[-1])
    slots = np.full(len(positions), SCRATCH_PAGE * page_size, np.int64)
    requests = np.repeat(np.arange(len(cu_query_lens) - 1), np.diff(cu_query_lens))
    real = positions[:num_real].astype(np.int64)
    slots[:num_real] = page_table[requests, real // page_size].astype(np.int64) * page_size
    slots[:num_real] += real % page_size
    return slots
