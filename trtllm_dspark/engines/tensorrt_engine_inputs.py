# SPDX-License-Identifier: Apache-2.0
"""Steps of the engine protocol as the padded input arrays of an exported graph.

Pure numpy: which profile runs, which shapes it gets, what padding holds. Padding rows write to the
scratch page, padding requests have no rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.engines.build_profiles import EngineLimits, ceiling_index
from trtllm_dspark.engines.protocol import DrafterStep, TargetStep
from trtllm_dspark.ops.ragged import flatten_slots
from trtllm_dspark.types import SCRATCH_PAGE, IntArray

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class GraphKey:
    """What fixes every shape of one call, hence one CUDA graph."""

    profile: int
    query_len: int
    """Length of query_offsets; 0 for drafter calls."""
    table_width: int
    context_rows: int = 0
    """Drafter calls only."""


@dataclass(frozen=True)
class ContextRows:
    """New drafter-context rows with the slots they go to; the taps stay in engine memory."""

    positions: IntArray
    """[C]"""
    slots: np.ndarray
    """[C] int64"""


NO_ROWS = ContextRows(np.zeros(0, np.int32), np.zeros(0, np.int64))


def target_key(step: TargetStep, limits: EngineLimits, *, exact_shapes: bool) -> GraphKey:
    """Key of a target step: its rung, and where lengths cost time (`exact_shapes`) their class.

    Kernels read lengths from device memory, so that with plugins the rung alone is the key. The
    function bodies pay for padding: queries are D or rung rows long, tables a power of two wide.
    """
    profile = ceiling_index(limits.rungs, step.rung, "rung")
    if not exact_shapes:
        return GraphKey(profile, step.rung, limits.max_table_width)
    longest = int(np.diff(step.cu_query_lens).max(initial=1))
    short = limits.short_query_len(step.rung)
    return GraphKey(
        profile, short if longest <= short else step.rung, table_width(step.page_table, limits)
    )


def table_width(page_table: IntArray, limits: EngineLimits) -> int:
    """Columns that run: the next power of two, the engine's widest at most."""
    used = max(1, page_table.shape[1])
    width = 1 << (used - 1).bit_length()
    ceiling_index((limits.max_table_width,), used, "page table columns")
    return min(width, limits.max_table_width)


def target_inputs(step: TargetStep, key: GraphKey, limits: EngineLimits) -> Arrays:
    """Input arrays of one target call (pages are bound apart), in the graph's dtypes."""
    requests = limits.requests_on(step.rung)
    return {
        "token_ids": _padded(step.token_ids, step.rung),
        "positions": _padded(step.positions, step.rung),
        "slots": flatten_slots(
            _padded(step.positions, step.rung),
            step.cu_query_lens,
            step.page_table,
            limits.page_size,
        ),
        "cu_query_lens": _padded(
            step.cu_query_lens, requests + 1, fill=int(step.cu_query_lens[-1])
        ),
        "context_lens": _padded(step.context_lens, requests),
        "page_table": padded_table(step.page_table, requests, key.table_width),
        "query_offsets": np.arange(key.query_len, dtype=np.int32),
        "logit_rows": _padded(step.logit_rows, limits.logit_rows_on(step.rung)),
    }


def context_rows(
    positions: IntArray, cu_row_lens: IntArray, page_table: IntArray, page_size: int
) -> ContextRows:
    """Slots of new context rows from their requests' pages."""
    slots = flatten_slots(positions, cu_row_lens, page_table, page_size)
    return ContextRows(positions.astype(np.int32), slots)


def fits_drafting(num_requests: int, num_rows: int, limits: EngineLimits) -> bool:
    """Whether a drafting call of R requests can take these context rows along."""
    bucket = limits.request_buckets[
        ceiling_index(limits.request_buckets, num_requests, "num_requests")
    ]
    return num_rows <= bucket * (limits.num_drafts + 1)


def drafting_key(step: DrafterStep, num_rows: int, limits: EngineLimits) -> GraphKey:
    """Key of a drafting call that also appends `num_rows` context rows."""
    index = ceiling_index(limits.request_buckets, len(step.anchor_ids), "num_requests")
    most = limits.request_buckets[index] * (limits.num_drafts + 1)
    rows = most if num_rows else 1
    return GraphKey(index, 0, table_width(step.page_table, limits), rows)


def append_key(num_rows: int, limits: EngineLimits) -> GraphKey:
    """Key of a call that only appends context rows."""
    index = ceiling_index(limits.rungs, num_rows, "context rows")
    block_pages = max(1, math.ceil(limits.block_len / limits.page_size))
    return GraphKey(len(limits.request_buckets), 0, block_pages, limits.rungs[index])


def drafting_inputs(
    step: DrafterStep, rows: ContextRows, key: GraphKey, limits: EngineLimits
) -> Arrays:
    """Input arrays of a drafting call; taps and pages are bound apart."""
    requests = limits.request_buckets[key.profile]
    return {
        **_row_inputs(rows, key, limits),
        "anchor_ids": _padded(step.anchor_ids, requests),
        "anchor_positions": _padded(step.anchor_positions, requests),
        "page_table": padded_table(step.page_table, requests, key.table_width),
    }


def append_inputs(rows: ContextRows, key: GraphKey, limits: EngineLimits) -> Arrays:
    """Input arrays of a context append: its one block lies on the scratch page."""
    return {
        **_row_inputs(rows, key, limits),
        "anchor_ids": np.zeros(1, np.int32),
        "anchor_positions": np.zeros(1, np.int32),
        "page_table": padded_table(np.zeros((1, 0), np.int32), 1, key.table_width),
    }


def _row_inputs(rows: ContextRows, key: GraphKey, limits: EngineLimits) -> Arrays:
    slots = np.full(key.context_rows, SCRATCH_PAGE * limits.page_size, np.int64)
    slots[: len(rows.slots)] = rows.slots
    return {"row_positions": _padded(rows.positions, key.context_rows), "row_slots": slots}


def padded_table(page_table: IntArray, num_requests: int, width: int) -> IntArray:
    """[num_requests, width] with the scratch page where the table says nothing."""
    table = np.full((num_requests, width), SCRATCH_PAGE, np.int32)
    rows, columns = page_table.shape
    table[:rows, :columns] = page_table
    return table


def _padded(values: IntArray, size: int, fill: int = 0) -> IntArray:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
