# SPDX-License-Identifier: Apache-2.0
"""The dense training forward equals the paged inference forward, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.models.drafter_builders import (
    append_rows,
    draft_batch,
    make_config,
    make_model,
    make_pages,
)
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.packing import TokenSequence, pack_blocks


@pytest.mark.parametrize(
    "changes",
    [{}, {"label_shift": False}, {"num_heads": 4, "num_kv_heads": 4}],
    ids=["shifted", "unshifted", "one-query-head-per-kv-head"],
)
def test_packed_blocks_equal_paged_drafting(changes: dict[str, Any]) -> None:
    model = make_model(make_config(**changes))
    rng = np.random.default_rng(0)
    items = [TokenSequence(rng.integers(0, 49, n), 2) for n in (9, 4, 14)]
    anchors = [np.array([2, 3, 7]), np.zeros(0, np.int64), np.array([5, 12])]
    packed = pack_blocks(items, anchors, 3)
    taps = torch.from_numpy(rng.standard_normal((27, 32)).astype(np.float32))
    hidden = forward_blocks(model, taps, packed)
    table = np.array([[1, 2, 3, 4, 5]], np.int32)
    block = 0
    for index, item in enumerate(items):
        start = int(packed.cu_seq_lens[index])
        for anchor in anchors[index].tolist():
            pages = make_pages(model)
            append_rows(model, pages, taps[start : start + anchor], 0, table[0])
            batch = draft_batch(model, np.array([anchor]), table)
            expected = model.run_blocks(torch.tensor([int(item.token_ids[anchor])]), pages, batch)
            torch.testing.assert_close(hidden[block], expected[0], atol=1e-5, rtol=1e-5)
            block += 1
    assert block == packed.num_blocks


def test_a_block_sees_neither_later_context_nor_other_blocks() -> None:
    model = make_model(make_config())
    rng = np.random.default_rng(1)
    item = TokenSequence(rng.integers(0, 49, 12), 2)
    taps = torch.from_numpy(rng.standard_normal((12, 32)).astype(np.float32))
    together = forward_blocks(model, taps, pack_blocks([item], [np.array([3, 4, 8])], 3))
    changed = taps.clone()
    changed[4:] = 5.0
    alone = forward_blocks(model, changed, pack_blocks([item], [np.array([4])], 3))
    torch.testing.assert_close(together[1], alone[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(
        together[2], forward_blocks(model, changed, pack_blocks([item], [np.array([8])], 3))[0]
    )


def test_gradients_flow_to_every_backbone_weight() -> None:
    model = make_model(make_config(qk_norm=True))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    item = TokenSequence(np.arange(10), 2)
    hidden = forward_blocks(model, torch.randn(10, 32), pack_blocks([item], [np.array([3, 6])], 3))
    hidden.square().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.startswith(("markov", "confidence")):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
