# SPDX-License-Identifier: Apache-2.0
"""Ragged paged attention against a row-by-row reference, on enumerated ragged cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trtllm_dspark.ops import native_attention
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


@pytest.fixture(params=["native", "torch"])
def backend(request, monkeypatch):
    """Both ways of attending on a CPU; the native one where a C compiler is at hand."""
    if request.param == "torch":
        monkeypatch.setattr(native_attention, "can_run", lambda q, kv_pages: False)
    elif not native_attention.can_run(torch.zeros(1, 1, 32), torch.zeros(1, 1, 2, 1, 32)):
        pytest.skip("no C compiler on this machine")
    return request.param


def make_batch(plan, num_rows):
    """The parts of a batch that attention reads."""
    return RaggedBatch(
        positions=torch.zeros(num_rows, dtype=torch.long),
        slots=torch.zeros(num_rows, dtype=torch.long),
        cu_query_lens=torch.from_numpy(plan.cu_query_lens),
        context_lens=torch.from_numpy(plan.context_lens),
        page_table=torch.from_numpy(plan.page_table),
        page_size=PAGE,
        is_causal=plan.is_causal,
        plan=plan,
    )


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
    backend, query_lens, context_lens, heads, kv_heads, is_causal, window
):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        shape = dict(heads=heads, kv_heads=kv_heads, dim=32, dtype=dtype)
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
        padded = torch.cat([q, torch.full((3, heads, 32), 5.0, dtype=dtype)])
        batch = make_batch(plan, len(padded))
        got = ragged_verify_attention(padded, pages, batch, 0.25)
        expected = reference(
            q, rows, query_lens, context_lens, is_causal=is_causal, window=window, scale=0.25
        )
        torch.testing.assert_close(got[: len(q)].double(), expected, atol=tolerance, rtol=tolerance)
        assert not got[len(q) :].any(), "padding rows return zeros"


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_size_is_attended_by_the_native_kernel(dim, dtype):
    lens, contexts = np.array([3, 1], np.int32), np.array([6, 9], np.int32)
    shape = dict(heads=6, kv_heads=2, dim=dim, dtype=dtype)
    q, pages, table, rows = make_case(lens, contexts, **shape)
    if not native_attention.can_run(q, pages):
        pytest.skip("no C compiler on this machine")
    cu = np.array([0, 3, 4], np.int32)
    plan = plan_attention(cu, contexts, table, PAGE, q_per_kv=3, dtype=dtype)
    got = native_attention.run(q, pages, plan, 0.25)
    expected = reference(q, rows, lens, contexts, is_causal=True, window=0, scale=0.25)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_natively_attended_row_has_the_same_bits_alone_and_in_any_company(dtype):
    lens, contexts = [5, 1, 8, 2], [9, 30, 3, 0]
    q, pages, table, _ = make_case(lens, contexts, heads=6, kv_heads=2, dim=64, dtype=dtype)
    if not native_attention.can_run(q, pages):
        pytest.skip("no C compiler on this machine")
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    options = dict(q_per_kv=3, dtype=dtype)
    whole_plan = plan_attention(cu, np.array(contexts, np.int32), table, PAGE, **options)
    whole = native_attention.run(q, pages, whole_plan, 0.125)
    for request, (count, context) in enumerate(zip(lens, contexts, strict=True)):
        for i in range(count):
            row = int(cu[request]) + i
            alone = plan_attention(
                np.array([0, 1], np.int32),
                np.array([context + i], np.int32),
                table[request : request + 1],
                PAGE,
                **options,
            )
            got = native_attention.run(q[row : row + 1], pages, alone, 0.125)
            assert torch.equal(got[0], whole[row]), (request, i)


def test_numbers_that_are_none_are_not_hidden_by_the_native_kernel():
    q, pages, table, _ = make_case([1], [5], heads=2, kv_heads=2, dim=32, dtype=torch.float32)
    if not native_attention.can_run(q, pages):
        pytest.skip("no C compiler on this machine")
    pages[table[0, 0], 2, 0] = float("nan")
    plan = plan_attention(
        np.array([0, 1], np.int32), np.array([5], np.int32), table, PAGE, q_per_kv=1, dtype=q.dtype
    )
    assert native_attention.run(q, pages, plan, 0.125).isnan().all()


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
