# SPDX-License-Identifier: Apache-2.0
"""The soft-max of a block over earlier context rows and its own rows, with an explicit gradient.

Two score tensors share one normaliser. Forward and backward are one pass each when compiled. Knows
scores and anchor positions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Scores = tuple[torch.Tensor, torch.Tensor]
BlockSoftmax = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Scores]
"""(far [k, n, p, B, L], near [k, n, p, B, B], anchors [n]) → weights of the same shapes.

k key heads, n blocks, p query heads per key head, B rows per block, L context rows. Far column i of
block j counts only where i < anchors[j].
"""


def weigh(far: torch.Tensor, near: torch.Tensor, anchors: torch.Tensor) -> Scores:
    """The forward pass, float32 inside."""
    is_hidden = torch.arange(far.shape[-1], device=far.device)[None, :] >= anchors[:, None]
    wide = far.float().masked_fill(is_hidden[None, :, None, None, :], float("-inf"))
    own = near.float()
    top = own.amax(dim=-1, keepdim=True)
    if far.shape[-1]:
        top = torch.maximum(top, wide.amax(dim=-1, keepdim=True))
    a, b = (wide - top).exp(), (own - top).exp()
    scale = 1.0 / (a.sum(dim=-1, keepdim=True) + b.sum(dim=-1, keepdim=True))
    return (a * scale).to(far.dtype), (b * scale).to(near.dtype)


def weigh_backward(
    far: torch.Tensor, near: torch.Tensor, grad_far: torch.Tensor, grad_near: torch.Tensor
) -> Scores:
    """From weights and their gradients to the scores' gradients."""
    a, b, da, db = far.float(), near.float(), grad_far.float(), grad_near.float()
    total = (a * da).sum(dim=-1, keepdim=True) + (b * db).sum(dim=-1, keepdim=True)
    return (a * (da - total)).to(far.dtype), (b * (db - total)).to(near.dtype)


def make_block_softmax(fuse: bool) -> BlockSoftmax:
    """As it stands, or with both passes compiled."""
    forward_pass = torch.compile(weigh, dynamic=True) if fuse else weigh
    backward_pass = torch.compile(weigh_backward, dynamic=True) if fuse else weigh_backward

    class _BlockSoftmax(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, far: torch.Tensor, near: torch.Tensor, anchors: torch.Tensor
        ) -> Scores:
            weights = forward_pass(far, near, anchors)
            ctx.save_for_backward(*weights)
            return weights

        @staticmethod
        def backward(
            ctx: Any, grad_far: torch.Tensor, grad_near: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, None]:
            a, b = backward_pass(*ctx.saved_tensors, grad_far, grad_near)  # type: ignore[call-arg]
            return a, b, None

    return _BlockSoftmax.apply
