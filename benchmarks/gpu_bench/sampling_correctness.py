# SPDX-License-Identifier: Apache-2.0
"""Drafting and acceptance kernels on fresh random inputs against the torch references on the CPU.

Draws are compared where the choice is clear: where the two best scores are closer than float32 can
tell, either answer is right, and the check counts only clear disagreements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from dspark_plugins.accept_drafts import (
    DraftDistributions,
    plan_accept_drafts,
    run_accept_drafts,
)
from dspark_plugins.filter_thresholds import run_filter_thresholds
from dspark_plugins.markov import run_markov_block
from dspark_plugins.markov_plan import (
    COUPLED,
    GREEDY,
    KEYED,
    HeadWeights,
    MarkovShape,
    SlotDraws,
    plan_markov,
)

from gpu_bench.correctness import Check
from gpu_bench.environment import Target
from trtllm_dspark.ops.accept_drafts import AcceptRule, accept_drafts
from trtllm_dspark.ops.filter_probs import filter_thresholds
from trtllm_dspark.ops.noise import Purpose, gumbel_row

CLEAR_MARGIN = 1e-3


def make_draws(modes: list[int], seed: int) -> SlotDraws:
    """One request per mode, random 64-bit seeds, temperature 0.8 where sampled."""
    count = len(modes)
    seeds = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)
    return SlotDraws(
        scales=torch.tensor([1.0 if mode == GREEDY else 1.25 for mode in modes]),
        thresholds=torch.full((count,), float("-inf")),
        modes=torch.tensor(modes, dtype=torch.int32),
        seeds=torch.from_numpy(seeds.view(np.int64)),
        anchor_positions=torch.arange(count, dtype=torch.int32) * 131 + 7,
    )


def expected_scores(logits: torch.Tensor, draws: SlotDraws, row: int, slot: int) -> np.ndarray:
    """Float64 scores whose arg-max is the draft: logits, or logit · scale + Gumbel."""
    values = logits.double().numpy()
    mode, vocab = int(draws.modes[row]), logits.shape[0]
    if mode == GREEDY:
        return values
    seed = int(draws.seeds[row].numpy().view(np.uint64))
    anchor = int(draws.anchor_positions[row])
    if mode == COUPLED:
        noise = gumbel_row(seed, anchor + 1 + slot, 0, Purpose.COUPLED, vocab)
    else:
        noise = gumbel_row(seed, anchor, slot, Purpose.DRAFT, vocab)
    return values * float(draws.scales[row]) + noise


def check_markov(target: Target, num_requests: int, vocab: int, rank: int) -> list[Check]:
    """Logits, drafts, q and confidence of a block that mixes greedy, keyed and coupled requests."""
    generator = torch.Generator().manual_seed(target.seed)
    dtype = torch.bfloat16 if target.is_cuda else torch.float16
    drafts, hidden_size = 3, 64

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(dtype)

    base = normal(num_requests, drafts, vocab, scale=2.0)
    w1, w2 = normal(vocab, rank), normal(vocab, rank, scale=rank**-0.5)
    weight, bias = normal(hidden_size + rank, scale=0.1), normal(1)
    hidden = normal(num_requests, drafts, hidden_size)
    anchors = torch.arange(num_requests, dtype=torch.int32)
    draws = make_draws([(GREEDY, KEYED, COUPLED)[i % 3] for i in range(num_requests)], target.seed)
    shape = MarkovShape(drafts, vocab, rank, hidden_size, with_markov=True)
    plan = plan_markov(shape, num_requests, dtype=dtype, device=target.device)
    moved = [x.to(target.device) for x in (base, anchors, hidden, w1, w2, weight, bias)]
    logits_out = torch.full((num_requests, drafts, vocab), float("nan"), device=target.device)
    on_device = SlotDraws(*(getattr(draws, f).to(target.device) for f in DRAW_FIELDS))
    weights = HeadWeights(moved[3], moved[4], moved[5], moved[6])
    run_markov_block(plan, moved[0], moved[1], moved[2], weights, on_device, logits_out)
    ids, logits = plan.token_ids.cpu(), logits_out.cpu()
    previous, logit_error, wrong = anchors.long(), 0.0, 0
    for slot in range(drafts):
        exact = base[:, slot].double() + w1[previous].double() @ w2.double().T
        logit_error = max(logit_error, (logits[:, slot].double() - exact).abs().max().item())
        for row in range(num_requests):
            scores = expected_scores(exact[row], draws, row, slot)
            wrong += bool(scores.max() - scores[int(ids[row, slot])] > CLEAR_MARGIN)
        previous = ids[:, slot].long()
    scales = draws.scales[:, None, None].double()
    q = torch.softmax(logits.double() * scales, dim=2).gather(2, ids.long()[:, :, None])[:, :, 0]
    q_error = ((plan.draft_probs.cpu().double() - q) / q).abs().max().item()
    features = torch.cat(
        (hidden, w1[torch.cat((anchors[:, None], ids[:, :-1]), dim=1).long()]), dim=2
    )
    confidence = features.double() @ weight.double() + bias.double()
    confidence_error = (plan.confidence.cpu().double() - confidence).abs().max().item()
    name = f"markov R={num_requests} V={vocab}"
    return [
        Check(f"{name} logits", logit_error, 2e-3),
        Check(f"{name} clear drafts (exact)", wrong, 0.0),
        Check(f"{name} q of the drafts (relative)", q_error, 1e-3),
        Check(f"{name} confidence logits", confidence_error, 2e-3),
    ]


DRAW_FIELDS = ("scales", "thresholds", "modes", "seeds", "anchor_positions")


def check_accept(target: Target, num_requests: int, vocab: int, drafts: int) -> list[Check]:
    """All three rules in one launch: requests that differ, error of the dropped probability.

    q comes as probabilities, and as logits with their (max, mass) as rounds on the device have it.
    Uniforms within float32 rounding of a boundary may fall on either side: up to 1 % may differ.
    """
    inputs, q = _make_accept_inputs(target, num_requests, vocab, drafts)
    scale, top = inputs["scale"][:, None, None], q.amax(dim=2, keepdim=True)
    mass = torch.exp((q - top) * scale).sum(dim=2, keepdim=True)
    bare = torch.full(q.shape[:2], float("-inf"))
    probs = torch.softmax(q * scale, dim=2)
    forms = {"probs": (probs,), "logits": (q, torch.cat((top, mass), dim=2), bare)}
    expected = accept_drafts(**inputs, draft_probs=probs)
    moved = {name: x.to(target.device) for name, x in inputs.items()}
    checks = []
    for form, values in forms.items():
        given = DraftDistributions(*(x.to(target.device) for x in values))
        plan = plan_accept_drafts(num_requests, drafts, vocab, device=target.device)
        found = run_accept_drafts(plan, drafts=given, **moved)
        lens, ids = found.accepted_lens.cpu(), found.next_token_ids.cpu()
        same = (lens == expected[0]) & (ids == expected[1])
        both = same & ~expected[2].isnan()
        error = (found.dropped_accept_probs.cpu() - expected[2])[both].abs().max().item()
        name = f"accept_drafts R={num_requests} V={vocab} q as {form}"
        checks += [
            Check(f"{name} differing requests", 1.0 - same.float().mean().item(), 0.01),
            Check(f"{name} dropped", error, 1e-3),
        ]
    return checks


def _make_accept_inputs(
    target: Target, num_requests: int, vocab: int, drafts: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of the reference but q, and logits of q [R, γ, V] that are near the target's."""
    generator = torch.Generator().manual_seed(target.seed)
    lens = torch.randint(0, drafts + 1, (num_requests,), generator=generator)
    cu_rows = torch.cat((torch.zeros(1), (lens + 1).cumsum(0))).to(torch.int32)
    logits = torch.randn(int(cu_rows[-1]), vocab, generator=generator) * 2
    ids = torch.randint(0, vocab, (num_requests, drafts), generator=generator, dtype=torch.int32)
    q = torch.randn(num_requests, drafts, vocab, generator=generator)
    for request in range(num_requests):
        for column in range(min(int(lens[request]) + 1, drafts)):
            row = logits[int(cu_rows[request]) + column]
            q[request, column] = row + 0.5 * q[request, column]
            if (request + column) % 4:
                ids[request, column] = int(row.argmax())
    uniforms = torch.rand(num_requests, drafts + 1, generator=generator, dtype=torch.float64)
    inputs = {
        "logits": logits,
        "scale": torch.rand(num_requests, generator=generator) + 0.5,
        "thresholds": logits.sort(dim=1, descending=True)
        .values[:, min(50, vocab - 1)]
        .contiguous(),
        "cu_rows": cu_rows,
        "draft_token_ids": ids,
        "draft_lens": torch.full((num_requests,), drafts, dtype=torch.int32),
        "sampled": torch.arange(num_requests) % 2 == 0,
        "rules": torch.arange(num_requests, dtype=torch.int32) % len(AcceptRule),
        "accept_uniforms": uniforms[:, :drafts].contiguous(),
        "final_uniforms": uniforms[:, drafts].contiguous(),
        "seeds": torch.arange(num_requests) * 7919 + target.seed,
        "anchor_positions": torch.arange(num_requests) * 17,
    }
    return inputs, q


def check_filters(target: Target, num_rows: int, vocab: int) -> Check:
    """Rows whose kept set differs; a mass that meets top_p to within rounding may go either way."""
    generator = torch.Generator().manual_seed(target.seed)
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    top_k = torch.arange(num_rows, dtype=torch.int32) % 3 * 20
    top_p = 1.0 - (torch.arange(num_rows) % 4) * 0.15
    min_p = (torch.arange(num_rows) % 5 == 4) * 0.05
    expected = filter_thresholds(
        logits, temperature=0.8, top_k=top_k.numpy(), top_p=top_p.numpy(), min_p=min_p.numpy()
    )
    scale = torch.full((num_rows,), 1.25)
    moved = [x.to(target.device) for x in (logits, scale, top_k, top_p, min_p)]
    found = run_filter_thresholds(*moved, torch.full_like(moved[1], float("nan"))).cpu()
    kept, wanted = logits >= found[:, None], logits >= expected[:, None]
    rate = (kept != wanted).any(dim=1).float().mean().item()
    return Check(f"filter_thresholds V={vocab} differing rows", rate, 0.02)


def list_sampling_checks(target: Target) -> list[Callable[[], list[Check]]]:
    """Drafting and acceptance, larger on a GPU."""
    if not target.is_cuda:
        return [
            lambda: check_markov(target, 3, 300, 16),
            lambda: check_accept(target, 9, 300, 3),
            lambda: [check_filters(target, 8, 700)],
        ]
    return [
        lambda: check_markov(target, 5, 49152, 64),
        lambda: check_markov(target, 70, 32003, 256),
        lambda: check_accept(target, 128, 32003, 7),
        lambda: check_accept(target, 16, 151936, 7),
        lambda: [check_filters(target, 120, 151936)],
    ]
