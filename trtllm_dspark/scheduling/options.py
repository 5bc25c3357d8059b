# SPDX-License-Identifier: Apache-2.0
"""What a step could do with its drafts and what that is worth: for every rung the expected tokens
when it is filled with the best drafts, and its cost. Pure functions of survivals and a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policy import BatchView
from trtllm_dspark.types import FloatArray, IntArray

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DraftOptions:
    """The rungs a drafted step can run, ascending; O of them."""

    capacities: npt.NDArray[np.int64]
    """[O] drafts that fill the rung (fewer where no more are admissible)."""
    gains: Vector
    """[O] expected committed tokens: R + Σ of the best `capacities` survivals."""
    costs: Vector
    """[O] milliseconds that the decode rows cost (prefill rows subtracted)."""
    ascending: FloatArray
    """[M, Rγ] all admissible survivals in ascending order, per sample."""

    def first_left_out(self, option: int) -> FloatArray:
        """Return [M] the survival of the first draft that `option` leaves out; 0 where none is."""
        size, capacity = self.ascending.shape[1], int(self.capacities[option])
        if capacity >= size:
            return np.zeros(len(self.ascending), np.float32)
        return self.ascending[:, size - 1 - capacity]

    def best_by_rate(self) -> int:
        """Return the option of highest gain / cost (the smaller rung wins ties)."""
        return int((self.gains / self.costs).argmax())

    def best_by_value(self, rate: float) -> int:
        """Return the option of highest gain − rate · cost (the smaller rung wins ties)."""
        return int((self.gains - rate * self.costs).argmax())


def draft_room(view: BatchView) -> int:
    """Return how many drafts max_num_tokens leaves room for beside decode and prefill rows."""
    return max(view.max_num_tokens - len(view.request_keys) - view.num_prefill_tokens, 0)


def mask_caps(samples: FloatArray, caps: IntArray) -> FloatArray:
    """Return [M, R, γ] survivals with inadmissible slots (column ≥ caps[r]) set to 0."""
    if len(caps) and caps.min() >= samples.shape[2]:
        return samples
    return np.where(np.arange(samples.shape[2]) < caps[:, None], samples, np.float32(0.0))


def gain_curve(admissible: FloatArray) -> tuple[Vector, FloatArray]:
    """Return G [Rγ+1], G[K] = mean over samples of the top-K sum, and the sorted [M, Rγ]."""
    ordered = np.sort(admissible.reshape(len(admissible), -1), axis=1)[:, ::-1]
    sums = np.zeros(ordered.shape[1] + 1)
    mean = ordered.mean(axis=0) if len(ordered) > 1 else ordered[0]
    np.cumsum(mean, dtype=np.float64, out=sums[1:])
    return sums, ordered


def gains_at(
    admissible: FloatArray, capacities: npt.NDArray[np.int64]
) -> tuple[Vector, FloatArray]:
    """Return G at ascending capacities [O], 0 at most once, and the sorted survivals [M, Rγ].

    The same numbers as `gain_curve`, without the sums that nobody asks for.
    """
    ascending = admissible.reshape(len(admissible), -1).copy()
    ascending.sort(axis=1)
    mean = ascending.mean(axis=0) if len(ascending) > 1 else ascending[0]
    gains = np.zeros(len(capacities))
    skip = int(capacities[0] == 0)
    if len(capacities) > skip:
        starts = (ascending.shape[1] - capacities[skip:])[::-1]
        segments = np.add.reduceat(mean, starts, dtype=np.float64)
        gains[skip:] = segments[::-1].cumsum()
    return gains, ascending


def draft_options(
    table: LatencyTable,
    view: BatchView,
    admissible: FloatArray,
    num_admissible: int,
    *,
    with_empty: bool = False,
    extra_ms: float = 0.0,
) -> DraftOptions | None:
    """Return the options for survivals [M, R, γ] (0 where inadmissible), None when there is none.

    A sample that proposed fewer drafts than a rung holds runs a smaller rung: that is its cost.
    `with_empty` adds the drafted step that verifies nothing; `extra_ms` is added to every cost.
    """
    num_requests, prefill = len(view.request_keys), view.num_prefill_tokens
    most = min(num_admissible, draft_room(view))
    least = 0 if with_empty else 1
    base = num_requests + prefill
    if most < least:
        return None
    first, last = table.rung_index(base + least), table.rung_index(base + most)
    capacities = np.minimum(table.rung_array[first : last + 1] - base, most)
    row = table.costs[table.bucket_index(num_requests)]
    costs = row[first : last + 1]
    if with_empty and capacities[0] > 0:
        capacities = np.concatenate([[0], capacities])
        costs = np.concatenate([costs[:1], costs])
    gains, ascending = gains_at(admissible, capacities)
    if most > 0 and ascending[:, ascending.shape[1] - most].min() <= 0.0:
        proposed = np.count_nonzero(ascending, axis=1)
        rows = base + np.minimum(capacities, proposed[:, None])
        costs = row[np.searchsorted(table.rung_array, rows)].mean(axis=0)
    shift = extra_ms - table.prefill_cost(num_requests, prefill)
    return DraftOptions(
        capacities=capacities,
        gains=num_requests + gains,
        costs=costs + shift,
        ascending=ascending,
    )
