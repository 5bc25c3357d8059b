# SPDX-License-Identifier: Apache-2.0
"""The two-part soft-max and its gradient against the one-part ones of torch."""

from __future__ import annotations

import torch

from trtllm_dspark.training.block_softmax import make_block_softmax


def test_values_and_gradients_equal_a_masked_softmax_over_both_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    far = torch.randn(2, 4, 3, 2, 6, generator=generator, dtype=torch.float64).float()
    near = torch.randn(2, 4, 3, 2, 2, generator=generator)
    grads = torch.randn(2, 4, 3, 2, 8, generator=generator)
    anchors = torch.tensor([0, 1, 4, 6])
    parts = [far.requires_grad_(), near.requires_grad_()]
    weights = make_block_softmax(False)(*parts, anchors)
    found = torch.autograd.grad(weights, parts, [grads[..., :6], grads[..., 6:]])
    is_hidden = torch.arange(6) >= anchors[:, None]
    masked = far.masked_fill(is_hidden[None, :, None, None, :], float("-inf"))
    expected = torch.cat((masked, near), dim=-1).softmax(-1)
    wanted = torch.autograd.grad(expected, parts, grads)
    torch.testing.assert_close(torch.cat(weights, dim=-1), expected)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_block_without_context_weighs_its_own_rows_only() -> None:
    far, near = torch.zeros(1, 2, 1, 3, 0), torch.zeros(1, 2, 1, 3, 3)
    weights = make_block_softmax(False)(far, near, torch.tensor([0, 0]))
    assert weights[0].shape[-1] == 0
    torch.testing.assert_close(weights[1], torch.full((1, 2, 1, 3, 3), 1 / 3))
