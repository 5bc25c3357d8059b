# SPDX-License-Identifier: Apache-2.0
"""One draft slot: arg-max with ties, draws from q, and the peak's log-odds."""

from __future__ import annotations

import numpy as np
import torch

from trtllm_dspark.ops.markov import SlotSampling, markov_sample, peak_log_odds


def sampling(num: int, temperature: float = 1.0, **changes: object) -> SlotSampling:
    fields: dict[str, object] = dict(
        temperature=np.full(num, temperature, np.float32),
        top_k=np.zeros(num, np.int32),
        top_p=np.ones(num, np.float32),
        min_p=np.zeros(num, np.float32),
        seeds=np.arange(num, dtype=np.uint64) * 977 + 5,
        anchor_positions=np.full(num, 9, np.int32),
        coupled=np.zeros(num, np.bool_),
    )
    return SlotSampling(**{**fields, **changes})  # type: ignore[arg-type]


def test_logits_are_base_plus_projected_features() -> None:
    base = torch.tensor([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]])
    w2 = torch.tensor([[3.0], [0.0], [0.0]])
    features = torch.tensor([[1.0], [-1.0]])
    assert markov_sample(base, features, lambda f: f @ w2.T, 0).token_ids.tolist() == [0, 1]
    assert markov_sample(base, None, None, 0).token_ids.tolist() == [1, 0]


def test_of_equal_logits_the_lowest_id_is_drafted() -> None:
    base = torch.tensor([[1.0, 4.0, 4.0, 4.0]])
    assert markov_sample(base, None, None, 0).token_ids.tolist() == [1]


def test_bfloat16_parts_are_added_in_float32() -> None:
    base = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16)
    add = torch.tensor([[0.25, 0.5]], dtype=torch.bfloat16)
    assert markov_sample(base, add, lambda f: f, 0).token_ids.tolist() == [1]


def test_drafts_follow_q_by_frequency() -> None:
    num = 4000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(num, 1)
    choice = markov_sample(logits, None, None, 2, sampling(num))
    counts = np.bincount(choice.token_ids.numpy(), minlength=3) / num
    # Six standard deviations of a frequency: a false alarm in about one run of 10⁸.
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=6 * 0.5 / num**0.5)
    torch.testing.assert_close(choice.draft_probs[0], torch.tensor([0.5, 0.3, 0.2]))


def test_a_slot_has_noise_of_its_own() -> None:
    logits = torch.zeros(1, 1000)
    one = sampling(1)
    drawn = [int(markov_sample(logits, None, None, slot, one).token_ids) for slot in range(4)]
    assert len(set(drawn)) == 4
    again = markov_sample(logits, None, None, 1, one)
    assert int(again.token_ids) == drawn[1]


def test_filters_bound_what_is_drafted_and_q_is_renormalised() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(50, 1)
    choice = markov_sample(logits, None, None, 0, sampling(50, top_k=np.full(50, 2, np.int32)))
    assert set(choice.token_ids.tolist()) <= {0, 1}
    expected = torch.tensor([3.0, 2.0]).softmax(0)
    torch.testing.assert_close(choice.draft_probs[0], torch.cat((expected, torch.zeros(2))))


def test_greedy_rows_of_a_mixed_batch_take_the_arg_max() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.0]]).repeat(3, 1)
    mixed = sampling(3, temperature=0.0, top_k=np.array([0, 1, 0], np.int32))
    assert markov_sample(logits, None, None, 0, mixed).draft_probs is None
    mixed.temperature[2] = 1.0
    choice = markov_sample(logits, None, None, 0, mixed)
    assert choice.token_ids[:2].tolist() == [1, 1]
    assert choice.draft_probs is not None


def test_coupled_rows_share_the_noise_of_the_position_they_draft_for() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    coupled = {"coupled": np.ones(1, np.bool_)}
    early = sampling(1, anchor_positions=np.array([10], np.int32), **coupled)
    late = sampling(1, anchor_positions=np.array([12], np.int32), **coupled)
    a = markov_sample(logits, None, None, 3, early).token_ids
    b = markov_sample(logits, None, None, 1, late).token_ids
    assert torch.equal(a, b)


def test_peak_log_odds_are_exact_near_one_and_for_ties() -> None:
    logits = torch.tensor([[0.0, 0.0], [30.0, 0.0], [1.0, 0.0], [200.0, -200.0]])
    found = peak_log_odds(logits)
    np.testing.assert_allclose(found[:3].numpy(), [0.0, 30.0, 1.0], rtol=1e-6, atol=1e-7)
    assert torch.isfinite(found).all()
