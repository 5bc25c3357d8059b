# SPDX-License-Identifier: Apache-2.0
"""`kv_append_` in the interpreter against the torch reference; fp8 bytes against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from dspark_plugins.kernels.fp8 import decode_e4m3, encode_e4m3
from dspark_plugins.kv_append import KvAppendPlan, plan_kv_append, run_kv_append_

from tests.unit.plugins.paged_batches import POISON
from trtllm_dspark.ops.kv_append import HeadShape, kv_append_

PAGE_SIZE, NUM_PAGES = 4, 5
SLOTS = np.array([6, 7, 17, 4, 0, 0], np.int64)  # two requests, a page boundary, two padding rows


def make_rows(
    num_rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + dim)
    qkv = torch.randn(num_rows, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    angle = torch.rand(num_rows, dim // 2, generator=generator) * 6.0
    return qkv, torch.stack((angle.cos(), angle.sin()), dim=1)


def run_both(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    has_norm: bool = False,
    slots: np.ndarray = SLOTS,
    page_dtype: torch.dtype | None = None,
    kv_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, pages) of the kernel, then of the reference."""
    qkv, rope = make_rows(len(slots), heads, kv_heads, dim, dtype)
    norms = [torch.rand(dim).to(dtype) + 0.5 for _ in range(2)] if has_norm else [None, None]
    shape = (NUM_PAGES, PAGE_SIZE, 2, kv_heads, dim)
    pages = torch.full(shape, POISON, dtype=dtype).to(page_dtype or dtype)
    expected_pages = pages.to(dtype, copy=True)
    plan = plan_kv_append(
        KvAppendPlan(len(slots), heads, kv_heads, dim),
        slots,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )
    q = torch.full((len(slots), heads, dim), POISON, dtype=dtype)
    ids = torch.from_numpy(slots)
    run_kv_append_(
        plan, pages, qkv, rope, ids, q, q_norm=norms[0], k_norm=norms[1], kv_scales=kv_scales
    )
    expected_q = kv_append_(
        expected_pages,
        qkv,
        HeadShape(heads, kv_heads, dim),
        rope,
        ids,
        q_norm=norms[0],
        k_norm=norms[1],
    )
    return q, pages, expected_q, expected_pages


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 16), (3, 1, 64), (9, 3, 64), (8, 2, 128), (8, 1, 16), (40, 8, 8), (2, 1, 24)],
)
def test_rows_are_normalised_rotated_and_scattered(
    heads: int, kv_heads: int, dim: int, has_norm: bool
) -> None:
    q, pages, expected_q, expected_pages = run_both(heads, kv_heads, dim, has_norm=has_norm)
    torch.testing.assert_close(q, expected_q, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(pages, expected_pages, rtol=2e-6, atol=2e-6, equal_nan=True)


EVERY_SLOT = np.random.default_rng(0).permutation(NUM_PAGES * PAGE_SIZE)


@pytest.mark.parametrize(
    "slots", [np.array([6]), np.array([3, 4]), EVERY_SLOT], ids=["one row", "boundary", "full pool"]
)
def test_one_row_a_page_boundary_and_a_full_pool(slots: np.ndarray) -> None:
    q, pages, expected_q, expected_pages = run_both(3, 1, 16, slots=slots.astype(np.int64))
    torch.testing.assert_close(q, expected_q, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(pages, expected_pages, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert int(pages.isfinite().all(dim=(2, 3, 4)).sum()) == len(slots)


def test_a_row_is_the_same_bit_for_bit_in_any_arrangement() -> None:
    qkv, rope = make_rows(4, 4, 2, 16, torch.float32)
    order = torch.tensor([2, 0, 3, 1, 0])  # the last one is padding, on the scratch page
    slots = torch.tensor([6, 7, 17, 4])
    moved = slots[order].index_fill(0, torch.tensor([4]), 0)
    results = []
    for rows, ids in ((slice(None), slots), (order, moved)):
        pages = torch.full((NUM_PAGES, PAGE_SIZE, 2, 2, 16), POISON)
        q = torch.full((len(ids), 4, 16), POISON)
        run_kv_append_(
            KvAppendPlan(len(ids), 4, 2, 16), pages, qkv[rows], rope[rows].contiguous(), ids, q
        )
        results.append((q, pages))
    (q, pages), (moved_q, moved_pages) = results
    assert torch.equal(moved_q, q[order])
    assert torch.equal(moved_pages[1:].nan_to_num(9.0), pages[1:].nan_to_num(9.0))


def test_context_rows_without_queries_are_the_keys_and_values_alone() -> None:
    # the drafter's context rows: num_heads = 0, k_norm for both norms
    qkv, rope = make_rows(len(SLOTS), 2, 2, 16, torch.float32)
    k_norm = torch.rand(16) + 0.5
    pages = [torch.full((NUM_PAGES, PAGE_SIZE, 2, 2, 16), POISON) for _ in range(2)]
    ids = torch.from_numpy(SLOTS)
    kv = qkv[:, 2 * 16 :].contiguous()
    for target, rows, heads in ((pages[0], qkv, 2), (pages[1], kv, 0)):
        q = torch.empty(len(SLOTS), heads, 16)
        plan = KvAppendPlan(len(SLOTS), heads, 2, 16)
        run_kv_append_(plan, target, rows, rope, ids, q, q_norm=k_norm, k_norm=k_norm)
    assert torch.equal(pages[0].nan_to_num(9.0), pages[1].nan_to_num(9.0))


def test_slots_that_no_row_names_keep_their_bits() -> None:
    _, pages, _, _ = run_both(4, 2, 16)
    touched = torch.zeros(NUM_PAGES * PAGE_SIZE, dtype=torch.bool)
    touched[torch.from_numpy(SLOTS)] = True
    flat = pages.view(NUM_PAGES * PAGE_SIZE, -1)
    assert flat[~touched].isnan().all()
    assert flat[touched].isfinite().all()


@pytest.mark.parametrize("has_norm", [False, True])
def test_half_precision_rounds_where_the_reference_rounds(has_norm: bool) -> None:
    q, pages, expected_q, expected_pages = run_both(
        4, 2, 16, dtype=torch.float16, has_norm=has_norm
    )
    # a float32 product may differ in its last bit, which moves few roundings to float16
    assert (q != expected_q).float().mean() < 0.02
    torch.testing.assert_close(q, expected_q, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pages, expected_pages, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_bfloat16_rows_stay_within_their_roundings() -> None:
    # the interpreter truncates to bfloat16 where the GPU rounds
    q, _, expected_q, _ = run_both(4, 2, 16, dtype=torch.bfloat16, has_norm=True)
    torch.testing.assert_close(q, expected_q, rtol=2**-6, atol=3e-2)


def test_values_pass_through_unrotated_bit_for_bit() -> None:
    _, pages, _, expected_pages = run_both(4, 2, 16, dtype=torch.float16, has_norm=True)
    torch.testing.assert_close(
        pages[:, :, 1], expected_pages[:, :, 1], rtol=0, atol=0, equal_nan=True
    )


def test_fp8_pages_hold_the_scaled_rows_as_torch_would_round_them() -> None:
    scales = torch.tensor([0.25, 0.0078125])
    _, pages, _, expected = run_both(
        4, 2, 16, dtype=torch.float16, page_dtype=torch.float8_e4m3fn, kv_scales=scales
    )
    wanted = expected.float() / scales[None, None, :, None, None]
    wanted = wanted.clamp(-448, 448).to(torch.float8_e4m3fn)
    real = pages.view(-1, 2, 2, 16)[torch.from_numpy(SLOTS[:4])].float()
    same = wanted.view(-1, 2, 2, 16)[torch.from_numpy(SLOTS[:4])].float()
    torch.testing.assert_close(real[:, 1], same[:, 1], rtol=0, atol=0)
    assert (real[:, 0] != same[:, 0]).float().mean() < 0.02


def test_fp8_pages_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_scales is None"):
        run_both(4, 2, 16, page_dtype=torch.float8_e4m3fn)


def test_an_empty_batch_touches_nothing() -> None:
    q, pages, _, _ = run_both(4, 2, 16, slots=np.array([], np.int64))
    assert q.shape[0] == 0
    assert pages.isnan().all()


@pytest.mark.parametrize("slot", [-1, NUM_PAGES * PAGE_SIZE])
def test_slots_outside_the_pool_are_refused_on_the_host(slot: int) -> None:
    with pytest.raises(ValueError, match=r"they must lie in 0..19 \(5 pages of 4 rows\)"):
        run_both(4, 2, 16, slots=np.array([0, slot], np.int64))


@triton.jit
def _encode_kernel(x_ptr, byte_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, SIZE)
    tl.store(byte_ptr + lanes, encode_e4m3(tl.load(x_ptr + lanes)))


@triton.jit
def _decode_kernel(byte_ptr, x_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, SIZE)
    tl.store(x_ptr + lanes, decode_e4m3(tl.load(byte_ptr + lanes)))


def test_every_fp8_byte_decodes_as_in_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = torch.empty(256, dtype=torch.float16)
    _decode_kernel[(1,)](codes, decoded, SIZE=256)
    expected = codes.view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(decoded.float()[is_number], expected[is_number])


def test_fp8_encoding_rounds_to_even_and_saturates_as_torch_does() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()].sort().values
    halfway = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, halfway, halfway * 1.00001, halfway * 0.99999, torch.randn(1000) * 80))
    x = torch.cat((x, torch.tensor([1e9, -1e9, 449.0]), torch.zeros(4096)))[:4096]
    codes = torch.empty(4096, dtype=torch.uint8)
    _encode_kernel[(1,)](x, codes, SIZE=4096)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, expected)
