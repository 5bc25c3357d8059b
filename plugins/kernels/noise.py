# SPDX-License-Identifier: Apache-2.0
"""Keyed noise on the device: Philox-4x32-10 words and the Gumbels made of them.

Counter layout as in the host's noise source: (lane = vocabulary index // 4, position, slot,
purpose) under the request's 64-bit seed; a vocabulary index takes word index % 4 of its lane.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

PURPOSE_DRAFT = tl.constexpr(1)
PURPOSE_COUPLED = tl.constexpr(4)


@triton.jit
def gumbel_from_word(word):
    """−log(−log u) in float32, u = (word + 0.5)·2⁻³².

    Close to 1 float32 cannot hold u: there −log u comes from the series of −log1p(−(1 − u)).
    """
    rest = ((0xFFFFFFFF - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 − u
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = 1.0 / 5.0 + rest * (1.0 / 6.0 + rest * (1.0 / 7.0))
    series = 1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * (0.25 + rest * series)))
    return -tl.log(tl.where(rest < 0.0625, rest * series, -tl.log(u)))


@triton.jit
def gumbel_tile(seeds, positions, slots, purposes, first, BLOCK_V: tl.constexpr):
    """Gumbels [rows, BLOCK_V] of vocabulary indices first.. (a multiple of 4); arguments [rows]."""
    lanes = (first // 4 + tl.arange(0, BLOCK_V // 4))[None, :]
    keys = seeds[:, None]
    w0, w1, w2, w3 = tl.philox(
        keys + tl.zeros_like(lanes),
        lanes + tl.zeros_like(positions)[:, None],
        positions[:, None] + tl.zeros_like(lanes),
        slots[:, None] + tl.zeros_like(lanes),
        purposes[:, None] + tl.zeros_like(lanes),
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return gumbel_from_word(words)
