# SPDX-License-Identifier: Apache-2.0
"""Whole rounds on the device: what the loop hands over, and what it reads back.

A round's capacity is decided while the round before it runs, from survivals two steps old (design
§4: `prefix_async`, `adaptive`); ranking and acceptance need no host. Where the batch has changed
meanwhile the decision is made anew, before anything is drafted. Knows sequences, not kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.decoding.acceptance import AcceptanceResult, InvalidLogitsError, accept_rule
from trtllm_dspark.decoding.batcher import ScheduledBatch
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.drafters.protocol import Drafter
from trtllm_dspark.decoding.sampling import needs_processing
from trtllm_dspark.decoding.sequence import Sequence
from trtllm_dspark.engines.protocol import (
    AcceptSampling,
    Engine,
    PendingRound,
    RoundEngine,
    RoundOutput,
    RoundStep,
)
from trtllm_dspark.ops import noise
from trtllm_dspark.ops.accept_drafts import AcceptRule
from trtllm_dspark.scheduling.buckets import rung_for
from trtllm_dspark.scheduling.policy import BatchView, DraftDecision, Policy, Sees
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftBlock, IntArray


@dataclass(frozen=True)
class FinishedRound:
    """A round as the host knows it."""

    block: DraftBlock
    verify_lens: IntArray
    result: AcceptanceResult


class Rounds:
    """Starts rounds and decides the next one meanwhile; the loop commits what they accept."""

    def __init__(
        self,
        engine: RoundEngine,
        drafter: DSparkDrafter,
        policy: Policy,
        estimator: SurvivalEstimator,
        rungs: tuple[int, ...],
    ) -> None:
        self.engine, self.drafter, self.policy = engine, drafter, policy
        self.estimator, self.rungs = estimator, rungs
        self.num_started = 0
        self.num_decided_ahead = 0
        """Decisions of the policy that were made while the device worked, and used."""
        self._ahead: tuple[BatchView, DraftDecision] | None = None
        self._unsettled: Callable[[], None] | None = None

    def takes(self, batch: ScheduledBatch, decision: DraftDecision) -> bool:
        """Whether this step can run without the host: drafted, no prompts, plain distributions."""
        drafted = decision.draft_mask & (batch.draft_caps > 0)
        return bool(drafted.any()) and not batch.prefill and all(map(_is_plain, batch.decoding))

    def settle_later(self, learn: Callable[[], None]) -> None:
        """Keep what a round taught until the next one runs."""
        self._unsettled = learn

    def settle(self) -> None:
        """Let everything that learns see the last round, if it has not yet."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            unsettled()

    def start(
        self, batch: ScheduledBatch, view: BatchView, decision: DraftDecision
    ) -> PendingRound:
        """Launch the round of a decided step."""
        caps = np.where(decision.draft_mask, view.draft_caps, 0).astype(np.int32)
        room = min(int(caps.sum()), self.rungs[-1] - len(caps))
        capacity = room if decision.capacity is None else min(decision.capacity, room)
        scale, offset = self.estimator.scales(view.modes)
        sources = [
            sequence.draft_source(int(cap))
            for sequence, cap in zip(batch.decoding, caps, strict=True)
        ]
        step = RoundStep(
            draft=self.drafter.prepare(sources),
            draft_caps=caps,
            capacity=capacity,
            rung=rung_for(self.rungs, len(caps) + capacity),
            confidence_scale=scale,
            confidence_offset=offset,
            accept=accept_sampling(batch.decoding, view.num_drafts),
        )
        self.num_started += 1
        return self.engine.start_round(step)

    def decide_ahead(self, view: BatchView) -> None:
        """Decide the next step as if the batch stayed; call it while the device works."""
        self._ahead = (view, self.policy.decide(view))

    def decide(self, view: BatchView) -> DraftDecision:
        """The decision that was made while the device worked, or a new one."""
        ahead = self._take_ahead(view)
        if ahead is not None:
            return ahead
        self.settle()
        return self.policy.decide(view)

    def _take_ahead(self, view: BatchView) -> DraftDecision | None:
        """The decision made ahead if the batch did stay, cut to what is now admissible."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or view.num_prefill_tokens:
            return None
        expected, decision = ahead
        if (expected.request_keys, expected.modes) != (view.request_keys, view.modes):
            return None
        self.num_decided_ahead += 1
        mask = decision.draft_mask & (view.draft_caps > 0)
        return dataclasses.replace(decision, draft_mask=mask)


def make_rounds(
    engine: Engine, drafter: Drafter, policy: Policy, estimator: SurvivalEstimator
) -> Rounds | None:
    """Rounds where the engine runs them and the policy decides capacities beforehand."""
    if not isinstance(engine, RoundEngine) or not isinstance(drafter, DSparkDrafter):
        return None
    if Sees.OLD_SURVIVALS not in policy.sees:
        return None
    return Rounds(engine, drafter, policy, estimator, engine.info.rungs)


def finish_round(output: RoundOutput, decision: DraftDecision, caps: IntArray) -> FinishedRound:
    """What a round proposed, verified and accepted; raises `InvalidLogitsError`."""
    bad = np.flatnonzero(~output.is_finite)
    if bad.size:
        raise InvalidLogitsError(
            f"target logits of request row {int(bad[0])} have no finite maximum; finite values "
            "are needed: check the checkpoint's weights and the engine's precision",
            tuple(int(row) for row in bad),
        )
    drafted = decision.draft_mask & (caps > 0)
    num_drafts = output.token_ids.shape[1]
    columns = np.arange(num_drafts)[None]
    token_ids = np.full((len(caps), num_drafts + 1), -1, np.int32)
    is_accepted = columns < output.accepted_lens[:, None]
    token_ids[:, :num_drafts] = np.where(is_accepted, output.token_ids, -1)
    token_ids[np.arange(len(caps)), output.accepted_lens] = output.next_token_ids
    result = AcceptanceResult(
        accepted_lens=output.accepted_lens,
        token_ids=token_ids,
        num_tokens=output.accepted_lens + np.int32(1),
        log_probs=None,
        dropped_accept_probs=np.where(drafted, output.dropped_accept_probs, np.float32("nan")),
        top2_gap=np.full(token_ids.shape, np.nan, np.float32),
    )
    block = DraftBlock(
        token_ids=output.token_ids,
        draft_lens=np.where(drafted, num_drafts, 0).astype(np.int32),
        confidence_logits=np.where(drafted[:, None], output.confidence_logits, -np.inf).astype(
            np.float32
        ),
    )
    return FinishedRound(block, output.verify_lens, result)


def accept_sampling(sequences: list[Sequence], num_drafts: int) -> AcceptSampling:
    """How the drafts of these requests are accepted, with the noise of this step."""
    views = [sequence.acceptance_view() for sequence in sequences]
    rules = np.array([accept_rule(view) for view in views], np.int32)
    seeds = np.array([view.noise_seed for view in views], np.uint64)
    positions = np.array([len(view.token_ids) - 1 for view in views], np.int64)
    accept_uniforms, final_uniforms = np.zeros((len(views), num_drafts)), np.zeros(len(views))
    drawn = np.flatnonzero(rules == AcceptRule.REJECTION)
    if drawn.size:
        keys, anchors = seeds[drawn], positions[drawn]
        accept_uniforms[drawn] = noise.accept_uniforms(keys, anchors, num_drafts)
        final_uniforms[drawn] = noise.final_uniforms(keys, anchors)
    params = [view.params for view in views]
    return AcceptSampling(
        rules=rules,
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        accept_uniforms=accept_uniforms,
        final_uniforms=final_uniforms,
    )


def _is_plain(sequence: Sequence) -> bool:
    """No penalty, bias or mask on the logits, and no log-probabilities to report."""
    params = sequence.params
    num_output_tokens = sequence.num_tokens - sequence.num_prompt_tokens
    return not params.return_log_probs and not needs_processing(params, num_output_tokens)
