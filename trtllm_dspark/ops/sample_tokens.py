# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens from given distributions with keyed noise: inverse CDF and Gumbel-max.

Both are exact. The inverse CDF costs one number per draw, Gumbel-max one per candidate token; the
latter is what coupled requests need, because its noise can be shared between drafter and target.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.ops import noise

_PRUNING_MARGIN = noise.GUMBEL_MAX - noise.GUMBEL_MIN
"""A token this far below the best one cannot win: Gumbels made of 32 bits are bounded."""


def sample_inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return token ids [N] int64 drawn from unnormalised non-negative weights [N, V].

    uniforms [N] float64 in [0, 1): the first id whose cumulative weight exceeds u · total. A token
    of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # u < 1, but u · total may round up to total: the largest float64 below it still lies in the
    # last step.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms[:, None] * total, below_total)
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


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
    edges = None if thresholds is None else thresholds.detach().cpu().numpy()
    picked = np.empty(len(table), dtype=np.int64)
    for i, row in enumerate(table):
        edge = float(row.max()) - _PRUNING_MARGIN / scales[i]
        edge = edge if edges is None else max(edge, float(edges[i]))
        picked[i] = _gumbel_argmax(row, scales[i], edge, int(seeds[i]), int(positions[i]))
    return torch.from_numpy(picked).to(logits.device)


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


def _gumbel_argmax(
    row: npt.NDArray[np.floating], scale: float, edge: float, seed: int, position: int
) -> int:
    is_kept = row >= edge if edge > -math.inf else np.ones(row.shape, dtype=np.bool_)
    kept = np.nonzero(is_kept)[0]
    if kept.size < row.size // 4:
        gumbels = noise.gumbel_at(seed, position, 0, noise.Purpose.COUPLED, kept)
    else:
        gumbels = noise.gumbel_row(seed, position, 0, noise.Purpose.COUPLED, row.size)[kept]
    return int(kept[np.argmax(row[kept].astype(np.float64) * scale + gumbels)])
