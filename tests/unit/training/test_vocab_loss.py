# SPDX-License-Identifier: Apache-2.0
"""The chunked analytic losses against plain autograd."""

from __future__ import annotations

import pytest
import torch

from trtllm_dspark.training.speed import can_fuse
from trtllm_dspark.training.vocab_loss import (
    VocabTargets,
    compute_vocab_loss,
    make_kernels,
    make_targets,
)

ROWS, VOCAB, WIDTH, FROZEN, DISTINCT = 23, 70, 12, 8, 9


def make_case(dtype: torch.dtype = torch.float32, scale: float = 1.0, fuse: bool = False):
    generator = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    inputs, weight = (randn(ROWS, WIDTH) * scale).to(dtype), randn(VOCAB, WIDTH).to(dtype)
    kernels = make_kernels(fuse)
    targets = make_targets(
        randn(DISTINCT, FROZEN).to(dtype),
        weight[:, :FROZEN].contiguous(),
        torch.arange(ROWS) % DISTINCT,
        torch.arange(ROWS) * 3 % VOCAB,
        torch.rand(ROWS, generator=generator),
        kernels,
    )
    return inputs, weight, targets, kernels


def by_autograd(
    inputs: torch.Tensor, weight: torch.Tensor, targets: VocabTargets, ce: float, tv: float
):
    inputs = inputs.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = inputs @ weight.T
    p_t = targets.logits.double().softmax(-1)[targets.rows]
    losses = ce * torch.nn.functional.cross_entropy(logits, targets.labels, reduction="none")
    losses = losses + tv * (logits.softmax(-1) - p_t).abs().sum(-1)
    loss = (targets.weights.double() * losses).sum()
    loss.backward()
    return loss, inputs.grad, weight.grad


@pytest.mark.parametrize("tile_rows", [1, 7, 23, 64])
@pytest.mark.parametrize(("ce", "tv"), [(0.1, 0.9), (1.0, 0.0), (0.0, 1.0)])
def test_values_and_gradients_equal_autograd_whatever_the_tile(
    tile_rows: int, ce: float, tv: float
) -> None:
    inputs, weight, targets, kernels = make_case()
    result = compute_vocab_loss(
        inputs,
        weight,
        targets,
        num_frozen=FROZEN,
        ce_weight=ce,
        tv_weight=tv,
        kernels=kernels,
        tile_rows=tile_rows,
    )
    loss, grad_inputs, grad_weight = by_autograd(inputs, weight, targets, ce, tv)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(result.grad_inputs.double(), grad_inputs, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(
        result.grad_weight.T.double(), grad_weight[:, FROZEN:], atol=2e-6, rtol=1e-4
    )


def test_extreme_logits_neither_overflow_nor_lose_the_gradient() -> None:
    inputs, weight, targets, kernels = make_case(scale=60.0)
    result = compute_vocab_loss(inputs, weight, targets, num_frozen=FROZEN, kernels=kernels)
    loss, grad_inputs, _ = by_autograd(inputs, weight, targets, 0.1, 0.9)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(result.grad_inputs.double(), grad_inputs, atol=1e-4, rtol=1e-3)


def test_bfloat16_gradients_agree_to_bfloat16_precision() -> None:
    inputs, weight, targets, kernels = make_case(torch.bfloat16)
    result = compute_vocab_loss(inputs, weight, targets, num_frozen=FROZEN, kernels=kernels)
    _, grad_inputs, _ = by_autograd(inputs, weight, targets, 0.1, 0.9)
    error = (result.grad_inputs.double() - grad_inputs).norm() / grad_inputs.norm()
    assert error < 0.02


def test_without_a_sequential_head_no_weight_gets_a_gradient() -> None:
    inputs, weight, targets, kernels = make_case()
    result = compute_vocab_loss(inputs, weight, targets, num_frozen=WIDTH, kernels=kernels)
    assert result.grad_weight is None


def test_a_drafter_equal_to_the_target_has_no_variation_and_acceptance_one() -> None:
    _, weight, targets, kernels = make_case()
    hidden = torch.linalg.lstsq(weight[:, :FROZEN], targets.logits[targets.rows].T).solution.T
    inputs = torch.cat((hidden, torch.zeros(ROWS, WIDTH - FROZEN)), dim=1)
    result = compute_vocab_loss(inputs, weight, targets, num_frozen=FROZEN, kernels=kernels)
    assert float(result.tv.max()) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not can_fuse(), reason="no C++ compiler on this machine")
def test_compiled_kernels_compute_what_plain_ones_compute() -> None:
    inputs, weight, targets, kernels = make_case()
    plain = compute_vocab_loss(inputs, weight, targets, num_frozen=FROZEN, kernels=kernels)
    fused = compute_vocab_loss(
        inputs, weight, targets, num_frozen=FROZEN, kernels=make_kernels(True)
    )
    torch.testing.assert_close(fused.grad_inputs, plain.grad_inputs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fused.tv, plain.tv)


def test_sampled_columns_count_for_the_tokens_they_stand_for() -> None:
    """All columns exact against all but the last four sampled with offset 0: the same numbers."""
    inputs, weight, targets, kernels = make_case()
    exact = compute_vocab_loss(inputs, weight, targets, num_frozen=FROZEN, kernels=kernels)
    hidden = targets.logits @ torch.linalg.pinv(weight[:, :FROZEN]).T
    doubled = make_targets(
        hidden,
        weight[:, :FROZEN].contiguous(),
        targets.rows,
        targets.labels,
        targets.weights,
        kernels,
        num_exact=VOCAB - 4,
        offset=0.0,
    )
    again = compute_vocab_loss(inputs, weight, doubled, num_frozen=FROZEN, kernels=kernels)
    torch.testing.assert_close(again.tv, exact.tv, atol=1e-4, rtol=1e-4)
    shifted = make_targets(
        hidden,
        weight[:, :FROZEN].contiguous(),
        targets.rows,
        targets.labels,
        targets.weights,
        kernels,
        num_exact=VOCAB - 4,
        offset=2.0,
    )
    expected = targets.logits.clone()
    expected[:, -4:] += 2.0
    torch.testing.assert_close(shifted.log_norms, expected.logsumexp(-1), atol=1e-4, rtol=1e-5)
