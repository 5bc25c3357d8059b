# SPDX-License-Identifier: Apache-2.0
"""`kv_append_` on the device: q/k RMSNorm, rotary embedding and the scatter into paged K/V.

One program takes BLOCK_HEADS heads of one packed qkv row (query heads, then K, then V) as two half
rows. Nothing here knows how pages are assigned: rows come with their slots.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.fp8 import encode_e4m3


@triton.jit
def _scale_of_heads(low, high, EPS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """1/rms of every head, from its two halves."""
    mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM
    return 1.0 / tl.sqrt(mean + EPS)


@triton.jit
def _norm_half(x, scale, q_norm_ptr, k_norm_ptr, columns, mask, is_q, dtype: tl.constexpr):
    """Scale one half by 1/rms and its weight, with the roundings of the torch reference."""
    q_weight = tl.load(q_norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
    return ((x * scale[:, None]).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _to_page(x, inverse_scale, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Round a finished half to the pages' element type."""
    if IS_FP8:
        return encode_e4m3(x * inverse_scale)
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def kv_append_kernel(
    kv_pages_in_ptr,  # the same pages as kv_pages_ptr: a plugin's aliased input comes twice
    qkv_ptr,  # [num_rows, NUM_HEADS + 2 NUM_KV_HEADS, HEAD_DIM]
    rope_ptr,  # [num_rows, 2, HEAD_DIM / 2] float32 cos, sin
    slots_ptr,  # [num_rows] int64, page · page_size + offset
    q_norm_ptr,  # [HEAD_DIM]; any pointer without HAS_NORM
    k_norm_ptr,  # [HEAD_DIM]
    kv_scales_ptr,  # [2] float32 scale of K and V; read with IS_FP8 only
    num_rows,
    kv_pages_ptr,  # [num_pages, page_size, 2, NUM_KV_HEADS, HEAD_DIM], in place
    q_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM]
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    half: tl.constexpr = HEAD_DIM // 2
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    in_half = columns < half
    mask = (heads < all_heads)[:, None] & in_half[None, :]
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    source = qkv_ptr + (row * all_heads + heads[:, None]) * HEAD_DIM + columns[None, :]
    raw_low = tl.load(source, mask=mask, other=0.0)
    raw_high = tl.load(source + half, mask=mask, other=0.0)
    dtype: tl.constexpr = raw_low.dtype
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    plain_low, plain_high = low, high
    if HAS_NORM:
        scale = _scale_of_heads(low, high, EPS, HEAD_DIM)
        low = _norm_half(low, scale, q_norm_ptr, k_norm_ptr, columns, in_half, is_q, dtype)
        high = _norm_half(
            high, scale, q_norm_ptr + half, k_norm_ptr + half, columns, in_half, is_q, dtype
        )
    rope = rope_ptr + row * HEAD_DIM + columns
    cos = tl.load(rope, mask=in_half, other=1.0)[None, :]
    sin = tl.load(rope + half, mask=in_half, other=0.0)[None, :]
    new_low = tl.where(is_v[:, None], plain_low, low * cos - high * sin)
    new_high = tl.where(is_v[:, None], plain_high, high * cos + low * sin)
    q_target = q_ptr + (row * NUM_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
    q_mask = mask & is_q[:, None]
    tl.store(q_target, new_low.to(dtype), mask=q_mask)
    tl.store(q_target + half, new_high.to(dtype), mask=q_mask)
    slot = tl.load(slots_ptr + row)
    kv_heads = heads - NUM_HEADS  # 0..NUM_KV_HEADS-1 are K, the next NUM_KV_HEADS are V
    target = slot * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_heads[:, None] * HEAD_DIM + columns[None, :]
    kv_mask = mask & (kv_heads >= 0)[:, None]
    inverse_scale = 1.0
    if IS_FP8:
        inverse_scale = 1.0 / tl.load(kv_scales_ptr + is_v.to(tl.int32))[:, None]
    page_dtype: tl.constexpr = kv_pages_ptr.dtype.element_ty
    # K is rounded to the activations' dtype first, as the reference's rotated K is.
    out_low = new_low.to(dtype).to(tl.float32)
    out_high = new_high.to(dtype).to(tl.float32)
    page_low = _to_page(out_low, inverse_scale, IS_FP8, page_dtype)
    page_high = _to_page(out_high, inverse_scale, IS_FP8, page_dtype)
    tl.store(kv_pages_ptr + target, page_low, mask=kv_mask)
    tl.store(kv_pages_ptr + target + half, page_high, mask=kv_mask)
