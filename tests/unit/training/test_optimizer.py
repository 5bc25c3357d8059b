# SPDX-License-Identifier: Apache-2.0
"""Which parameters each optimizer moves, and how: AdamW by its size, Muon orthogonally."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trtllm_dspark.training.optimizer import OPTIMIZERS, MasterOptimizer

LR = 1e-2


class Parts(nn.Module):
    """A hidden matrix, a head's table, and a vector, under a drafter's names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8, bias=False)
        self.markov = nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(16, bias=False)


def first_step(optimizer: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients whose matrices have condition number 100, and what the first step changes."""
    torch.manual_seed(0)
    moved = MasterOptimizer(Parts(), lr=LR, optimizer=optimizer)
    left, _ = torch.linalg.qr(torch.randn(8, 8))
    right, _ = torch.linalg.qr(torch.randn(16, 16))
    matrix = left @ torch.diag(torch.logspace(0, -2, 8)) @ right[:8]
    grads = {"fc.weight": matrix, "markov.weight": matrix, "norm.weight": torch.ones(16)}
    before = {name: master.detach().clone() for name, master in moved.masters.items()}
    moved.step({name: grad.clone() for name, grad in grads.items()}, 1.0, max_norm=1e9)
    return grads, {name: moved.masters[name].detach() - value for name, value in before.items()}


def test_muon_moves_hidden_matrices_alike_in_all_directions() -> None:
    _, change = first_step("muon")
    sizes = torch.linalg.svdvals(change["fc.weight"])
    assert sizes[-1] > 0.3 * sizes[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_and_vectors_move_by_the_rate_against_the_gradients_sign(optimizer: str) -> None:
    grads, change = first_step(optimizer)
    names = ("markov.weight", "norm.weight") if optimizer == "muon" else tuple(grads)
    for name in names:
        torch.testing.assert_close(change[name], -LR * grads[name].sign(), rtol=1e-3, atol=1e-6)
