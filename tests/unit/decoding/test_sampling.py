# SPDX-License-Identifier: Apache-2.0
"""Penalties and masks against a scalar reference, and along a drafted prefix as without one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dspark.decoding.sampling import has_filters, needs_processing, process_logits
from trtllm_dspark.types import SamplingParams

VOCAB = 8
TOKEN = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    frequency_penalty=st.sampled_from([0.0, 0.15, -0.1]),
    min_tokens=st.integers(0, 5),
    end_ids=st.sampled_from([(), (2,), (2, 5)]),
    stop_token_ids=WORDS,
    bad_token_ids=WORDS,
    logit_bias=st.lists(
        st.tuples(TOKEN, st.sampled_from([-1.5, 0.5])), max_size=3, unique_by=lambda b: b[0]
    ).map(tuple),
)


def reference_row(logits, params, context, num_output_tokens) -> list[float]:
    """TensorRT-LLM's conventions, one token at a time: bias, temperature, penalties, masks."""
    row = [float(x) for x in logits]
    for token, bias in params.logit_bias:
        row[token] += bias
    if params.temperature > 0.0:
        row = [x / params.temperature for x in row]
    for token in range(len(row)):
        count = list(context).count(token)
        if count == 0:
            continue
        penalty = params.repetition_penalty
        row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
        row[token] -= params.presence_penalty + params.frequency_penalty * count
    banned = set()
    for word in params.bad_token_ids:
        if len(word) == 1 or tuple(context[-(len(word) - 1) :]) == word[:-1]:
            banned.add(word[-1])
    if num_output_tokens < params.min_tokens:
        banned |= set(params.end_ids) | {w[0] for w in params.stop_token_ids if len(w) == 1}
    masked = [-math.inf if token in banned else x for token, x in enumerate(row)]
    return masked if max(masked) > -math.inf else row


@settings(deadline=None)
@given(
    params=PARAMS,
    prompt=st.lists(TOKEN, min_size=1, max_size=6),
    output=st.lists(TOKEN, max_size=5),
    drafts=st.lists(TOKEN, max_size=4),
    seed=st.integers(0, 99),
)
def test_every_row_sees_the_drafts_before_it_exactly_as_plain_decoding_would(
    params, prompt, output, drafts, seed
):
    logits = np.random.default_rng(seed).normal(size=(len(drafts) + 1, VOCAB)) * 3
    tokens = np.array(prompt + output, dtype=np.int32)
    found = process_logits(torch.from_numpy(logits), params, tokens, len(prompt), drafts)
    for j in range(len(drafts) + 1):
        context = [*prompt, *output, *drafts[:j]]
        expected = reference_row(logits[j], params, context, len(output) + j)
        np.testing.assert_allclose(found[j].numpy(), expected, rtol=1e-12, atol=1e-12)


def test_the_prompt_counts_for_all_three_penalties():
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, temperature=1.0
    )
    row = process_logits(torch.tensor([[4.0, -4.0, 4.0]]), params, np.array([0, 0, 1], np.int32), 3)
    assert row.tolist() == [[4.0 / 2 - 0.25 - 1.0, -4.0 * 2 - 0.25 - 0.5, 4.0]]


def test_penalties_act_after_temperature():
    params = SamplingParams(presence_penalty=1.0, temperature=0.5)
    row = process_logits(torch.tensor([[1.0, 1.0]]), params, np.array([0], np.int32), 1)
    assert row.tolist() == [[1.0, 2.0]]


def test_end_tokens_and_one_token_stop_words_wait_for_min_tokens_inside_a_block():
    params = SamplingParams(min_tokens=3, end_ids=(1,), stop_token_ids=((2,), (3, 4)))
    tokens = np.array([5, 6, 7], np.int32)
    rows = process_logits(torch.zeros(4, 8), params, tokens, 2, [5, 5, 5])
    banned = [np.nonzero(np.isneginf(row))[0].tolist() for row in rows.numpy()]
    assert banned == [[1, 2], [1, 2], [], []]


def test_bad_words_complete_across_the_committed_tokens_and_the_drafts():
    params = SamplingParams(bad_token_ids=((3,), (6, 1), (6, 1, 0), (7, 7, 7, 7)))
    rows = process_logits(torch.zeros(3, 8), params, np.array([7, 6], np.int32), 1, [1, 0])
    banned = [np.nonzero(np.isneginf(row))[0].tolist() for row in rows.numpy()]
    assert banned == [[1, 3], [0, 3], [3]]


def test_masks_that_would_leave_nothing_are_dropped_for_that_row():
    params = SamplingParams(bad_token_ids=((0,), (5, 1)))
    rows = process_logits(torch.zeros(2, 2), params, np.array([5], np.int32), 1, [0])
    assert rows.tolist() == [[0.0, 0.0], [-math.inf, 0.0]]


def test_token_ids_outside_the_vocabulary_are_ignored_by_masks_and_penalties():
    params = SamplingParams(
        bad_token_ids=((99,),), end_ids=(77,), min_tokens=5, repetition_penalty=2.0
    )
    row = process_logits(torch.full((1, 4), 2.0), params, np.array([50, 1, -1], np.int32), 3)
    assert row.tolist() == [[2.0, 1.0, 2.0, 2.0]]


def test_the_engine_logits_are_left_alone():
    logits = torch.zeros(1, 4)
    process_logits(logits, SamplingParams(logit_bias=((0, 1.0),)), np.array([0], np.int32), 1)
    assert logits.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, False),
        ({"logit_bias": ((0, 1.0),)}, True),
        ({"bad_token_ids": ((0,),)}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"min_tokens": 3}, False),
        ({"min_tokens": 3, "end_ids": (1,)}, True),
        ({"min_tokens": 2, "end_ids": (1,)}, False),
        ({"min_tokens": 3, "stop_token_ids": ((1, 2),)}, False),
    ],
)
def test_processing_is_skipped_when_nothing_would_change(change, expected):
    assert needs_processing(replace(SamplingParams(), **change), 2) is expected


def test_greedy_requests_have_no_filters():
    assert has_filters(SamplingParams(top_k=5))
    assert has_filters(SamplingParams(top_p=0.9))
    assert has_filters(SamplingParams(min_p=0.1))
    assert not has_filters(SamplingParams())
    assert not has_filters(SamplingParams(temperature=0.0, top_k=5, top_p=0.9))
    assert not has_filters(SamplingParams(top_k=1))
