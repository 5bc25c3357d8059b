# SPDX-License-Identifier: Apache-2.0
"""Which requests are worth drafting for. A request may bring less than its share of the draft time
costs; then the step is cheaper, and no poorer by much, without it. Pure functions of survivals and
of the table's draft row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.options import DraftOptions, Vector, draft_options, mask_caps
from trtllm_dspark.scheduling.policy import BatchView
from trtllm_dspark.types import FloatArray


@dataclass(frozen=True)
class Candidate:
    """A drafted step: whom to draft for, how many drafts to verify, gain − λ · cost."""

    mask: npt.NDArray[np.bool_]
    capacity: int
    value: float


class SubsetCosts:
    """What drafting for fewer requests saves, from the draft row of a table."""

    def __init__(self, table: LatencyTable) -> None:
        self._table = table
        self._sizes: dict[tuple[int, int], tuple[npt.NDArray[np.int64], Vector]] = {}

    def change(self, num_requests: int, num_drafted: int) -> float:
        """Return the cost change (≤ 0, ms) when only `num_drafted` of the requests are drafted.

        The draft part inside C(R, ·) is exchanged for the one of the subset; 0 where it is unknown.
        """
        if num_drafted >= num_requests:
            return 0.0
        change = self._table.draft_cost(num_drafted) - self._table.draft_cost(num_requests)
        return 0.0 if np.isnan(change) else min(change, 0.0)

    def sizes(self, num_requests: int, num_wanted: int) -> tuple[npt.NDArray[np.int64], Vector]:
        """Return set sizes below `num_wanted` and the milliseconds that each saves further."""
        key = (num_requests, num_wanted)
        if key not in self._sizes:
            sizes = [n for n in self._table.request_buckets if n < num_wanted]
            whole = self.change(num_requests, num_wanted)
            saved = [whole - self.change(num_requests, n) for n in sizes]
            self._sizes[key] = (np.array(sizes, np.int64), np.array(saved))
        return self._sizes[key]


def surplus_per_request(old: FloatArray, left_out: FloatArray) -> FloatArray:
    """Return Σ_k max(a_{r,k} − μ, 0), [R], averaged over samples; μ = left_out [M]."""
    beyond = np.maximum(old - left_out[:, None, None], np.float32(0.0))
    weight = np.full(old.shape[2], 1.0 / len(old), np.float32)
    sums: FloatArray = beyond @ weight  # a matrix product is faster than a sum over a short axis
    return sums[0] if len(old) == 1 else sums.sum(axis=0)


def narrow_requests(
    table: LatencyTable,
    costs: SubsetCosts,
    view: BatchView,
    wanted: npt.NDArray[np.bool_],
    old: FloatArray,
    options: DraftOptions,
    best: int,
    rate: float,
    floor: float,
) -> Candidate | None:
    """Return a drafted step that leaves some requests out, None when none can be worth it.

    With μ the survival of the first draft left out of option `best`, Σ_k max(a_{r,k} − μ, 0) is
    what request r brings beyond what others would do with its slots. The set that saves most draft
    time against that loss is valued exactly, if it can reach `floor` at all (the estimate never
    underrates it).
    """
    num_requests, num_wanted = len(wanted), int(np.count_nonzero(wanted))
    sizes, saved_ms = costs.sizes(num_requests, num_wanted)
    value = float(options.gains[best] - rate * options.costs[best])
    if not len(sizes) or saved_ms[0] <= 0.0 or value + rate * saved_ms[0] <= floor:
        return None
    surplus = surplus_per_request(old, options.first_left_out(best))
    order = np.argsort(np.where(wanted, -surplus, np.inf))[:num_wanted]
    kept = np.cumsum(surplus[order], dtype=np.float64)
    merit = rate * saved_ms - (kept[-1] - kept[sizes - 1])
    choice = int(np.argmax(merit))
    if merit[choice] <= 0.0 or value + merit[choice] <= floor:
        return None
    mask = np.zeros_like(wanted)
    mask[order[: sizes[choice]]] = True
    caps = np.where(mask, view.draft_caps, 0)
    extra = costs.change(num_requests, int(sizes[choice]))
    narrowed = draft_options(table, view, mask_caps(old, caps), int(caps.sum()), extra_ms=extra)
    if narrowed is None:
        return None
    index = narrowed.best_by_value(rate)
    return Candidate(
        mask,
        int(narrowed.capacities[index]),
        float(narrowed.gains[index] - rate * narrowed.costs[index]),
    )
