# SPDX-License-Identifier: Apache-2.0
"""Speculative sampling emits the target's distribution over whole continuations.

Shown by exact enumeration over the keyed noise on toy tables, with mutants that must be caught.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.decoding.noise_enumeration import Paths, Run, Tables, enumerate_continuations
from trtllm_dspark.ops import accept_drafts as op
from trtllm_dspark.ops.noise import Purpose

TABLES = Tables(
    target=np.array([[4, 3, 1], [1, 1, 6], [2, 5, 1]]) / 8,
    drafter=np.array([[1, 1, 2], [2, 1, 1], [1, 2, 1]]) / 4,
)
"""Depends on the previous token; the drafter prefers wrong tokens often enough to be rejected."""

SKEWED = Tables(target=np.array([[0.7, 0.3]] * 2), drafter=np.array([[0.5, 0.5]] * 2))
"""The example of design §4."""


def fixed(num_verified: int):
    return lambda step, paths, drafts: np.full(len(paths.lens), num_verified)


def varying(step: int, paths: Paths, drafts: np.ndarray) -> np.ndarray:
    return np.full(len(paths.lens), (1, 2, 0)[step % 3])


def stale(step: int, paths: Paths, drafts: np.ndarray) -> np.ndarray:
    """Capacity from what an older step drafted: allowed, its noise is never used again."""
    return np.where(paths.memory[:, -1] == 0, paths.memory.shape[1], 0)


def retrospective(step: int, paths: Paths, drafts: np.ndarray) -> np.ndarray:
    """Looks at the draft it decides upon: forbidden with sampled drafts."""
    return np.where(drafts[:, 0] == 0, 1, 0)


def distance(run: Run) -> float:
    """Largest error of the probability of a whole continuation."""
    emitted = enumerate_continuations(run)
    target = run.tables.continuation_probs(run.anchor, run.num_tokens)
    assert set(emitted) <= set(target)
    return max(abs(emitted.get(tokens, 0.0) - weight) for tokens, weight in target.items())


@pytest.mark.parametrize("rule", [fixed(0), fixed(1), fixed(2), varying, stale])
@pytest.mark.parametrize("samples_drafts", [False, True], ids=["greedy-drafts", "sampled-drafts"])
def test_emitted_continuations_have_the_target_distribution(rule, samples_drafts):
    assert distance(Run(TABLES, 2, samples_drafts, rule)) < 1e-12


@pytest.mark.parametrize("num_verified", [0, 1, 2, 3])
@pytest.mark.parametrize("samples_drafts", [False, True], ids=["greedy-drafts", "sampled-drafts"])
def test_blocks_of_three_drafts_keep_the_distribution_at_every_verified_length(
    num_verified, samples_drafts
):
    run = Run(SKEWED, 3, samples_drafts, fixed(num_verified), num_tokens=5)
    assert distance(run) < 1e-12


def test_a_drafter_that_misses_part_of_the_vocabulary_keeps_the_distribution():
    drafter = np.array([[2, 0, 2], [4, 0, 0], [0, 2, 2]]) / 4
    assert distance(Run(replace(TABLES, drafter=drafter), 2, True, fixed(2))) < 1e-12


def test_a_target_without_some_drafted_tokens_keeps_the_distribution():
    target = np.array([[0, 7, 1], [8, 0, 0], [3, 5, 0]]) / 8
    assert distance(Run(replace(TABLES, target=target), 2, True, varying)) < 1e-12


def test_a_drafter_equal_to_the_target_is_always_accepted():
    run = Run(Tables(TABLES.drafter, TABLES.drafter), 2, True, fixed(2))
    assert distance(run) < 1e-12


def test_greedy_drafts_stay_exact_under_a_rule_that_looks_at_them():
    assert distance(Run(TABLES, 2, False, retrospective)) < 1e-12


def test_the_enumeration_sees_a_rule_that_looks_at_the_sampled_draft_it_decides_upon():
    assert distance(Run(TABLES, 2, True, retrospective, num_tokens=2)) > 0.01


def test_mutant_draft_noise_keyed_by_absolute_position_is_caught():
    """A position drafted again with the same noise: an old block then reveals the current draft."""

    def by_position(key):
        purpose, position, slot = key
        return (purpose, position + 1 + slot, 0) if purpose == Purpose.DRAFT_UNIFORM else key

    def is_alive(key, anchor_position):
        return key[1] > anchor_position or (
            key[0] != Purpose.DRAFT_UNIFORM and key[1] >= anchor_position
        )

    honest = Run(SKEWED, 2, True, stale, num_tokens=4)
    assert distance(honest) < 1e-12
    assert distance(replace(honest, rename=by_position, is_alive=is_alive)) > 0.01


def test_mutant_final_token_drawn_with_the_noise_of_a_rejection_is_caught():
    def reuse(key):
        purpose, position, _ = key
        return (int(Purpose.ACCEPT), position, 0) if purpose == Purpose.FINAL else key

    assert distance(Run(TABLES, 2, True, fixed(2), rename=reuse)) > 0.01
    assert distance(Run(TABLES, 2, False, fixed(2), rename=reuse)) > 0.01


@pytest.mark.parametrize("samples_drafts", [False, True], ids=["greedy-drafts", "sampled-drafts"])
def test_mutant_bonus_drawn_from_the_residual_of_a_dropped_draft_is_caught(
    monkeypatch, samples_drafts
):
    honest = op._final_weights

    def from_residual(block, who, column, weights, totals, is_rejection):
        has_draft = column < block.draft_lens[who]
        return honest(block, who, column, weights, totals, is_rejection | has_draft)

    monkeypatch.setattr(op, "_final_weights", from_residual)
    assert distance(Run(TABLES, 2, samples_drafts, fixed(1), num_tokens=2)) > 0.01
    assert distance(Run(TABLES, 2, samples_drafts, fixed(2), num_tokens=2)) < 1e-12
