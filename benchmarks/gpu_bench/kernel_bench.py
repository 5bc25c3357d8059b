# SPDX-License-Identifier: Apache-2.0
"""Kernel timings beside their roofline floors: attention, Markov head, selection, acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from dspark_plugins.accept_drafts import plan_accept_drafts, run_accept_drafts
from dspark_plugins.launch import machine_of
from dspark_plugins.markov import run_markov_block
from dspark_plugins.markov_plan import HeadWeights, MarkovShape, greedy_draws, plan_markov
from dspark_plugins.ragged_attention import (
    AttentionShape,
    plan_ragged_attention,
    run_ragged_attention,
)
from dspark_plugins.select_drafts import plan_select_drafts, run_select_drafts

from gpu_bench.batches import lay_out_requests, random_pages
from gpu_bench.environment import Target
from gpu_bench.roofline import PEAK_FLOPS, Work, attention_work, markov_work
from gpu_bench.shapes import QWEN3_8B, TINY, ModelSpec
from gpu_bench.timing import time_call

Row = dict[str, Any]


def make_row(target: Target, call: Any, work: Work, bandwidth: float, **labels: Any) -> Row:
    """Time a call with a cold cache and put its floor beside it."""
    timing = time_call(call, target, is_cold=True)
    flops = PEAK_FLOPS.get(machine_of(target.device).capability, 1e15)
    floor = work.floor_ms(bandwidth, flops)
    return {
        **labels,
        "median_ms": timing.median_ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "bytes": work.num_bytes,
        "flops": work.num_flops,
        "floor_ms": floor,
        "share_of_bandwidth": work.num_bytes / (timing.median_ms * 1e-3) / bandwidth,
    }


def bench_attention(target: Target, bandwidth: float) -> Iterator[Row]:
    """One layer at Qwen3-8B heads over requests, contexts and verified rows."""
    spec = QWEN3_8B if target.is_cuda else TINY
    if target.is_cuda:
        cells = [
            (r, c, q) for r in (1, 16, 64, 256) for c in (512, 4096, 32768) for q in (2, 8, 16)
        ]
    else:
        cells = [(2, 20, 3)]
    for num_requests, context_len, query_len in cells:
        yield _bench_attention_cell(target, bandwidth, spec, num_requests, context_len, query_len)


def _bench_attention_cell(
    target: Target,
    bandwidth: float,
    spec: ModelSpec,
    num_requests: int,
    context_len: int,
    query_len: int,
) -> Row:
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    batch = lay_out_requests(
        [query_len] * num_requests, [context_len] * num_requests, spec.page_size, target.seed
    )
    pages = random_pages(batch, spec.num_kv_heads, spec.head_dim, dtype, target.device)
    q = torch.randn(batch.num_rows, spec.num_heads, spec.head_dim, device=target.device).to(dtype)
    shape = AttentionShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size, batch.num_pages
    )
    plan = plan_ragged_attention(
        shape,
        batch.cu_query_lens,
        batch.context_lens,
        batch.page_table,
        num_rows=batch.num_rows,
        device=target.device,
    )
    inputs = [
        torch.from_numpy(x).to(target.device)
        for x in (batch.page_table, batch.cu_query_lens, batch.context_lens)
    ]
    out = torch.empty_like(q)
    work = attention_work(
        num_requests,
        context_len,
        query_len,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_bytes=dtype.itemsize,
    )
    return make_row(
        target,
        lambda: run_ragged_attention(plan, q, pages, *inputs, spec.head_dim**-0.5, out),
        work,
        bandwidth,
        op="ragged_verify_attention",
        num_requests=num_requests,
        context_len=context_len,
        query_len=query_len,
        num_splits=plan.num_splits,
        block_m=plan.tiles.block_m,
    )


def bench_markov(target: Target, bandwidth: float) -> Iterator[Row]:
    """A whole greedy block of the Markov head, γ 7 and 15."""
    spec = QWEN3_8B if target.is_cuda else TINY
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    for num_drafts in (7, 15) if target.is_cuda else (2,):
        for num_requests in (1, 16, 64) if target.is_cuda else (2,):
            yield _bench_markov_cell(target, bandwidth, spec, dtype, num_requests, num_drafts)


def _bench_markov_cell(
    target: Target,
    bandwidth: float,
    spec: ModelSpec,
    dtype: torch.dtype,
    num_requests: int,
    num_drafts: int,
) -> Row:
    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=target.device).normal_()

    shape = MarkovShape(
        num_drafts, spec.vocab_size, spec.markov_rank, spec.hidden_size, with_markov=True
    )
    plan = plan_markov(shape, num_requests, dtype=dtype, device=target.device)
    base = normal(num_requests, num_drafts, spec.vocab_size)
    hidden = normal(num_requests, num_drafts, spec.hidden_size)
    weights = HeadWeights(
        normal(spec.vocab_size, spec.markov_rank),
        normal(spec.vocab_size, spec.markov_rank),
        normal(spec.hidden_size + spec.markov_rank),
        normal(1),
    )
    anchors = torch.arange(num_requests, dtype=torch.int32, device=target.device)
    draws = greedy_draws(num_requests, target.device)
    return make_row(
        target,
        lambda: run_markov_block(plan, base, anchors, hidden, weights, draws),
        markov_work(num_requests, num_drafts, spec.vocab_size, spec.markov_rank),
        bandwidth,
        op="markov block",
        num_requests=num_requests,
        num_drafts=num_drafts,
    )


def bench_small_ops(target: Target, bandwidth: float) -> Iterator[Row]:
    """Selection and greedy acceptance; acceptance is counted with every row read."""
    device = target.device
    for num_requests in (1, 64) if target.is_cuda else (2,):
        drafts, vocab = (7, QWEN3_8B.vocab_size) if target.is_cuda else (2, 48)
        rows = num_requests * (drafts + 1)
        zeros = torch.zeros(num_requests, dtype=torch.int32, device=device)
        survivals = torch.rand(num_requests, drafts, device=device).cumprod(dim=1)
        ids = torch.zeros(num_requests, drafts, dtype=torch.int32, device=device)
        selection = plan_select_drafts(num_requests, drafts, rung=rows, device=device)
        capacity = torch.tensor([rows // 2], dtype=torch.int32, device=device)
        inputs = (survivals, capacity, zeros + drafts, zeros, zeros, ids)
        labels = {"num_requests": num_requests, "num_drafts": drafts}
        yield make_row(
            target,
            lambda p=selection, i=inputs: run_select_drafts(p, *i),
            Work(rows * 12.0, 0.0),
            bandwidth,
            op="select_drafts",
            **labels,
        )
        logits = torch.zeros(rows, vocab, device=device)
        logits[:, 0] = 1.0  # every draft (token 0) is accepted: the walk reads all rows
        plan = plan_accept_drafts(num_requests, drafts, vocab, device=device)
        fields = {
            "logits": logits,
            "scale": torch.ones(num_requests, device=device),
            "thresholds": None,
            "cu_rows": torch.arange(num_requests + 1, dtype=torch.int32, device=device)
            * (drafts + 1),
            "draft_token_ids": ids,
            "draft_lens": zeros + drafts,
            "drafts": None,
            "sampled": zeros.bool(),
            "rules": zeros,
            "accept_uniforms": torch.zeros(num_requests, drafts, device=device).double(),
            "final_uniforms": torch.zeros(num_requests, device=device).double(),
            "seeds": zeros.long(),
            "anchor_positions": zeros.long(),
        }
        yield make_row(
            target,
            lambda p=plan, f=fields: run_accept_drafts(p, **f),
            Work(rows * vocab * 4.0, 0.0),
            bandwidth,
            op="accept_drafts (greedy, all rows)",
            **labels,
        )
