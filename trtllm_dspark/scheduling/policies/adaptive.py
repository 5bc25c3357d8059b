# SPDX-License-Identifier: Apache-2.0
"""The default policy `adaptive`: before drafting it maximises Σ survival − λ·C over rungs, over the
set of requests worth drafting for, and over not drafting at all.

λ is the current rate of this batch; survivals are at least two steps old. Current ones only rank
under the capacity already fixed, so {ℓ_r ≥ k} never depends on x_{r,k}: lossless in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_dspark.config import from_json_dict, require
from trtllm_dspark.scheduling.history import SurvivalHistory
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.options import DraftOptions, draft_options, mask_caps
from trtllm_dspark.scheduling.policies.base import (
    ALL_MODES,
    PolicyBase,
    PriorRows,
    plan_decided,
)
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Sees, register_policy
from trtllm_dspark.scheduling.policy_options import PolicyResources, refuse_unknown_options
from trtllm_dspark.scheduling.rates import CostRelation, ProbeBudget, RunningRate
from trtllm_dspark.scheduling.subsets import Candidate, SubsetCosts, narrow_requests
from trtllm_dspark.types import FloatArray, IntArray, StepOutcome

NEEDED_SAMPLES = 8.0
"""Comparisons of times below which the other kind of step is tried, where the two are close."""
VERDICT_STEPS = 8
"""Steps for which a plain run of one batch is not thought over again: λ and ages change slowly."""
CLOSE_CALL = 0.3
"""Part of a plain step: kinds further apart than this are not confused by an error of the table."""


@dataclass(frozen=True)
class AdaptiveOptions:
    """Knobs of `adaptive`; the defaults are meant to stay."""

    min_gain: float = 0.01
    """Hysteresis: drafting starts or stops only when it pays by this share of a plain step."""
    probe_share: float = 0.01
    """Share of a run's time that probes of the other kind of step may take (≤ 0.02)."""
    staleness: int = 2
    """Steps that survivals must be old before they decide anything."""
    max_age: int = 64
    """Steps after which a request's older samples are dropped (the newest one stays)."""
    num_rows: int = 128
    """Survival rows averaged at least: small batches look further back, up to `max_samples`."""
    max_samples: int = 8
    rate_half_life: float = 32.0
    """Steps after which a finished step counts half in λ."""
    rate_prior_steps: float = 128.0
    """Weight, in steps, of the present batch's own forecast in λ: how hard a text is lasts for as
    many tokens as it has, so that time saved now is spent on the same text, at its own rate."""
    choose_requests: bool = True
    """Leave out requests whose drafts do not pay for drafting them."""
    refresh_interval: int = 64
    """Every so many steps nobody is left out, so that requests left out get new survivals."""

    def __post_init__(self) -> None:
        require(0.0 <= self.min_gain < 1.0, "adaptive.min_gain", self.min_gain, "in [0, 1)")
        require(self.num_rows >= 1, "adaptive.num_rows", self.num_rows, "≥ 1")
        require(self.max_samples >= 1, "adaptive.max_samples", self.max_samples, "≥ 1")
        interval = self.refresh_interval
        require(interval >= 8, "adaptive.refresh_interval", interval, "≥ 8 steps")


@dataclass(frozen=True)
class PlainVerdict:
    """That plain steps are best, and what a probe would be; stands while its grounds do."""

    view: BatchView
    step: int
    """When it was found."""
    bucket: int
    plain_ms: float
    probe_ms: float
    probe_capacity: int
    compares: bool
    """Whether the time of a drafted step would teach something."""

    def holds(self, view: BatchView, history: SurvivalHistory) -> bool:
        """Whether the batch is the same, the verdict young and no survival newer than it saw."""
        return (
            history.step - self.step < VERDICT_STEPS
            and history.last_recorded <= self.step - history.staleness
            and view.request_keys == self.view.request_keys
            and view.num_prefill_tokens == self.view.num_prefill_tokens
            and bool(np.array_equal(view.draft_caps, self.view.draft_caps))
        )


class AdaptivePolicy(PolicyBase):
    """See the module docstring. One instance per system; it remembers finished steps."""

    name = "adaptive"
    sees = frozenset({Sees.OLD_SURVIVALS, Sees.CURRENT_RANKING})
    covers = ALL_MODES

    def __init__(self, options: AdaptiveOptions, resources: PolicyResources) -> None:
        super().__init__(resources)
        self.options = options
        self.history = SurvivalHistory(options.max_samples, options.staleness, options.max_age)
        self.priors = PriorRows(self.estimator)
        self.subsets = SubsetCosts(self.table) if self.table else None
        num_buckets = len(self.table.request_buckets) if self.table else 0
        self.rates = RunningRate(num_buckets, options.rate_half_life, options.rate_prior_steps)
        self.relation = CostRelation(num_buckets)
        self.probes, self.plain_probes = (ProbeBudget(options.probe_share) for _ in range(2))
        self._second_probe_of = -1
        """Requests bucket whose probe is to be followed by another one; -1 = none."""
        self._verdict: PlainVerdict | None = None
        self._drafted_last: frozenset[int] = frozenset()
        self.was_drafting = True
        self.last_rate = float("nan")
        """λ of the last decision, for metrics."""

    def decide(self, view: BatchView) -> DraftDecision:
        """Choose between a plain step and the best drafted one, from older knowledge only."""
        self.history.begin_step()
        decision = self._decide(view)
        self.history.record_decision(view, decision.draft_mask)
        return decision

    def _decide(self, view: BatchView) -> DraftDecision:
        wanted = view.draft_caps > 0
        num_wanted = int(np.count_nonzero(wanted))
        if self.table is None or self.subsets is None or num_wanted == 0:
            return DraftDecision(draft_mask=wanted)
        if self._verdict is not None and self._verdict.holds(view, self.history):
            return self._stay_plain(self._verdict, wanted)
        num_samples = -(-self.options.num_rows // len(wanted))
        num_samples = min(num_samples, self.options.max_samples)
        old = self.history.recall(view, self.priors.rows, num_samples)
        old = mask_caps(old, view.draft_caps)
        options = draft_options(
            self.table,
            view,
            old,
            int(view.draft_caps.sum()),
            extra_ms=self.subsets.change(len(wanted), num_wanted),
        )
        if options is None:
            return DraftDecision(draft_mask=np.zeros_like(wanted), capacity=0)
        return self._choose(self.table, self.subsets, view, wanted, old, options)

    def _choose(
        self,
        table: LatencyTable,
        subsets: SubsetCosts,
        view: BatchView,
        wanted: npt.NDArray[np.bool_],
        old: FloatArray,
        options: DraftOptions,
    ) -> DraftDecision:
        num_requests = len(wanted)
        bucket = table.bucket_index(num_requests)
        plain_ms = float(table.no_draft_ms[bucket]) * self.relation.factor(bucket)
        rate = self._rate(table, options, num_requests, plain_ms)
        best = options.best_by_value(rate)
        value = float(options.gains[best] - rate * options.costs[best])
        drafted = Candidate(wanted, int(options.capacities[best]), value)
        floor = self._floor(num_requests, rate, plain_ms)
        is_refresh = self.history.step % self.options.refresh_interval == 0
        if self.options.choose_requests and not is_refresh:
            narrowed = narrow_requests(
                table, subsets, view, wanted, old, options, best, rate, floor
            )
            if narrowed is not None and narrowed.value > value:
                drafted = narrowed
        # What drafting brings beyond a plain step, as time.
        lead_ms = (drafted.value - num_requests) / rate + plain_ms
        is_drafted = drafted.value > floor
        compares = self._wants_time(table, view, not is_drafted, lead_ms, plain_ms)
        if is_drafted:
            self.was_drafting, self._second_probe_of = True, -1
            if compares and self.plain_probes.spend(float(options.costs[best]), lead_ms):
                return DraftDecision(draft_mask=np.zeros_like(wanted), capacity=0)
            return DraftDecision(draft_mask=drafted.mask, capacity=drafted.capacity)
        self.was_drafting = False
        cheapest = int(np.argmin(options.costs))
        verdict = PlainVerdict(
            view,
            self.history.step,
            bucket,
            plain_ms,
            probe_ms=float(options.costs[cheapest]),
            probe_capacity=int(options.capacities[cheapest]),
            compares=compares,
        )
        return self._stay_plain(verdict, wanted)

    def _stay_plain(self, verdict: PlainVerdict, wanted: npt.NDArray[np.bool_]) -> DraftDecision:
        """Return a plain step, or the probe that is due."""
        self._verdict = verdict
        if self._must_probe(verdict):
            return DraftDecision(wanted, verdict.probe_capacity, is_probe=True)
        return DraftDecision(draft_mask=np.zeros_like(wanted), capacity=0)

    def _wants_time(
        self, table: LatencyTable, view: BatchView, drafted: bool, lead_ms: float, plain_ms: float
    ) -> bool:
        """Whether this kind of step is close to the other, by the clock or by the table alone, and
        its time would teach something. Steps with prompts are not timed.
        """
        bucket = table.bucket_index(len(view.request_keys))
        table_lead_ms = lead_ms - plain_ms + float(table.no_draft_ms[bucket])
        nearest_ms = min(abs(lead_ms), abs(table_lead_ms))
        is_close = nearest_ms <= CLOSE_CALL * plain_ms and view.num_prefill_tokens == 0
        return is_close and self.relation.wants(bucket, drafted, NEEDED_SAMPLES)

    def _must_probe(self, verdict: PlainVerdict) -> bool:
        """Whether a step of a plain run is drafted. To be timed takes two: the first one writes
        the rows that plain steps left. Survivals must not wait for that, so the second is owed.
        """
        if self._second_probe_of == verdict.bucket:
            self._second_probe_of = -1
            return True
        price_ms = verdict.probe_ms - verdict.plain_ms
        if not self.probes.spend(verdict.plain_ms, price_ms):
            return False
        self._second_probe_of = -1
        if verdict.compares:
            self._second_probe_of = verdict.bucket
            self.probes.owe(price_ms)
        return True

    def plan(self, view: BatchView, decision: DraftDecision, survivals: FloatArray) -> IntArray:
        """Return the top-K drafts by current survival and remember the survivals."""
        self.history.record(view, decision.draft_mask, survivals)
        return plan_decided(view, decision, survivals)

    def observe(self, outcome: StepOutcome) -> None:
        """Add the step to the long-run rate: committed tokens over the table's cost of its rows."""
        self.history.settle(outcome.request_keys)
        num_requests = len(outcome.request_keys)
        if self.table is None or self.subsets is None or num_requests == 0:
            self._drafted_last = frozenset()
            return
        bucket = self.table.bucket_index(num_requests)
        if outcome.drafted:
            num_rows = num_requests + int(outcome.verify_lens.sum())
            cost = self.table.step_cost(num_requests, num_rows)
            num_drafted = int(np.count_nonzero(outcome.draft_lens))
            cost += self.subsets.change(num_requests, num_drafted)
        else:
            cost = self.table.plain_cost(num_requests)
        self._time(outcome, bucket, cost)
        if not outcome.drafted:
            cost *= self.relation.factor(bucket)
        if cost > 0:
            num_tokens = num_requests + float(outcome.accepted_lens.sum())
            self.rates.observe(bucket, num_tokens, cost)

    def _time(self, outcome: StepOutcome, bucket: int, table_ms: float) -> None:
        """Hold the step's time against the table.

        Not where prompts were part of it, and not where a request is drafted that was not in the
        step before: then the drafter first writes the rows that came in between.
        """
        drafted = frozenset(
            key
            for key, n in zip(outcome.request_keys, outcome.draft_lens.tolist(), strict=True)
            if n
        )
        is_usual = outcome.num_prefill_tokens == 0 and drafted <= self._drafted_last
        self._drafted_last = drafted
        measured_ms = outcome.step_ms if is_usual else 0.0
        self.relation.observe(bucket, outcome.drafted, measured_ms, table_ms)

    def _rate(
        self, table: LatencyTable, options: DraftOptions, num_requests: int, plain_ms: float
    ) -> float:
        """λ: the present batch's forecast, steadied by the realised rate of its bucket."""
        best = options.best_by_rate()
        forecast, cost = float(options.gains[best] / options.costs[best]), options.costs[best]
        if num_requests > forecast * plain_ms:
            forecast, cost = num_requests / plain_ms, plain_ms
        self.last_rate = self.rates.rate(table.bucket_index(num_requests), forecast, float(cost))
        return self.last_rate

    def _floor(self, num_requests: int, rate: float, plain_ms: float) -> float:
        """Return the value a drafted step must exceed: a plain step's, with hysteresis."""
        if np.isnan(plain_ms):
            return -np.inf
        margin = self.options.min_gain * rate * plain_ms
        return num_requests - rate * plain_ms + (-margin if self.was_drafting else margin)


@register_policy("adaptive")
def create_adaptive(options: dict[str, Any], resources: PolicyResources) -> AdaptivePolicy:
    """Build the policy from the fields of `AdaptiveOptions`."""
    refuse_unknown_options("adaptive", options, tuple(AdaptiveOptions.__dataclass_fields__))
    return AdaptivePolicy(from_json_dict(AdaptiveOptions, options, "adaptive"), resources)
