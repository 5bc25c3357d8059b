# SPDX-License-Identifier: Apache-2.0
"""Random paged batches on the device, with host copies of their lengths and page table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PagedRequests:
    """R requests that own shuffled pages; page 0 is the scratch page."""

    query_lens: np.ndarray
    context_lens: np.ndarray
    page_table: np.ndarray
    num_pages: int
    page_size: int

    @property
    def cu_query_lens(self) -> np.ndarray:
        """[R+1] int32 prefix sums."""
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    @property
    def num_rows(self) -> int:
        """Real rows."""
        return int(self.query_lens.sum())

    def positions(self) -> np.ndarray:
        """[N] int64 absolute positions of the new rows."""
        parts = [c + np.arange(q) for c, q in zip(self.context_lens, self.query_lens, strict=True)]
        return np.concatenate([*parts, np.zeros(0)]).astype(np.int64)

    def slots(self) -> np.ndarray:
        """[N] int64 slots of the new rows."""
        requests = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        positions = self.positions()
        pages = self.page_table[requests, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size


def lay_out_requests(
    query_lens: list[int], context_lens: list[int], page_size: int, seed: int
) -> PagedRequests:
    """Give every request the pages it needs, in shuffled order."""
    lens = np.array(query_lens, np.int64) + np.array(context_lens, np.int64)
    pages_per = -(-lens // page_size)
    num_pages = int(pages_per.sum()) + 1
    ids = np.random.default_rng(seed).permutation(num_pages - 1).astype(np.int32) + 1
    table = np.zeros((len(lens), max(int(pages_per.max(initial=0)), 1)), np.int32)
    used = 0
    for request, count in enumerate(pages_per):
        table[request, :count] = ids[used : used + count]
        used += int(count)
    return PagedRequests(
        np.array(query_lens, np.int32),
        np.array(context_lens, np.int32),
        table,
        num_pages,
        page_size,
    )


def random_pages(
    batch: PagedRequests, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Pages filled with noise, page by page group so that float32 temporaries stay small."""
    shape = (batch.num_pages, batch.page_size, 2, kv_heads, dim)
    pages = torch.empty(shape, dtype=dtype, device=device)
    step = max((64 << 20) // (pages[0].numel() * 4), 1)
    for first in range(0, batch.num_pages, step):
        part = pages[first : first + step]
        part.copy_(torch.randn(part.shape, device=device))
    return pages
