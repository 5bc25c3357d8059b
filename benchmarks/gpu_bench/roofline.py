# SPDX-License-Identifier: Apache-2.0
"""Bytes that must move and FLOPs that must be done, counted from shapes; and the floor they give.

Pure functions. Only compulsory traffic counts: every input once, every output once, no partials.
"""

from __future__ import annotations

from dataclasses import dataclass

PEAK_FLOPS = {90: 989e12, 100: 2250e12, 80: 312e12, 120: 419e12}
"""Dense bf16 FLOP/s by capability, from the vendors' data sheets (SXM parts)."""


@dataclass(frozen=True)
class Work:
    """What one call cannot avoid."""

    num_bytes: float
    num_flops: float

    def floor_ms(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The larger of the memory and the arithmetic time."""
        return 1e3 * max(self.num_bytes / bytes_per_second, self.num_flops / flops_per_second)

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)


def attention_work(
    num_requests: int,
    context_len: int,
    query_len: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_bytes: int = 2,
) -> Work:
    """One layer of causal verification: K/V once per request, q in, output out (2 bytes each).

    Example: 1 request, context 512, 8 rows, 32/8 heads of 128: 520 · 4096 K/V bytes.
    """
    kv_rows = num_requests * (context_len + query_len)
    kv = kv_rows * 2 * num_kv_heads * head_dim * kv_bytes
    rows = num_requests * query_len * num_heads * head_dim * 2 * 2
    seen = num_requests * query_len * (context_len + (query_len + 1) / 2)
    return Work(kv + rows, 4.0 * seen * num_heads * head_dim)


def markov_work(num_requests: int, num_drafts: int, vocab_size: int, rank: int) -> Work:
    """γ slots: W2 once per slot, U once (bf16); W2 does not fit any L2 at large vocabularies."""
    weights = num_drafts * vocab_size * rank * 2
    logits = num_requests * num_drafts * vocab_size * 2
    flops = 2.0 * num_requests * num_drafts * vocab_size * rank
    return Work(weights + logits, flops)


def dense_work(num_rows: int, num_weights: int) -> Work:
    """Linear layers: every bf16 weight once, two FLOPs per row and weight."""
    return Work(2.0 * num_weights, 2.0 * num_rows * num_weights)
