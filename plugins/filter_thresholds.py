# SPDX-License-Identifier: Apache-2.0
"""Launcher of the filter pass: thresholds for `accept_drafts`, `markov_tile` and their q."""

from __future__ import annotations

import torch
from dspark_plugins.kernels.filter_thresholds import filter_thresholds_kernel
from dspark_plugins.launch import require_tensor

BLOCK_TOKENS = 512
BLOCK_MASS_TOKENS = 1024
NUM_PIVOTS = 16
NUM_WARPS = 8


def run_filter_thresholds(
    logits: torch.Tensor,
    scale: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    thresholds: torch.Tensor,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> torch.Tensor:
    """Write the smallest kept logit of each row into thresholds [M] float32 and return it.

    logits [M, V]; scale (1 / temperature), top_p, min_p [M] float32; top_k [M] int32. Order: top-k,
    then top-p over the mass that top-k left, then min-p; ties with the last kept logit are kept.
    Sums are float32: a row whose cumulative mass meets top_p to within 1e-6 may fall on either
    side. Rows without filters cost nothing. Never synchronises.
    """
    rows, vocab_size = logits.shape
    require_tensor("logits", logits, (rows, vocab_size), logits.dtype)
    require_tensor("top_k", top_k, (rows,), torch.int32)
    for name, x in (
        ("scale", scale),
        ("top_p", top_p),
        ("min_p", min_p),
        ("thresholds", thresholds),
    ):
        require_tensor(name, x, (rows,), torch.float32)
    if rows:
        filter_thresholds_kernel[(rows,)](
            logits,
            scale,
            top_k,
            top_p,
            min_p,
            rows,
            thresholds,
            VOCAB=vocab_size,
            BLOCK=block_tokens,
            BLOCK_MASS=max(block_tokens, min(BLOCK_MASS_TOKENS, 4 * block_tokens)),
            FAN=NUM_PIVOTS,
            num_warps=NUM_WARPS,
        )
    return thresholds
