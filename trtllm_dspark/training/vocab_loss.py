# SPDX-License-Identifier: Apache-2.0
"""The vocabulary-wide losses and their analytic gradient, one tile of rows at a time.

Per row: CE = −log p_d(label) and TV = Σ_v |p_d(v) − p_t(v)|. A tile's logits live as long as the
tile and its gradient is formed in their place: no [rows, V] tensor of the whole step ever exists
except the target's own logits. Knows rows and weights, not blocks, slots or heads.

dTV/dz_v = p_d(v) (s_v − Σ_u s_u p_d(u)) with s = sign(p_d − p_t); dCE/dz_v = p_d(v) − [v = label].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

DEFAULT_TILE_ROWS = 256


@dataclass(frozen=True)
class VocabKernels:
    """Three passes over a tile of logits; compiled or not, they compute the same."""

    log_norms: Callable[[torch.Tensor], torch.Tensor]
    compare_: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    combine_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def log_norms(logits: torch.Tensor) -> torch.Tensor:
    """log Σ exp of every row: [M, V] → [M] float32."""
    wide = logits.float()
    top = wide.amax(dim=-1)
    return top + (wide - top[:, None]).exp().sum(dim=-1).log()


def compare_(
    draft: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    draft_norms: torch.Tensor,
    target_norms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace draft logits by p_d with the sign of p_d − p_t; return (TV [M], Σ s·p_d [M]).

    draft [M, V] is overwritten; target [P, V] logits; rows [M] says which target row goes with
    each.
    """
    p = (draft.float() - draft_norms[:, None]).exp()
    gap = p - (target[rows].float() - target_norms[rows][:, None]).exp()
    signed = torch.where(gap < 0, -p, p)
    draft.copy_(signed.to(draft.dtype))
    return gap.abs().sum(dim=-1), signed.sum(dim=-1)


def combine_(signed: torch.Tensor, on_sign: torch.Tensor, on_size: torch.Tensor) -> None:
    """signed ← on_sign·signed + on_size·|signed|, row factors [M] float32."""
    wide = signed.float()
    signed.copy_((wide * on_sign[:, None] + wide.abs() * on_size[:, None]).to(signed.dtype))


def make_kernels(fuse: bool) -> VocabKernels:
    """Kernels as they stand, or fused by the compiler of torch (needs a C++ compiler on a CPU)."""
    if not fuse:
        return VocabKernels(log_norms, compare_, combine_)
    return VocabKernels(
        torch.compile(log_norms, dynamic=True),
        torch.compile(compare_, dynamic=True),
        torch.compile(combine_, dynamic=True),
    )


@dataclass(frozen=True)
class VocabTargets:
    """What M rows are compared with; none of it takes part in autograd."""

    logits: torch.Tensor
    """[P, V] target logits of the distinct rows."""
    log_norms: torch.Tensor
    """[P] float32"""
    rows: torch.Tensor
    """[M] int64 into P"""
    labels: torch.Tensor
    """[M] int64 the true next tokens"""
    weights: torch.Tensor
    """[M] float32 weight of the row, normalisation included"""
    num_exact: int
    """Columns from here on are a sample and get `offset` added to their logits."""
    offset: float = 0.0


@dataclass
class VocabLossResult:
    """Values and gradients of Σ_m w_m (ce_weight·CE_m + tv_weight·TV_m)."""

    loss: float
    ce: torch.Tensor
    """[M] float32"""
    tv: torch.Tensor
    """[M] float32"""
    grad_inputs: torch.Tensor
    """[M, K] in the inputs' dtype"""
    grad_weight: torch.Tensor | None
    """[K − frozen, V] float32 (transposed), None when every column is frozen."""


def compute_vocab_loss(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    targets: VocabTargets,
    *,
    num_frozen: int,
    ce_weight: float = 0.1,
    tv_weight: float = 0.9,
    kernels: VocabKernels,
    tile_rows: int = DEFAULT_TILE_ROWS,
) -> VocabLossResult:
    """Losses and analytic gradients of logits = inputs @ weightᵀ.

    inputs [M, K] = [h; f]; weight [V, K] = [lm_head | W2], whose first `num_frozen` columns get no
    gradient. Exact up to the rounding of the inputs' dtype: p_d is held in it between the passes.
    """
    num_rows, width = inputs.shape
    ce, tv = inputs.new_empty(num_rows, dtype=torch.float32), None
    tv = torch.empty_like(ce)
    grad_inputs = torch.empty_like(inputs)
    grad_weight = None
    if num_frozen < width:
        grad_weight = ce.new_zeros(width - num_frozen, weight.shape[0])
    buffer = inputs.new_empty(min(tile_rows, num_rows), weight.shape[0])
    for start in range(0, num_rows, tile_rows):
        tile = slice(start, min(start + tile_rows, num_rows))
        x, row, w = inputs[tile], targets.rows[tile], targets.weights[tile]
        hits = (torch.arange(len(x), device=x.device), targets.labels[tile])
        z = torch.mm(x, weight.t(), out=buffer[: len(x)])
        z[:, targets.num_exact :] += targets.offset
        norms = kernels.log_norms(z)
        ce[tile] = norms - z[hits].float()
        tv[tile], signed_mass = kernels.compare_(z, targets.logits, row, norms, targets.log_norms)
        kernels.combine_(z, tv_weight * w, (ce_weight - tv_weight * signed_mass) * w)
        z.index_put_(hits, (-ce_weight * w).to(z.dtype), accumulate=True)
        torch.mm(z, weight, out=grad_inputs[tile])
        if grad_weight is not None:
            grad_weight += x[:, num_frozen:].t().contiguous() @ z
    loss = float((targets.weights * (ce_weight * ce + tv_weight * tv)).sum())
    return VocabLossResult(loss, ce, tv, grad_inputs, grad_weight)


def make_targets(
    target_hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    kernels: VocabKernels,
    *,
    num_exact: int | None = None,
    offset: float = 0.0,
) -> VocabTargets:
    """Target logits of the distinct rows: target_hidden [P, H] (after the final norm)."""
    logits = torch.mm(target_hidden, lm_head_weight.t())
    num_exact = logits.shape[1] if num_exact is None else num_exact
    logits[:, num_exact:] += offset
    norms = kernels.log_norms(logits)
    return VocabTargets(logits, norms, rows, labels, weights, num_exact, offset)
