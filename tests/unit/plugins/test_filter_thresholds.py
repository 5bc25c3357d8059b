# SPDX-License-Identifier: Apache-2.0
"""The filter pass in the interpreter against the reference thresholds: the kept sets are equal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from dspark_plugins.filter_thresholds import run_filter_thresholds

from tests.unit.plugins.paged_batches import POISON
from trtllm_dspark.ops.filter_probs import filter_thresholds

VOCAB = 37


def run_rows(
    logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float], scale: float
) -> torch.Tensor:
    rows = len(logits)
    found = run_filter_thresholds(
        logits,
        torch.full((rows,), scale),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.full((rows,), POISON),
        block_tokens=16,
    )
    expected = filter_thresholds(
        logits,
        temperature=np.full(rows, 1.0 / scale),
        top_k=np.array(top_k),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
    )
    kept, wanted = logits >= found[:, None], logits >= expected[:, None]
    assert torch.equal(kept, wanted), (kept.sum(1), wanted.sum(1))
    return found


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_every_combination_of_filters_keeps_the_same_tokens(scale: float) -> None:
    grid = list(itertools.product((0, 1, 5, 1000), (1.0, 0.7, 0.05), (0.0, 0.1)))
    logits = torch.randn(len(grid), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    found = run_rows(
        logits, [g[0] for g in grid], [g[1] for g in grid], [g[2] for g in grid], scale
    )
    is_off = [k in (0, 1000) and p == 1.0 and m == 0.0 for k, p, m in grid]
    assert (found == float("-inf")).tolist() == is_off


def test_top_k_finds_the_exact_logit_among_neighbours() -> None:
    value = np.float32(-1.5)
    steps = [value]
    for _ in range(VOCAB - 1):
        steps.append(np.nextafter(steps[-1], np.float32(9)))
    logits = torch.tensor(np.array([steps, steps[::-1]]))
    found = run_rows(logits, [3, VOCAB - 1], [1.0, 1.0], [0.0, 0.0], 1.0)
    assert found.tolist() == [float(steps[-3]), float(steps[1])]


def test_ties_with_the_last_kept_logit_are_kept() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, :2] = 1.0
    run_rows(logits, [3, 0], [1.0, 0.5], [0.0, 0.0], 1.0)


def test_masked_tokens_and_both_signs_are_ordered() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[:, ::3] = float("-inf")
    logits[1] -= 100.0
    run_rows(logits, [4, 4, 0, 30], [1.0, 0.9, 0.9, 0.8], [0.0, 0.0, 0.2, 0.0], 2.0)


def test_a_row_alone_has_the_threshold_it_has_in_company() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(9))
    together = run_rows(logits, [4, 0, 7], [0.9, 0.6, 1.0], [0.0, 0.0, 0.1], 1.5)
    alone = run_rows(logits[1:2], [0], [0.6], [0.0], 1.5)
    assert torch.equal(alone, together[1:2])


def test_an_empty_batch_is_fine() -> None:
    empty = torch.zeros(0)
    assert run_filter_thresholds(
        torch.zeros(0, VOCAB), empty, empty.int(), empty, empty, empty
    ).shape == (0,)
