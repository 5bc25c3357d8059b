# SPDX-License-Identifier: Apache-2.0
"""`select_drafts` on the device: top-K survivals under caps, and the packed rows that follow.

One program holds all R·γ survivals, position-major. The K-th largest value is found by bisection
over float bits (non-negative floats order like their bits); ties at that value go by (position,
request), which is the order of the tile. Nothing here reads anything but its arguments.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

MAX_SURVIVAL_BITS = tl.constexpr(0x3F800000)  # 1.0


@triton.jit
def _sum_all(x):
    """Sum of a two-dimensional tile."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _choose(bits, capacity):
    """int32 mask of the `capacity` largest entries > 0 of a position-major tile [γ, R]."""
    low = 0  # at least `capacity` entries are ≥ low, or low is 0
    high = MAX_SURVIVAL_BITS + 1  # fewer than `capacity` entries are ≥ high
    while low + 1 < high:
        middle = (low + high) // 2
        is_low = _sum_all((bits >= middle).to(tl.int32)) >= capacity
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    above = (bits > low).to(tl.int32)
    ties = ((bits == low) & (bits > 0)).to(tl.int32)
    ties_per_position = tl.sum(ties, axis=1)
    before = tl.cumsum(ties_per_position, axis=0) - ties_per_position
    rank = before[:, None] + tl.cumsum(ties, axis=1)  # 1-based among the ties
    return above | (ties & (rank <= capacity - _sum_all(above)).to(tl.int32))


@triton.jit(do_not_specialize=["num_requests", "rung"])
def select_drafts_kernel(
    survivals_ptr,  # [num_requests, NUM_DRAFTS] float32
    capacity_ptr,  # [1] int32
    caps_ptr,  # [num_requests] int32, −1 = absent
    anchor_ids_ptr,  # [num_requests] int32
    anchor_positions_ptr,  # [num_requests] int32
    draft_ids_ptr,  # [num_requests, NUM_DRAFTS] int32
    num_requests,
    rung,
    verify_lens_ptr,  # [num_requests] int32
    cu_query_lens_ptr,  # [num_requests + 1] int32
    token_ids_ptr,  # [rung] int32
    positions_ptr,  # [rung] int32
    row_requests_ptr,  # [rung] int32, −1 on padding rows
    NUM_DRAFTS: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    requests = tl.arange(0, BLOCK_REQUESTS)
    drafts = tl.arange(0, BLOCK_DRAFTS)
    in_batch = requests < num_requests
    caps = tl.load(caps_ptr + requests, mask=in_batch, other=-1)
    admissible = (drafts[:, None] < tl.minimum(caps, NUM_DRAFTS)[None, :]) & in_batch[None, :]
    cells = requests[None, :] * NUM_DRAFTS + drafts[:, None]
    survivals = tl.load(survivals_ptr + cells, mask=admissible, other=0.0)
    survivals = tl.where(survivals > 0.0, survivals, 0.0)  # −0 and NaN count as 0
    bits = tl.minimum(survivals.to(tl.int32, bitcast=True), MAX_SURVIVAL_BITS)
    chosen = _choose(bits, tl.maximum(tl.load(capacity_ptr), 0))

    verify_lens = tl.sum(chosen, axis=0)
    is_present = in_batch & (caps >= 0)
    query_lens = tl.where(is_present, verify_lens + 1, 0)
    ends = tl.cumsum(query_lens, axis=0)
    starts = ends - query_lens
    num_rows = tl.sum(query_lens, axis=0)
    tl.store(verify_lens_ptr + requests, verify_lens, mask=in_batch)
    tl.store(cu_query_lens_ptr + requests, starts, mask=in_batch)
    tl.store(cu_query_lens_ptr + num_requests, num_rows)

    for first in range(0, rung, BLOCK_ROWS):  # padding rows
        rows = first + tl.arange(0, BLOCK_ROWS)
        is_padding = (rows >= num_rows) & (rows < rung)
        tl.store(token_ids_ptr + rows, tl.zeros([BLOCK_ROWS], tl.int32), mask=is_padding)
        tl.store(positions_ptr + rows, tl.zeros([BLOCK_ROWS], tl.int32), mask=is_padding)
        tl.store(row_requests_ptr + rows, tl.full([BLOCK_ROWS], -1, tl.int32), mask=is_padding)

    positions = tl.load(anchor_positions_ptr + requests, mask=is_present, other=0)
    anchors = tl.load(anchor_ids_ptr + requests, mask=is_present, other=0)
    fits = is_present & (starts < rung)
    tl.store(token_ids_ptr + starts, anchors, mask=fits)
    tl.store(positions_ptr + starts, positions, mask=fits)
    tl.store(row_requests_ptr + starts, requests, mask=fits)
    rows = starts[None, :] + 1 + drafts[:, None]
    is_row = (chosen > 0) & is_present[None, :] & (rows < rung)
    ids = tl.load(draft_ids_ptr + cells, mask=is_row, other=0)
    tl.store(token_ids_ptr + rows, ids, mask=is_row)
    tl.store(positions_ptr + rows, positions[None, :] + 1 + drafts[:, None], mask=is_row)
    request_of_row = requests[None, :] + tl.zeros([BLOCK_DRAFTS, 1], tl.int32)
    tl.store(row_requests_ptr + rows, request_of_row, mask=is_row)
