# SPDX-License-Identifier: Apache-2.0
"""`accept` on whole requests: speculation changes nothing but the number of steps."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.unit.decoding.test_sampling import PARAMS
from tests.unit.decoding.toy_model import VOCAB, ToyRequest, decode, toy_logits
from trtllm_dspark.decoding.acceptance import (
    AcceptanceBatch,
    InvalidLogitsError,
    SequenceView,
    accept,
)
from trtllm_dspark.decoding.sampling import filter_probs, process_logits
from trtllm_dspark.errors import EngineError
from trtllm_dspark.ops.sample_tokens import sample_drafts
from trtllm_dspark.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def view(tokens, params=GREEDY, seed=1, is_coupled=False, num_prompt_tokens=1) -> SequenceView:
    return SequenceView(np.array(tokens, np.int32), num_prompt_tokens, params, seed, is_coupled)


def batch_of(drafts, verify_lens, sequences, **changes) -> AcceptanceBatch:
    ids = np.array(drafts, dtype=np.int32)
    cu_rows = np.cumsum([0, *(n + 1 for n in verify_lens)]).astype(np.int32)
    base = AcceptanceBatch(
        cu_rows=cu_rows,
        draft_token_ids=ids,
        draft_lens=np.full(len(sequences), ids.shape[1], dtype=np.int32),
        draft_probs=None,
        sampled=np.zeros(len(sequences), dtype=np.bool_),
        sequences=sequences,
    )
    return replace(base, **changes)


def good_guesses(outputs_by_prompt, num_drafts, wrong_every=3):
    """Drafts that know the answer, with an error at every `wrong_every`-th position."""

    def drafts(tokens):
        answer = next(a for a in outputs_by_prompt if a[: len(tokens)] == tokens)
        known = answer[len(tokens) : len(tokens) + num_drafts]
        known += [0] * (num_drafts - len(known))
        at = range(len(tokens), len(tokens) + num_drafts)
        return [
            (t + 1) % VOCAB if p % wrong_every == 0 else t for t, p in zip(known, at, strict=True)
        ]

    return drafts


@settings(max_examples=60, deadline=None)
@given(
    params=PARAMS,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    is_greedy=st.booleans(),
    verify_len=st.integers(1, 4),
    wrong_every=st.sampled_from([1, 2, 5, 99]),
)
def test_speculation_gives_plain_decoding_token_for_token_with_penalties_and_masks(
    params, prompt, is_greedy, verify_len, wrong_every
):
    """Greedy requests and requests with an explicit seed; the pathwise half of losslessness."""
    params = replace(params, temperature=0.0 if is_greedy else max(params.temperature, 0.5))
    plain = decode([ToyRequest(prompt, params, 7, is_coupled=True)], 8)[0]
    drafts = good_guesses([prompt + plain], 4, wrong_every)
    request = ToyRequest(prompt, params, 7, is_coupled=True)
    speculated = decode([request], 8, drafts, lambda step: verify_len)[0]
    assert speculated == plain


def test_seeded_output_is_the_same_alone_and_in_company_for_any_drafts_and_verify_lens():
    settings_ = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.05, repetition_penalty=1.2),
        GREEDY,
    ]
    prompts = [[1, 2, 3], [4], [5, 6], [1, 2]]

    def fresh():
        return [
            ToyRequest(p, s, seed=2**63 + i, is_coupled=True)
            for i, (p, s) in enumerate(zip(prompts, settings_, strict=True))
        ]

    alone = [decode([request], 24)[0] for request in fresh()]
    answers = [p + a for p, a in zip(prompts, [decode([r], 40)[0] for r in fresh()], strict=True)]
    assert decode(fresh(), 24) == alone
    for num_drafts, verify_len in [(3, lambda s: 3), (3, lambda s: s % 4), (7, lambda s: 2)]:
        drafts = good_guesses(answers, num_drafts)
        assert decode(fresh(), 24, drafts, verify_len) == alone
    assert decode(fresh()[::-1], 24, lambda tokens: [1, 1], lambda s: 2) == alone[::-1]


def test_a_different_seed_gives_a_different_output():
    outputs = {
        tuple(decode([ToyRequest([1], SamplingParams(), seed, True)], 12)[0]) for seed in range(20)
    }
    assert len(outputs) == 20


@pytest.mark.parametrize("num_verified", [0, 1, 3])
@pytest.mark.parametrize("samples_drafts", [False, True], ids=["greedy-drafts", "sampled-drafts"])
def test_sampled_output_follows_the_filtered_target(num_verified, samples_drafts):
    """Real keyed noise, filters and penalties; chi-square of the first two tokens, 5,000 requests.

    False-alarm rate of a fresh set of keys: 2·10⁻⁶ per case. The keys are fixed, so it never
    flickers.
    """
    count, num_drafts, prompt = 5_000, 3, [3, 1]
    params = SamplingParams(temperature=1.3, top_k=8, top_p=0.95, presence_penalty=0.5)

    def target(context):
        row = torch.from_numpy(toy_logits(context)).double()[None]
        row = process_logits(row, params, np.array(context, np.int32), 2)
        return filter_probs(row, 1.0, params.top_k, params.top_p)[0].numpy()

    drafter = np.random.default_rng(5).dirichlet(np.ones(VOCAB), VOCAB)
    drafter[prompt[-1]] = (drafter[prompt[-1]] + target(prompt)) / 2
    seeds = np.arange(count, dtype=np.uint64)
    drafts = np.zeros((count, num_drafts), dtype=np.int32)
    q = np.zeros((count, num_drafts, VOCAB))
    previous = np.full(count, prompt[-1])
    for slot in range(num_drafts):
        q[:, slot] = drafter[previous]
        if samples_drafts:
            free = np.zeros(count, dtype=np.bool_)
            ids = sample_drafts(torch.from_numpy(q[:, slot]), seeds, np.full(count, 1), slot, free)
            previous = ids.numpy()
        else:
            previous = q[:, slot].argmax(axis=1)
        drafts[:, slot] = previous
    table = {}
    rows = []
    for x in drafts.tolist():
        for j in range(num_verified + 1):
            key = tuple(x[:j])
            table.setdefault(key, toy_logits([*prompt, *key]))
            rows.append(table[key])
    batch = batch_of(
        drafts,
        [num_verified] * count,
        [view(prompt, params, int(s), num_prompt_tokens=2) for s in seeds],
        draft_probs=torch.from_numpy(q) if samples_drafts else None,
        sampled=np.full(count, samples_drafts),
    )
    result = accept(torch.from_numpy(np.stack(rows)), batch)

    first = result.token_ids[:, 0]
    assert pvalue(first, target(prompt)) > 1e-6
    if num_verified:
        commonest = int(np.bincount(drafts[:, 0]).argmax())
        second = result.token_ids[(first == commonest) & (result.num_tokens > 1), 1]
        assert len(second) > 200
        assert pvalue(second, target([*prompt, commonest])) > 1e-6


def pvalue(tokens, probs) -> float:
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    probs = probs.astype(np.float64)
    expected = probs[probs > 0] / probs.sum() * counts.sum()
    return stats.chisquare(counts[probs > 0], expected).pvalue


def test_coupled_output_follows_the_target():
    """Chi-square at fixed keys; fresh keys would fail once in 10⁶."""
    count = 20_000
    row = toy_logits([1])
    batch = batch_of(
        np.zeros((count, 0)),
        [0] * count,
        [view([1], SamplingParams(temperature=1.5), s, is_coupled=True) for s in range(count)],
    )
    result = accept(torch.from_numpy(row).expand(count, -1), batch)
    assert (
        pvalue(result.token_ids[:, 0], filter_probs(torch.tensor(row)[None], 1.5)[0].numpy()) > 1e-6
    )


def test_filters_cut_the_distribution_after_temperature():
    """Temperature 0.5 squares p to [.25, .09, .04]; top-p 0.8 then keeps two tokens."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
    params = SamplingParams(temperature=0.5, top_p=0.8)
    probs = [
        float(accept(logits, batch_of([[x]], [0], [view([0], params)])).dropped_accept_probs[0])
        for x in range(3)
    ]
    np.testing.assert_allclose(probs, [0.25 / 0.34, 0.09 / 0.34, 0.0], rtol=1e-6)


def test_results_are_laid_out_by_request_and_padded():
    logits = torch.eye(4)[[1, 2, 3, 0, 3, 2]]
    sequences = [view([0]), view([0, 0]), view([0])]
    result = accept(logits, batch_of([[1, 2], [0, 0], [3, 1]], [2, 0, 1], sequences))
    assert result.token_ids.tolist() == [[1, 2, 3], [0, -1, -1], [3, 2, -1]]
    assert result.accepted_lens.tolist() == [2, 0, 1]
    assert result.num_tokens.tolist() == [3, 1, 2]
    np.testing.assert_array_equal(result.dropped_accept_probs, np.float32([math.nan, 1.0, 0.0]))
    assert result.log_probs is None
    for array in (result.token_ids, result.accepted_lens, result.num_tokens):
        assert array.dtype == np.int32


def test_an_end_token_inside_the_block_is_committed_like_any_other():
    params = replace(GREEDY, end_ids=(2,))
    logits = torch.eye(4)[[1, 2, 3]]
    result = accept(logits, batch_of([[1, 2]], [2], [view([0], params)]))
    assert result.token_ids.tolist() == [[1, 2, 3]]


def test_min_tokens_end_inside_a_block():
    """Three tokens are wanted before the end token: it is banned in rows 0 and 1, free in row 2."""
    params = replace(GREEDY, end_ids=(2,), min_tokens=3)
    logits = torch.tensor([[0.0, 1.0, 9.0]] * 3)
    result = accept(logits, batch_of([[1, 1]], [2], [view([0, 1], params)]))
    assert result.token_ids.tolist() == [[1, 1, 2]]


def test_a_bad_word_is_prevented_across_the_accepted_block():
    params = replace(GREEDY, bad_token_ids=((1, 2),))
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, 1.0, 9.0]])
    result = accept(logits, batch_of([[1]], [1], [view([0], params)]))
    assert result.token_ids.tolist() == [[1, 1]]


def test_log_probs_are_those_of_the_processed_unfiltered_distribution():
    params = SamplingParams(temperature=0.5, top_k=1, return_log_probs=True, logit_bias=((0, 1.0),))
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]))
    sequences = [view([0], params), view([0])]
    result = accept(logits, batch_of([[0], [0]], [0, 0], sequences))
    weights = np.array([0.2 * math.e, 0.5, 0.3]) ** 2
    assert result.token_ids[:, 0].tolist() == [0, 2]
    expected = [[math.log(weights[0] / weights.sum()), math.nan], [math.nan, math.nan]]
    np.testing.assert_allclose(result.log_probs, expected, rtol=1e-6)


def test_log_probs_of_a_block_belong_to_their_own_rows():
    params = replace(GREEDY, return_log_probs=True)
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]))
    result = accept(logits, batch_of([[1, 2]], [2], [view([0], params)]))
    np.testing.assert_allclose(result.log_probs, np.log([[0.5, 0.8, 0.6]]), rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [3, 5000])
def test_top2_gaps_are_the_margins_of_the_rows_that_gave_the_tokens(vocab_size):
    logits = torch.full((4, vocab_size), -5.0)
    logits[:, :3] = torch.tensor([[1.0, 3.5, 1.0], [2.0, 0.0, 2.0], [0.0, 0.0, 7.0], [9.0, 1.0, 0]])
    result = accept(logits, batch_of([[1, 2], [0, 0]], [2, 0], [view([0]), view([0])]))
    np.testing.assert_array_equal(
        result.top2_gap, np.float32([[2.5, 0.0, math.nan], [8.0, math.nan, math.nan]])
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), replace(GREEDY, presence_penalty=1.0)]
)
def test_unusable_logits_are_an_engine_error_that_names_the_request(bad, params):
    logits = torch.zeros(5, 4)
    logits[3, 2] = bad
    sequences = [view([0], params), view([0], params), view([0], params)]
    where = "request row 1 (draft position 1)"
    with pytest.raises(InvalidLogitsError, match=re.escape(where)) as caught:
        accept(logits, batch_of([[0], [0], [0]], [1, 1, 0], sequences))
    assert isinstance(caught.value, EngineError)
    assert caught.value.request_rows == (1,)


def test_rows_without_any_possible_token_are_an_engine_error():
    with pytest.raises(InvalidLogitsError, match="-inf"):
        accept(torch.full((1, 3), -math.inf), batch_of(np.zeros((1, 0)), [0], [view([0])]))


def test_padding_rows_behind_the_last_request_are_not_looked_at():
    logits = torch.full((3, 4), math.nan)
    logits[0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    result = accept(logits, batch_of(np.zeros((1, 0)), [0], [view([0])]))
    assert result.token_ids.tolist() == [[1]]


def test_an_empty_batch_gives_empty_results():
    result = accept(torch.zeros(0, 4), batch_of(np.zeros((0, 2)), [], []))
    assert result.token_ids.shape[0] == 0 and result.num_tokens.tolist() == []


def test_logits_are_left_alone():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=1.0, return_log_probs=True)
    sequences = [view([0, 1], params), view([2], params, is_coupled=True), view([3])]
    accept(logits, batch_of([[1], [2], [3]], [1, 1, 1], sequences))
    assert torch.equal(logits, before)
