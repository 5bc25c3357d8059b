# SPDX-License-Identifier: Apache-2.0
"""The native CPU kernel of `ragged_verify_attention`, called per layer.

Its results do not depend on the batch around a row, which torch's bfloat16 attention cannot
promise.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from trtllm_dspark.errors import EngineError
from trtllm_dspark.ops import native_library

if TYPE_CHECKING:
    from trtllm_dspark.ops.attention import AttentionPlan

_CHUNK, _MAX_HEAD_DIM = 32, 256


class _Arguments(ctypes.Structure):
    """`Arguments` of the C file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("cu_query_lens", "context_lens", "page_table")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_requests", "table_stride")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("page_size", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_causal", "is_bf16", "num_threads")),
    )


def can_run(q: torch.Tensor, kv_pages: torch.Tensor) -> bool:
    """Whether the kernel exists here and takes these tensors."""
    head_dim = q.shape[-1]
    return (
        head_dim % _CHUNK == 0 and head_dim <= _MAX_HEAD_DIM and native_library.takes(q, kv_pages)
    )


def run(q: torch.Tensor, kv_pages: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """As `ragged_verify_attention`; page ids and lengths must already have been checked."""
    library = native_library.library()
    if library is None:
        raise EngineError("the native attention kernel is not available: ask can_run first")
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = _Arguments(
        q.data_ptr(),
        kv_pages.data_ptr(),
        out.data_ptr(),
        plan.cu_query_lens.ctypes.data,
        plan.context_lens.ctypes.data,
        plan.page_table.ctypes.data,
        len(q),
        len(plan.context_lens),
        plan.page_table.shape[1],
        q.shape[1],
        kv_pages.shape[-2],
        q.shape[2],
        plan.page_size,
        plan.window,
        scale,
        plan.is_causal,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if library.ragged_attention(ctypes.byref(arguments)):
        raise EngineError(f"attention over {len(plan.context_lens)} requests ran out of memory")
    return out
