# SPDX-License-Identifier: Apache-2.0
"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p, per row.

A filter is a *threshold* on the logit, so the kept set is {v : logit_v ≥ τ}: logits equal to the
last kept one are kept too, and the set depends on values only, never on token order. Drafters use
`filter_probs` for q and acceptance uses `filter_thresholds` for p; penalties and masks are not
known here.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.ops.kernels import runs_kernels, thresholds_by_kernel

_PRUNING_WIDTHS = (6.0, 12.0, 24.0, math.inf)
"""Nats below the maximum within which kept tokens are looked for, one after the other."""


def argmax_lowest(logits: torch.Tensor) -> torch.Tensor:
    """Return the arg-max [N] int64 of each row; of equal values the lowest id. NaN wins."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.argmax(logits.detach().numpy(), axis=-1))
    return torch.argmax(logits, dim=-1)


def filter_thresholds(
    logits: torch.Tensor,
    *,
    temperature: npt.ArrayLike,
    top_k: npt.ArrayLike,
    top_p: npt.ArrayLike,
    min_p: npt.ArrayLike,
) -> torch.Tensor:
    """Return the smallest kept logit of each row, −inf where nothing is filtered.

    Returns [N] in logits' dtype. logits [N, V] before temperature; the others [N] or scalars. Order
    as in TensorRT-LLM: top-k, then top-p over the mass that top-k left, then min-p (p ≥ min_p · max
    p). Off: top_k 0 (or ≥ V), top_p 1, min_p 0. Rows of temperature 0 are read as temperature 1. A
    row's result depends on that row alone.
    """
    rows = _row_parameters(logits, temperature, top_k, top_p, min_p)
    is_filtered = (rows[1] > 0) | (rows[2] < 1.0) | (rows[3] > 0.0)
    if runs_kernels(logits):
        found = thresholds_by_kernel(logits, *(torch.from_numpy(c.copy()) for c in rows))
        return found.to(logits.dtype)
    thresholds = torch.full((logits.shape[0],), -math.inf, dtype=logits.dtype)
    chosen = np.nonzero(is_filtered)[0]
    if chosen.size == 0:
        return thresholds
    inverse, k, p, m = (column[chosen] for column in rows)
    table = logits.detach().numpy()
    edges = [
        _row_threshold(table[row], inverse[i], int(k[i]), float(p[i]), float(m[i]))
        for i, row in enumerate(chosen)
    ]
    thresholds[torch.from_numpy(chosen)] = torch.tensor(edges, dtype=logits.dtype)
    return thresholds


def filter_probs(
    logits: torch.Tensor,
    temperature: npt.ArrayLike,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
) -> torch.Tensor:
    """Return the normalised distribution [N, V] that each row is sampled from.

    Parameters [N] or scalars, as in `filter_thresholds`. Rows of temperature 0 or top_k 1 are
    one-hot on the arg-max (lowest id among equals). Not in place.
    """
    inverse, k, _, _ = _row_parameters(logits, temperature, top_k, top_p, min_p)
    is_greedy = (np.broadcast_to(np.asarray(temperature), k.shape) == 0.0) | (k == 1)
    if is_greedy.all():
        return _one_hot(logits)
    thresholds = filter_thresholds(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    scale = torch.tensor(inverse, dtype=logits.dtype, device=logits.device)
    probs = filtered_weights(logits, scale, thresholds)
    probs /= probs.sum(dim=-1, keepdim=True)
    if is_greedy.any():
        rows = torch.from_numpy(np.nonzero(is_greedy)[0]).to(logits.device)
        probs[rows] = _one_hot(logits[rows])
    return probs


def filtered_weights(
    logits: torch.Tensor,
    scale: torch.Tensor,
    thresholds: torch.Tensor | None,
    largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return exp((logit − max)·scale) [N, V], 0 below the row's threshold; not normalised.

    scale [N] is 1 / temperature; thresholds [N] or None when no row is filtered; largest [N] the
    rows' maxima, if known.
    """
    if largest is None:
        largest = logits.amax(dim=-1)
    weights = logits - largest[:, None]
    weights.mul_(scale[:, None]).exp_()
    if thresholds is not None:
        weights.masked_fill_(logits < thresholds[:, None], 0.0)
    return weights


def inverse_temperatures(temperature: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return 1 / temperature, 1 where the temperature is 0 (greedy: scaling changes nothing)."""
    values = np.asarray(temperature, dtype=np.float64)
    return 1.0 / np.where(values == 0.0, 1.0, values)


def _row_parameters(
    logits: torch.Tensor,
    temperature: npt.ArrayLike,
    top_k: npt.ArrayLike,
    top_p: npt.ArrayLike,
    min_p: npt.ArrayLike,
) -> tuple[npt.NDArray[np.float64], ...]:
    """Broadcast to [N] columns (1/temperature, top_k with 0 = off, top_p, min_p)."""
    num_rows, vocab_size = logits.shape
    k = np.asarray(top_k, dtype=np.float64)
    columns = (inverse_temperatures(temperature), np.where(k >= vocab_size, 0, k), top_p, min_p)
    return tuple(np.broadcast_to(np.asarray(c, dtype=np.float64), (num_rows,)) for c in columns)


def _row_threshold(
    row: npt.NDArray[np.floating], scale: float, top_k: int, top_p: float, min_p: float
) -> float:
    """One CPU row. Only logits near the maximum are sorted; how near is widened until it
    suffices."""
    top = row.max()
    threshold = float(top) + math.log(min_p) / scale if min_p > 0.0 else -math.inf
    total = 0.0
    if top_p < 1.0 and top_k == 0:
        total = float(np.exp((row - top) * row.dtype.type(scale)).sum(dtype=np.float64))
    for width in _PRUNING_WIDTHS:
        kept = row[row >= top - width / scale] if width < math.inf else row
        if kept.size < top_k:
            continue
        if top_k:
            edge = np.partition(kept, kept.size - top_k)[kept.size - top_k]
            threshold = max(threshold, float(edge))
            kept = kept[kept >= edge]
        if top_p == 1.0:
            break
        kept = -np.sort(-kept)
        mass = np.exp((kept - top) * row.dtype.type(scale)).cumsum(dtype=np.float64)
        wanted = top_p * (total if top_k == 0 else mass[-1])
        if mass[-1] >= wanted or width == math.inf:
            edge = kept[min(int(np.searchsorted(mass, wanted)), kept.size - 1)]
            threshold = max(threshold, float(edge))
            break
    return threshold


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).scatter_(1, argmax_lowest(logits)[:, None], 1.0)
