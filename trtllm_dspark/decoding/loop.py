# SPDX-License-Identifier: Apache-2.0
"""The step loop: draft, plan, verify, accept, commit (design §3), over continuous batching.

Token ids in, token ids out; text, transport and files are other rooms. One thread drives it.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable

import numpy as np

from trtllm_dspark.decoding.acceptance import (
    AcceptanceBatch,
    AcceptanceResult,
    InvalidLogitsError,
    accept,
)
from trtllm_dspark.decoding.admission import check_request
from trtllm_dspark.decoding.batcher import Batcher, ScheduledBatch
from trtllm_dspark.decoding.blocks import empty_block, spread_block
from trtllm_dspark.decoding.drafters.protocol import CommittedRows, Drafter
from trtllm_dspark.decoding.emission import Emitter
from trtllm_dspark.decoding.outcome import StepTimes, make_outcome
from trtllm_dspark.decoding.packing import PackedStep, pack_step
from trtllm_dspark.decoding.pages import PagePool
from trtllm_dspark.decoding.rounds import FinishedRound, Rounds, finish_round, make_rounds
from trtllm_dspark.decoding.sequence import Sequence
from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.engines.protocol import Engine, TargetOutput
from trtllm_dspark.errors import InvalidRequestError, QueueFullError
from trtllm_dspark.scheduling.buckets import rung_for
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Policy
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import (
    DraftBlock,
    DraftMode,
    FinishReason,
    FloatArray,
    GenerationRequest,
    IntArray,
    RequestOutput,
    StepOutcome,
)

logger = logging.getLogger(__name__)


class DecodingLoop:
    """Serves requests on one engine with one drafter and one policy."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        policy: Policy,
        estimator: SurvivalEstimator,
        *,
        max_queue_size: int = 0,
        enable_prefix_reuse: bool = True,
        strict_policy: bool = False,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = engine.info
        self.engine, self.drafter, self.policy, self.estimator = engine, drafter, policy, estimator
        self.max_queue_size = max_queue_size
        self.strict_policy = strict_policy
        self.draw_seed, self.clock = draw_seed, clock
        self.pool = PagePool(info.num_pages, info.page_size, enable_prefix_reuse)
        self.batcher = Batcher(
            self.pool,
            max_num_requests=info.max_num_requests,
            max_num_tokens=info.rungs[-1],
            num_drafts=drafter.num_drafts,
            block_rows=drafter.num_drafts + 1 if drafter.needs_taps else 0,
            on_preempt=lambda sequence: drafter.release(sequence.key),
        )
        self.rounds = make_rounds(engine, drafter, policy, estimator)
        """Whole rounds on the device, None where the engine runs none."""
        self.counters = LoopStats(num_drafts=drafter.num_drafts)
        self._live: dict[str, Sequence] = {}
        self._emitter = Emitter(self.clock)
        self._ended: list[RequestOutput] = []
        self._next_key = 0
        self.last_outcome: StepOutcome | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""
        return bool(self._live or self._ended)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; InvalidRequestError and QueueFullError leave everything unchanged."""
        check_request(request, self.engine.info)
        if request.request_id in self._live:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use: ids of live requests must differ"
            )
        if self.max_queue_size and len(self.batcher.waiting) >= self.max_queue_size:
            raise QueueFullError(
                f"{len(self.batcher.waiting)} requests are waiting and max_queue_size is "
                f"{self.max_queue_size}: try again later"
            )
        seed = request.params.seed
        sequence = Sequence(
            request,
            self._next_key,
            self.draw_seed() if seed is None else seed,
            self._drafts_greedily(request),
        )
        self._next_key += 1
        self._live[request.request_id] = sequence
        self.batcher.add(sequence)

    def _drafts_greedily(self, request: GenerationRequest) -> bool:
        """Whether drafts must be deterministic: drafter cannot sample, or policy needs it."""
        params = request.params
        if params.is_greedy or not self.drafter.can_sample:
            return True
        if params.seed is not None or DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS in self.policy.covers:
            return False
        if self.strict_policy:
            raise InvalidRequestError(
                f"policy {self.policy.name!r} is not lossless for sampled drafts and the server is "
                "strict: set temperature 0 or a seed, or choose another policy"
            )
        self.counters.num_greedily_drafted_requests += 1
        return True

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request now; its last output comes with the next `step`. Unknown ids: ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason)
            self._ended.append(self._emitter.end(sequence))

    def step(self) -> list[RequestOutput]:
        """Run one decode step; returns what every request got or how it ended."""
        self._expire()
        outputs, self._ended = self._ended, []
        batch = self.batcher.schedule()
        if not batch.decoding and not batch.prefill:
            return outputs
        self._mark_scheduled(batch)
        times = StepTimes()
        view = self._view(batch)
        decision = (self.rounds or self.policy).decide(view)
        times.mark("plan")
        if self.rounds is not None:
            if self.rounds.takes(batch, decision):
                return outputs + self._run_round(self.rounds, batch, view, decision, times)
            self.rounds.settle()  # what the host does now is learnt in order
            times.skip()
        block = self._draft(batch, decision)
        times.mark("draft")
        survivals = self.estimator.survivals(block.confidence_logits, block.draft_lens, view.modes)
        verify_lens = self._plan(view, decision, survivals, block)
        times.mark("plan")
        packed = pack_step(batch, block, verify_lens, self._rung(batch, verify_lens))
        output = self.engine.run_target(packed.step)
        try:
            result = self._accept(packed, block, output)
        except InvalidLogitsError as error:
            return outputs + self._fail(packed, error)
        outputs += self._commit(packed, result, output)
        times.mark("verify")
        self._observe(
            make_outcome(
                view,
                block,
                verify_lens,
                survivals,
                result,
                rung=packed.step.rung,
                times=times,
            )
        )
        return outputs

    def _run_round(
        self,
        rounds: Rounds,
        batch: ScheduledBatch,
        view: BatchView,
        decision: DraftDecision,
        times: StepTimes,
    ) -> list[RequestOutput]:
        """Run a round on the device; meanwhile settle the last one and decide the next one."""
        pending = rounds.start(batch, view, decision)
        times.mark("draft")
        rounds.settle()
        rounds.decide_ahead(view)
        times.mark("plan")
        output = pending.read()
        empty = empty_block(len(batch.decoding), self.drafter.num_drafts)
        try:
            finished = finish_round(output, decision, view.draft_caps)
        except InvalidLogitsError as error:
            none = np.zeros(len(batch.decoding), np.int32)
            return self._fail(pack_step(batch, empty, none, self._rung(batch, none)), error)
        rung = self._rung(batch, finished.verify_lens)
        packed = pack_step(batch, finished.block, finished.verify_lens, rung)
        outputs = self._commit(packed, finished.result, None)
        times.mark("verify")
        rounds.settle_later(lambda: self._learn(view, decision, finished, rung, times))
        if not self._live:
            rounds.settle()
        return outputs

    def _learn(
        self,
        view: BatchView,
        decision: DraftDecision,
        finished: FinishedRound,
        rung: int,
        times: StepTimes,
    ) -> None:
        """Show a round to the policy (which lengths to verify was the device's choice)."""
        block = finished.block
        survivals = self.estimator.survivals(block.confidence_logits, block.draft_lens, view.modes)
        self.policy.plan(view, decision, survivals)
        self._observe(
            make_outcome(
                view,
                block,
                finished.verify_lens,
                survivals,
                finished.result,
                rung=rung,
                times=times,
            )
        )

    def _fail(self, packed: PackedStep, error: InvalidLogitsError) -> list[RequestOutput]:
        """End the requests whose logits are no numbers; the others take the step again.

        Their positions are drafted anew, so unseeded requests get a fresh seed: noise that an
        aborted step has used must not come back (design §4).
        """
        outputs = []
        for row, sequence in enumerate(packed.sampled):
            if row in error.request_rows:
                self._finish(sequence, FinishReason.ERROR)
                outputs.append(dataclasses.replace(self._emitter.end(sequence), error=error))
        for sequence in packed.sequences:
            if sequence.params.seed is None:
                sequence.noise_seed = self.draw_seed()
        logger.error("%d requests ended: %s", len(outputs), error)
        return outputs

    def _observe(self, outcome: StepOutcome) -> None:
        """Let everything that learns see a finished step."""
        self.last_outcome = outcome
        self.estimator.observe(outcome)
        self.policy.observe(outcome)
        self.counters.record(outcome)

    def _rung(self, batch: ScheduledBatch, verify_lens: IntArray) -> int:
        rows = int(verify_lens.sum()) + len(batch.decoding) + batch.num_prefill_tokens
        return rung_for(self.engine.info.rungs, rows)

    def _expire(self) -> None:
        now = self.clock()
        for sequence in list(self._live.values()):
            timeout = sequence.request.timeout_s
            if timeout is not None and now - sequence.request.priority_time_s > timeout:
                self.cancel(sequence.request.request_id, FinishReason.TIMEOUT)

    def _mark_scheduled(self, batch: ScheduledBatch) -> None:
        for sequence, _ in batch.prefill:
            if sequence.stats.first_scheduled_time_s is None:
                sequence.stats.first_scheduled_time_s = self.clock()

    def _view(self, batch: ScheduledBatch) -> BatchView:
        return BatchView(
            request_keys=tuple(s.key for s in batch.decoding),
            modes=tuple(s.mode for s in batch.decoding),
            draft_caps=batch.draft_caps,
            num_drafts=self.drafter.num_drafts,
            num_prefill_tokens=batch.num_prefill_tokens,
            rungs=self.engine.info.rungs,
            max_num_tokens=self.engine.info.rungs[-1],
        )

    def _draft(self, batch: ScheduledBatch, decision: DraftDecision) -> DraftBlock:
        """Propose for the chosen requests; the others get rows that propose nothing."""
        chosen = np.flatnonzero(decision.draft_mask & (batch.draft_caps > 0))
        size = len(batch.decoding)
        if not len(chosen):
            return empty_block(size, self.drafter.num_drafts)
        sources = [batch.decoding[i].draft_source(int(batch.draft_caps[i])) for i in chosen]
        return spread_block(self.drafter.propose(sources), chosen, size)

    def _plan(
        self, view: BatchView, decision: DraftDecision, survivals: FloatArray, block: DraftBlock
    ) -> IntArray:
        if not block.draft_lens.any():
            return np.zeros(len(block.draft_lens), np.int32)
        lens = self.policy.plan(view, decision, survivals)
        return np.minimum(lens, np.minimum(view.draft_caps, block.draft_lens)).astype(np.int32)

    def _accept(
        self, packed: PackedStep, block: DraftBlock, output: TargetOutput
    ) -> AcceptanceResult:
        """Exact acceptance; requests whose prompt ends here are requests with nothing verified."""
        num_plain = len(packed.sampled) - packed.num_decoding
        sampled = block.sampled
        if sampled is None:
            sampled = np.zeros(packed.num_decoding, np.bool_)
        return accept(
            output.logits,
            AcceptanceBatch(
                cu_rows=packed.cu_logit_rows,
                draft_token_ids=np.pad(block.token_ids, ((0, num_plain), (0, 0))),
                draft_lens=np.pad(block.draft_lens, (0, num_plain)),
                draft_probs=block.draft_probs,
                sampled=np.pad(sampled, (0, num_plain)),
                sequences=[s.acceptance_view() for s in packed.sampled],
            ),
        )

    def _commit(
        self, packed: PackedStep, result: AcceptanceResult, output: TargetOutput | None
    ) -> list[RequestOutput]:
        """Advance every request; tell the drafter which rows became context.

        No `output`: a round on the device has written the drafter's rows, too.
        """
        outputs: list[RequestOutput] = []
        rows: list[CommittedRows] = []
        kept: list[Sequence] = []
        index_of = {id(s): i for i, s in enumerate(packed.sampled)}
        cu = packed.step.cu_query_lens
        for position, sequence in enumerate(packed.sequences):
            index = index_of.get(id(sequence))
            start, num_rows = int(cu[position]), int(cu[position + 1] - cu[position])
            if position < packed.num_decoding and index is not None:
                num_rows = int(result.num_tokens[index])
                sequence.stats.num_verified_tokens += int(cu[position + 1]) - start - 1
            first = sequence.num_computed
            sequence.num_computed += num_rows
            if index is not None:
                emitted = self._emitter.commit(sequence, result, index)
                if emitted is not None:
                    outputs.append(emitted)
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)
                continue
            source = sequence.draft_source(0)
            rows.append(CommittedRows(source, first, num_rows, start, is_written=output is None))
            kept.append(sequence)
        self.drafter.commit(rows, None if output is None else output.taps)
        for sequence in kept:
            self.batcher.offer_pages(sequence, self.drafter.synced_len(sequence.key))
        return outputs

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.batcher.remove(sequence)
        self.drafter.release(sequence.key)
        del self._live[sequence.request.request_id]
        self.counters.record_finish(reason)

    def stats(self) -> LoopStats:
        """Counters so far and the present state; a fresh object that the caller may keep."""
        return self.counters.snapshot(
            num_running=len(self.batcher.running),
            num_waiting=len(self.batcher.waiting),
            num_pages=self.pool.num_pages - 1,
            num_free_pages=self.pool.num_free,
            num_preemptions=self.batcher.num_preemptions,
            calibration_gaps={
                mode: report["gap"] for mode, report in self.estimator.drift_report().items()
            },
        )
