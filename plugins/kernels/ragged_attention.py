# SPDX-License-Identifier: Apache-2.0
"""`ragged_verify_attention` and `ragged_verify_reduce` on the device: grouped-query attention of
packed ragged rows over paged K/V, split over the K/V length.

A tile holds some query rows of one request times the query heads of one K/V head, so that a
verification of a few rows still fills tensor-core tiles. Each (tile, K/V head, split) is one
program; its normalised partial and base-2 log-sum-exp are outputs that the reduce kernel combines.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from dspark_plugins.kernels.fp8 import decode_e4m3


@triton.jit
def _find_request(cu_query_lens_ptr, tile, num_requests, BLOCK_Q: tl.constexpr):
    """Request of a tile when request r starts at tile cu[r] // BLOCK_Q + r.

    Those starts grow strictly and leave room for every request's tiles, whatever its length.
    """
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_query_lens_ptr + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _split_len(kv_span, num_splits, SPLIT_ALIGN: tl.constexpr):
    """K/V rows per split of one request: a function of its own length, never of the batch."""
    return tl.cdiv(tl.cdiv(kv_span, num_splits), SPLIT_ALIGN) * SPLIT_ALIGN


@triton.jit
def _first_visible(context_len, WINDOW: tl.constexpr, SPLIT_ALIGN: tl.constexpr):
    """First K/V row that any new row of the request can see, rounded down to whole blocks."""
    if WINDOW > 0:
        return tl.maximum(context_len - WINDOW + 1, 0) // SPLIT_ALIGN * SPLIT_ALIGN
    else:
        return context_len * 0


@triton.jit
def _find_pages(table_row_ptr, start, kv_stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of the block's rows: one id where a page holds the whole block, else one per row."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_row_ptr + start // PAGE_SIZE, mask=start < kv_stop, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(table_row_ptr + keys // PAGE_SIZE, mask=keys < kv_stop, other=0)


@triton.jit
def _load_block(
    kv_pages_ptr,
    pages,
    start,
    kv_stop,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """K [BLOCK_D, BLOCK_N] and V [BLOCK_N, BLOCK_D] of rows start..; zeros from kv_stop on."""
    keys = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    inside = keys < kv_stop
    slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    base = slots * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    k_mask = inside[None, :]
    v_mask = inside[:, None]
    if BLOCK_D != HEAD_DIM:
        k_mask = k_mask & (columns < HEAD_DIM)[:, None]
        v_mask = v_mask & (columns < HEAD_DIM)[None, :]
    v_offset: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    k = tl.load(kv_pages_ptr + base[None, :] + columns[:, None], mask=k_mask, other=0)
    v = tl.load(kv_pages_ptr + base[:, None] + v_offset + columns[None, :], mask=v_mask, other=0)
    return k, v


@triton.jit
def _dot(a, b):
    """float32 product; float32 operands keep their accuracy (three TF32 products)."""
    return tl.dot(a, b, input_precision="tf32x3", out_dtype=tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "table_width", "num_splits"])
def ragged_verify_attention_kernel(
    q_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM]
    kv_pages_ptr,  # [num_pages, PAGE_SIZE, 2, NUM_KV_HEADS, HEAD_DIM] of one layer
    page_table_ptr,  # [num_requests, table_width] int32
    cu_query_lens_ptr,  # [num_requests + 1] int32
    context_lens_ptr,  # [num_requests] int32
    kv_scales_ptr,  # [2] float32; read with IS_FP8 only
    num_rows,
    num_requests,
    table_width,
    num_splits,
    partial_ptr,  # [num_splits, num_rows, NUM_HEADS, HEAD_DIM] float32
    lse_ptr,  # [num_splits, num_rows, NUM_HEADS] float32, base 2
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,  # softmax scale · log2(e)
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    IS_FP8: tl.constexpr,
    SPLIT_ALIGN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    block_q: tl.constexpr = BLOCK_M // group
    request = _find_request(cu_query_lens_ptr, tile, num_requests, block_q)
    row_start = tl.load(cu_query_lens_ptr + request)
    query_len = tl.load(cu_query_lens_ptr + request + 1) - row_start
    first_query = (tile - row_start // block_q - request) * block_q
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + request)
    kv_len = context_len + query_len
    kv_first = _first_visible(context_len, WINDOW, SPLIT_ALIGN)
    split_len = _split_len(kv_len - kv_first, num_splits, SPLIT_ALIGN)
    start = kv_first + split * split_len
    if start >= kv_len:
        return
    stop = tl.minimum(start + split_len, kv_len)
    last_query = tl.minimum(first_query + block_q, query_len) - 1
    if IS_CAUSAL:
        stop = tl.minimum(stop, context_len + last_query + 1)
    if WINDOW > 0:
        tile_first = tl.maximum(context_len + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        start = tl.maximum(start, tile_first)

    lanes = tl.arange(0, BLOCK_M)
    queries = first_query + lanes // group
    heads = kv_head * group + lanes % group
    is_row = (queries < query_len) & (lanes < block_q * group)
    columns = tl.arange(0, BLOCK_D)
    rows = (row_start + queries).to(tl.int64)
    row_heads = rows * NUM_HEADS + heads
    cells = row_heads[:, None] * HEAD_DIM + columns[None, :]
    cell_mask = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + cells, mask=cell_mask, other=0.0).to(DOT_DTYPE)
    positions = context_len + queries
    score_scale = SCALE_LOG2
    v_scale = 1.0
    if IS_FP8:
        score_scale = SCALE_LOG2 * tl.load(kv_scales_ptr)
        v_scale = tl.load(kv_scales_ptr + 1)
    table_row_ptr = page_table_ptr + request.to(tl.int64) * table_width
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # page ids are read one block ahead, so that the K/V loads can be pipelined
    pages = _find_pages(table_row_ptr, start, stop, PAGE_SIZE, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        k, v = _load_block(
            kv_pages_ptr,
            pages,
            block,
            stop,
            kv_head,
            NUM_KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_D,
        )
        pages = _find_pages(table_row_ptr, block + BLOCK_N, stop, PAGE_SIZE, BLOCK_N)
        if IS_FP8:
            k = decode_e4m3(k)
            v = decode_e4m3(v)
        keys = block + tl.arange(0, BLOCK_N)
        seen = (keys < stop)[None, :]
        if IS_CAUSAL:
            seen = seen & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, _dot(q, k.to(DOT_DTYPE)) * score_scale, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(best - pivot)
        mass = mass * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + _dot(
            weights.to(q_ptr.dtype.element_ty).to(DOT_DTYPE), v.to(DOT_DTYPE)
        )
        best = new_best
    is_empty = mass == 0.0
    safe_mass = tl.where(is_empty, 1.0, mass)
    lse = tl.where(is_empty, float("-inf"), best + tl.log2(safe_mass))
    out_row = split.to(tl.int64) * num_rows * NUM_HEADS
    tl.store(lse_ptr + out_row + row_heads, lse, mask=is_row)
    result = acc * (v_scale / safe_mass)[:, None]
    tl.store(partial_ptr + out_row * HEAD_DIM + cells, result, mask=cell_mask)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_splits"])
def ragged_verify_reduce_kernel(
    partial_ptr,  # [num_splits, num_rows, NUM_HEADS, HEAD_DIM] float32
    lse_ptr,  # [num_splits, num_rows, NUM_HEADS] float32, base 2
    cu_query_lens_ptr,  # [num_requests + 1] int32
    context_lens_ptr,  # [num_requests] int32
    num_rows,
    num_requests,
    num_splits,
    out_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM]; zeros on padding rows
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    head_mask = heads < NUM_HEADS
    row_heads = row * NUM_HEADS + heads
    cells = row_heads[:, None] * HEAD_DIM + columns[None, :]
    mask = head_mask[:, None] & (columns < HEAD_DIM)[None, :]
    num_real = tl.load(cu_query_lens_ptr + num_requests)
    used_splits = 0
    if row < num_real:
        # request of a row: the tile search with tiles of one row, without the per-request surplus
        low = 0
        high = num_requests
        while low < high:
            middle = (low + high) // 2
            if tl.load(cu_query_lens_ptr + middle + 1) <= row:
                low = middle + 1
            else:
                high = middle
        context_len = tl.load(context_lens_ptr + low)
        query_len = tl.load(cu_query_lens_ptr + low + 1) - tl.load(cu_query_lens_ptr + low)
        kv_span = context_len + query_len - _first_visible(context_len, WINDOW, SPLIT_ALIGN)
        used_splits = tl.cdiv(kv_span, _split_len(kv_span, num_splits, SPLIT_ALIGN))
    best = tl.full([BLOCK_H], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    stride = num_rows.to(tl.int64) * NUM_HEADS
    for split in range(0, used_splits):
        lse = tl.load(lse_ptr + split * stride + row_heads, mask=head_mask, other=float("-inf"))
        part = tl.load(partial_ptr + split * stride * HEAD_DIM + cells, mask=mask, other=0.0)
        new_best = tl.maximum(best, lse)
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - pivot)
        weight = tl.exp2(lse - pivot)
        acc = acc * decay[:, None] + part * weight[:, None]
        mass = mass * decay + weight
        best = new_best
    result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(out_ptr + cells, result.to(out_ptr.dtype.element_ty), mask=mask)
