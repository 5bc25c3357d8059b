# SPDX-License-Identifier: Apache-2.0
"""The measured latency table: C(requests bucket, rung) → milliseconds of a whole step, drafting
included, and two plain rows. Look-up takes the ceiling cell (that is what runs), never an
interpolation. Knows how a table is read, written, completed and refused; not how steps are timed.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import load_json, require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.isotonic import complete_cells, fit_isotonic_rows

log = logging.getLogger(__name__)
Milliseconds = npt.NDArray[np.float64]

FORMAT = "dspark-latency-table"
VERSION = 1
MIN_RELATIVE_RISE = 0.05
"""A table whose dearest rung costs less than 5 % more than its cheapest, in every row, is flat."""


@dataclass(frozen=True)
class LatencyTable:
    """Costs of one engine on one machine. B requests buckets, T rungs."""

    request_buckets: tuple[int, ...]
    """[B] ascending."""
    rungs: tuple[int, ...]
    """[T] the ladder, ascending."""
    step_ms: Milliseconds
    """[B, T] whole drafted steps; NaN where nothing was measured. `costs` has no holes."""
    autoregressive_ms: Milliseconds
    """[B] a plain step of a server without a drafter; NaN = unknown."""
    no_draft_ms: Milliseconds
    """[B] a plain step with the drafter loaded, its rows kept for later; NaN = unknown."""
    draft_ms: Milliseconds
    """[B] the draft part of a step by requests drafted: part of `step_ms`, never added to it."""
    fingerprint: str
    num_drafts: int
    """γ"""
    context_lens: tuple[int, ...] = ()
    """Context lengths that were measured; cells are means over them."""
    machine: dict[str, Any] = field(default_factory=dict)
    costs: Milliseconds = field(init=False, repr=False, compare=False)
    """[B, T] `step_ms` without holes and non-decreasing along rungs: what policies read."""

    rung_array: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """[T] `rungs` as an array."""

    def __post_init__(self) -> None:
        for name, values in (("request_buckets", self.request_buckets), ("rungs", self.rungs)):
            ascending = bool(values) and list(values) == sorted(set(values)) and values[0] >= 1
            require(ascending, name, values, "one or more ascending positive numbers")
        shape = (len(self.request_buckets), len(self.rungs))
        require(self.step_ms.shape == shape, "step_ms.shape", self.step_ms.shape, f"{shape}")
        for name in ("autoregressive_ms", "no_draft_ms", "draft_ms"):
            found = getattr(self, name).shape
            require(found == shape[:1], f"{name}.shape", found, f"{shape[:1]}")
        for name in ("step_ms", "autoregressive_ms", "no_draft_ms"):
            values = getattr(self, name)
            positive = bool(np.all(np.isnan(values) | ((values > 0) & np.isfinite(values))))
            require(positive, name, values, "positive milliseconds (NaN where unknown)")
        object.__setattr__(self, "rung_array", np.array(self.rungs, np.int64))
        object.__setattr__(self, "costs", fit_isotonic_rows(complete_cells(self.step_ms)))

    def bucket_index(self, num_requests: int) -> int:
        """Return the row of the smallest requests bucket ≥ `num_requests` (the last beyond it)."""
        return min(bisect_left(self.request_buckets, num_requests), len(self.request_buckets) - 1)

    def rung_index(self, num_tokens: int) -> int:
        """Return the column of the smallest rung ≥ `num_tokens`, refusing what no rung holds."""
        index = bisect_left(self.rungs, num_tokens)
        if index == len(self.rungs):
            raise ConfigError(
                f"num_tokens = {num_tokens} is above the table's last rung {self.rungs[-1]}; "
                f"measure the table again with this engine's ladder"
            )
        return index

    def step_cost(self, num_requests: int, num_tokens: int) -> float:
        """Return C of a drafted step with `num_tokens` rows in all (ceiling cell)."""
        return float(self.costs[self.bucket_index(num_requests), self.rung_index(num_tokens)])

    def prefill_cost(self, num_requests: int, num_prefill_tokens: int) -> float:
        """Return what the prefill rows alone add to a step of `num_requests` decode rows."""
        if num_prefill_tokens == 0:
            return 0.0
        with_prefill = self.step_cost(num_requests, num_requests + num_prefill_tokens)
        return with_prefill - self.step_cost(num_requests, num_requests)

    def plain_cost(self, num_requests: int, num_prefill_tokens: int = 0) -> float:
        """Return the cost of a step that drafts nothing; NaN where the plain row is unknown."""
        plain = float(self.no_draft_ms[self.bucket_index(num_requests)])
        return plain + self.prefill_cost(num_requests, num_prefill_tokens)

    def draft_cost(self, num_requests: int) -> float:
        """Return the draft part for `num_requests` drafted requests; 0 for none, NaN if unknown."""
        return float(self.draft_ms[self.bucket_index(num_requests)]) if num_requests else 0.0

    @property
    def relative_rise(self) -> float:
        """Largest rise of cost from R to R·D rows (the decode rungs) over the requests buckets."""
        rises = []
        for row, bucket in enumerate(self.request_buckets):
            last = min(bucket * (self.num_drafts + 1), self.rungs[-1])
            first = min(bucket, last)
            cheap, dear = self.rung_index(first), self.rung_index(last)
            rises.append(float(self.costs[row, dear] / self.costs[row, cheap]) - 1.0)
        return max(rises)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the documented JSON form (docs/scheduling.md); unknown cells are null."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "num_drafts": self.num_drafts,
            "context_lens": list(self.context_lens),
            "machine": self.machine,
            "request_buckets": list(self.request_buckets),
            "rungs": list(self.rungs),
            "step_ms": _to_lists(self.step_ms),
            "autoregressive_ms": _to_lists(self.autoregressive_ms),
            "no_draft_ms": _to_lists(self.no_draft_ms),
            "draft_ms": _to_lists(self.draft_ms),
        }

    @classmethod
    def from_json_dict(cls, data: dict[str, Any], where: str = "latency table") -> LatencyTable:
        """Read the documented JSON form; a wrong format, version or missing key is named."""
        found = (data.get("format"), data.get("version"))
        require(
            found == (FORMAT, VERSION), f"{where}: format, version", found, f"{FORMAT}, {VERSION}"
        )
        try:
            return cls(
                request_buckets=tuple(data["request_buckets"]),
                rungs=tuple(data["rungs"]),
                step_ms=_to_array(data["step_ms"]),
                autoregressive_ms=_to_array(data["autoregressive_ms"]),
                no_draft_ms=_to_array(data["no_draft_ms"]),
                draft_ms=_to_array(data["draft_ms"]),
                fingerprint=data["fingerprint"],
                num_drafts=data["num_drafts"],
                context_lens=tuple(data.get("context_lens", ())),
                machine=data.get("machine", {}),
            )
        except KeyError as error:
            raise ConfigError(f"{where}: the key {error} is missing; measure it again") from error
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where}: cells must be numbers or null ({error})") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON form (one file, replaced whole)."""
        target = Path(path)
        scratch = target.with_name(target.name + ".tmp")
        scratch.write_text(json.dumps(self.to_json_dict(), indent=1) + "\n", encoding="utf-8")
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> LatencyTable:
        """Read a file written by `save`."""
        return cls.from_json_dict(load_json(path), str(path))


def refusal_reason(table: LatencyTable | None, fingerprint: str, rungs: tuple[int, ...]) -> str:
    """Return why `table` must not be used for an engine with this fingerprint and ladder, or ''."""
    if table is None:
        return "there is no latency table (run `dspark profile`)"
    if table.fingerprint != fingerprint:
        return (
            f"the latency table was measured with fingerprint {table.fingerprint!r}, "
            f"this engine's is {fingerprint!r} (run `dspark profile` again)"
        )
    if table.rungs != tuple(rungs):
        return f"the latency table has rungs {table.rungs}, this engine runs {tuple(rungs)}"
    if table.relative_rise < MIN_RELATIVE_RISE:
        return (
            f"the latency table is flat: its dearest rung costs {100 * table.relative_rise:.1f} % "
            f"more than its cheapest, {100 * MIN_RELATIVE_RISE:.0f} % or more is needed to trim"
        )
    return ""


def usable_table(
    table: LatencyTable | None, fingerprint: str, rungs: tuple[int, ...]
) -> LatencyTable | None:
    """Return `table` if it may be trusted, else None with one warning: every draft is verified."""
    reason = refusal_reason(table, fingerprint, rungs)
    if reason:
        log.warning("no trimming, every draft is verified: %s", reason)
        return None
    return table


def _to_lists(values: Milliseconds) -> list[Any]:
    if values.ndim == 2:
        return [_to_lists(row) for row in values]
    return [None if np.isnan(v) else round(float(v), 6) for v in values]


def _to_array(values: list[Any]) -> Milliseconds:
    return np.asarray(values, dtype=np.float64)
