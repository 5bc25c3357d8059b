# SPDX-License-Identifier: Apache-2.0
"""The whole objective against one plain autograd expression of its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.unit.models.drafter_builders import make_config, make_model
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.objective import LossWeights, Objective
from trtllm_dspark.training.packing import PackedBlocks, TokenSequence, pack_blocks
from trtllm_dspark.training.vocab_loss import make_kernels
from trtllm_dspark.training.vocabulary import ActiveVocabulary


def make_case(**changes: object):
    model = make_model(make_config(**changes))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    rng = np.random.default_rng(2)
    items = [TokenSequence(rng.integers(0, 49, n), 2) for n in (9, 11)]
    packed = pack_blocks(items, [np.array([2, 3, 7]), np.array([4, 8])], 3)
    taps = torch.from_numpy(rng.standard_normal((20, 32)).astype(np.float32))
    target_hidden = torch.from_numpy(rng.standard_normal((20, 24)).astype(np.float32))
    return model, packed, taps, target_hidden


def plain_loss(
    model: DSparkModel, packed: PackedBlocks, taps: torch.Tensor, target_hidden: torch.Tensor
) -> torch.Tensor:
    """L = Σ w (0.1 CE + 0.9 TV + BCE) / Σ w, block by block and slot by slot."""
    head = model._borrowed[1].weight
    hidden = forward_blocks(model, taps, packed)
    total, weight_sum = torch.zeros(()), 0.0
    for block in range(packed.num_blocks):
        state = None
        for slot in range(int(packed.num_labels[block])):
            row = int(packed.anchor_rows[block]) + slot
            previous, label = (int(packed.token_ids[row + i]) for i in (0, 1))
            h = hidden[block, slot][None]
            logits, e = h @ head.T, None
            if model.markov is not None:
                e = model.markov.embed(torch.tensor([previous]))
                features, state = model.markov.step(e, h, state)
                logits = logits + features @ model.markov.w2.weight.T
            p_t = (target_hidden[row] @ head.T).softmax(-1)
            tv = (logits.softmax(-1)[0] - p_t).abs().sum()
            ce = functional.cross_entropy(logits, torch.tensor([label]))
            bce = functional.binary_cross_entropy_with_logits(
                model.confidence(h, e)[0], (1 - tv / 2).detach()
            )
            weight = float(np.exp(-slot / 4))
            total = total + weight * (0.1 * ce + 0.9 * tv + bce)
            weight_sum += weight
    return total / weight_sum


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_type": "rnn"},
        {"head_type": "gated"},
        {"head_type": "none", "markov_rank": 0, "confidence_with_markov": False},
    ],
    ids=["markov", "rnn", "gated", "none"],
)
def test_gradients_of_every_parameter_equal_autograd(changes: dict) -> None:
    model, packed, taps, target_hidden = make_case(**changes)
    head = model._borrowed[1].weight
    objective = Objective(model, head, LossWeights(), make_kernels(False), tile_rows=4)
    objective.refresh([packed], np.random.default_rng(0))
    hidden = forward_blocks(model, taps, packed)
    normalizer = objective.total_weight(packed)
    grads, values = objective.gradients(
        hidden, target_hidden, packed, normalizer, np.random.default_rng(0)
    )
    loss = plain_loss(model, packed, taps, target_hidden)
    loss.backward()
    found = (0.1 * values.ce + 0.9 * values.tv + values.confidence) / values.weight
    assert found == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=2e-6, rtol=2e-4, msg=name)


def test_sampled_slots_have_the_same_expectation() -> None:
    model, packed, taps, target_hidden = make_case()
    head, kernels = model._borrowed[1].weight, make_kernels(False)
    sums = {}
    for sample_slots, rounds in ((False, 1), (True, 400)):
        objective = Objective(model, head, LossWeights(sample_slots=sample_slots), kernels)
        objective.refresh([packed], np.random.default_rng(0))
        rng, total = np.random.default_rng(3), torch.zeros(24, 32)
        for _ in range(rounds):
            hidden = forward_blocks(model, taps, packed)
            grads, _ = objective.gradients(hidden, target_hidden, packed, 10.0, rng)
            total += grads["fc.weight"] / rounds
        sums[sample_slots] = total
    error = (sums[True] - sums[False]).norm() / sums[False].norm()
    assert error < 0.1


def test_an_active_vocabulary_that_holds_every_token_changes_nothing() -> None:
    model, packed, taps, target_hidden = make_case()
    head, kernels = model._borrowed[1].weight, make_kernels(False)
    results = []
    for vocabulary in (None, ActiveVocabulary(50, np.arange(30), 20)):
        objective = Objective(model, head, LossWeights(), kernels, vocabulary=vocabulary)
        objective.refresh([packed], np.random.default_rng(0))
        hidden = forward_blocks(model, taps, packed)
        results.append(
            objective.gradients(hidden, target_hidden, packed, 5.0, np.random.default_rng(0))[0]
        )
    for name, grad in results[0].items():
        torch.testing.assert_close(grad, results[1][name], atol=1e-6, rtol=1e-4, msg=name)
