# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens from given distributions with keyed noise: inverse CDF and Gumbel-max.

Both are exact. The inverse CDF costs one number per draw, Gumbel-max one per candidate token; the
latter is what coupled requests need, because its noise can be shared between drafter and target.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from trtllm_dspark.ops import native_rows, noise

_PRUNING_MARGIN = noise.GUMBEL_MAX - noise.GUMBEL_MIN
"""A token this far below the best one cannot win: Gumbels made of 32 bits are bounded."""

_BLOCK = 512
"""Weights that the inverse CDF adds up at once."""

_SHORT_ROW = 512
"""Kept tokens up to which a row's noise is drawn together with that of other rows."""


def sample_inverse_cdf(
    weights: torch.Tensor, uniforms: torch.Tensor, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Return token ids [N] int64 drawn from unnormalised non-negative weights [N, V].

    uniforms [N] float64 in [0, 1): the first id whose cumulative weight exceeds u · total. A token
    of weight 0 is never drawn. Sums are float64, first of whole blocks, then inside the block that
    holds the target: a cumulative sum of the whole row would be twice the row's own memory. `sums`
    are the weights' `block_sums`, if known.
    """
    ends = (block_sums(weights) if sums is None else sums).cumsum(dim=-1)
    total = ends[:, -1:]
    # u < 1, but u · total may round up to total: the largest float64 below it still lies in the
    # last step.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms[:, None] * total, below_total)
    block = torch.searchsorted(ends, targets, right=True)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=weights.shape[1] - 1)).double()
    inside.masked_fill_(columns >= weights.shape[1], 0.0)
    begin = functional.pad(ends[:, :-1], (1, 0)).gather(1, block)
    steps = begin + inside.cumsum(dim=-1)
    # Both ways of adding may differ in the last place: the block's last token with weight ends it.
    last = (inside > 0).long().mul_(torch.arange(_BLOCK, device=weights.device)).amax(dim=-1)
    first = torch.searchsorted(steps, targets, right=True)[:, 0]
    return block[:, 0] * _BLOCK + torch.minimum(first, last)


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """[N, V] → float64 sums of blocks of _BLOCK, the last one shorter."""
    native = native_rows.block_sums(weights, _BLOCK)
    if native is not None:
        return native
    whole = weights.shape[1] // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1, dtype=torch.float64)
    if whole == weights.shape[1]:
        return sums
    rest = weights[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)
    return torch.cat((sums, rest), dim=1)


def sample_gumbel(
    logits: torch.Tensor,
    scale: torch.Tensor,
    thresholds: torch.Tensor | None,
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.integer],
) -> torch.Tensor:
    """Return y [N] int64 = argmax of logit · scale + Gumbel(seed, position) over the kept tokens.

    logits [N, V]; scale [N] = 1 / temperature; thresholds [N] or None (keep all). The key's purpose
    is COUPLED, slot 0. Of equal sums the lowest id wins. Sums are float64, so the result depends
    only on the row and its key.
    """
    table = logits.detach().cpu().numpy()
    scales = scale.detach().cpu().double().numpy()
    edges = table.max(axis=1).astype(np.float64) - _PRUNING_MARGIN / scales
    if thresholds is not None:
        edges = np.maximum(edges, thresholds.detach().cpu().numpy())
    kept = [np.nonzero(row >= edge)[0] for row, edge in zip(table, edges, strict=True)]
    gumbels = _gumbels(kept, seeds, positions, table.shape[1])
    picked = [
        ids[np.argmax(row[ids].astype(np.float64) * by + g)]
        for ids, row, by, g in zip(kept, table, scales, gumbels, strict=True)
    ]
    return torch.tensor(picked, dtype=torch.int64, device=logits.device)


def sample_drafts(
    probs: torch.Tensor,
    seeds: npt.NDArray[np.uint64],
    anchor_positions: npt.NDArray[np.integer],
    slot: int,
    coupled: npt.NDArray[np.bool_],
) -> torch.Tensor:
    """Return the draft ids [R] int64 of one slot (0-based), drawn from q = probs [R, V].

    Coupled rows share the Gumbel noise of acceptance at position anchor + 1 + slot; the others draw
    by inverse CDF with noise of (seed, anchor position, slot), never used twice.
    """
    uniforms = noise.keyed_uniforms(seeds, anchor_positions, slot, noise.Purpose.DRAFT_UNIFORM)
    ids = sample_inverse_cdf(probs, torch.from_numpy(uniforms).to(probs.device))
    rows = np.nonzero(coupled)[0]
    if rows.size:
        index = torch.from_numpy(rows).to(probs.device)
        scale = torch.ones(rows.size, dtype=torch.float64)
        positions = np.asarray(anchor_positions)[rows] + 1 + slot
        ids[index] = sample_gumbel(probs[index].log(), scale, None, seeds[rows], positions)
    return ids


def _gumbels(
    kept: list[npt.NDArray[np.intp]],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.integer],
    vocab_size: int,
) -> list[npt.NDArray[np.float64]]:
    """Return the coupled noise of each row's kept ids: short rows in one call, long ones whole."""
    sizes = np.array([ids.size for ids in kept], dtype=np.int64)
    is_short = sizes < max(vocab_size // 4, _SHORT_ROW)
    short = np.nonzero(is_short)[0]
    gumbels: list[npt.NDArray[np.float64]] = [np.empty(0)] * len(kept)
    if short.size:
        counts = sizes[short]
        flat = noise.gumbel_at(
            np.repeat(seeds[short], counts),
            np.repeat(positions[short], counts),
            0,
            noise.Purpose.COUPLED,
            np.concatenate([kept[i] for i in short]),
        )
        for i, part in zip(short, np.split(flat, np.cumsum(counts)[:-1]), strict=True):
            gumbels[i] = part
    for i in np.nonzero(~is_short)[0]:
        row = noise.gumbel_row(
            int(seeds[i]), int(positions[i]), 0, noise.Purpose.COUPLED, vocab_size
        )
        gumbels[i] = row[kept[i]]
    return gumbels
