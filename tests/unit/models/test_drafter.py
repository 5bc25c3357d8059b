# SPDX-License-Identifier: Apache-2.0
"""The drafter's incremental, ragged, paged path against an independent recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.models.drafter_builders import (
    Recomputation,
    append_rows,
    draft_batch,
    make_config,
    make_model,
    make_pages,
)
from trtllm_dspark.ops.markov import SlotSampling

VARIANTS = {
    "markov": {},
    "unshifted": {"label_shift": False},
    "plain": {
        "head_type": "none",
        "markov_rank": 0,
        "confidence_head": False,
        "confidence_with_markov": False,
        "confidence_bias": False,
        "label_shift": False,
    },
    "gated": {"head_type": "gated", "qk_norm": False, "confidence_bias": False},
    "peak": {"confidence_with_peak": True},
    "rnn and peak": {
        "head_type": "rnn",
        "confidence_with_markov": False,
        "confidence_with_peak": True,
    },
    "no head but peak": {
        "head_type": "none",
        "markov_rank": 0,
        "confidence_with_markov": False,
        "confidence_with_peak": True,
    },
    "rnn": {"head_type": "rnn", "attention_bias": True, "confidence_with_markov": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_paged_drafts_equal_a_recomputation_over_steps_with_different_accepted_lengths(
    name: str,
) -> None:
    model = make_model(make_config(**VARIANTS[name]))
    reference = Recomputation(model)
    pages, rng = make_pages(model), np.random.default_rng(1)
    table = np.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 10], [11, 12, 13, 14, 15]], np.int32)
    taps = torch.from_numpy(rng.standard_normal((3, 16, 32)).astype(np.float32))
    lens = [5, 0, 2]
    for request, length in enumerate(lens):
        append_rows(model, pages, taps[request, :length], 0, table[request])
    for accepted in ([3, 0, 1], [0, 2, 3], [1, 1, 0]):
        anchors = rng.integers(0, 49, 3)
        positions = np.array(lens, np.int32)
        drafted = model.draft(
            torch.from_numpy(anchors), pages, draft_batch(model, positions, table)
        )
        for request in range(3):
            context = taps[request, : lens[request]]
            ids, confidences = reference.draft(context, int(anchors[request]))
            assert drafted.token_ids[request].tolist() == ids
            np.testing.assert_allclose(
                drafted.confidence_logits[request].numpy(), confidences, rtol=1e-4, atol=1e-5
            )
        hidden = model.run_blocks(
            torch.from_numpy(anchors), pages, draft_batch(model, positions, table)
        )
        for request in range(3):
            expected = reference.hidden(taps[request, : lens[request]], int(anchors[request]))
            np.testing.assert_allclose(hidden[request].numpy(), expected.numpy(), atol=1e-5)
        for request, count in enumerate(accepted):
            new = slice(lens[request], lens[request] + count + 1)
            append_rows(model, pages, taps[request, new], lens[request], table[request])
            lens[request] += count + 1


def test_one_call_for_many_requests_appends_what_single_calls_append() -> None:
    model = make_model(make_config())
    taps = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    positions, slots = torch.tensor([3, 4, 5, 6, 0, 1, 2]), torch.tensor([7, 8, 9, 10, 20, 21, 22])
    together, apart = make_pages(model), make_pages(model)
    model.append_context(taps, positions, slots, together)
    for rows in (slice(0, 3), slice(3, 3), slice(3, 7)):
        model.append_context(taps[rows], positions[rows], slots[rows], apart)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_a_request_drafts_the_same_in_any_company() -> None:
    model = make_model(make_config(head_type="rnn"))
    pages = make_pages(model)
    table = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    taps = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
    for request, length in ((0, 6), (1, 3)):
        append_rows(model, pages, taps[request, :length], 0, table[request])
    both = model.draft(torch.tensor([4, 5]), pages, draft_batch(model, np.array([6, 3]), table))
    alone = model.draft(torch.tensor([5]), pages, draft_batch(model, np.array([3]), table[1:]))
    assert both.token_ids[1].tolist() == alone.token_ids[0].tolist()
    torch.testing.assert_close(both.confidence_logits[1], alone.confidence_logits[0])


def test_q_is_the_distribution_that_sampled_drafts_come_from() -> None:
    config = make_config(head_type="markov")
    model = make_model(config)
    hidden = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(4))
    sampling = SlotSampling(
        temperature=np.array([0.7, 0.0], np.float32),
        top_k=np.array([5, 0], np.int32),
        top_p=np.ones(2, np.float32),
        min_p=np.zeros(2, np.float32),
        seeds=np.array([11, 12], np.uint64),
        anchor_positions=np.array([3, 8], np.int32),
        coupled=np.zeros(2, np.bool_),
    )
    drafted = model.draft_from_hidden(torch.tensor([1, 2]), hidden, sampling)
    assert drafted.draft_probs is not None
    previous = 1
    for slot in range(3):
        logits = model._borrowed[1](hidden[0, slot]) + model.markov.w2(
            model.markov.embed(torch.tensor(previous))
        )
        kept = logits.topk(5).indices
        expected = torch.zeros(50)
        expected[kept] = (logits[kept] / 0.7).softmax(0)
        torch.testing.assert_close(drafted.draft_probs[0, slot], expected, atol=1e-6, rtol=1e-5)
        previous = int(drafted.token_ids[0, slot])
        assert expected[previous] > 0
    greedy = model.draft_from_hidden(torch.tensor([1, 2]), hidden)
    assert drafted.token_ids[1].tolist() == greedy.token_ids[1].tolist()
    assert greedy.draft_probs is None


def test_casting_the_model_leaves_the_rotary_table_in_float32() -> None:
    model = make_model(make_config())
    table = model.rope_table.clone()
    model.to(torch.bfloat16)
    assert model.fc.weight.dtype == torch.bfloat16
    assert torch.equal(model.rope_table, table)


def test_embedding_and_head_are_borrowed_not_stored() -> None:
    model = make_model(make_config())
    assert not any("embed" in name or "lm_head" in name for name in model.state_dict())
