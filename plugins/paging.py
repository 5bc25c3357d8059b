# SPDX-License-Identifier: Apache-2.0
"""Host-side checks of page tables and ragged lengths: kernels trust what passed here.

Knows numpy only. Called by `plan_*`; nothing here runs inside a captured step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]


def check_ragged_lengths(cu_query_lens: Ints, context_lens: Ints, num_rows: int) -> None:
    """Refuse prefix sums that do not start at 0, decrease, or run past num_rows (with padding)."""
    if len(cu_query_lens) != len(context_lens) + 1:
        raise ValueError(
            f"cu_query_lens has {len(cu_query_lens)} entries for {len(context_lens)} requests: "
            "there must be one more than there are context_lens"
        )
    if int(cu_query_lens[0]) != 0 or (np.diff(cu_query_lens) < 0).any():
        raise ValueError(
            f"cu_query_lens {cu_query_lens.tolist()} are no prefix sums: they must start at 0 and "
            "never decrease"
        )
    if int(cu_query_lens[-1]) > num_rows:
        raise ValueError(
            f"cu_query_lens ends at {int(cu_query_lens[-1])} but the batch has {num_rows} rows: "
            "pad the rows up to a rung at least that long"
        )
    if (context_lens < 0).any():
        raise ValueError(f"context_lens {context_lens.tolist()} must not be negative")


def check_page_table(page_table: Ints, kv_lens: Ints, *, num_pages: int, page_size: int) -> None:
    """Refuse page ids outside the pool and tables too narrow for a request's K/V rows."""
    needed = -(-kv_lens.astype(np.int64) // page_size)
    if page_table.ndim != 2 or page_table.shape[0] != len(kv_lens):
        raise ValueError(
            f"page_table has shape {page_table.shape}: it must be [{len(kv_lens)}, P], pages "
            "per request"
        )
    if needed.size and int(needed.max()) > page_table.shape[1]:
        request = int(needed.argmax())
        raise ValueError(
            f"request {request} has {int(kv_lens[request])} K/V rows, {int(needed[request])} pages "
            f"of {page_size}, but its page table has {page_table.shape[1]} columns: widen the table"
        )
    if page_table.size and not 0 <= int(page_table.min()) <= int(page_table.max()) < num_pages:
        raise ValueError(
            f"page ids run from {int(page_table.min())} to {int(page_table.max())}: they must "
            f"lie in 0..{num_pages - 1}, the pages of the pool"
        )


def check_slots(slots: Ints, *, num_pages: int, page_size: int) -> None:
    """Refuse slots outside the pool (slot = page id · page_size + offset)."""
    limit = num_pages * page_size
    if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < limit:
        raise ValueError(
            f"slots run from {int(slots.min())} to {int(slots.max())}: they must lie in "
            f"0..{limit - 1} ({num_pages} pages of {page_size} rows)"
        )
