# SPDX-License-Identifier: Apache-2.0
"""The bounded search for a greedy draft finds what adding up all logits finds."""

from __future__ import annotations

import pytest
import torch

from trtllm_dspark.ops import native_library
from trtllm_dspark.ops.markov import peak_log_odds
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
    found, _ = markov_argmax(base, features, weight, row_norms(weight))
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
    ids, _ = markov_argmax(base, features, weight, row_norms(weight))
    assert ids.tolist() == [900]


@pytest.mark.parametrize("equals", [(5, 6), (63, 64), (300, 1023), (0, 1023)])
def test_of_equal_sums_the_lowest_id_is_found(equals):
    base = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    weight = torch.zeros(VOCAB, RANK, dtype=torch.bfloat16)
    low, high = equals
    base[0, high] = 4.0  # the search starts there
    weight[low, 0] = 4.0
    features = torch.zeros(1, RANK, dtype=torch.bfloat16)
    features[0, 0] = 1.0
    ids, peaks = markov_argmax(base, features, weight, row_norms(weight))
    assert ids.tolist() == [low]
    assert peaks.item() == pytest.approx(0.0, abs=0.02)  # two alike, 1022 of e^−4 at most


def test_rows_may_lie_apart():
    base = torch.randn(4, 3, VOCAB).to(torch.bfloat16)
    weight = torch.randn(VOCAB, RANK).to(torch.bfloat16)
    features = torch.randn(4, RANK).to(torch.bfloat16)
    norms = row_norms(weight)
    apart = markov_argmax(base[:, 1], features, weight, norms)
    together = markov_argmax(base[:, 1].contiguous(), features, weight, norms)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("height", [0.0, 6.0, 60.0])
def test_log_odds_leave_out_only_tokens_that_cannot_win(spread, height):
    base = (2 * torch.randn(40, VOCAB)).to(torch.bfloat16)
    base[:, 5] += height
    weight = (spread * torch.randn(VOCAB, RANK)).to(torch.bfloat16)
    features = torch.randn(40, RANK).to(torch.bfloat16)
    norms = row_norms(weight)
    _, found = markov_argmax(base, features, weight, norms)
    everything = sums(base, features, weight)
    top = everything.amax(1, keepdim=True)
    reach = base.float() + norms * torch.linalg.vector_norm(features.float(), dim=1, keepdim=True)
    most = peak_log_odds(everything.masked_fill(reach < top, -torch.inf))
    least = peak_log_odds(everything)
    assert (found >= least - 0.1).all() and (found <= most + 0.1).all()
    assert (found.isfinite()).all()


@pytest.mark.parametrize(
    ("vocab", "rank", "dtype"),
    [(1000, 32, torch.bfloat16), (1024, 24, torch.bfloat16), (1024, 32, torch.float32)],
)
def test_other_shapes_and_types_are_left_to_torch(vocab, rank, dtype):
    base, weight = torch.zeros(1, vocab, dtype=dtype), torch.zeros(vocab, rank, dtype=dtype)
    features = torch.zeros(1, rank, dtype=dtype)
    assert markov_argmax(base, features, weight, row_norms(weight)) is None
