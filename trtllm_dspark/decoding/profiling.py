# SPDX-License-Identifier: Apache-2.0
"""Times whole steps (draft, plan, verify, accept) of an idle engine, cell by cell.

Requests are synthetic and pinned: every step starts from the same context and what it accepts is
thrown away, so that all rounds time the same work. Which cells, in which order: `scheduling`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trtllm_dspark.config import BucketConfig
from trtllm_dspark.decoding.acceptance import AcceptanceBatch, accept
from trtllm_dspark.decoding.batcher import ScheduledBatch
from trtllm_dspark.decoding.blocks import empty_block
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.drafters.protocol import CommittedRows, Drafter
from trtllm_dspark.decoding.packing import pack_step
from trtllm_dspark.decoding.rounds import accept_sampling
from trtllm_dspark.decoding.sequence import Sequence as Request
from trtllm_dspark.engines.protocol import (
    Engine,
    QueueingEngine,
    RoundEngine,
    RoundStep,
    TargetOutput,
)
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.measurement import (
    Cell,
    Sample,
    StepKind,
    num_rounds,
    plan_cells,
    plan_round,
    table_from_samples,
)
from trtllm_dspark.scheduling.selection import select_drafts
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import (
    DraftBlock,
    DraftMode,
    GenerationRequest,
    IntArray,
    SamplingParams,
)

logger = logging.getLogger(__name__)

PENDING_ROWS = 2
"""Context rows that a drafter finds new at each draft: about what a step commits."""
NUM_WARM_UP_ROUNDS = 1


def spread_evenly(total: int, num_requests: int) -> IntArray:
    """`total` drafts over R requests, the rest to the first ones: 5 over 3 → 2, 2, 1."""
    base, extra = divmod(total, num_requests)
    return np.array([base + (r < extra) for r in range(num_requests)], np.int32)


class StepProfiler:
    """Owns the synthetic requests; uses every page of an engine that serves nobody."""

    def __init__(self, engine: Engine, drafter: Drafter, seed: int = 0) -> None:
        self.engine, self.drafter = engine, drafter
        self.estimator = SurvivalEstimator(drafter.num_drafts, learns=False)
        self.rng = np.random.default_rng(seed)
        self._requests: dict[tuple[int, int], list[Request]] = {}
        self._taps: TargetOutput | None = None

    def time_cell(self, cell: Cell) -> Sample:
        """Run one pinned step and time it."""
        requests = self._requests_for(cell.num_requests, cell.context_len)
        drafts = cell.kind is StepKind.DRAFTED
        if self.drafter.needs_taps:
            self._pin_context(requests)
        engine, drafter = self.engine, self.drafter
        if drafts and isinstance(engine, RoundEngine) and isinstance(drafter, DSparkDrafter):
            return self._time_round(cell, requests, engine, drafter)
        started = time.perf_counter()
        block = empty_block(len(requests), self.drafter.num_drafts)
        if drafts:
            gamma = self.drafter.num_drafts
            block = self.drafter.propose([r.draft_source(gamma) for r in requests])
        drafted = time.perf_counter()
        if drafts:
            self._rank(block, cell)
        self._verify(requests, block, spread_evenly(cell.num_verified, len(requests)), cell)
        if cell.kind is StepKind.NO_DRAFT:
            self._keep_rows(requests)
        self._wait()
        ended = time.perf_counter()
        return Sample(cell, (ended - started) * 1e3, (drafted - started) * 1e3)

    def _keep_rows(self, requests: list[Request]) -> None:
        """Let the drafter keep the step's rows for later, as it does while nobody drafts."""
        if self.drafter.needs_taps:
            assert self._taps is not None
            self.drafter.commit(
                [
                    CommittedRows(request.draft_source(0), request.num_computed, 1, row)
                    for row, request in enumerate(requests)
                ],
                self._taps.taps,
            )

    def _rank(self, block: DraftBlock, cell: Cell) -> None:
        """Rank the drafts as a plan does; what is verified stays pinned."""
        modes = (DraftMode.GREEDY_TARGET,) * len(block.draft_lens)
        logits, draft_lens = block.confidence_logits, block.draft_lens
        survivals = self.estimator.survivals(logits, draft_lens, modes)
        select_drafts(survivals, cell.num_verified, draft_lens)

    def _wait(self) -> None:
        """Wait for rows that were queued and that nothing reads."""
        if isinstance(self.engine, QueueingEngine):
            self.engine.synchronize()
        elif self.engine.info.device != "cpu":
            torch.cuda.synchronize(self.engine.info.device)

    def _time_round(
        self, cell: Cell, requests: list[Request], engine: RoundEngine, drafter: DSparkDrafter
    ) -> Sample:
        """Run the same step as one round on the device; what drafting takes of it is not known."""
        gamma, shape = drafter.num_drafts, (len(requests), drafter.num_drafts)
        started = time.perf_counter()
        step = RoundStep(
            draft=drafter.prepare([r.draft_source(gamma) for r in requests]),
            draft_caps=np.full(len(requests), gamma, np.int32),
            capacity=cell.num_verified,
            rung=cell.rung,
            confidence_scale=np.ones(shape, np.float32),
            confidence_offset=np.zeros(shape, np.float32),
            accept=accept_sampling(requests, gamma),
        )
        engine.start_round(step).read()
        return Sample(cell, (time.perf_counter() - started) * 1e3, float("nan"))

    def _verify(
        self, requests: list[Request], block: DraftBlock, verify_lens: IntArray, cell: Cell
    ) -> None:
        batch = ScheduledBatch(decoding=requests, draft_caps=verify_lens)
        packed = pack_step(batch, block, verify_lens, cell.rung)
        output = self.engine.run_target(packed.step)
        accept(
            output.logits,
            AcceptanceBatch(
                cu_rows=packed.cu_logit_rows,
                draft_token_ids=block.token_ids,
                draft_lens=verify_lens,
                draft_probs=None,
                sampled=np.zeros(len(requests), np.bool_),
                sequences=[r.acceptance_view() for r in requests],
            ),
        )
        self._taps = output

    def _pin_context(self, requests: list[Request]) -> None:
        """Give every request the same few pending context rows (their values do not matter)."""
        if self._taps is None or self._taps.taps is None:
            rung = self.engine.info.rungs[0]
            cell = Cell(StepKind.NO_DRAFT, 1, rung, 0, requests[0].num_computed)
            block = empty_block(1, self.drafter.num_drafts)
            self._verify(requests[:1], block, np.zeros(1, np.int32), cell)
        assert self._taps is not None and self._taps.taps is not None
        taps = self._taps.taps[:1].expand(PENDING_ROWS, -1)
        rows = []
        for request in requests:
            self.drafter.release(request.key)
            source, start = request.draft_source(0), request.num_computed - PENDING_ROWS
            rows.append(CommittedRows(source, start, PENDING_ROWS, first_row=0))
        self.drafter.commit(rows, taps)

    def release(self) -> None:
        """Make the drafter forget the synthetic requests."""
        for requests in self._requests.values():
            for request in requests:
                self.drafter.release(request.key)

    def _requests_for(self, count: int, context_len: int) -> list[Request]:
        key = (count, context_len)
        if key not in self._requests:
            self._requests[key] = [self._make_request(i, count, context_len) for i in range(count)]
        return self._requests[key]

    def _make_request(self, index: int, count: int, context_len: int) -> Request:
        info = self.engine.info
        pages = -(-(context_len + 2 * (self.drafter.num_drafts + 1)) // info.page_size)
        if pages * count > info.num_pages - 1:
            raise ConfigError(
                f"{count} requests of {context_len} tokens need {pages * count} K/V pages and the "
                f"pool has {info.num_pages - 1}: profile shorter contexts or give it more pages"
            )
        tokens = self.rng.integers(0, info.vocab_size, context_len + 1).astype(np.int32)
        params = SamplingParams(max_tokens=self.drafter.num_drafts + 2, temperature=0.0)
        request = Request(GenerationRequest(f"profile-{index}", tokens, params), index, 0, True)
        request.page_ids = list(range(1 + index * pages, 1 + (index + 1) * pages))
        request.num_computed = context_len
        return request


def measure_table(
    engine: Engine,
    drafter: Drafter,
    buckets: BucketConfig,
    *,
    context_lens: Sequence[int],
    budget_s: float = 30.0,
    machine: dict[str, str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LatencyTable:
    """Time every cell in interleaved rounds for about `budget_s` seconds; median per cell."""
    info = engine.info
    cells = plan_cells(buckets, info.rungs, drafter.num_drafts, context_lens)
    profiler = StepProfiler(engine, drafter)
    started = time.perf_counter()
    for index in range(NUM_WARM_UP_ROUNDS):
        for cell in plan_round(cells, index):
            profiler.time_cell(cell)
    round_s = (time.perf_counter() - started) / NUM_WARM_UP_ROUNDS
    rounds = num_rounds(round_s * 1e3, budget_s - round_s)
    samples = []
    for index in range(rounds):
        order = plan_round(cells, NUM_WARM_UP_ROUNDS + index)
        samples += [profiler.time_cell(cell) for cell in order]
        if on_progress is not None:
            on_progress(index + 1, rounds)
    profiler.release()
    seconds = time.perf_counter() - started
    logger.info("measured %d cells × %d rounds in %.1f s", len(cells), rounds, seconds)
    return table_from_samples(
        samples,
        buckets,
        info.rungs,
        num_drafts=drafter.num_drafts,
        fingerprint=info.fingerprint,
        machine=dict(machine or {}),
    )
