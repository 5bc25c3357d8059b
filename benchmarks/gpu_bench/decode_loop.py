# SPDX-License-Identifier: Apache-2.0
"""The end-to-end loop on a small random model: greedy tokens against full recomputation.

Prefill, then rounds (one captured graph on a GPU) at a fixed keep ratio. The tokens must equal the
CPU's float32 ones up to the first position whose two best logits are closer than rounding can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from dspark_plugins.ragged_attention import AttentionShape, plan_ragged_attention

from gpu_bench.batches import PagedRequests
from gpu_bench.decode_round import DecodeRound
from gpu_bench.environment import Target
from gpu_bench.random_model import (
    DeviceBatch,
    Model,
    allocate_pages,
    append_context,
    build_model,
    recompute_greedy,
    run_target,
)
from gpu_bench.shapes import SMALL, TINY, ModelSpec
from gpu_bench.timing import capture

NEAR_TIE = 2e-3


@dataclass(frozen=True)
class LoopResult:
    """What the loop produced over all requests."""

    num_compared: int
    """Tokens compared, near-ties and what follows them left out."""
    num_wrong: int
    num_rounds: int
    num_committed: int


def run_decode_loop(target: Target) -> LoopResult:
    """Decode a ragged batch of random prompts and compare every token."""
    spec, lens, count, drafts = (
        (SMALL, [5, 70, 33], 48, 5) if target.is_cuda else (TINY, [3, 18], 7, 3)
    )
    model = build_model(spec, torch.float32, target.device, target.seed)
    generator = np.random.default_rng(target.seed)
    prompts = [generator.integers(0, spec.vocab_size, n).tolist() for n in lens]
    answers = [recompute_greedy(model, prompt, count) for prompt in prompts]
    hints = [_spoil(tokens, spec.vocab_size, generator) for tokens, _ in answers]
    outputs, num_rounds = speculate(target, model, prompts, count, drafts, hints)
    compared = wrong = 0
    for found, (expected, margins) in zip(outputs, answers, strict=True):
        for token, other, margin in zip(found, expected, margins, strict=True):
            if margin < NEAR_TIE:
                break
            compared += 1
            wrong += token != other
    return LoopResult(compared, wrong, num_rounds, sum(len(x) for x in outputs))


def _spoil(tokens: list[int], vocab_size: int, generator: np.random.Generator) -> list[int]:
    """The right tokens with one in four replaced: drafts that are accepted for a while."""
    wrong = generator.integers(0, vocab_size, len(tokens))
    is_wrong = generator.random(len(tokens)) < 0.25
    return np.where(is_wrong, wrong, tokens).tolist()


def speculate(
    target: Target,
    model: Model,
    prompts: list[list[int]],
    num_tokens: int,
    num_drafts: int,
    hints: list[list[int]],
) -> tuple[list[list[int]], int]:
    """Greedy tokens of every prompt, number of rounds. Two rounds of three draft the hints."""
    spec, count = model.spec, len(prompts)
    table, num_pages = _lay_out_pages(spec, prompts, num_tokens + num_drafts + 1)
    page_table = torch.from_numpy(table).to(target.device)
    pages = (
        allocate_pages(spec, spec.num_layers, num_pages, model.embed),
        allocate_pages(spec, spec.drafter_layers, num_pages, model.embed),
    )
    first = _prefill(target, model, prompts, table, pages)
    outputs = [[token] for token in first]
    rung = count + -(-count * num_drafts * 3 // 4)
    step = DecodeRound(
        model,
        pages,
        page_table,
        num_drafts=num_drafts,
        rung=rung,
        context_len=max(map(len, prompts)),
    )
    positions = [len(prompt) for prompt in prompts]
    graph, num_rounds = None, 0
    while min(map(len, outputs)) < num_tokens:
        step.anchor_ids.copy_(torch.tensor([x[-1] for x in outputs], dtype=torch.int32))
        step.anchor_positions.copy_(torch.tensor(positions, dtype=torch.int32))
        room = [min(max(num_tokens - len(x) - 1, 0), num_drafts) for x in outputs]
        step.caps.copy_(torch.tensor(room, dtype=torch.int32))
        step.forced_ids.fill_(-1)
        if num_rounds % 3:
            for request, hint in enumerate(hints):
                known = hint[len(outputs[request]) :][:num_drafts]
                step.forced_ids[request, : len(known)] = torch.tensor(known, dtype=torch.int32)
        if target.is_cuda and graph is None:
            graph = capture(step.run)  # its warm-up rounds write what this round writes again
        if graph is not None:
            graph.replay()
        else:
            step.run()
        _commit(step, outputs, positions, num_tokens)
        num_rounds += 1
    return [x[:num_tokens] for x in outputs], num_rounds


def _commit(
    step: DecodeRound, outputs: list[list[int]], positions: list[int], num_tokens: int
) -> None:
    """Append accepted drafts and the next token; finished requests stay where they are."""
    accepted = step.acceptance.accepted_lens.cpu().tolist()
    next_ids = step.acceptance.next_token_ids.cpu().tolist()
    drafts = step.drafts.token_ids.cpu().tolist()
    for request, length in enumerate(accepted):
        if len(outputs[request]) < num_tokens:
            outputs[request] += [*drafts[request][:length], next_ids[request]]
            positions[request] += length + 1


def _prefill(
    target: Target,
    model: Model,
    prompts: list[list[int]],
    table: np.ndarray,
    pages: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> list[int]:
    """Run the prompts as one ragged batch; the first token of each."""
    spec, device = model.spec, target.device
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    requests = PagedRequests(lens, lens * 0, table, pages[0][0].shape[0], spec.page_size)
    shape = AttentionShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size, requests.num_pages
    )
    plan = plan_ragged_attention(
        shape, requests.cu_query_lens, lens * 0, table, num_rows=requests.num_rows, device=device
    )
    batch = DeviceBatch(
        torch.from_numpy(requests.positions()).to(device),
        torch.from_numpy(requests.slots()).to(device),
        torch.from_numpy(requests.cu_query_lens).to(device),
        torch.from_numpy(lens * 0).to(device),
        torch.from_numpy(table).to(device),
        plan,
    )
    tokens = torch.tensor([t for prompt in prompts for t in prompt], dtype=torch.int32)
    logits, taps = run_target(model, tokens.to(device), pages[0], batch)
    append_context(model, taps, pages[1], batch)
    last = torch.from_numpy(requests.cu_query_lens[1:].astype(np.int64) - 1).to(device)
    return logits[last].argmax(dim=-1).cpu().tolist()


def _lay_out_pages(spec: ModelSpec, prompts: list[list[int]], room: int) -> tuple[np.ndarray, int]:
    """A page table with room for every request's tokens, and the number of pages."""
    per_request = max(-(-(len(prompt) + room) // spec.page_size) for prompt in prompts)
    count = len(prompts) * per_request
    ids = np.random.default_rng(0).permutation(count).astype(np.int32) + 1
    return ids.reshape(len(prompts), per_request), count + 1
