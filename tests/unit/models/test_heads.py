# SPDX-License-Identifier: Apache-2.0
"""Sequential and confidence heads: equations, teacher forcing against stepping."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.models.drafter_builders import make_config, make_model
from trtllm_dspark.models.heads import ConfidenceHead, SequentialHead
from trtllm_dspark.ops.markov import SlotSampling


def make_sampling(seed: int) -> SlotSampling:
    """One request at temperature 1."""
    return SlotSampling(
        temperature=np.ones(1, np.float32),
        top_k=np.zeros(1, np.int32),
        top_p=np.ones(1, np.float32),
        min_p=np.zeros(1, np.float32),
        seeds=np.array([seed], np.uint64),
        anchor_positions=np.array([4], np.int32),
        coupled=np.zeros(1, np.bool_),
    )


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.requires_grad_(False)


@pytest.mark.parametrize("head_type", ["markov", "gated", "rnn"])
def test_teacher_forcing_gives_what_stepping_gives(head_type: str) -> None:
    head = filled(SequentialHead(make_config(head_type=head_type)))
    embedded, hidden = torch.randn(4, 3, 5), torch.randn(4, 3, 24)
    scanned, state = head.scan(embedded, hidden), None
    for slot in range(3):
        features, state = head.step(embedded[:, slot], hidden[:, slot], state)
        torch.testing.assert_close(scanned[:, slot], features)
    assert (state is None) == (head_type != "rnn")


def test_a_gate_shut_by_its_bias_silences_the_gated_head() -> None:
    head = filled(SequentialHead(make_config(head_type="gated")))
    head.gate_proj.weight.zero_()
    head.gate_proj.bias.fill_(-200.0)
    features, _ = head.step(torch.ones(2, 5), torch.ones(2, 24), None)
    assert torch.equal(features, torch.zeros(2, 5))


def test_the_rnn_state_moves_by_its_gate_and_is_read_before_it_moves() -> None:
    head = filled(SequentialHead(make_config(head_type="rnn")))
    e, h, s = torch.randn(1, 5), torch.randn(1, 24), torch.randn(1, 5)
    gate, candidate, output = (
        (head.joint_proj.weight @ torch.cat((s, e, h), 1)[0]).add(head.joint_proj.bias).chunk(3)
    )
    features, state = head.step(e, h, s)
    torch.testing.assert_close(features[0], torch.tanh(output))
    kept = torch.sigmoid(gate)
    torch.testing.assert_close(state[0], kept * s[0] + (1 - kept) * torch.tanh(candidate))


def test_the_markov_bias_depends_on_the_previous_token_only() -> None:
    head = filled(SequentialHead(make_config()))
    a, _ = head.step(head.embed(torch.tensor([3])), torch.randn(1, 24), None)
    b, _ = head.step(head.embed(torch.tensor([3])), torch.randn(1, 24), None)
    assert torch.equal(a, b)
    assert head.w2(a).shape == (1, 50)


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("with_peak", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_confidence_is_linear_in_its_features(
    with_markov: bool, with_peak: bool, bias: bool
) -> None:
    head = filled(
        ConfidenceHead(
            make_config(
                confidence_with_markov=with_markov,
                confidence_with_peak=with_peak,
                confidence_bias=bias,
            )
        )
    )
    h, e, peak = torch.randn(2, 24), torch.randn(2, 5), torch.tensor([3.0, 40.0])
    seen = [h, *([e] if with_markov else []), *([torch.tensor([[3.0], [12.0]])] * with_peak)]
    expected = torch.cat(seen, 1) @ head.proj.weight[0] + (head.proj.bias[0] if bias else 0.0)
    torch.testing.assert_close(head(h, e, peak), expected)


def test_a_confidence_head_with_markov_features_needs_the_embedding() -> None:
    with pytest.raises(ValueError, match="no embedding"):
        filled(ConfidenceHead(make_config()))(torch.randn(1, 24), None)
    with pytest.raises(ValueError, match="found none"):
        filled(ConfidenceHead(make_config(confidence_with_peak=True)))(
            torch.randn(1, 24), torch.randn(1, 5)
        )


def test_confidence_never_sees_its_own_draft() -> None:
    """c_k is a function of h_k and x_{k−1}: changing what slot k itself chooses changes nothing."""
    model = make_model(make_config())
    hidden = torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(6))
    before = model.draft_from_hidden(torch.tensor([7]), hidden)
    first = int(before.token_ids[0, 0])
    model.markov.w2.weight[first] = -50.0 * model.markov.w1.weight[7]
    after = model.draft_from_hidden(torch.tensor([7]), hidden)
    assert int(after.token_ids[0, 0]) != first
    assert before.confidence_logits[0, 0] == after.confidence_logits[0, 0]
    assert before.confidence_logits[0, 1] != after.confidence_logits[0, 1]


def test_a_confidence_with_the_peak_never_sees_what_a_sampled_slot_drew() -> None:
    model = make_model(make_config(confidence_with_peak=True))
    hidden = 0.1 * torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(6))
    first: dict[int, float] = {}
    for seed in range(20):
        drawn = model.draft_from_hidden(torch.tensor([7]), hidden, make_sampling(seed))
        first[int(drawn.token_ids[0, 0])] = float(drawn.confidence_logits[0, 0])
    assert len(first) > 3
    assert len(set(first.values())) == 1


@pytest.mark.parametrize("head_type", ["markov", "gated", "rnn"])
def test_greedy_drafts_are_the_same_with_and_without_the_native_search(head_type: str) -> None:
    config = make_config(head_type=head_type, markov_rank=16, vocab_size=64)
    model = make_model(config).to(torch.bfloat16)
    for borrowed in model._borrowed:
        borrowed.to(torch.bfloat16)
    anchors, hidden = torch.tensor([7, 9]), torch.randn(2, 3, 24).to(torch.bfloat16)
    with torch.no_grad():
        plain = model.draft_from_hidden(anchors, hidden)
        model.pack_()
        packed = model.draft_from_hidden(anchors, hidden)
    assert torch.equal(plain.token_ids, packed.token_ids)
    torch.testing.assert_close(plain.confidence_logits, packed.confidence_logits)
