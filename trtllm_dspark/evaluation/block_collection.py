# SPDX-License-Identifier: Apache-2.0
"""Drafted blocks and what full verification said about them, collected through the decoding loop.

One run per mode on an idle engine, with everything verified, so that no position is censored by a
policy. Knows prompts as token ids; fitting and reporting are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.protocol import Engine
from trtllm_dspark.errors import EngineError
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.calibration import BlockSamples
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import DraftMode, GenerationRequest, IntArray, SamplingParams, StepOutcome


@dataclass(frozen=True)
class CollectedBlocks:
    """The blocks of one mode, each with the prompt it came from."""

    samples: BlockSamples
    prompt_ids: npt.NDArray[np.int64]
    """[n] index of the prompt: blocks of one prompt are not independent."""


def make_collection_loop(engine: Engine, mode: DraftMode) -> DecodingLoop:
    """A loop that drafts in `mode` and verifies all drafts."""
    can_sample = mode is not DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS
    return DecodingLoop(
        engine,
        DSparkDrafter(engine, can_sample=can_sample),
        create_policy("fixed"),
        SurvivalEstimator(engine.info.num_drafts),
    )


def mode_params(
    mode: DraftMode, max_tokens: int, end_ids: tuple[int, ...], temperature: float = 1.0
) -> SamplingParams:
    """Sampling parameters under which a request is in `mode`."""
    hot = 0.0 if mode is DraftMode.GREEDY_TARGET else temperature
    return SamplingParams(max_tokens=max_tokens, temperature=hot, end_ids=end_ids)


def collect_blocks(
    engine: Engine,
    prompts: Sequence[IntArray],
    mode: DraftMode,
    params: SamplingParams,
    *,
    on_finish: Callable[[int], None] | None = None,
) -> CollectedBlocks:
    """Answer all prompts with full verification; return every drafted block in order of steps.

    `on_finish` gets the number of finished prompts. The engine must be idle.
    """
    loop = make_collection_loop(engine, mode)
    for number, prompt in enumerate(prompts):
        loop.add(GenerationRequest(str(number), np.asarray(prompt, np.int32), params))
    outcomes: list[StepOutcome] = []
    num_finished = 0
    while loop.has_work:
        loop.last_outcome = None
        finished = sum(output.finish_reason is not None for output in loop.step())
        outcome = loop.last_outcome
        if outcome is not None and outcome.drafted:
            outcomes.append(outcome)
        if finished and on_finish is not None:
            num_finished += finished
            on_finish(num_finished)
    return _join(outcomes, mode, engine.info.num_drafts)


def _join(outcomes: Sequence[StepOutcome], mode: DraftMode, num_drafts: int) -> CollectedBlocks:
    logits, verified, accepted, prompts = [], [], [], []
    for outcome in outcomes:
        if outcome.confidence_logits is None:
            continue
        if any(found is not mode for found in outcome.modes):
            raise EngineError(f"blocks of {set(outcome.modes)} among blocks of {mode}")
        rows = np.flatnonzero(outcome.draft_lens)
        logits.append(outcome.confidence_logits[rows])
        verified.append(outcome.verify_lens[rows])
        accepted.append(outcome.accepted_lens[rows])
        # The loop numbers requests from 0 in the order they were added.
        prompts.append(np.asarray(outcome.request_keys, np.int64)[rows])
    if not logits:
        empty = np.zeros(0, np.int32)
        samples = BlockSamples(np.zeros((0, num_drafts), np.float32), empty, empty)
        return CollectedBlocks(samples, empty.astype(np.int64))
    samples = BlockSamples(
        np.concatenate(logits), np.concatenate(verified), np.concatenate(accepted)
    )
    return CollectedBlocks(samples, np.concatenate(prompts))
