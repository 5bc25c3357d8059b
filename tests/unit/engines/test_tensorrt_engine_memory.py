# SPDX-License-Identifier: Apache-2.0
"""Arrays over addresses: sizes, rows, lifetimes, and bits that only torch has a type for."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
import torch

from trtllm_dspark.engines.tensorrt_engine_exchange import as_tensor
from trtllm_dspark.engines.tensorrt_engine_memory import (
    Block,
    DeviceArray,
    as_floats,
    host_view,
    round_up,
)
from trtllm_dspark.errors import EngineError


def test_sizes_follow_from_shape_and_type_and_rows_are_the_first_ones():
    array = DeviceArray(4096, (5, 3), "BF16")
    assert array.num_bytes == 30 and array.rows(2).num_bytes == 12
    assert array.rows(2).address == 4096 and array.rows(0).num_bytes == 0
    with pytest.raises(EngineError, match="6 rows of a buffer with 5"):
        array.rows(6)


def test_a_block_is_given_back_once_when_its_last_view_is_gone():
    freed: list[int] = []
    array = DeviceArray(4096, (5, 3), "FLOAT", Block(4096, freed.append))
    part = array.rows(2)
    del array
    gc.collect()
    assert freed == []
    del part
    gc.collect()
    assert freed == [4096]


def test_pinned_memory_lives_as_long_as_a_tensor_over_a_part_of_it():
    memory, freed = (ctypes.c_uint8 * 64)(), []
    address = ctypes.addressof(memory)
    array = host_view(address, (4, 4), "FLOAT", freed.append)
    array[...] = np.arange(16).reshape(4, 4)
    tensor = as_tensor(array[:2], "FLOAT")
    del array
    gc.collect()
    assert freed == [] and tensor.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    del tensor
    gc.collect()
    assert freed == [address]


def test_bfloat16_bits_are_read_exactly_with_and_without_torch():
    values = torch.tensor([0.0, -1.5, 3.140625, float("inf"), 1e-30]).bfloat16()
    bits = values.view(torch.int16).numpy()
    assert torch.equal(as_tensor(bits, "BF16"), values)
    assert as_floats(bits, "BF16").tolist() == values.float().tolist()
    assert as_floats(np.array([0.5], np.float16), "HALF").dtype == np.float32


def test_sizes_are_rounded_up_to_what_addresses_must_be_aligned_to():
    assert [round_up(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
