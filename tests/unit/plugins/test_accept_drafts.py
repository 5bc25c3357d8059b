# SPDX-License-Identifier: Apache-2.0
"""`accept_drafts` in the interpreter against the torch reference, on enumerated ragged batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from dspark_plugins.accept_drafts import (
    AcceptPlan,
    DraftDistributions,
    plan_accept_drafts,
    run_accept_drafts,
)

from tests.unit.plugins.paged_batches import POISON
from trtllm_dspark.ops.accept_drafts import AcceptRule, accept_drafts

CPU = torch.device("cpu")
VOCAB, DRAFTS = 23, 4
GREEDY, REJECTION, COUPLED = AcceptRule


@dataclass(frozen=True)
class Block:
    """Inputs of one call, in the reference's dtypes."""

    logits: torch.Tensor
    scale: torch.Tensor
    thresholds: torch.Tensor | None
    cu_rows: torch.Tensor
    draft_token_ids: torch.Tensor
    draft_lens: torch.Tensor
    draft_probs: torch.Tensor | None
    sampled: torch.Tensor
    rules: torch.Tensor
    accept_uniforms: torch.Tensor
    final_uniforms: torch.Tensor
    seeds: torch.Tensor
    anchor_positions: torch.Tensor


def make_block(
    verify_lens: list[int],
    rules: list[AcceptRule],
    *,
    seed: int = 0,
    match_rate: float = 0.7,
    with_q: bool = True,
    sharpness: float = 1.5,
) -> Block:
    """Random logits; drafts equal the row's arg-max with `match_rate`, q is near p."""
    generator = torch.Generator().manual_seed(seed)
    count = len(verify_lens)
    cu_rows = np.concatenate([[0], np.cumsum(np.array(verify_lens, int) + 1)]).astype(np.int32)
    logits = torch.randn(int(cu_rows[-1]), VOCAB, generator=generator) * sharpness
    drafts = torch.randint(0, VOCAB, (count, DRAFTS), generator=generator, dtype=torch.int32)
    q_logits = torch.randn(count, DRAFTS, VOCAB, generator=generator)
    for request, length in enumerate(verify_lens):
        for column in range(min(length + 1, DRAFTS)):
            row = logits[cu_rows[request] + column]
            q_logits[request, column] = row + 0.7 * q_logits[request, column]
            if float(torch.rand((), generator=generator)) < match_rate:
                drafts[request, column] = int(row.argmax())
    uniforms = torch.rand(count, DRAFTS + 1, generator=generator, dtype=torch.float64)
    return Block(
        logits=logits,
        scale=torch.rand(count, generator=generator) + 0.5,
        thresholds=None,
        cu_rows=torch.from_numpy(cu_rows),
        draft_token_ids=drafts,
        draft_lens=torch.full((count,), DRAFTS, dtype=torch.int32),
        draft_probs=torch.softmax(q_logits, dim=-1) if with_q else None,
        sampled=torch.tensor([with_q and i % 3 != 2 for i in range(count)], dtype=torch.bool),
        rules=torch.tensor([int(rule) for rule in rules], dtype=torch.int32),
        accept_uniforms=uniforms[:, :DRAFTS].contiguous(),
        final_uniforms=uniforms[:, DRAFTS].contiguous(),
        seeds=torch.arange(count) * 0x123456789ABCDEF - 5,
        anchor_positions=torch.arange(count) * 37 + 3,
    )


def run_kernel(block: Block, drafts: DraftDistributions | None = None) -> AcceptPlan:
    plan = plan_accept_drafts(len(block.rules), DRAFTS, VOCAB, device=CPU, block_tokens=8)
    plan.accepted_lens.fill_(-9)
    plan.next_token_ids.fill_(-9)
    plan.dropped_accept_probs.fill_(-9.0)
    fields = dict(vars(block))
    probs = fields.pop("draft_probs")
    if drafts is None and probs is not None:
        drafts = DraftDistributions(probs)
    return run_accept_drafts(plan, drafts=drafts, **fields)


def assert_same(block: Block, drafts: DraftDistributions | None = None) -> AcceptPlan:
    found = run_kernel(block, drafts)
    accepted_lens, next_ids, dropped = accept_drafts(**vars(block))
    assert found.accepted_lens.tolist() == accepted_lens.tolist()
    assert found.next_token_ids.tolist() == next_ids.tolist()
    torch.testing.assert_close(
        found.dropped_accept_probs, dropped, rtol=1e-5, atol=1e-6, equal_nan=True
    )
    return found


LENGTHS = {
    "nothing verified": [0, 0, 0],
    "everything verified": [DRAFTS] * 3,
    "ragged": [2, 0, 4, 1, 3, 2],
    "one request": [3],
}


@pytest.mark.parametrize("rule", [GREEDY, REJECTION, COUPLED])
@pytest.mark.parametrize("case", LENGTHS)
def test_every_rule_equals_the_reference_on_ragged_batches(case: str, rule: AcceptRule) -> None:
    lens = LENGTHS[case]
    block = make_block(lens, [rule] * len(lens), seed=len(lens))
    assert_same(block)


@pytest.mark.parametrize("seed", range(4))
def test_rules_mix_in_one_launch(seed: int) -> None:
    rules = [GREEDY, REJECTION, COUPLED, REJECTION, REJECTION, GREEDY]
    found = assert_same(make_block([4, 3, 2, 4, 0, 1], rules, seed=seed))
    assert (found.next_token_ids >= 0).all()


def test_coupled_drafts_that_equal_the_noise_are_accepted_to_the_end() -> None:
    block = make_block([DRAFTS, 2], [COUPLED] * 2, match_rate=0.0)
    for column in range(DRAFTS):  # what the reference draws at each row becomes the draft
        _, next_ids, _ = accept_drafts(**vars(block))
        accepted = accept_drafts(**vars(block))[0]
        for request in range(2):
            if int(accepted[request]) == column:
                block.draft_token_ids[request, column] = next_ids[request]
    found = assert_same(block)
    assert found.accepted_lens.tolist() == [DRAFTS, 2]
    assert found.dropped_accept_probs[1] == 1.0


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_extreme_uniforms_draw_the_first_and_the_last_token_with_weight(uniform: float) -> None:
    block = make_block([1, 0, 2], [REJECTION] * 3, seed=5)
    final = torch.full((3,), uniform, dtype=torch.float64)
    edge = torch.full((block.logits.shape[0],), 0.5)
    found = run_kernel(replace(block, final_uniforms=final, thresholds=edge))
    for request, accepted in enumerate(found.accepted_lens.tolist()):
        row = block.logits[int(block.cu_rows[request]) + accepted]
        token = int(found.next_token_ids[request])
        assert row[token] >= 0.5
        if accepted == int(block.cu_rows[request + 1] - block.cu_rows[request]) - 1:
            kept = torch.nonzero(row >= 0.5)[:, 0]
            assert token == int(kept[0] if uniform == 0.0 else kept[-1])


def test_thresholds_filter_p_under_every_rule_that_samples() -> None:
    block = make_block([3, 2, 4, 1], [REJECTION, COUPLED, REJECTION, COUPLED], seed=11)
    edges = block.logits.sort(dim=1, descending=True).values[:, 4].contiguous()
    assert_same(replace(block, thresholds=edges))


def test_greedy_drafts_of_sampling_requests_are_one_hot() -> None:
    assert_same(make_block([4, 2, 3], [REJECTION] * 3, with_q=False, seed=2))


def test_a_deterministic_draft_is_never_recovered() -> None:
    block = make_block([1] * 8, [REJECTION] * 8, with_q=False, match_rate=1.0, seed=4)
    never = torch.full((8, DRAFTS), 1.0 - 2**-53, dtype=torch.float64)
    found = assert_same(replace(block, accept_uniforms=never))
    assert (found.accepted_lens == 0).all()
    assert (found.next_token_ids != block.draft_token_ids[:, 0]).all()


def test_an_empty_residual_falls_back_to_p() -> None:
    block = make_block([1], [REJECTION], seed=6)
    p = torch.softmax(block.logits[0] * block.scale[0], dim=0)
    q = torch.stack([p * 1.0001] * DRAFTS)[None]
    draft = torch.full((1, DRAFTS), int(p.argmax()), dtype=torch.int32)
    uniforms = torch.full((1, DRAFTS), 1.0 - 2**-53, dtype=torch.float64)
    found = run_kernel(
        replace(
            block,
            draft_probs=q.contiguous(),
            draft_token_ids=draft,
            accept_uniforms=uniforms,
            sampled=torch.tensor([True]),
        )
    )
    assert found.accepted_lens.tolist() == [0]
    cumulative = p.double().cumsum(0)
    expected = int(torch.searchsorted(cumulative, block.final_uniforms[0], right=True))
    assert found.next_token_ids.tolist() == [expected]


def test_q_from_logits_and_their_mass_equals_q_from_probabilities() -> None:
    block = make_block([4, 2, 3, 0], [REJECTION] * 4, seed=8)
    logits = torch.randn(4, DRAFTS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    edges = torch.full((4, DRAFTS), -1.0)
    scale = block.scale[:, None, None]
    top = logits.amax(dim=2, keepdim=True)
    weights = torch.exp((logits - top) * scale) * (logits >= -1.0)
    mass = weights.sum(dim=2, keepdim=True)
    stats = torch.cat((top, mass), dim=2).contiguous()
    assert_same(
        replace(block, draft_probs=weights / mass), DraftDistributions(logits, stats, edges)
    )


def test_uniforms_may_come_as_their_53_bits() -> None:
    block = make_block([3, 2, 4, 0], [REJECTION] * 4, seed=12)
    bits = replace(
        block,
        accept_uniforms=(block.accept_uniforms * 2.0**53).long(),
        final_uniforms=(block.final_uniforms * 2.0**53).long(),
    )
    as_bits, as_floats = run_kernel(bits), run_kernel(block)
    assert as_bits.accepted_lens.tolist() == as_floats.accepted_lens.tolist()
    assert as_bits.next_token_ids.tolist() == as_floats.next_token_ids.tolist()


def test_absent_requests_read_nothing() -> None:
    block = make_block([2, 1], [REJECTION, GREEDY], seed=3)
    cu_rows = torch.tensor([0, 3, 3, 5, 5], dtype=torch.int32)

    def spread(x: torch.Tensor) -> torch.Tensor:
        filler = torch.full_like(x[:1], -1 if not x.is_floating_point() else POISON)
        return torch.cat((x[:1], filler, x[1:], filler))

    names = ("scale", "draft_token_ids", "draft_lens", "rules", "accept_uniforms", "seeds")
    changes = {name: spread(getattr(block, name)) for name in names}
    changes["final_uniforms"] = spread(block.final_uniforms)
    changes["anchor_positions"] = spread(block.anchor_positions)
    changes["sampled"] = torch.tensor([True, False, True, False])
    assert block.draft_probs is not None
    sampled = block.sampled.tolist()
    changes["sampled"] = torch.tensor([sampled[0], False, sampled[1], False])
    changes["draft_probs"] = spread(block.draft_probs)
    found = run_kernel(replace(block, cu_rows=cu_rows, **changes))
    alone = run_kernel(block)
    assert found.accepted_lens[[0, 2]].tolist() == alone.accepted_lens.tolist()
    assert found.next_token_ids[[0, 2]].tolist() == alone.next_token_ids.tolist()
    assert found.next_token_ids[[1, 3]].tolist() == [-1, -1]
    assert found.accepted_lens[[1, 3]].tolist() == [0, 0]


def rearrange(block: Block, order: list[int]) -> Block:
    """The same requests in another order."""
    bounds = block.cu_rows.tolist()
    rows = torch.cat([torch.arange(bounds[r], bounds[r + 1]) for r in order])
    lens = [0, *(bounds[r + 1] - bounds[r] for r in order)]
    shared = ("logits", "thresholds", "cu_rows")
    moved = {
        name: value[order]
        for name, value in vars(block).items()
        if name not in shared and value is not None
    }
    cu_rows = torch.tensor(np.cumsum(lens), dtype=torch.int32)
    return replace(block, logits=block.logits[rows], cu_rows=cu_rows, **moved)


def test_a_request_is_accepted_alike_in_any_arrangement() -> None:
    rules = [GREEDY, REJECTION, COUPLED, REJECTION, REJECTION]
    block, order = make_block([4, 3, 2, 0, 4], rules, seed=21), [3, 1, 4, 0, 2]
    base, moved = run_kernel(block), run_kernel(rearrange(block, order))
    assert moved.accepted_lens.tolist() == base.accepted_lens[order].tolist()
    assert moved.next_token_ids.tolist() == base.next_token_ids[order].tolist()
    assert torch.equal(
        moved.dropped_accept_probs.nan_to_num(-1.0),
        base.dropped_accept_probs[order].nan_to_num(-1.0),
    )


def test_ties_go_to_the_lowest_id_in_any_tile() -> None:
    block = make_block([0, 0], [GREEDY] * 2)
    logits = torch.zeros(2, VOCAB)
    logits[0, [21, 6, 9]] = 1.0
    logits[1, [15, 16]] = 1.0
    found = run_kernel(replace(block, logits=logits))
    assert found.next_token_ids.tolist() == [6, 15]


def test_committed_tokens_follow_the_target_exactly_over_all_drafts_and_uniforms() -> None:
    # acceptance and residual probabilities are multiples of 1/4, so midpoints of quarters are exact
    p = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    q = torch.tensor([0.125, 0.125, 0.5, 0.25], dtype=torch.float64)
    quarters = (torch.arange(4, dtype=torch.float64) + 0.5) / 4
    u, v = torch.meshgrid(quarters[[0, 3]], quarters, indexing="ij")
    count = u.numel()
    total = torch.zeros(4, dtype=torch.float64)
    for draft in range(4):
        out = run_accept_drafts(
            plan_accept_drafts(count, 1, 4, device=CPU, block_tokens=8),
            logits=p.log().float().repeat(2 * count, 1),
            scale=torch.ones(count),
            thresholds=None,
            cu_rows=torch.arange(count + 1, dtype=torch.int32) * 2,
            draft_token_ids=torch.full((count, 1), draft, dtype=torch.int32),
            draft_lens=torch.ones(count, dtype=torch.int32),
            drafts=DraftDistributions(q.float().repeat(count, 1, 1)),
            sampled=torch.ones(count, dtype=torch.bool),
            rules=torch.ones(count, dtype=torch.int32),
            accept_uniforms=u.reshape(-1, 1).contiguous(),
            final_uniforms=v.reshape(-1).contiguous(),
            seeds=torch.zeros(count, dtype=torch.int64),
            anchor_positions=torch.zeros(count, dtype=torch.int64),
        )
        first = torch.where(out.accepted_lens > 0, draft, out.next_token_ids)
        total += q[draft] * torch.bincount(first.long(), minlength=4) / count
    assert total.tolist() == p.tolist()


def test_an_empty_batch_launches_nothing() -> None:
    assert run_kernel(make_block([], [])).accepted_lens.shape == (0,)
