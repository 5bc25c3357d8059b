# SPDX-License-Identifier: Apache-2.0
"""Ragged paged attention against a row-by-row reference, on enumerated ragged cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trtllm_dspark.ops.attention import group_requests, plan_attention, ragged_verify_attention
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots

PAGE = 4


def make_case(query_lens, context_lens, *, heads, kv_heads, dim, dtype, seed=0):
    """Random pages with poison outside every request's rows, and the packed queries."""
    generator = torch.Generator().manual_seed(seed)
    kv_lens = np.array(context_lens) + np.array(query_lens)
    pages_each = -(-kv_lens // PAGE)
    total = int(pages_each.sum()) + 1
    order = np.random.default_rng(seed).permutation(np.arange(1, total))
    table = np.zeros((len(query_lens), max([*pages_each, 1])), np.int32)
    taken = 0
    for r, count in enumerate(pages_each):
        table[r, :count] = order[taken : taken + count]
        taken += count
    pages = torch.randn(total, PAGE, 2, kv_heads, dim, generator=generator).to(dtype)
    flat = pages.view(-1, 2, kv_heads, dim)
    owned = [
        torch.tensor([table[r, p // PAGE] * PAGE + p % PAGE for p in range(kv_lens[r])]).long()
        for r in range(len(query_lens))
    ]
    poison = torch.ones(len(flat), dtype=torch.bool)
    for slots in owned:
        poison[slots] = False
    flat[poison] = 1e4
    num_rows = int(sum(query_lens))
    q = torch.randn(num_rows, heads, dim, generator=generator).to(dtype)
    return q, pages, table, [flat[slots] for slots in owned]


def reference(q, rows_of, query_lens, context_lens, *, is_causal, window, scale):
    """One softmax per row and head, in float64."""
    heads = q.shape[1]
    out, start = torch.zeros(q.shape, dtype=torch.float64), 0
    for r, (n, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        keys, values = rows_of[r][:, 0].double(), rows_of[r][:, 1].double()
        group = heads // keys.shape[1]
        for i, h in itertools.product(range(n), range(heads)):
            position = context + i
            last = position + 1 if is_causal else context + n
            first = max(0, position + 1 - window) if window else 0
            k, v = keys[first:last, h // group], values[first:last, h // group]
            weights = torch.softmax(k @ q[start + i, h].double() * scale, dim=0)
            out[start + i, h] = weights @ v
        start += n
    return out


RAGGED = [
    ((1,), (0,)),
    ((1,), (7,)),
    ((3,), (5,)),
    ((1, 1, 1), (0, 3, 40)),
    ((3, 1, 4), (10, 7, 0)),
    ((8, 0, 2, 1), (1, 4, 3, 0)),
    ((4, 4), (4, 8)),
    ((40, 1, 33, 2), (2, 30, 0, 5)),
]


@pytest.mark.parametrize("query_lens,context_lens", RAGGED)
@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (6, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("is_causal,window", [(True, 0), (False, 0), (True, 3)])
def test_ragged_rows_equal_one_softmax_per_row(
    query_lens, context_lens, heads, kv_heads, is_causal, window
):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        shape = dict(heads=heads, kv_heads=kv_heads, dim=16, dtype=dtype)
        q, pages, table, rows = make_case(query_lens, context_lens, **shape)
        cu = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        contexts = np.array(context_lens, np.int32)
        plan = plan_attention(
            cu,
            contexts,
            table,
            PAGE,
            q_per_kv=heads // kv_heads,
            dtype=dtype,
            is_causal=is_causal,
            window=window,
        )
        padded = torch.cat([q, torch.full((3, heads, 16), 5.0, dtype=dtype)])
        batch = RaggedBatch(
            positions=torch.zeros(len(padded), dtype=torch.long),
            slots=torch.zeros(len(padded), dtype=torch.long),
            cu_query_lens=torch.from_numpy(cu),
            context_lens=torch.from_numpy(contexts),
            page_table=torch.from_numpy(table),
            page_size=PAGE,
            is_causal=is_causal,
            plan=plan,
        )
        got = ragged_verify_attention(padded, pages, batch, 0.25)
        expected = reference(
            q, rows, query_lens, context_lens, is_causal=is_causal, window=window, scale=0.25
        )
        torch.testing.assert_close(got[: len(q)].double(), expected, atol=tolerance, rtol=tolerance)
        assert not got[len(q) :].any(), "padding rows return zeros"


def test_every_request_with_rows_is_in_exactly_one_group():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lens = rng.integers(0, 50, 12)
        pages = rng.integers(1, 40, 12)
        groups = group_requests(lens, pages)
        members = sorted(m for group in groups for m in group)
        assert members == np.flatnonzero(lens > 0).tolist()
        for group in groups:
            if len(group) > 1:
                assert max(lens[group]) <= 32
                assert max(pages[group]) <= max(2 * min(pages[group]), min(pages[group]) + 2)


def test_slots_follow_the_page_table_and_padding_goes_to_the_scratch_page():
    cu = np.array([0, 3, 4], np.int32)
    table = np.array([[5, 2, 9], [7, 0, 0]], np.int32)
    positions = np.array([2, 3, 4, 0, 0, 0], np.int64)
    assert flatten_slots(positions, cu, table, PAGE).tolist() == [22, 23, 8, 28, 0, 0]
