# SPDX-License-Identifier: Apache-2.0
"""A discrete-step simulator of the serving loop. It calls the same policy and estimator objects as
the server; costs come from a latency table, blocks from an acceptance model. No engine, no torch.

One step: arrivals and admission, `decide`, draft, `plan`, accept, commit, `observe`; time advances
by the table's cost of exactly the rung that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.evaluation.acceptance_models import AcceptanceModel, SimulatedBlocks
from trtllm_dspark.evaluation.long_run_optimum import LongRunOptimum
from trtllm_dspark.evaluation.simulated_requests import ActiveRequests, Limits, Workload
from trtllm_dspark.evaluation.simulation_report import SimulationReport, Tally
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policies.baselines import OraclePolicy
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Policy
from trtllm_dspark.scheduling.subsets import SubsetCosts
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftMode, IntArray, StepOutcome


@dataclass(frozen=True)
class SimulatedSystem:
    """What is simulated: costs, policy, estimator, drafts."""

    table: LatencyTable
    policy: Policy
    estimator: SurvivalEstimator
    acceptance: AcceptanceModel


class Simulation:
    """One run. The same seed, system and workload give the same run."""

    def __init__(
        self, system: SimulatedSystem, workload: Workload, limits: Limits | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.system, self.workload = system, workload
        self.limits = limits_of(system.table, limits)
        self.rng = np.random.default_rng(seed)
        self.requests = ActiveRequests(workload, self.limits, system.acceptance, self.rng)
        self.subsets = SubsetCosts(system.table)
        self.now_ms = 0.0
        self.tally = Tally(system.acceptance.num_drafts)
        self._has_drafter = system.policy.name != "autoregressive"

    def run(self, num_steps: int, warm_up: int = 0) -> SimulationReport:
        """Run `warm_up` steps that do not count, then `num_steps` that do."""
        for _ in range(warm_up):
            self.step()
        self.tally = Tally(self.system.acceptance.num_drafts)
        for _ in range(num_steps):
            self.step()
        return self.tally.report(self.requests.num_preemptions, len(self.requests.waiting))

    def step(self) -> None:
        """Run one decode step, prefill rows of admitted prompts included."""
        requests, gamma = self.requests, self.system.acceptance.num_drafts
        requests.arrive(self.now_ms)
        if not len(requests) and not requests.waiting:
            self._wait_until(requests.next_arrival_ms)
        requests.preempt(gamma + 1)
        requests.admit(gamma + 1)
        decoding = requests.rows["prompt_left"] == 0
        prefill = self._prefill_rows(decoding)
        view = self._view(decoding, int(prefill.sum()))
        blocks = self.system.acceptance.draw(self.rng, requests.rows["state"][decoding])
        outcome, expected = self._decode(view, blocks)
        self.now_ms += outcome.step_ms
        self._commit(decoding, prefill, outcome)
        self.system.estimator.observe(outcome)
        self.system.policy.observe(outcome)
        self.tally.add_step(outcome, expected)
        requests.redraw_states()

    def _wait_until(self, arrival_ms: float) -> None:
        """Let time pass without a step, to the next arrival."""
        self.tally.add_idle(max(arrival_ms - self.now_ms, 0.0))
        self.now_ms = max(self.now_ms, arrival_ms)
        self.requests.arrive(self.now_ms)

    def _prefill_rows(self, decoding: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Rows [R] that each waiting prompt gets in this step, oldest first."""
        left = self.requests.rows["prompt_left"].astype(np.int64)
        if not left.any():
            return left
        room = max(self.limits.max_num_tokens - int(decoding.sum()), 0)
        before = np.cumsum(left) - left
        return np.clip(room - before, 0, left)

    def _view(self, decoding: npt.NDArray[np.bool_], num_prefill: int) -> BatchView:
        rows, gamma = self.requests.rows, self.system.acceptance.num_drafts
        left = rows["wanted"][decoding] - rows["made"][decoding]
        return BatchView(
            request_keys=tuple(rows["key"][decoding].astype(int).tolist()),
            modes=(DraftMode.GREEDY_TARGET,) * int(decoding.sum()),
            draft_caps=np.clip(left - 1, 0, gamma).astype(np.int32),
            num_drafts=gamma,
            num_prefill_tokens=num_prefill,
            rungs=self.system.table.rungs,
            max_num_tokens=self.limits.max_num_tokens,
        )

    def _decode(self, view: BatchView, blocks: SimulatedBlocks) -> tuple[StepOutcome, float]:
        policy, gamma = self.system.policy, view.num_drafts
        num_requests = len(view.request_keys)
        self._reveal(view, blocks)
        decision = policy.decide(view)
        drafted = decision.draft_mask & (view.draft_caps > 0)
        draft_lens = np.where(drafted, gamma, 0).astype(np.int32)
        survivals = self.system.estimator.survivals(blocks.logits, draft_lens, view.modes)
        verify_lens = np.zeros(num_requests, np.int32)
        if drafted.any():
            planned = policy.plan(view, decision, survivals)
            verify_lens = np.minimum(planned, np.minimum(view.draft_caps, draft_lens))
        accepted = np.minimum(blocks.accepted_lens, verify_lens).astype(np.int32)
        verified = np.arange(gamma) < verify_lens[:, None]
        expected = num_requests + float(accepted.sum())
        if blocks.true_probs is not None:
            expected = num_requests + float((np.cumprod(blocks.true_probs, 1) * verified).sum())
        rows = num_requests + int(verify_lens.sum()) + view.num_prefill_tokens
        outcome = StepOutcome(
            request_keys=view.request_keys,
            verify_lens=verify_lens.astype(np.int32),
            accepted_lens=accepted,
            draft_lens=draft_lens,
            confidence_logits=blocks.logits if drafted.any() else None,
            modes=view.modes,
            dropped_accept_probs=dropped_outcomes(blocks, verify_lens, accepted, draft_lens),
            rung=self.system.table.rungs[self.system.table.rung_index(max(rows, 1))],
            num_prefill_tokens=view.num_prefill_tokens,
            drafted=bool(drafted.any()),
            step_ms=self._cost(view, decision, int(drafted.sum()), rows),
            expected_tokens=num_requests + float((survivals * verified).sum()),
        )
        return outcome, expected

    def _reveal(self, view: BatchView, blocks: SimulatedBlocks) -> None:
        """Tell yardsticks what no server knows."""
        policy = self.system.policy
        if isinstance(policy, OraclePolicy):
            policy.reveal(blocks.accepted_lens)
        if isinstance(policy, LongRunOptimum):
            everything = np.full(len(view.request_keys), view.num_drafts, np.int32)
            policy.reveal(self.system.estimator.survivals(blocks.logits, everything, view.modes))

    def _cost(self, view: BatchView, decision: DraftDecision, num_drafted: int, rows: int) -> float:
        """Milliseconds of this step by the table."""
        table, num_requests = self.system.table, len(view.request_keys)
        if num_drafted:
            change = self.subsets.change(num_requests, num_drafted)
            return table.step_cost(num_requests, rows) + change
        if num_requests == 0:  # prompts only: a cell's draft part is charged too, which is little
            return table.step_cost(1, max(rows, 1))
        count = num_requests
        if not self._has_drafter:
            plain = float(table.autoregressive_ms[table.bucket_index(count)])
            if not np.isnan(plain):
                return plain + table.prefill_cost(count, view.num_prefill_tokens)
        plain = table.plain_cost(count, view.num_prefill_tokens)
        return table.step_cost(count, max(rows, 1)) if np.isnan(plain) else plain

    def _commit(
        self,
        decoding: npt.NDArray[np.bool_],
        prefill: npt.NDArray[np.int64],
        outcome: StepOutcome,
    ) -> None:
        rows = self.requests.rows
        committed = np.zeros(len(decoding))
        left = rows["wanted"][decoding] - rows["made"][decoding]
        committed[decoding] = np.minimum(outcome.accepted_lens + 1, left)
        rows["prompt_left"] -= prefill
        committed[(prefill > 0) & (rows["prompt_left"] == 0)] += 1
        rows["cached"] += prefill + committed
        fresh = (rows["made"] == 0) & (committed > 0)
        rows["first_ms"][fresh] = self.now_ms
        rows["made"] += committed
        done = rows["made"] >= rows["wanted"]
        if done.any():
            self.tally.add_requests(
                first_token_ms=(rows["first_ms"] - rows["arrival_ms"])[done],
                ms_per_token=(self.now_ms - rows["first_ms"])[done]
                / np.maximum(rows["made"][done] - 1, 1),
            )
            self.requests.num_finished += int(done.sum())
            self.requests.keep(~done)


def limits_of(table: LatencyTable, given: Limits | None = None) -> Limits:
    """Return `given` (default: all that fits) within what the table has costs for.

    No more requests than its last bucket: `bucket_index` would price them as that bucket.
    """
    last = table.rungs[-1]
    given = given or Limits(max_num_requests=min(4096, last), max_num_tokens=last)
    num_tokens = min(given.max_num_tokens, last)
    num_requests = min(given.max_num_requests, num_tokens, table.request_buckets[-1])
    return Limits(num_requests, num_tokens, given.num_kv_tokens)


def dropped_outcomes(
    blocks: SimulatedBlocks, verify_lens: IntArray, accepted: IntArray, draft_lens: IntArray
) -> npt.NDArray[np.float32]:
    """Return [R] whether the first dropped draft would have been accepted (greedy: 0 or 1).

    NaN where a verified draft was rejected or nothing was dropped, as the server reports it.
    """
    known = (accepted == verify_lens) & (verify_lens < draft_lens)
    hit = (blocks.accepted_lens > verify_lens).astype(np.float32)
    return np.where(known, hit, np.float32(np.nan))
