# SPDX-License-Identifier: Apache-2.0
"""Ops under `kernels_on_cpu` give what their torch references give, through the public ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_dspark.errors import EngineError
from trtllm_dspark.ops import kernels
from trtllm_dspark.ops.accept_drafts import AcceptRule, accept_drafts
from trtllm_dspark.ops.filter_probs import filter_thresholds
from trtllm_dspark.ops.kernels import kernels_on_cpu, runs_kernels
from trtllm_dspark.ops.kv_append import HeadShape, kv_append_
from trtllm_dspark.ops.select_drafts import select_drafts

pytest.importorskip("triton")


def test_kernels_run_on_cpu_tensors_only_where_asked() -> None:
    x = torch.zeros(1)
    assert not runs_kernels(x)
    with kernels_on_cpu():
        assert runs_kernels(x)
    assert not runs_kernels(x)
    assert runs_kernels(torch.empty(1, device="meta")) is False


def test_kernels_that_are_not_interpreted_are_refused_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr("dspark_plugins.launch.is_interpreting", lambda: False)
    with pytest.raises(EngineError, match="TRITON_INTERPRET=1"), kernels_on_cpu():
        pass
    assert not kernels._on_cpu.get()


@pytest.mark.parametrize("has_norm", [False, True])
def test_append_is_the_same_op_by_kernel(has_norm: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape, rows = HeadShape(3, 1, 8), 4
    qkv = torch.randn(rows, 5 * 8, generator=generator)
    rope = torch.randn(rows, 2, 4, generator=generator)
    slots = torch.tensor([9, 3, 0, 14])
    norms = [torch.rand(8, generator=generator) + 0.5 for _ in range(2)] if has_norm else [None] * 2
    found = []
    for by_kernel in (False, True):
        pages = torch.full((4, 4, 2, 1, 8), 7.0)
        arguments = (pages, qkv, shape, rope, slots)
        if by_kernel:
            with kernels_on_cpu():
                q = kv_append_(*arguments, q_norm=norms[0], k_norm=norms[1])
        else:
            q = kv_append_(*arguments, q_norm=norms[0], k_norm=norms[1])
        found.append((q, pages))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


def accept_inputs(num_probs: int | None) -> dict[str, torch.Tensor | None]:
    """Three requests, one per rule, verifying 2, 0 and 1 of 2 drafts."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 40, generator=generator) * 2
    ids = torch.randint(0, 40, (3, 2), generator=generator, dtype=torch.int32)
    ids[0] = torch.stack([logits[0].argmax(), logits[1].argmax()])
    probs = None
    if num_probs is not None:
        probs = torch.softmax(torch.randn(num_probs, 2, 40, generator=generator), dim=-1)
    return {
        "logits": logits,
        "scale": torch.tensor([1.0, 1.25, 0.8]),
        "thresholds": torch.full((6,), -1.0),
        "cu_rows": torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        "draft_token_ids": ids,
        "draft_lens": torch.tensor([2, 2, 2], dtype=torch.int32),
        "draft_probs": probs,
        "sampled": torch.tensor([False, num_probs is not None, False]),
        "rules": torch.tensor(list(AcceptRule), dtype=torch.int32),
        "accept_uniforms": torch.rand(3, 2, generator=generator, dtype=torch.float64),
        "final_uniforms": torch.rand(3, generator=generator, dtype=torch.float64),
        "seeds": torch.tensor([1, 2, -3]),
        "anchor_positions": torch.tensor([5, 6, 7]),
    }


@pytest.mark.parametrize("num_probs", [None, 2, 3])
def test_acceptance_is_the_same_op_by_kernel(num_probs: int | None) -> None:
    """Distributions may be missing for the last requests: those whose prompt ends have none."""
    inputs = accept_inputs(num_probs)
    expected = accept_drafts(**inputs)  # type: ignore[arg-type]
    with kernels_on_cpu():
        found = accept_drafts(**inputs)  # type: ignore[arg-type]
    assert expected[0][0] == 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_filters_are_the_same_op_by_kernel() -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(1)) * 3
    filters = {
        "temperature": np.array([0.0, 0.7, 1.0, 1.3]),
        "top_k": np.array([0, 5, 100, 3]),
        "top_p": np.array([1.0, 0.9, 0.5, 1.0]),
        "min_p": np.array([0.0, 0.0, 0.1, 0.05]),
    }
    expected = filter_thresholds(logits, **filters)
    with kernels_on_cpu():
        found = filter_thresholds(logits, **filters)
    assert torch.equal(logits >= found[:, None], logits >= expected[:, None])
    assert expected[0] == -np.inf and (expected[1:] > -100).all()


def test_selection_is_the_same_op_by_kernel() -> None:
    inputs = (
        torch.tensor([[0.9, 0.5], [0.5, 0.4], [0.2, 0.1]]),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([2, 2, -1], dtype=torch.int32),
        torch.tensor([7, 8, 9], dtype=torch.int32),
        torch.tensor([3, 4, 5], dtype=torch.int32),
        torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
    )
    expected = select_drafts(*inputs, 8)
    with kernels_on_cpu():
        found = select_drafts(*inputs, 8)
    assert expected.verify_lens.tolist() == [2, 1, 0]
    for name in vars(expected):
        assert torch.equal(getattr(found, name), getattr(expected, name).to(torch.int32)), name
