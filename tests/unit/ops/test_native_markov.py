# SPDX-License-Identifier: Apache-2.0
"""The bounded search for a greedy draft finds what adding up all logits finds."""

from __future__ import annotations

import pytest
import torch

from trtllm_dspark.ops import native_library
from trtllm_dspark.ops.native_markov import markov_argmax, row_norms

VOCAB, RANK = 1024, 32


@pytest.fixture(autouse=True)
def compiled():
    if native_library.library() is None:
        pytest.skip("no C compiler on this machine")
    torch.manual_seed(0)


def sums(base, features, weight):
    """All logits, each product rounded once."""
    exact = features.double() @ weight.double().T
    return base.float() + exact.float().to(torch.bfloat16).float()


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_bounded_search_finds_the_largest_sum(spread, num_rows):
    base = torch.randn(num_rows, VOCAB).to(torch.bfloat16)
    weight = (spread * torch.randn(VOCAB, RANK)).to(torch.bfloat16)
    features = torch.randn(num_rows, RANK).to(torch.bfloat16)
    found = markov_argmax(base, features, weight, row_norms(weight))
    everything = sums(base, features, weight)
    chosen = everything.gather(1, found[:, None])[:, 0]
    # A product may be rounded the other way where the order of its sum decides: one unit.
    assert (everything.amax(1) - chosen <= 2.0**-7 * everything.amax(1).abs()).all()
    assert (found == everything.argmax(1)).float().mean() > 0.9


def test_a_token_whose_own_logit_is_low_wins_by_its_product():
    base = torch.full((1, VOCAB), 2.0, dtype=torch.bfloat16)
    base[0, 7], base[0, 900] = 4.0, -30.0
    weight = torch.zeros(VOCAB, RANK, dtype=torch.bfloat16)
    weight[900], weight[7] = 1.0, -1.0
    features = torch.full((1, RANK), 1.5, dtype=torch.bfloat16)
    assert markov_argmax(base, features, weight, row_norms(weight)).tolist() == [900]


@pytest.mark.parametrize("equals", [(5, 6), (63, 64), (300, 1023), (0, 1023)])
def test_of_equal_sums_the_lowest_id_is_found(equals):
    base = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    weight = torch.zeros(VOCAB, RANK, dtype=torch.bfloat16)
    low, high = equals
    base[0, high] = 4.0  # the search starts there
    weight[low, 0] = 4.0
    features = torch.zeros(1, RANK, dtype=torch.bfloat16)
    features[0, 0] = 1.0
    assert markov_argmax(base, features, weight, row_norms(weight)).tolist() == [low]


def test_rows_may_lie_apart():
    base = torch.randn(4, 3, VOCAB).to(torch.bfloat16)
    weight = torch.randn(VOCAB, RANK).to(torch.bfloat16)
    features = torch.randn(4, RANK).to(torch.bfloat16)
    norms = row_norms(weight)
    apart = markov_argmax(base[:, 1], features, weight, norms)
    assert torch.equal(apart, markov_argmax(base[:, 1].contiguous(), features, weight, norms))


@pytest.mark.parametrize(
    ("vocab", "rank", "dtype"),
    [(1000, 32, torch.bfloat16), (1024, 24, torch.bfloat16), (1024, 32, torch.float32)],
)
def test_other_shapes_and_types_are_left_to_torch(vocab, rank, dtype):
    base, weight = torch.zeros(1, vocab, dtype=dtype), torch.zeros(vocab, rank, dtype=dtype)
    features = torch.zeros(1, rank, dtype=dtype)
    assert markov_argmax(base, features, weight, row_norms(weight)) is None
