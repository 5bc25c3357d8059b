# SPDX-License-Identifier: Apache-2.0
"""Inverse CDF and Gumbel-max: edges exactly, laws by frequency, pruning against the full row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trtllm_dspark.ops import noise, sample_tokens
from trtllm_dspark.ops.sample_tokens import sample_drafts, sample_gumbel, sample_inverse_cdf

P = np.array([0.4, 0.0, 0.25, 0.2, 0.15])


def frequency_pvalue(ids: np.ndarray, p: np.ndarray) -> float:
    counts = np.bincount(ids, minlength=len(p))
    assert counts[p == 0].sum() == 0
    return stats.chisquare(counts[p > 0], p[p > 0] * len(ids)).pvalue


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, 1), (0.249, 1), (0.25, 3), (0.999, 3), (1.0 - 2.0**-53, 3)],
)
def test_the_inverse_cdf_steps_at_cumulative_weights_and_skips_impossible_tokens(uniform, expected):
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]])
    assert sample_inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)) == expected


def test_weights_need_no_normalisation_and_may_be_tiny():
    weights = torch.tensor([[2e-30, 6e-30]])
    uniforms = torch.tensor([0.24], dtype=torch.float64)
    assert sample_inverse_cdf(weights, uniforms).tolist() == [0]
    assert sample_inverse_cdf(weights, uniforms + 0.02).tolist() == [1]


@pytest.mark.parametrize("vocab_size", [1, 511, 512, 513, 2048, 5000])
def test_adding_by_blocks_draws_what_one_long_sum_draws(vocab_size):
    rng = np.random.default_rng(vocab_size)
    weights = np.exp(rng.normal(0, 4, (400, vocab_size))).astype(np.float32)
    weights[rng.random(weights.shape) < 0.7] = 0.0
    weights[:, rng.integers(vocab_size)] = 1.0
    uniforms = rng.random(400)
    cumulative = weights.cumsum(axis=1, dtype=np.float64)
    expected = [
        np.searchsorted(c, u * c[-1], side="right")
        for c, u in zip(cumulative, uniforms, strict=True)
    ]
    got = sample_inverse_cdf(torch.from_numpy(weights), torch.from_numpy(uniforms)).numpy()
    assert (weights[np.arange(400), got] > 0).all()
    assert got.tolist() == expected


def test_no_token_of_weight_zero_is_drawn_at_the_very_edges_of_blocks():
    """Targets on the border of every block, zeros on both sides of it."""
    rng = np.random.default_rng(0)
    weights = rng.random(4096).astype(np.float32)
    for edge in range(512, 4096, 512):
        weights[edge - 9 : edge + 9] = 0.0
    ends = weights.reshape(8, 512).sum(axis=1, dtype=np.float64).cumsum()
    around = np.concatenate([ends[:-1], np.nextafter(ends, 0), np.nextafter(ends[:-1], 9e9)])
    rows = torch.from_numpy(weights).expand(len(around), -1)
    got = sample_inverse_cdf(rows, torch.from_numpy(around / ends[-1]))
    assert (rows.gather(1, got[:, None]) > 0).all()


def test_gumbel_max_follows_the_filtered_distribution():
    """Chi-square at fixed keys; fresh keys would fail once in 10⁶."""
    count = 20_000
    logits = torch.log(torch.from_numpy(P)).expand(count, -1)
    seeds, positions = np.full(count, 9, dtype=np.uint64), np.arange(count)
    scale = torch.ones(count, dtype=torch.float64)
    ids = sample_gumbel(logits, scale, None, seeds, positions).numpy()
    assert frequency_pvalue(ids, P) > 1e-6
    edges = torch.full((count,), math.log(0.2), dtype=torch.float64)
    kept = np.where(P >= 0.2, P, 0.0)
    ids = sample_gumbel(logits, scale, edges, seeds, positions).numpy()
    assert frequency_pvalue(ids, kept / kept.sum()) > 1e-6


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    spread=st.sampled_from([0.1, 5.0, 60.0]),
    scale=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_skipping_tokens_that_cannot_win_changes_nothing(seed, position, spread, scale):
    row = np.random.default_rng(seed % 1000).normal(size=400) * spread
    gumbels = noise.gumbel_row(seed, position, 0, noise.Purpose.COUPLED, 400)
    expected = int(np.argmax(row * scale + gumbels))
    picked = sample_gumbel(
        torch.from_numpy(row)[None],
        torch.tensor([scale], dtype=torch.float64),
        None,
        np.array([seed], dtype=np.uint64),
        np.array([position]),
    )
    assert picked.tolist() == [expected]


@pytest.mark.parametrize("is_coupled", [False, True])
def test_drafts_follow_q_in_both_modes(is_coupled):
    """Chi-square at fixed keys; fresh keys would fail once in 10⁶."""
    count = 20_000
    ids = sample_drafts(
        torch.from_numpy(P).expand(count, -1),
        np.arange(count, dtype=np.uint64),
        np.full(count, 31),
        2,
        np.full(count, is_coupled),
    )
    assert frequency_pvalue(ids.numpy(), P) > 1e-6


def test_a_coupled_draft_with_the_target_distribution_is_the_token_acceptance_draws():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seeds, anchors = np.arange(64, dtype=np.uint64), np.arange(64) + 5
    drafts = sample_drafts(logits.softmax(-1), seeds, anchors, 3, np.ones(64, dtype=np.bool_))
    scale = torch.ones(64, dtype=torch.float64)
    targets = sample_gumbel(logits, scale, None, seeds, anchors + 4)
    assert drafts.tolist() == targets.tolist()


def test_uncoupled_drafts_of_a_position_drafted_again_are_fresh():
    """Position 40 as slot 5 of anchor 34 and as slot 0 of anchor 39: independent, not equal."""
    probs = torch.full((4000, 2), 0.5)
    seeds, free = np.arange(4000, dtype=np.uint64), np.zeros(4000, dtype=np.bool_)
    first = sample_drafts(probs, seeds, np.full(4000, 34), 5, free)
    again = sample_drafts(probs, seeds, np.full(4000, 39), 0, free)
    agreeing = int((first == again).sum())
    assert stats.binomtest(agreeing, 4000, 0.5).pvalue > 1e-6


def test_pruning_uses_the_bounds_of_the_noise():
    assert pytest.approx(noise.GUMBEL_MAX - noise.GUMBEL_MIN) == sample_tokens._PRUNING_MARGIN
