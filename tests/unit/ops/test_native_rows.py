# SPDX-License-Identifier: Apache-2.0
"""The native row kernels against torch's operators: same numbers, same rounding, any company."""

import ctypes
import re

import pytest
import torch

from trtllm_dspark.ops import native_library, native_rows
from trtllm_dspark.ops.kv_append import HeadShape, apply_rope, kv_append_
from trtllm_dspark.ops.norm import rms_norm
from trtllm_dspark.ops.sample_tokens import block_sums
from trtllm_dspark.ops.swiglu import swiglu

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [HeadShape(9, 3, 64), HeadShape(4, 4, 32), HeadShape(8, 1, 128)]


@pytest.fixture(autouse=True)
def compiled():
    if native_library.library() is None:
        pytest.skip("no C compiler on this machine")
    torch.manual_seed(0)


def by_torch(function, *arguments, **options):
    """The same call without the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "library", lambda: None)
        return function(*arguments, **options)


def assert_same(got, expected):
    """Equal up to the order of one sum: one unit in the last place."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    unit = 2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(got.float(), expected.float(), rtol=unit, atol=2.0**-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (37, 576), (300, 1024), (3, 5, 64)])
def test_rms_norm_is_torchs(shape, dtype):
    x, weight = torch.randn(shape).to(dtype) * 5, torch.randn(shape[-1]).to(dtype)
    assert_same(rms_norm(x, weight, 1e-5), by_torch(rms_norm, x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_reads_rows_that_do_not_lie_side_by_side(dtype):
    x, weight = torch.randn(6, 5, 64).to(dtype)[:, 1:3], torch.randn(64).to(dtype)
    assert_same(rms_norm(x, weight, 1e-5), by_torch(rms_norm, x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (41, 3072), (2, 3, 64)])
def test_swiglu_is_torchs(shape, dtype):
    x = torch.randn(shape).to(dtype) * 8
    assert_same(swiglu(x), by_torch(swiglu, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_holds_at_the_ends_of_the_number_range(dtype):
    gate = [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 3e38, -3e38, float("inf"), float("nan")]
    x = torch.tensor([gate + [1.0] * 6 + [1.0] * 16]).to(dtype)
    assert_same(swiglu(x)[:, :9], by_torch(swiglu, x)[:, :9])
    assert swiglu(x)[0, 9].isnan()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_rotated_and_keys_and_values_land_in_their_slots(dtype, shape, has_norm):
    rows = 23
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(rows, heads * shape.head_dim).to(dtype)
    angles = torch.rand(rows, shape.head_dim // 2) * 6
    rope = torch.stack((angles.cos(), angles.sin()), dim=1)
    slots = torch.randperm(64)[:rows]
    norms = {}
    if has_norm:
        norms = {n: torch.randn(shape.head_dim).to(dtype) for n in ("q_norm", "k_norm")}
    pages = torch.full((4, 16, 2, shape.num_kv_heads, shape.head_dim), 7.0, dtype=dtype)
    other = pages.clone()
    q = kv_append_(pages, qkv, shape, rope, slots, **norms)
    assert_same(q, by_torch(kv_append_, other, qkv, shape, rope, slots, **norms))
    assert_same(pages, other)
    free = torch.ones(64, dtype=torch.bool)
    free[slots] = False
    assert (pages.view(64, -1)[free] == 7).all(), "no other slot is touched"


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated_by_themselves(dtype):
    x, rope = torch.randn(9, 4, 64).to(dtype), torch.randn(9, 2, 32)
    assert_same(apply_rope(x, rope), by_torch(apply_rope, x, rope))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_in_any_company_and_on_any_number_of_threads(dtype):
    x, weight = torch.randn(200, 576).to(dtype), torch.randn(576).to(dtype)
    gate_up = torch.randn(200, 3072).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = rms_norm(x, weight, 1e-5), swiglu(gate_up)
        torch.set_num_threads(1)
        for row in (0, 1, 99, 199):
            at = slice(row, row + 1)
            assert torch.equal(rms_norm(x[at], weight, 1e-5), whole[0][at])
            assert torch.equal(swiglu(gate_up[at]), whole[1][at])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [1, 15, 512, 513, 5000])
def test_block_sums_are_double_sums(width):
    x = torch.rand(7, width)
    got = block_sums(x)
    parts = [part.double().sum(dim=1) for part in x.split(512, dim=1)]
    torch.testing.assert_close(got, torch.stack(parts, dim=1), rtol=1e-14, atol=0)
    torch.testing.assert_close(got, by_torch(block_sums, x), rtol=1e-14, atol=0)


def test_widths_that_do_not_fill_a_register_are_torchs_business():
    x = torch.randn(3, 20)
    assert torch.equal(rms_norm(x, x[0], 1e-5), by_torch(rms_norm, x, x[0], 1e-5))
    assert torch.equal(swiglu(x), by_torch(swiglu, x))


C_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


@pytest.mark.parametrize("name", native_rows.SIGNATURES)
def test_declared_parameters_are_those_of_the_c_function(name):
    source = (native_library.SOURCE_DIR / "decoder_rows.c").read_text()
    (parameters,) = re.findall(rf"^void {name}\(([^)]*)\)", source, re.MULTILINE)
    expected = [
        ctypes.POINTER(native_rows._RotateArguments)
        if "RotateArguments" in parameter
        else ctypes.c_void_p
        if "*" in parameter
        else C_TYPES[parameter.split()[0]]
        for parameter in parameters.split(",")
    ]
    assert list(native_rows.SIGNATURES[name]) == expected
