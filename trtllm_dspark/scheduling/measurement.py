# SPDX-License-Identifier: Apache-2.0
"""What to time for a latency table, in which order, and how samples become cells. The timing itself
(an engine, a clock) belongs to whoever walks the plan.

Rounds are interleaved: every round visits every cell, in an order of its own, so that a drift of
the machine hits all cells alike.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.config import BucketConfig, require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.buckets import request_buckets, rung_for
from trtllm_dspark.scheduling.latency_table import LatencyTable


class StepKind(str, enum.Enum):
    """Which kind of step a cell stands for."""

    DRAFTED = "drafted"
    NO_DRAFT = "no_draft"
    """Plain step, drafter loaded: it keeps the rows that the drafter needs once it drafts again."""
    AUTOREGRESSIVE = "autoregressive"
    """Plain step as a server without a drafter runs it."""


VISITS = {StepKind.DRAFTED: 1, StepKind.NO_DRAFT: 3, StepKind.AUTOREGRESSIVE: 3}
"""Times a round visits a cell. Every decision to draft or not rests on one plain cell, while rungs
are smoothed by their neighbours; and plain steps are the cheapest to time."""


@dataclass(frozen=True, order=True)
class Cell:
    """One thing to time: `num_requests` decoding, `num_verified` drafts in all, one rung."""

    kind: StepKind
    num_requests: int
    rung: int
    num_verified: int
    """Drafts verified over all requests, spread evenly; acceptance is pinned while timing."""
    context_len: int


@dataclass(frozen=True)
class Sample:
    """One timed step."""

    cell: Cell
    step_ms: float
    draft_ms: float = 0.0


def plan_cells(
    config: BucketConfig, rungs: Sequence[int], num_drafts: int, context_lens: Sequence[int]
) -> tuple[Cell, ...]:
    """Return the cells worth timing: per requests bucket the rungs R to R·D and both plain rows.

    Rungs above the largest decode total are timed for the largest bucket only; the table completes
    the other rows from it. Without a drafter (γ = 0) only the autoregressive row remains.
    """
    require(bool(context_lens), "context_lens", context_lens, "one context length or more")
    buckets = request_buckets(config)
    cells = []
    for context_len in context_lens:
        for num_requests in buckets:
            plain = rung_for(rungs, num_requests)
            kinds = [StepKind.AUTOREGRESSIVE] + ([StepKind.NO_DRAFT] if num_drafts else [])
            cells += [Cell(kind, num_requests, plain, 0, context_len) for kind in kinds]
            most = num_requests * num_drafts
            last = rungs[-1]
            if num_requests != buckets[-1]:
                last = rung_for(rungs, min(num_requests + most, rungs[-1]))
            for rung in rungs if num_drafts else ():
                if plain <= rung <= last:
                    verified = min(rung - num_requests, most)
                    cells.append(Cell(StepKind.DRAFTED, num_requests, rung, verified, context_len))
    return tuple(cells)


def plan_round(cells: Sequence[Cell], round_index: int, seed: int = 0) -> tuple[Cell, ...]:
    """Return every cell in the order of this round (a function of seed and round alone)."""
    visits = [VISITS[cell.kind] for cell in cells]
    order = np.random.default_rng((seed, round_index)).permutation(
        np.repeat(range(len(cells)), visits)
    )
    return tuple(cells[i] for i in order)


def num_rounds(round_ms: float, budget_s: float, least: int = 3, most: int = 25) -> int:
    """Return how many timed rounds fit `budget_s` when one round took `round_ms` (clamped)."""
    require(round_ms > 0, "round_ms", round_ms, "> 0")
    return int(min(max(budget_s * 1e3 // round_ms, least), most))


def table_from_samples(
    samples: Iterable[Sample],
    config: BucketConfig,
    rungs: Sequence[int],
    *,
    num_drafts: int,
    fingerprint: str,
    machine: dict[str, Any] | None = None,
) -> LatencyTable:
    """Aggregate timed samples (no warm-up): median per cell, then the mean over contexts."""
    by_cell: dict[Cell, list[Sample]] = {}
    for sample in samples:
        by_cell.setdefault(sample.cell, []).append(sample)
    if not by_cell:
        raise ConfigError("no samples: a latency table needs at least one timed step per cell")
    buckets = request_buckets(config)
    contexts = sorted({cell.context_len for cell in by_cell})
    shape = (len(contexts), len(buckets), len(rungs))
    step = np.full(shape, np.nan)
    rows = {kind: np.full(shape[:2], np.nan) for kind in StepKind}
    draft: dict[tuple[int, int], list[float]] = {}
    for cell, timed in by_cell.items():
        x, b = contexts.index(cell.context_len), buckets.index(cell.num_requests)
        median = float(np.median([s.step_ms for s in timed]))
        if cell.kind is StepKind.DRAFTED:
            step[x, b, list(rungs).index(cell.rung)] = median
            draft.setdefault((x, b), []).extend(s.draft_ms for s in timed)
        else:
            rows[cell.kind][x, b] = median
    for (x, b), values in draft.items():
        rows[StepKind.DRAFTED][x, b] = float(np.median(values))
    return LatencyTable(
        request_buckets=buckets,
        rungs=tuple(rungs),
        step_ms=step.mean(axis=0),
        autoregressive_ms=rows[StepKind.AUTOREGRESSIVE].mean(axis=0),
        no_draft_ms=rows[StepKind.NO_DRAFT].mean(axis=0),
        draft_ms=rows[StepKind.DRAFTED].mean(axis=0),
        fingerprint=fingerprint,
        num_drafts=num_drafts,
        context_lens=tuple(contexts),
        machine=machine or {},
    )
