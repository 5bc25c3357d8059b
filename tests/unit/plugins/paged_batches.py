# SPDX-License-Identifier: Apache-2.0
"""Ragged paged batches for kernel tests, and float64 attention that walks row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

POISON = float("nan")


@dataclass(frozen=True)
class PagedBatch:
    """One call: host lengths, a shuffled page table and pages whose unused rows are poisoned."""

    query_lens: list[int]
    context_lens: list[int]
    q: torch.Tensor
    kv_pages: torch.Tensor
    page_table: np.ndarray
    num_rows: int

    @property
    def cu_query_lens(self) -> np.ndarray:
        """[R+1] int32 prefix sums."""
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)


def make_paged_batch(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page_size: int = 8,
    padding: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_columns: int = 1,
) -> PagedBatch:
    """Random rows; every request owns its pages, ids are shuffled, all unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    lens = [a + b for a, b in zip(query_lens, context_lens, strict=True)]
    pages_per = [-(-n // page_size) for n in lens]
    num_pages = sum(pages_per) + 2
    ids = (np.random.default_rng(seed).permutation(num_pages - 1) + 1).tolist()
    table = np.zeros((len(lens), max(pages_per, default=0) + spare_columns), np.int32)
    pages = torch.full((num_pages, page_size, 2, kv_heads, dim), POISON)
    for request, (count, length) in enumerate(zip(pages_per, lens, strict=True)):
        table[request, :count] = [ids.pop() for _ in range(count)]
        for position in range(length):
            page = table[request, position // page_size]
            pages[page, position % page_size] = torch.randn(2, kv_heads, dim, generator=generator)
    num_rows = sum(query_lens) + padding
    q = torch.randn(num_rows, heads, dim, generator=generator)
    return PagedBatch(query_lens, context_lens, q.to(dtype), pages.to(dtype), table, num_rows)


def gather_rows(batch: PagedBatch, request: int, pages: torch.Tensor) -> torch.Tensor:
    """K/V rows of a request, [length, 2, kv_heads, dim]."""
    length = batch.query_lens[request] + batch.context_lens[request]
    ids = torch.from_numpy(batch.page_table[request].astype(np.int64))
    return pages[ids].flatten(0, 1)[:length]


def attend(
    batch: PagedBatch,
    scale: float,
    *,
    is_causal: bool = True,
    window: int = 0,
    pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in float64, one query row and head at a time; padding rows are zeros."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    pages = (batch.kv_pages if pages is None else pages).double()
    group = batch.q.shape[1] // pages.shape[3]
    row = 0
    for request, query_len in enumerate(batch.query_lens):
        kv = gather_rows(batch, request, pages)
        for i in range(query_len):
            position = batch.context_lens[request] + i
            last = position if is_causal else len(kv) - 1
            first = max(position - window + 1, 0) if window else 0
            for head in range(batch.q.shape[1]):
                keys = kv[first : last + 1, 0, head // group]
                values = kv[first : last + 1, 1, head // group]
                weights = torch.softmax(keys @ batch.q[row, head].double() * scale, dim=0)
                out[row, head] = weights @ values
            row += 1
    return out
