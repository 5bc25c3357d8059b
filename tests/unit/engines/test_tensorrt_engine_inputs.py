# SPDX-License-Identifier: Apache-2.0
"""Which profile runs, which shapes it gets, what padding holds."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.protocol import TargetStep
from trtllm_dspark.engines.tensorrt_engine_inputs import (
    GraphKey,
    append_key,
    fits_drafting,
    table_width,
    target_inputs,
    target_key,
)
from trtllm_dspark.errors import ConfigError

LIMITS = EngineLimits((1, 2, 4, 8, 16, 32), (1, 2, 4), 3, 3, 40, 4, 41)


def step(lens=(3, 1, 4), rung=16, width=3) -> TargetStep:
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    table = np.arange(1, 1 + len(lens) * width, dtype=np.int32).reshape(len(lens), width)
    return TargetStep(
        token_ids=np.arange(cu[-1], dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in lens]).astype(np.int32),
        cu_query_lens=cu,
        context_lens=np.zeros(len(lens), np.int32),
        page_table=table,
        logit_rows=np.array([2, 3, 7], np.int32),
        rung=rung,
    )


def test_with_plugins_the_rung_alone_is_the_key():
    keys = {target_key(step(lens), LIMITS, exact_shapes=False) for lens in ((3, 1, 4), (9, 1, 1))}
    assert keys == {GraphKey(4, 16, LIMITS.max_table_width)}


def test_with_bodies_query_and_table_lengths_fall_into_few_classes():
    short = target_key(step((3, 1, 4)), LIMITS, exact_shapes=True)
    chunk = target_key(step((9, 1, 1)), LIMITS, exact_shapes=True)
    assert (short.query_len, chunk.query_len) == (4, 16)
    assert short.table_width == 4


@pytest.mark.parametrize("columns,width", [(0, 1), (1, 1), (3, 4), (4, 4), (9, 11), (11, 11)])
def test_tables_are_a_power_of_two_wide_up_to_the_engines_widest(columns, width):
    assert table_width(np.zeros((1, columns), np.int32), LIMITS) == width


def test_a_table_wider_than_the_engine_is_refused():
    with pytest.raises(ConfigError, match="page table columns = 12"):
        table_width(np.zeros((1, 12), np.int32), LIMITS)


def test_padding_rows_go_to_the_scratch_page_and_padding_requests_have_no_rows():
    inputs = target_inputs(step(), GraphKey(4, 4, 4), LIMITS)
    assert inputs["token_ids"].tolist() == [*range(8), *[0] * 8]
    assert inputs["cu_query_lens"].tolist() == [0, 3, 4, 8, 8]
    assert inputs["slots"].tolist() == [4, 5, 6, 16, 28, 29, 30, 31, *[0] * 8]
    assert inputs["page_table"].tolist()[2:] == [[7, 8, 9, 0], [0, 0, 0, 0]]
    assert inputs["logit_rows"].tolist() == [2, 3, 7, *[0] * 13]
    assert inputs["slots"].dtype == np.int64 and inputs["positions"].dtype == np.int32


def test_context_rows_ride_with_a_draft_while_they_are_one_steps_worth():
    assert fits_drafting(3, 16, LIMITS) and not fits_drafting(3, 17, LIMITS)
    assert append_key(17, LIMITS) == GraphKey(3, 0, 1, 32)


@pytest.mark.parametrize("page_size,columns", [(4, 1), (2, 2), (1, 3)])
def test_an_appends_idle_block_has_as_many_table_columns_as_it_has_pages(page_size, columns):
    limits = EngineLimits((1, 32), (1, 2), 3, 3, 40, page_size, 41)
    assert append_key(20, limits) == GraphKey(2, 0, columns, 32)
