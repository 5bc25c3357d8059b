# SPDX-License-Identifier: Apache-2.0
"""A row's bfloat16 result has the same bits in every batch, whatever kernel the library chooses."""

from __future__ import annotations

import pytest
import torch

from trtllm_dspark.ops.linear import Linear, can_pack
from trtllm_dspark.ops.row_invariance import (
    MIN_TILE,
    cancelling_product,
    choose_packing,
    count_invariant_rows,
)

SHAPES = [(960, 576), (576, 1536), (640, 256)]
needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)),
    reason="oneDNN's packed bfloat16 products do not exist on this machine",
)


def test_the_probe_product_is_zero_but_for_its_rounding():
    x, weight = cancelling_product(64, 96)
    exact = x[:50].double() @ weight.double().T
    assert exact.abs().max() < 1e-12
    assert (x[:50].float() @ weight.float().T).abs().max() > 0


@needs_packing
@pytest.mark.parametrize("out_features,in_features", SHAPES)
def test_a_row_of_a_packed_product_has_the_same_bits_in_every_batch(out_features, in_features):
    if choose_packing(out_features, in_features, torch.get_num_threads()).tile == 0:
        pytest.skip("this machine has no packing whose rows are independent; the log says so")
    x, weight = cancelling_product(out_features, in_features)
    layer = Linear(in_features, out_features)
    layer.weight.data = weight
    layer.pack_()
    whole = layer(x)
    for count in [*range(1, 40), 63, 64, 65, *range(120, 140), 192, 255, 300, 511]:
        first = count % (len(x) - count + 1)
        rows = x[first : first + count].contiguous()
        assert torch.equal(layer(rows), whole[first : first + count]), (first, count)


def test_counting_stops_at_the_first_row_count_that_changes_a_bit(monkeypatch):
    def run(x, packed):
        return packed[: len(x)] + (1.0 if len(x) >= 24 else 0.0)

    monkeypatch.setattr("trtllm_dspark.ops.row_invariance.run_packed", run)
    x, packed = torch.zeros(64, 2), torch.rand(64, 2)
    assert count_invariant_rows(x, packed, [1, 8, 16, 24, 32]) == 16
    assert count_invariant_rows(x, packed, [1, 8, 16]) == 16
    assert count_invariant_rows(x, packed, [1, 24]) == 1


def test_a_machine_without_invariant_products_runs_rows_as_they_come_and_says_so(
    monkeypatch, caplog
):
    monkeypatch.setattr("trtllm_dspark.ops.row_invariance.reorder", lambda w, batch: w)
    monkeypatch.setattr(
        "trtllm_dspark.ops.row_invariance.run_packed", lambda x, w: torch.full((len(x),), len(x))
    )
    packing = choose_packing.__wrapped__(64, 32, 1)
    assert packing.tile == 0 and MIN_TILE > 1
    assert "depend on the number of rows" in caplog.text
