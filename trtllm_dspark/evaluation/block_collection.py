# SPDX-License-Identifier: Apache-2.0
"""Drafted blocks and what full verification said about them, collected through the decoding loop.

Everything is verified, so that no position is censored by a policy. A draft past the end of the
answer is a draft of nothing: such positions are not judged. Knows prompts as token ids; fitting
and reporting are elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.drafters.protocol import Drafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.protocol import Engine
from trtllm_dspark.errors import EngineError
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.calibration import BlockSamples
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import (
    DraftMode,
    FinishReason,
    FloatArray,
    GenerationRequest,
    IntArray,
    RequestOutput,
    SamplingParams,
    StepOutcome,
)


@dataclass(frozen=True)
class PromptBlocks:
    """The blocks of one answer, in order.

    Example, γ = 3, an answer of 6 tokens and no limit on it: the first token comes with the prompt,
    a block that accepts 2 drafts is judged at all 3 positions (5 tokens were to come), the next one
    at 2 (the answer ended there).
    """

    prompt_id: str
    logits: FloatArray
    """[n, γ] raw confidence logits, −inf where nothing was proposed."""
    judged_lens: IntArray
    """[n] positions that were drafts of something: γ, or fewer near the end of the answer."""
    accepted_lens: IntArray
    """[n] accepted drafts, ≤ judged_lens."""
    num_tokens: int
    """Tokens of the answer, its end token included."""
    num_steps: int
    """Decode steps after the one that gave the first token."""


@dataclass(frozen=True)
class CollectedBlocks:
    """The blocks of one mode, each with the prompt it came from."""

    samples: BlockSamples
    prompt_ids: npt.NDArray[np.int64]
    """[n] index of the prompt: blocks of one prompt are not independent."""


class _Answer:
    """One request on its way."""

    def __init__(self, prompt_id: str, num_drafts: int) -> None:
        self.prompt_id = prompt_id
        self.nothing_proposed = np.full(num_drafts, -np.inf, np.float32)
        self.num_tokens = self.num_steps = 0
        self.logits: list[FloatArray] = []
        self.committed: list[int] = []
        self.verified: list[int] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def add_step(self, outcome: StepOutcome, row: int) -> None:
        """Note what was drafted before this step's tokens were committed.

        A step in which the drafter had nothing to propose is a block that accepts nothing.
        """
        self.num_steps += 1
        logits = outcome.confidence_logits
        self.logits.append(self.nothing_proposed if logits is None else logits[row])
        self.committed.append(self.num_tokens)
        self.verified.append(int(outcome.verify_lens[row]))
        self.drafted.append(int(outcome.draft_lens[row]))
        self.accepted.append(int(outcome.accepted_lens[row]))

    def add_output(self, output: RequestOutput) -> None:
        """Count committed tokens; an end token is committed and not put out."""
        self.num_tokens += len(output.new_token_ids)
        self.num_tokens += output.finish_reason is FinishReason.EOS

    def close(self, num_drafts: int, max_tokens: int) -> PromptBlocks:
        """Judge the blocks, now that the end of the answer is known."""
        before = np.asarray(self.committed, np.int32)
        room = np.minimum(max_tokens - before - 1, num_drafts)
        cut = np.flatnonzero(np.minimum(room, self.drafted) > self.verified)
        if len(cut):
            raise EngineError(
                f"prompt {self.prompt_id}: {self.verified[cut[0]]} drafts were verified and "
                f"{int(room[cut[0]])} had room: raise max_num_tokens or the number of pages"
            )
        judged = np.minimum(room, self.num_tokens - before).astype(np.int32)
        rows = judged > 0
        logits = np.asarray(self.logits, np.float32).reshape(-1, num_drafts)
        accepted = np.minimum(np.asarray(self.accepted, np.int32), judged)
        return PromptBlocks(
            self.prompt_id,
            logits[rows],
            judged[rows],
            accepted[rows],
            self.num_tokens,
            self.num_steps,
        )


def make_collection_loop(engine: Engine, drafter: Drafter) -> DecodingLoop:
    """A loop that verifies all drafts. Prefix reuse is off: pages may be another loop's."""
    return DecodingLoop(
        engine,
        drafter,
        create_policy("fixed"),
        SurvivalEstimator(drafter.num_drafts),
        enable_prefix_reuse=False,
    )


def mode_params(
    mode: DraftMode, max_tokens: int, end_ids: tuple[int, ...], temperature: float = 1.0
) -> SamplingParams:
    """Sampling parameters under which a request is in `mode`."""
    hot = 0.0 if mode is DraftMode.GREEDY_TARGET else temperature
    return SamplingParams(max_tokens=max_tokens, temperature=hot, end_ids=end_ids)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The 64-bit noise key of a prompt: the same whatever else is in the batch."""
    digest = hashlib.blake2b(f"{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def iterate_blocks(
    engine: Engine,
    drafter: Drafter,
    prompts: Mapping[str, IntArray],
    mode: DraftMode,
    params: SamplingParams,
    *,
    seed: int = 0,
) -> Iterator[PromptBlocks]:
    """Answer the prompts (id → token ids) in full batches; yield each answer as it ends.

    The engine must be idle. An answer is a function of prompt, id and seed as far as the engine
    computes a row the same in any company.
    """
    loop = make_collection_loop(engine, drafter)
    answers: dict[str, _Answer] = {}
    for prompt_id, tokens in prompts.items():
        key = prompt_seed(seed, prompt_id)
        loop.draw_seed = lambda key=key: key  # type: ignore[misc]
        loop.add(GenerationRequest(prompt_id, np.asarray(tokens, np.int32), params))
        answers[prompt_id] = _Answer(prompt_id, drafter.num_drafts)
    # The loop numbers requests from 0 in the order in which they were added.
    by_key = list(answers.values())
    while loop.has_work:
        loop.last_outcome = None
        outputs = loop.step()
        outcome = loop.last_outcome
        if outcome is not None:
            if any(found is not mode for found in outcome.modes):
                raise EngineError(f"blocks of {set(outcome.modes)} among blocks of {mode}")
            for row, request_key in enumerate(outcome.request_keys):
                by_key[request_key].add_step(outcome, row)
        for output in outputs:
            answers[output.request_id].add_output(output)
            if output.error is not None:
                raise output.error
            if output.finish_reason is not None:
                answer = answers.pop(output.request_id)
                yield answer.close(drafter.num_drafts, params.max_tokens)


def collect_blocks(
    engine: Engine,
    prompts: Sequence[IntArray],
    mode: DraftMode,
    params: SamplingParams,
    *,
    on_finish: Callable[[int], None] | None = None,
) -> CollectedBlocks:
    """Answer all prompts with the engine's drafter; `on_finish` gets how many are finished."""
    can_sample = mode is not DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS
    drafter = DSparkDrafter(engine, can_sample=can_sample)
    named = {str(index): prompt for index, prompt in enumerate(prompts)}
    found: dict[str, PromptBlocks] = {}
    for blocks in iterate_blocks(engine, drafter, named, mode, params):
        found[blocks.prompt_id] = blocks
        if on_finish is not None:
            on_finish(len(found))
    return join_blocks([found[name] for name in named], engine.info.num_drafts)


def join_blocks(answers: Sequence[PromptBlocks], num_drafts: int) -> CollectedBlocks:
    """All blocks in the order given; `prompt_ids` are places in that order."""
    samples = BlockSamples(
        np.concatenate([np.zeros((0, num_drafts), np.float32), *(a.logits for a in answers)]),
        np.concatenate([np.zeros(0, np.int32), *(a.judged_lens for a in answers)]),
        np.concatenate([np.zeros(0, np.int32), *(a.accepted_lens for a in answers)]),
    )
    prompt_ids = [np.full(len(a.logits), i, np.int64) for i, a in enumerate(answers)]
    return CollectedBlocks(samples, np.concatenate([np.zeros(0, np.int64), *prompt_ids]))
