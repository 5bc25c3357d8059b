# SPDX-License-Identifier: Apache-2.0
"""Filters against a scalar reference that works token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dspark.ops.filter_probs import argmax_lowest, filter_probs, filter_thresholds


def reference_probs(logits, temperature, top_k, top_p, min_p) -> list[float]:
    """One row in plain Python: top-k, top-p over the rest, min-p; ties of the last kept stay."""
    if temperature == 0.0 or top_k == 1:
        best = max(range(len(logits)), key=lambda v: (logits[v], -v))
        return [float(v == best) for v in range(len(logits))]
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    edge = -math.inf
    kept = order
    if 0 < top_k < len(logits):
        edge = logits[order[top_k - 1]]
        kept = [v for v in order if logits[v] >= edge]
    if top_p < 1.0:
        total, running = sum(weights[v] for v in kept), 0.0
        for v in kept:
            running += weights[v]
            edge = max(edge, -math.inf) if running < top_p * total else max(edge, logits[v])
            if running >= top_p * total:
                break
    if min_p > 0.0:
        edge = max(edge, max(logits) + math.log(min_p) * temperature)
    weights = [w if x >= edge else 0.0 for w, x in zip(weights, logits, strict=True)]
    return [w / sum(weights) for w in weights]


LOGITS = st.lists(
    st.one_of(st.integers(-8, 8).map(float), st.floats(-30, 30, width=32)), min_size=2, max_size=12
)
FILTERS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.9137, 0.5003, 0.017]),
    st.sampled_from([0.0, 0.0501, 0.31, 1.0]),
)


@settings(deadline=None)
@given(logits=LOGITS, filters=FILTERS)
def test_filters_equal_the_scalar_reference(logits, filters):
    row = torch.tensor([logits], dtype=torch.float64)
    expected = reference_probs(row[0].tolist(), *filters)
    np.testing.assert_allclose(filter_probs(row, *filters)[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 40.0])
@pytest.mark.parametrize(
    "filters",
    [(1.0, 50, 1.0, 0.0), (0.7, 0, 0.95, 0.0), (1.3, 700, 0.8, 0.02), (1.0, 0, 0.9999, 0.0)],
)
def test_a_wide_vocabulary_is_filtered_like_the_reference_whatever_its_spread(spread, filters):
    logits = np.random.default_rng(0).normal(size=1500) * spread
    probs = filter_probs(torch.from_numpy(logits)[None], *filters)[0].numpy()
    np.testing.assert_allclose(probs, reference_probs(logits.tolist(), *filters), atol=1e-12)


def test_rows_keep_their_own_parameters():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]] * 4, dtype=torch.float64))
    probs = filter_probs(logits, [1.0, 0.0, 1.0, 1.0], [0, 0, 2, 0], [1, 1, 1, 0.5], [0, 0, 0, 0])
    expected = [[0.5, 0.3, 0.2], [1, 0, 0], [0.625, 0.375, 0], [1, 0, 0]]
    np.testing.assert_allclose(probs.numpy(), expected, atol=1e-12)


def test_logits_equal_to_the_last_kept_one_are_kept():
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]])
    probs = filter_probs(logits, 1.0, top_k=2)
    assert (probs[0] > 0).tolist() == [True, True, True, True, False]


def test_greedy_rows_put_all_mass_on_the_lowest_of_equal_arg_maxima():
    logits = torch.tensor([[0.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    assert filter_probs(logits, 0.0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert filter_probs(logits, [0.0, 1.0], top_k=[0, 1]).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert argmax_lowest(logits).tolist() == [1, 0]


def test_masked_tokens_stay_impossible_and_filters_see_the_rest():
    logits = torch.tensor([[-math.inf, 1.0, 0.0, -math.inf]], dtype=torch.float64)
    np.testing.assert_allclose(
        filter_probs(logits, 1.0, top_k=3).numpy(), filter_probs(logits, 1.0).numpy()
    )
    assert filter_probs(logits, 1.0, top_p=0.6)[0].tolist() == [0, 1, 0, 0]


def test_a_row_is_filtered_alike_alone_and_in_company():
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    together = filter_thresholds(rows, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)
    alone = [
        filter_thresholds(row[None], temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)[0]
        for row in rows
    ]
    assert together.tolist() == [float(t) for t in alone]


def test_nothing_is_filtered_when_every_filter_is_off():
    rows = torch.randn(3, 10)
    found = filter_thresholds(rows, temperature=0.5, top_k=[0, 10, 11], top_p=1.0, min_p=0.0)
    assert found.tolist() == [-math.inf] * 3


def test_inputs_are_not_modified():
    rows = torch.randn(2, 10)
    before = rows.clone()
    filter_probs(rows, 0.5, top_k=3, top_p=0.9, min_p=0.1)
    assert torch.equal(rows, before)
