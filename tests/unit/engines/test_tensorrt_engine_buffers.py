# SPDX-License-Identifier: Apache-2.0
"""Sizes, offsets, pools and files of an engine's tensors, on paper."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trtllm_dspark.engines.build_profiles import EngineLimits, drafter_profiles, target_profiles
from trtllm_dspark.engines.tensorrt_engine_buffers import (
    TensorSpec,
    is_in_place,
    largest_shape,
    locate_profile,
    page_specs,
    plan_staging,
    pool_of,
    split_rows,
    staging_bytes,
    write_inputs,
)
from trtllm_dspark.errors import EngineError

LIMITS = EngineLimits((1, 2, 4, 8, 16, 32), (1, 2, 4), 3, 3, 40, 4, 41)
TARGET, DRAFTER = target_profiles(LIMITS), drafter_profiles(LIMITS, 96)


def spec(name: str, dtype: str = "INT32", shape=(-1,), is_input: bool = True) -> TensorSpec:
    return TensorSpec(name, dtype, shape, is_input)


@pytest.mark.parametrize(
    "tensor,profiles,shape",
    [
        (spec("token_ids"), TARGET, (32,)),
        (spec("cu_query_lens"), TARGET, (5,)),
        (spec("page_table", shape=(-1, -1)), TARGET, (4, 11)),
        (spec("logits", "FLOAT", (-1, 7), False), TARGET, (16, 7)),
        (spec("taps", "BF16", (-1, 96), False), TARGET, (32, 96)),
        (spec("taps", "BF16", (-1, 96)), DRAFTER, (32, 96)),
        (spec("token_ids", shape=(-1, 3), is_input=False), DRAFTER, (4, 3)),
        (spec("confidence_logits", "FLOAT", (-1, 3), False), DRAFTER, (4, 3)),
    ],
)
def test_a_buffer_holds_the_largest_call_of_any_profile(tensor, profiles, shape):
    assert largest_shape(tensor, profiles) == shape


@pytest.mark.parametrize("tensor", [spec("oddity"), spec("oddity", is_input=False)])
def test_a_tensor_that_no_profile_knows_is_refused_by_name(tensor):
    with pytest.raises(EngineError, match="'oddity'"):
        largest_shape(tensor, TARGET)


def test_an_unknown_element_type_is_refused_by_name():
    with pytest.raises(EngineError, match="FP4"):
        _ = spec("taps", "FP4").element


def test_host_inputs_share_one_block_without_overlap_and_device_inputs_stay_out():
    specs = [
        spec("taps", "BF16", (-1, 96)),
        spec("row_slots", "INT64"),
        spec("anchor_ids"),
        spec("page_table", shape=(-1, -1)),
        spec("kv_pages_0", "BF16", (-1, 4, 2, 2, 8)),
        spec("token_ids", shape=(-1, 3), is_input=False),
    ]
    staged = plan_staging(specs, DRAFTER, ["kv_pages_0"])
    assert list(staged) == ["row_slots", "anchor_ids", "page_table"]
    assert [s.offset for s in staged.values()] == [0, 256, 512]
    assert staged["row_slots"].element == np.int64
    assert staged["row_slots"].capacity_bytes == 32 * 8
    assert staged["page_table"].capacity_bytes == 4 * 11 * 4
    assert staging_bytes(staged) == 768
    assert staging_bytes({}) > 0


def test_arrays_are_written_to_their_places_in_the_engines_types_and_unknown_ones_left_out():
    staged = plan_staging([spec("row_slots", "INT64"), spec("anchor_ids")], DRAFTER, [])
    block = np.zeros(staging_bytes(staged), np.uint8)
    arrays = {
        "anchor_ids": np.array([7, 8], np.int64),
        "row_slots": np.array([5], np.int32),
        "query_offsets": np.arange(3),
    }
    assert write_inputs(block, arrays, staged) == 256 + 2 * 4
    assert block[256:264].view(np.int32).tolist() == [7, 8]
    assert block[:8].view(np.int64).tolist() == [5] and not block[8:256].any()
    assert write_inputs(block, {}, staged) == 0


def test_pages_are_found_in_layer_order_with_the_pools_size():
    shape = (-1, 4, 2, 2, 8)
    specs = [spec(f"kv_pages_{i}", "BF16", shape) for i in (1, 10, 0)]
    found = page_specs(specs, 41)
    assert [(p.name, p.shape[0]) for p in found] == [("kv_pages_0", 41), ("kv_pages_1", 41)]


def test_pages_are_all_in_place_or_none():
    both = {"new_kv_pages_0": "kv_pages_0", "new_kv_pages_1": "kv_pages_1"}
    assert is_in_place(both, 2) and not is_in_place({}, 2)
    with pytest.raises(EngineError, match="all pages in place or none"):
        is_in_place({"new_kv_pages_0": "kv_pages_1"}, 2)
    with pytest.raises(EngineError, match="all pages in place or none"):
        is_in_place(dict(list(both.items())[:1]), 2)


def test_two_pools_take_turns_so_that_each_call_reads_what_the_last_one_wrote():
    turns = [pool_of(call, False) for call in range(4)]
    assert turns == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(turns))
    assert {pool_of(call, True) for call in range(4)} == {(0, 0)}


def test_a_profile_is_in_the_one_file_or_is_a_file_of_its_own():
    assert locate_profile(5, 1) == (0, 5)
    assert locate_profile(5, 6) == (5, 0)


@pytest.mark.parametrize("num_rows,lens", [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_rows_are_split_into_calls_that_fit(num_rows, lens):
    parts = split_rows(num_rows, 4)
    assert [part.stop - part.start for part in parts] == lens
    assert sum(lens) == num_rows
