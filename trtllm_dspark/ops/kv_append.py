# SPDX-License-Identifier: Apache-2.0
"""`kv_append_`: optional q/k RMSNorm, rotary embedding, and the scatter of N rows into K/V pages.

Layout of one layer's pages: [num_pages, page_size, 2, num_kv_heads, head_dim], token-major, K at
index 0 and V at index 1, so that one gather of whole pages brings both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_dspark.ops import native_rows
from trtllm_dspark.ops.kernels import append_by_kernel, runs_kernels
from trtllm_dspark.ops.norm import rms_norm


@dataclass(frozen=True)
class HeadShape:
    """How a packed qkv row splits: num_heads query heads, then K heads, then V heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate halves of x [N, heads, d] by rope [N, 2, d/2] (float32 inside, x's dtype out)."""
    native = native_rows.apply_rope(x, rope)
    if native is not None:
        return native
    cos, sin = rope[:, 0, None, :], rope[:, 1, None, :]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def kv_append_(
    kv_pages: torch.Tensor,
    qkv: torch.Tensor,
    shape: HeadShape,
    rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Write K/V of N rows into their slots and return the rotated queries [N, num_heads, head_dim].

    qkv [N, (num_heads + 2 num_kv_heads) head_dim]; rope [N, 2, head_dim/2] float32 rows of the
    table at the rows' positions; slots [N] int64. kv_pages is changed in place. Equal slots
    may only occur on padding rows (any of them wins).
    """
    if runs_kernels(qkv):
        return append_by_kernel(kv_pages, qkv, shape, rope, slots, q_norm, k_norm, eps)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    native = native_rows.kv_append_(
        kv_pages, qkv, (heads, kv_heads, shape.head_dim), rope, slots, norms, eps
    )
    if native is not None:
        return native
    rows = qkv.view(qkv.shape[0], heads + 2 * kv_heads, shape.head_dim)
    if norms is None:
        rotated = apply_rope(rows[:, : heads + kv_heads], rope)
        q, k = rotated[:, :heads], rotated[:, heads:]
    else:
        q = apply_rope(rms_norm(rows[:, :heads], norms[0], eps), rope)
        k = apply_rope(rms_norm(rows[:, heads : heads + kv_heads], norms[1], eps), rope)
    scatter_kv_(kv_pages, k, rows[:, heads + kv_heads :], slots)
    return q


def scatter_kv_(
    kv_pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write finished k, v [N, num_kv_heads, head_dim] into their slots, in place."""
    flat = kv_pages.view(-1, 2, kv_pages.shape[-2], kv_pages.shape[-1])
    flat.index_copy_(0, slots, torch.stack((k, v), dim=1).to(kv_pages.dtype))
