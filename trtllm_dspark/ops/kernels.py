# SPDX-License-Identifier: Apache-2.0
"""Which tensors the ops hand to the Triton-language kernels, and the calls that do it.

CUDA tensors run kernels; CPU tensors only inside `kernels_on_cpu`, in the kernels' interpreter. The
kernels are imported when one is first called. Shapes are the ops'; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from trtllm_dspark.errors import EngineError

if TYPE_CHECKING:
    from trtllm_dspark.ops.kv_append import HeadShape
    from trtllm_dspark.ops.ragged import RaggedBatch

_on_cpu: ContextVar[bool] = ContextVar("dspark_kernels_on_cpu", default=False)


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether ops on this tensor are kernels."""
    return x.device.type == "cuda" or _on_cpu.get()


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Run the kernels on CPU tensors too: their logic, checked where there is no GPU."""
    from dspark_plugins.launch import is_interpreting

    if not is_interpreting():
        raise EngineError(
            "kernels run on CPU tensors in the Triton-language interpreter only: set "
            "TRITON_INTERPRET=1 before triton is imported"
        )
    token = _on_cpu.set(True)
    try:
        yield
    finally:
        _on_cpu.reset(token)


def append_by_kernel(
    kv_pages: torch.Tensor,
    qkv: torch.Tensor,
    shape: HeadShape,
    rope: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """`kv_append_`; the engine has checked the slots."""
    from dspark_plugins.kv_append import KvAppendPlan, run_kv_append_

    rows = qkv.shape[0]
    plan = KvAppendPlan(rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, eps)
    q = qkv.new_empty((rows, shape.num_heads, shape.head_dim))
    run_kv_append_(plan, kv_pages, qkv, rope, slots, q, q_norm=q_norm, k_norm=k_norm)
    return q


def attend_by_kernel(
    q: torch.Tensor, kv_pages: torch.Tensor, batch: RaggedBatch, scale: float
) -> torch.Tensor:
    """`ragged_verify_attention` under the batch's `kernel_plan`."""
    from dspark_plugins.ragged_attention import run_ragged_attention

    return run_ragged_attention(
        batch.kernel_plan,
        q,
        kv_pages,
        batch.page_table,
        batch.cu_query_lens,
        batch.context_lens,
        scale,
        torch.empty_like(q),
    )


def thresholds_by_kernel(
    logits: torch.Tensor,
    scale: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`filter_thresholds` of every row; parameters [M] on any device, 0 / 1 / 0 = off."""
    from dspark_plugins.filter_thresholds import run_filter_thresholds

    device = logits.device
    floats = [x.to(device, torch.float32).contiguous() for x in (scale, top_p, min_p)]
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=device)
    return run_filter_thresholds(
        logits, floats[0], top_k.to(device, torch.int32).contiguous(), floats[1], floats[2], out
    )


def accept_by_kernel(
    *,
    logits: torch.Tensor,
    scale: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    rules: torch.Tensor,
    **inputs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accept_drafts` in one launch; inputs as in the torch reference."""
    from dspark_plugins.accept_drafts import (
        DraftDistributions,
        plan_accept_drafts,
        run_accept_drafts,
    )

    num_drafts, vocab_size = draft_token_ids.shape[1], logits.shape[1]
    plan = plan_accept_drafts(rules.shape[0], num_drafts, vocab_size, device=logits.device)
    drafts = None if draft_probs is None else DraftDistributions(draft_probs)
    out = run_accept_drafts(
        plan,
        logits=logits,
        scale=scale.float(),
        draft_token_ids=draft_token_ids,
        drafts=drafts,
        rules=rules,
        **inputs,  # type: ignore[arg-type]
    )
    return out.accepted_lens, out.next_token_ids, out.dropped_accept_probs
