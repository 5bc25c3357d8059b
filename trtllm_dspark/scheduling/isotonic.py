# SPDX-License-Identifier: Apache-2.0
"""Repairs of measured cost grids: holes filled from neighbouring rows, rows made non-decreasing,
and the additive model T = bias + α(requests) + θ(tokens). Plain arithmetic on [B, T] arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import ConfigError

Grid = npt.NDArray[np.float64]


def fit_isotonic(values: Grid) -> Grid:
    """Return the non-decreasing vector nearest to `values` in least squares (pooled violators).

    A running maximum would let one slow outlier lift every dearer rung; pooling keeps the mean.
    Example: [1, 3, 2, 4] → [1, 2.5, 2.5, 4].
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = float(value), 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            previous_total, previous_count = blocks.pop()
            total, count = total + previous_total, count + previous_count
        blocks.append((total, count))
    return np.concatenate([np.full(count, total / count) for total, count in blocks])


def fit_isotonic_rows(grid: Grid) -> Grid:
    """Apply `fit_isotonic` to every row."""
    return np.stack([fit_isotonic(row) for row in grid])


def complete_cells(grid: Grid) -> Grid:
    """Return `grid` with every NaN filled: rows differ by what the nearest row with data differs.

    A hole (b, t) takes its own row's nearest measured cell t₀ plus the cost difference t₀ → t in
    the nearest row that has both (additive model), else that nearest cell itself.
    A row without any cell copies the next larger row, else the next smaller one.
    """
    known = ~np.isnan(grid)
    if not known.any():
        raise ConfigError("the latency table has no measured cell at all; measure it again")
    filled = grid.copy()
    for row in range(len(grid)):
        source = row if known[row].any() else _nearest_row(known.any(axis=1), row)
        columns = np.flatnonzero(known[source])
        for column in np.flatnonzero(~known[row]):
            anchor = int(columns[np.argmin(np.abs(columns - column))])
            both = known[:, anchor] & known[:, column]
            filled[row, column] = grid[source, anchor]
            if both.any():
                other = _nearest_row(both, row)
                filled[row, column] += grid[other, column] - grid[other, anchor]
    lowest = float(np.nanmin(grid))
    return np.maximum(filled, 0.1 * lowest)


def _nearest_row(usable: npt.NDArray[np.bool_], row: int) -> int:
    rows = np.flatnonzero(usable)
    distance = np.abs(rows - row) * 2 - (rows > row)  # larger rows win ties
    return int(rows[np.argmin(distance)])


@dataclass(frozen=True)
class AdditiveFit:
    """T(b, t) = bias + alpha[b] + theta[t], in the unit of the grid; alpha and theta are ≥ 0."""

    bias: float
    alpha: Grid
    theta: Grid
    max_error: float
    """Largest absolute deviation over the measured cells."""


def fit_additive(grid: Grid) -> AdditiveFit:
    """Fit the additive model by least squares over the measured (not NaN) cells."""
    rows, columns = np.nonzero(~np.isnan(grid))
    num_rows, num_columns = grid.shape
    design = np.zeros((len(rows), num_rows + num_columns))
    design[np.arange(len(rows)), rows] = 1.0
    design[np.arange(len(rows)), num_rows + columns] = 1.0
    solution = np.linalg.lstsq(design, grid[rows, columns], rcond=None)[0]
    alpha, theta = solution[:num_rows], solution[num_rows:]
    error = float(np.abs(design @ solution - grid[rows, columns]).max())
    bias = float(alpha.min() + theta.min())
    return AdditiveFit(bias, alpha - alpha.min(), theta - theta.min(), error)
