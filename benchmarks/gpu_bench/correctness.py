# SPDX-License-Identifier: Apache-2.0
"""Every kernel on fresh random inputs against float64 or exact references on the CPU.

References are the torch ops of the package where they exist, dense float64 attention otherwise. A
check reports its largest error and the tolerance it was given, with the reason for it in its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from dspark_plugins.kv_append import KvAppendPlan, plan_kv_append, run_kv_append_
from dspark_plugins.ragged_attention import (
    AttentionShape,
    plan_ragged_attention,
    run_ragged_attention,
)
from dspark_plugins.select_drafts import plan_select_drafts, run_select_drafts

from gpu_bench.batches import PagedRequests, lay_out_requests, random_pages
from gpu_bench.environment import Target
from trtllm_dspark.ops.kv_append import HeadShape, kv_append_
from trtllm_dspark.ops.select_drafts import select_drafts


@dataclass(frozen=True)
class Check:
    """One comparison."""

    name: str
    error: float
    tolerance: float

    @property
    def is_ok(self) -> bool:
        """NaN fails."""
        return self.error <= self.tolerance


def attend_dense(
    q: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedRequests,
    scale: float,
    is_causal: bool,
    window: int,
) -> torch.Tensor:
    """Float64 attention of every real row, one request at a time, on the CPU."""
    outs = []
    group = q.shape[1] // pages.shape[3]
    for request, (start, query_len) in enumerate(
        zip(batch.cu_query_lens[:-1], batch.query_lens, strict=True)
    ):
        length = int(batch.context_lens[request] + query_len)
        ids = torch.from_numpy(batch.page_table[request].astype(np.int64)).to(pages.device)
        kv = pages[ids].flatten(0, 1)[:length].cpu().double()
        keys = kv[:, 0].repeat_interleave(group, dim=1)
        values = kv[:, 1].repeat_interleave(group, dim=1)
        rows = q[start : start + query_len].cpu().double()
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        seen = torch.ones(int(query_len), length, dtype=torch.bool)
        position = int(batch.context_lens[request]) + torch.arange(int(query_len))[:, None]
        if is_causal:
            seen &= torch.arange(length)[None] <= position
        if window:
            seen &= torch.arange(length)[None] > position - window
        scores.masked_fill_(~seen, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values))
    return torch.cat(outs) if outs else torch.zeros(q.shape, dtype=torch.float64)


def check_attention(
    target: Target,
    name: str,
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: tuple[int, int, int],
    is_causal: bool = True,
    window: int = 0,
    num_splits: int | None = None,
    is_fp8: bool = False,
) -> Check:
    """One ragged batch in bf16 (fp16 when interpreted: there bf16 truncates)."""
    num_heads, kv_heads, dim = heads
    dtype = torch.bfloat16 if target.is_cuda else torch.float16
    batch = lay_out_requests(query_lens, context_lens, 32, target.seed)
    pages = random_pages(batch, kv_heads, dim, dtype, target.device)
    scales = torch.tensor([0.05, 0.02], device=target.device) if is_fp8 else None
    if is_fp8 and scales is not None:
        stored = (pages.float() / scales[None, None, :, None, None]).clamp(-448, 448)
        stored = stored.to(torch.float8_e4m3fn)
        pages = stored.float() * scales[None, None, :, None, None]
    else:
        stored = pages
    num_rows = batch.num_rows + 3
    q = torch.randn(num_rows, num_heads, dim, device=target.device).to(dtype)
    plan = plan_ragged_attention(
        AttentionShape(num_heads, kv_heads, dim, 32, batch.num_pages, is_causal, window, is_fp8),
        batch.cu_query_lens,
        batch.context_lens,
        batch.page_table,
        num_rows=num_rows,
        device=target.device,
        num_splits=num_splits,
    )
    plan.partials.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    out = run_ragged_attention(
        plan,
        q,
        stored,
        torch.from_numpy(batch.page_table).to(target.device),
        torch.from_numpy(batch.cu_query_lens).to(target.device),
        torch.from_numpy(batch.context_lens).to(target.device),
        dim**-0.5,
        torch.full_like(q, float("nan")),
        scales,
    ).cpu()
    expected = attend_dense(q, pages, batch, dim**-0.5, is_causal, window)
    error = (out[: batch.num_rows].double() - expected).abs().max().item()
    if out[batch.num_rows :].abs().sum().item() != 0.0:
        error = float("nan")
    return Check(f"attention {name}", error, 2e-2 if dtype == torch.bfloat16 else 3e-3)


def check_kv_append(
    target: Target, heads: tuple[int, int, int], has_norm: bool, *, is_fp8: bool = False
) -> Check:
    """Queries and pages against the torch op on the CPU, relative (a few roundings apart).

    fp8 pages are compared with the op's rows scaled and rounded to e4m3: one step of 2⁻³ at most.
    """
    num_heads, kv_heads, dim = heads
    dtype = torch.bfloat16 if target.is_cuda else torch.float16
    batch = lay_out_requests([5, 1, 8], [30, 7, 64], 32, target.seed)
    rows, slots = batch.num_rows, torch.from_numpy(batch.slots())
    qkv = torch.randn(rows, (num_heads + 2 * kv_heads) * dim).to(dtype)
    angle = torch.rand(rows, dim // 2) * 6.0
    rope = torch.stack((angle.cos(), angle.sin()), dim=1).contiguous()
    norms = [torch.rand(dim).to(dtype) + 0.5 for _ in range(2)] if has_norm else [None, None]
    shape = (batch.num_pages, 32, 2, kv_heads, dim)
    expected_pages = torch.zeros(shape, dtype=dtype)
    expected_q = kv_append_(
        expected_pages,
        qkv,
        HeadShape(num_heads, kv_heads, dim),
        rope,
        slots,
        q_norm=norms[0],
        k_norm=norms[1],
    )
    moved = [None if x is None else x.to(target.device) for x in norms]
    kind = torch.float8_e4m3fn if is_fp8 else dtype
    pages = torch.zeros(shape, device=target.device).to(kind)
    scales = torch.tensor([0.05, 0.02], device=target.device) if is_fp8 else None
    q = torch.full((rows, num_heads, dim), float("nan"), dtype=dtype, device=target.device)
    plan = plan_kv_append(
        KvAppendPlan(rows, num_heads, kv_heads, dim),
        batch.slots(),
        num_pages=batch.num_pages,
        page_size=32,
    )
    run_kv_append_(
        plan,
        pages,
        qkv.to(target.device),
        rope.to(target.device),
        slots.to(target.device),
        q,
        q_norm=moved[0],
        k_norm=moved[1],
        kv_scales=scales,
    )
    stored, wanted_pages = pages.float().cpu(), expected_pages.float()
    if scales is not None:
        wanted_pages = wanted_pages / scales.cpu()[None, None, :, None, None]
        wanted_pages = wanted_pages.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    error = max(
        ((found - wanted) / wanted.abs().clamp(min=1.0)).abs().max()
        for found, wanted in ((q.cpu().float(), expected_q.float()), (stored, wanted_pages))
    ).item()
    kinds = f"{' qk-norm' if has_norm else ''}{' fp8' if is_fp8 else ''}"
    tolerance = 6e-2 if dtype == torch.bfloat16 else 6e-3
    name = f"kv_append {num_heads}/{kv_heads}x{dim}{kinds}"
    return Check(name, error, 0.13 if is_fp8 else tolerance)


def check_select(target: Target, num_requests: int, num_drafts: int, num_batches: int) -> Check:
    """Number of differing outputs over random batches with many ties; must be 0."""
    generator = np.random.default_rng(target.seed)
    rung = num_requests * (num_drafts + 1)
    plan = plan_select_drafts(num_requests, num_drafts, rung=rung, device=target.device)
    wrong = 0
    for _ in range(num_batches):
        levels = generator.integers(0, 6, size=(num_requests, num_drafts)) / 5
        survivals = np.minimum.accumulate(levels, axis=1).astype(np.float32)
        inputs = [
            torch.from_numpy(survivals),
            torch.tensor([generator.integers(0, rung)], dtype=torch.int32),
            torch.from_numpy(generator.integers(-1, num_drafts + 1, num_requests, np.int32)),
            torch.arange(num_requests, dtype=torch.int32),
            torch.arange(num_requests, dtype=torch.int32) * 3,
            torch.arange(rung - num_requests, dtype=torch.int32).view(num_requests, num_drafts),
        ]
        expected = select_drafts(*inputs, rung)
        found = run_select_drafts(plan, *(x.to(target.device) for x in inputs))
        for field in ("verify_lens", "cu_query_lens", "token_ids", "positions", "row_requests"):
            wrong += int((getattr(found, field).cpu() != getattr(expected, field)).sum())
    return Check(f"select_drafts R={num_requests} γ={num_drafts} (exact)", wrong, 0.0)


def list_paged_checks(target: Target) -> list[Callable[[], Check]]:
    """Attention, K/V append and selection, larger on a GPU."""
    if not target.is_cuda:
        heads = ((3, 1, 16), (4, 4, 16))
        lens = ([3, 1, 0, 4], [40, 7, 9, 0])
    else:
        heads = ((9, 3, 64), (32, 8, 128), (16, 16, 64), (32, 4, 128))
        lens = ([8, 1, 0, 16, 3, 200], [4000, 7, 9, 0, 511, 300])
    checks: list[Callable[[], Check]] = []
    for shape in heads:
        checks.append(lambda s=shape: check_kv_append(target, s, True))
        checks.append(lambda s=shape: check_kv_append(target, s, False))
        checks.append(lambda s=shape: check_kv_append(target, s, True, is_fp8=True))
        for options in (
            {},
            {"num_splits": 5},
            {"is_causal": False},
            {"window": 33},
            {"is_fp8": True},
        ):
            name = f"{shape[0]}/{shape[1]}x{shape[2]} {options or ''}"
            checks.append(
                lambda s=shape, o=options, n=name: check_attention(target, n, *lens, heads=s, **o)
            )
    sizes = ((64, 7, 40), (256, 15, 20), (1, 4, 10)) if target.is_cuda else ((5, 3, 2),)
    for size in sizes:
        checks.append(lambda s=size: check_select(target, *s))
    return checks
