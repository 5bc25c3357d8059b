# SPDX-License-Identifier: Apache-2.0
"""Collecting blocks for calibration: every block, its mode, its acceptance, no censoring."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.decoding.loops import TinyModel, random_prompts
from tests.unit.decoding.loops import make_loop as make_tiny_loop
from tests.unit.decoding.test_dspark_loop import GAMMA, make_loop, random_drafter
from trtllm_dspark.decoding.drafters.ngram import NgramDrafter
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.evaluation.block_collection import (
    collect_blocks,
    iterate_blocks,
    mode_params,
    prompt_seed,
)
from trtllm_dspark.types import DraftMode


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    tiny = TinyModel(3)
    return make_loop(tiny.target, random_drafter(tiny.target)).engine


@pytest.mark.parametrize("mode", list(DraftMode), ids=lambda m: m.value)
def test_blocks_of_a_mode_are_verified_in_full(engine: TorchEngine, mode: DraftMode) -> None:
    prompts = [np.asarray(p, np.int32) for p in random_prompts(5, seed=6)]
    finished: list[int] = []
    found = collect_blocks(
        engine, prompts, mode, mode_params(mode, 25, ()), on_finish=finished.append
    )
    samples = found.samples
    assert finished[-1] == 5
    assert samples.num_drafts == GAMMA
    assert len(samples.logits) == len(found.prompt_ids)
    assert np.isfinite(samples.logits).all()
    assert set(found.prompt_ids.tolist()) == set(range(5))
    for prompt in range(5):
        rows = found.prompt_ids == prompt
        committed = 1  # the first token comes with the prompt's last chunk
        for verified, accepted in zip(
            samples.verify_lens[rows], samples.accepted_lens[rows], strict=True
        ):
            # Nothing is cut but by the tokens still wanted.
            assert verified == min(GAMMA, 25 - committed - 1)
            committed += int(accepted) + 1
        assert 24 <= committed <= 25


def test_no_prompts_give_no_blocks(engine: TorchEngine) -> None:
    mode = DraftMode.GREEDY_TARGET
    found = collect_blocks(engine, [], mode, mode_params(mode, 5, ()))
    assert found.samples.logits.shape == (0, GAMMA)


def test_drafts_past_the_end_of_the_answer_are_not_judged() -> None:
    """Look-up drafts of a greedy text that repeats itself go on after its end token."""
    tiny, mode, most, gamma = TinyModel(3), DraftMode.GREEDY_TARGET, 40, 5
    engine = make_tiny_loop(tiny, drafter="ngram").engine
    num_cut = 0
    for seed in range(6):
        prompt = random_prompts(1, seed=seed)[0]
        answer = tiny.greedy(prompt, most)
        end_id = answer[-4]
        length = answer.index(end_id) + 1
        blocks = next(
            iterate_blocks(
                engine,
                NgramDrafter(gamma, 1, 4),
                {"a": np.asarray(prompt, np.int32)},
                mode,
                mode_params(mode, most, (end_id,)),
            )
        )
        assert blocks.num_tokens == length
        committed, expected = 1, []
        for accepted in blocks.accepted_lens:
            expected.append(min(gamma, most - committed - 1, length - committed))
            committed += int(accepted) + 1
        assert blocks.judged_lens.tolist() == expected
        assert (blocks.accepted_lens <= blocks.judged_lens).all()
        num_cut += int((blocks.judged_lens < gamma).sum())
    assert num_cut > 0


def test_noise_keys_differ_by_prompt_and_seed_and_not_by_company() -> None:
    keys = {prompt_seed(seed, name) for seed in (0, 1) for name in ("a", "b")}
    assert len(keys) == 4 and prompt_seed(0, "a") in keys
    assert all(0 <= key < 1 << 64 for key in keys)
