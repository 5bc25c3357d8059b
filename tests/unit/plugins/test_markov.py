# SPDX-License-Identifier: Apache-2.0
"""`markov_tile` + `markov_select` in the interpreter against the torch reference and its noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from dspark_plugins.heuristics import VocabularyTile
from dspark_plugins.markov import run_markov_block, run_markov_slot
from dspark_plugins.markov_plan import (
    COUPLED,
    GREEDY,
    KEYED,
    HeadWeights,
    MarkovPlan,
    MarkovShape,
    SlotDraws,
    greedy_draws,
    plan_markov,
)

from tests.unit.plugins.paged_batches import POISON
from trtllm_dspark.ops.markov import PEAK_LIMIT, markov_sample, peak_log_odds
from trtllm_dspark.ops.noise import Purpose, gumbel_row

CPU = torch.device("cpu")
VOCAB, RANK, HIDDEN, DRAFTS = 44, 16, 20, 3
SHAPE = MarkovShape(DRAFTS, VOCAB, RANK, HIDDEN, with_markov=True)
HEADLESS = MarkovShape(DRAFTS, VOCAB)
TILE = VocabularyTile(4, 16, num_warps=4)


@dataclass(frozen=True)
class Case:
    """Inputs of one block."""

    base: torch.Tensor
    anchors: torch.Tensor
    hidden: torch.Tensor
    weights: HeadWeights


def make_case(
    num_requests: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    with_markov: bool = True,
    with_peak: bool = False,
) -> Case:
    """Random inputs; the flags say what the confidence head sees."""
    seen = replace(SHAPE, with_markov=with_markov, with_peak=with_peak)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return Case(
        base=normal(num_requests, DRAFTS, VOCAB) * 2,
        anchors=torch.arange(num_requests, dtype=torch.int32) * 7 % VOCAB,
        hidden=normal(num_requests, DRAFTS, HIDDEN),
        weights=HeadWeights(
            normal(VOCAB, RANK),
            normal(VOCAB, RANK),
            normal(seen.num_confidence_features),
            normal(1),
        ),
    )


def make_draws(modes: list[int], threshold: float = float("-inf")) -> SlotDraws:
    count = len(modes)
    seeds = np.array([2**63 + 5, 17, 2**64 - 1, 3, 99][:count], np.uint64)
    return SlotDraws(
        scales=torch.tensor([1.0 if mode == GREEDY else 1.25 for mode in modes]),
        thresholds=torch.full((count,), threshold),
        modes=torch.tensor(modes, dtype=torch.int32),
        seeds=torch.from_numpy(seeds.view(np.int64)),
        anchor_positions=torch.arange(count, dtype=torch.int32) * 100 + 11,
    )


def make_plan(num_requests: int, shape: MarkovShape = SHAPE) -> MarkovPlan:
    plan = plan_markov(shape, num_requests, dtype=torch.float32, device=CPU, tile=TILE)
    for out in (plan.draft_probs, plan.confidence, plan.stats, plan.tile_scores):
        out.fill_(POISON)
    plan.next_features.fill_(POISON)
    for ids in (plan.token_ids, plan.next_ids, plan.tile_ids):
        ids.fill_(-9)
    return plan


def run_case(
    case: Case,
    draws: SlotDraws | None = None,
    shape: MarkovShape = SHAPE,
    logits_out: torch.Tensor | None = None,
) -> MarkovPlan:
    count = len(case.anchors)
    hidden = case.hidden if shape.hidden_size else None
    return run_markov_block(
        make_plan(count, shape),
        case.base,
        case.anchors,
        hidden,
        case.weights,
        draws or greedy_draws(count, CPU),
        logits_out,
    )


def reference_logits(case: Case, slot: int, previous: torch.Tensor) -> torch.Tensor:
    """U_k + W2 W1[x_{k−1}], float64."""
    w1, w2 = case.weights.w1, case.weights.w2
    assert w1 is not None
    assert w2 is not None
    return case.base[:, slot].double() + w1[previous.long()].double() @ w2.double().T


@pytest.mark.parametrize("num_requests", [1, 3, 4, 5])
def test_greedy_blocks_equal_the_torch_reference(num_requests: int) -> None:
    case = make_case(num_requests)
    found = run_case(case)
    w1, w2 = case.weights.w1, case.weights.w2
    assert w1 is not None
    assert w2 is not None
    previous = case.anchors
    for slot in range(DRAFTS):
        features = w1[previous.long()]
        choice = markov_sample(case.base[:, slot], features, lambda f: f @ w2.T, slot)
        assert found.token_ids[:, slot].tolist() == choice.token_ids.tolist()
        seen = torch.cat((case.hidden[:, slot], features), dim=1)
        assert case.weights.confidence_weight is not None
        expected = seen @ case.weights.confidence_weight + case.weights.confidence_bias
        torch.testing.assert_close(found.confidence[:, slot], expected, rtol=1e-5, atol=1e-5)
        previous = choice.token_ids
    assert found.next_ids[(DRAFTS - 1) % 2].tolist() == found.token_ids[:, -1].tolist()


def test_every_output_is_written_and_gives_q_back() -> None:
    case = make_case(3)
    logits_out = torch.full_like(case.base, POISON)
    found = run_case(case, make_draws([KEYED, GREEDY, COUPLED]), logits_out=logits_out)
    previous = case.anchors
    for slot in range(DRAFTS):
        logits = reference_logits(case, slot, previous)
        torch.testing.assert_close(logits_out[:, slot].double(), logits, rtol=1e-5, atol=1e-5)
        scales = torch.tensor([1.25, 1.0, 1.25], dtype=torch.float64)[:, None]
        q = torch.softmax(logits * scales, dim=1)
        top, mass = found.stats[:, slot].double().unbind(1)
        again = torch.exp((logits - top[:, None]) * scales) / mass[:, None]
        torch.testing.assert_close(again, q, rtol=1e-5, atol=1e-6)
        ids = found.token_ids[:, slot].long()
        chosen = q.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(found.draft_probs[:, slot].double(), chosen, rtol=1e-5, atol=0)
        previous = ids
    w1 = case.weights.w1
    assert w1 is not None
    assert torch.equal(found.next_features, w1[previous])
    assert found.next_ids.tolist() == found.token_ids[:, [2, 1]].T.tolist()
    assert found.tile_scores[:4].isfinite().all() and (found.tile_ids >= 0).all()


def test_sampled_drafts_are_the_gumbel_maxima_of_their_keys() -> None:
    case = make_case(4, seed=3)
    modes = [KEYED, COUPLED, KEYED, COUPLED]
    draws = make_draws(modes)
    found = run_case(case, draws)
    previous = case.anchors
    for slot in range(DRAFTS):
        logits = reference_logits(case, slot, previous).numpy() * 1.25
        for row, mode in enumerate(modes):
            seed = int(draws.seeds[row].numpy().view(np.uint64))
            anchor = int(draws.anchor_positions[row])
            if mode == COUPLED:
                noise = gumbel_row(seed, anchor + 1 + slot, 0, Purpose.COUPLED, VOCAB)
            else:
                noise = gumbel_row(seed, anchor, slot, Purpose.DRAFT, VOCAB)
            assert int(found.token_ids[row, slot]) == int(np.argmax(logits[row] + noise))
        previous = found.token_ids[:, slot]


def test_of_equal_logits_the_lowest_id_is_drafted() -> None:
    case = make_case(2)
    base = torch.zeros_like(case.base)
    base[0, :, [3, 19, 40]] = 5.0
    base[1, :, [43, 17]] = 5.0
    found = run_case(replace(case, base=base), shape=HEADLESS)
    assert found.token_ids.tolist() == [[3] * DRAFTS, [17] * DRAFTS]


def test_tokens_below_the_threshold_are_never_drawn_and_q_ignores_them() -> None:
    case = make_case(3, seed=5)
    draws = make_draws([KEYED, KEYED, GREEDY], threshold=2.0)
    found = run_case(case, draws, shape=HEADLESS)
    weights = torch.exp(case.base * torch.tensor([1.25, 1.25, 1.0])[:, None, None])
    q = weights * (case.base >= 2.0)
    q = q / q.sum(dim=2, keepdim=True)
    chosen = q.gather(2, found.token_ids.long()[:, :, None])[:, :, 0]
    assert (chosen > 0).all()
    torch.testing.assert_close(found.draft_probs, chosen, rtol=1e-5, atol=0)


def test_without_a_confidence_head_the_peak_at_temperature_one_stands_in() -> None:
    case = make_case(3, seed=7)
    found = run_case(case, make_draws([KEYED, GREEDY, COUPLED], threshold=1.0), shape=HEADLESS)
    for slot in range(DRAFTS):
        expected = peak_log_odds(case.base[:, slot])
        torch.testing.assert_close(found.confidence[:, slot], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_markov", [False, True])
@pytest.mark.parametrize("height", [0.0, 40.0])
def test_a_head_with_the_peak_sees_it_at_temperature_one_and_within_its_limit(
    with_markov: bool, height: float
) -> None:
    case = make_case(3, seed=8, with_markov=with_markov, with_peak=True)
    case.base[:, :, 30] += height
    shape = replace(SHAPE, with_markov=with_markov, with_peak=True)
    found = run_case(case, make_draws([KEYED, GREEDY, COUPLED], threshold=1.0), shape=shape)
    weight, bias, w1 = case.weights.confidence_weight, case.weights.confidence_bias, case.weights.w1
    assert weight is not None and bias is not None and w1 is not None
    previous = case.anchors
    for slot in range(DRAFTS):
        peak = peak_log_odds(reference_logits(case, slot, previous).float())
        assert bool((peak > PEAK_LIMIT).any()) == (height > 0)
        seen = [case.hidden[:, slot], *([w1[previous.long()]] if with_markov else [])]
        seen.append(peak.clamp(-PEAK_LIMIT, PEAK_LIMIT)[:, None])
        expected = torch.cat(seen, dim=1) @ weight + bias
        torch.testing.assert_close(found.confidence[:, slot], expected, rtol=1e-4, atol=1e-4)
        previous = found.token_ids[:, slot]


def test_a_confidence_weight_of_another_head_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence_weight"):
        run_case(make_case(2), shape=replace(SHAPE, with_peak=True))


def test_a_request_is_the_same_in_any_arrangement() -> None:
    case, modes = make_case(5, seed=9), [KEYED, GREEDY, COUPLED, KEYED, GREEDY]
    draws = make_draws(modes)
    order = [4, 2, 0]
    moved = replace(
        case, base=case.base[order], anchors=case.anchors[order], hidden=case.hidden[order]
    )
    moved_draws = SlotDraws(
        draws.scales[order],
        draws.thresholds[order],
        draws.modes[order],
        draws.seeds[order],
        draws.anchor_positions[order],
    )
    whole, part = run_case(case, draws), run_case(moved, moved_draws)
    for name in ("token_ids", "draft_probs", "confidence", "stats"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[order]), name


def test_half_precision_weights_are_multiplied_in_float32() -> None:
    case = make_case(3, seed=2, dtype=torch.float16)
    logits_out = torch.full(case.base.shape, POISON)
    plan = plan_markov(SHAPE, 3, dtype=torch.float16, device=CPU, tile=TILE)
    draws = greedy_draws(3, CPU)
    run_markov_block(plan, case.base, case.anchors, case.hidden, case.weights, draws, logits_out)
    expected = reference_logits(case, 0, case.anchors)
    torch.testing.assert_close(logits_out[:, 0].double(), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_batch_and_missing_weights_are_told_apart() -> None:
    assert run_case(make_case(0)).token_ids.shape == (0, DRAFTS)
    case = make_case(2)
    plan = make_plan(2)
    with pytest.raises(ValueError, match="rank 16 needs features, w1 and w2"):
        run_markov_slot(
            plan, 0, case.base, None, case.anchors, case.hidden, HeadWeights(), greedy_draws(2, CPU)
        )
