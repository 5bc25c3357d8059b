# SPDX-License-Identifier: Apache-2.0
"""Counter-based noise: Philox-4x32-10, the same bits in numpy, torch and the Triton language.

Knows keys, counters and how bits become uniforms and Gumbels; knows nothing of tokens or
acceptance. Whatever draws a random number in this package draws it here, so that a number is a
function of its key alone: never of the batch, of the order of calls, or of what was drawn before.

Layout (design §4). Key = the request's 64-bit seed (k0 low, k1 high word). Counter words:
  c0  lane: vocabulary index // 4 for Gumbels (output word = vocabulary index % 4), 0 for uniforms
  c1  position: of the anchor, or, with purpose COUPLED, of the token that is drawn
  c2  slot: 0-based draft slot, 0 where a step draws once
  c3  purpose tag, see `Purpose`
In the Triton language: `tl.philox(seed, c0, c1, c2, c3)` with a uint64 seed and 32-bit counters.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

UIntArray = npt.NDArray[np.uint64]
DoubleArray = npt.NDArray[np.float64]

NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

GUMBEL_MIN = -3.14
GUMBEL_MAX = 22.88
"""Bounds of `gumbel_from_bits`: −log(33·log 2) and, rounded outward, −log(2⁻³³)."""


class Purpose(enum.IntEnum):
    """Counter word c3. Two purposes never share a number."""

    DRAFT = 1
    """Gumbel noise of a draft: (seed, anchor position, slot)."""
    ACCEPT = 2
    """Uniform against which draft `slot` is tested: (seed, anchor position, slot)."""
    FINAL = 3
    """Uniform of the recovered or bonus token: (seed, anchor position)."""
    COUPLED = 4
    """Gumbel noise of the token at an absolute position, shared by drafting and acceptance."""
    DRAFT_UNIFORM = 5
    """Uniform of a draft drawn by inverse CDF: (seed, anchor position, slot)."""


def philox(key: Any, counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Run Philox-4x32-10 on numpy uint64 arrays that hold 32-bit values; return four such arrays.

    `key` is a uint64 array (or scalar) that broadcasts with the counter words. Nothing is modified.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    mask, half = np.uint64(_MASK), np.uint64(32)
    key = np.asarray(key, dtype=np.uint64)
    k0, k1 = key & mask, key >> half
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c2 = (product1 >> half) ^ c1 ^ k0, (product0 >> half) ^ c3 ^ k1
        c1, c3 = product1 & mask, product0 & mask
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    return c0, c1, c2, c3


def philox_torch(
    key: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the same generator in int64 arithmetic on any device.

    `key` holds the seed's 64 bits as int64 (two's complement); counters and results are int64
    tensors in [0, 2³²). Products wrap modulo 2⁶⁴, which keeps both 32-bit halves right.
    """
    c0, c1, c2, c3 = (word.to(torch.int64) for word in counter)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform_from_bits(word0: Any, word1: Any) -> DoubleArray:
    """Return u = (word0·2²¹ + word1 // 2¹¹)·2⁻⁵³ in [0, 1), exactly representable in float64."""
    bits = (np.asarray(word0, np.uint64) << np.uint64(21)) | (
        np.asarray(word1, np.uint64) >> np.uint64(11)
    )
    return bits.astype(np.float64) * 2.0**-53


def gumbel_from_bits(word: Any) -> DoubleArray:
    """Return −log(−log u), u = (word + 0.5)·2⁻³², evaluated in float64.

    In float32, u rounds to 1 for the largest words: there take −log u as
    −log1p(−(2³²−1−word+0.5)·2⁻³²).
    """
    u = (np.asarray(word, np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log(u))


def keyed_uniforms(seeds: Any, positions: Any, slots: Any, purpose: Purpose) -> DoubleArray:
    """Return one uniform per (seed, position, slot); the three broadcast against each other."""
    word0, word1, _, _ = philox(seeds, (0, positions, slots, int(purpose)))
    return uniform_from_bits(word0, word1)


def gumbel_at(
    seeds: Any, positions: Any, slots: Any, purpose: Purpose, token_ids: Any
) -> DoubleArray:
    """Return the Gumbel noise of single vocabulary indices; seeds … token_ids broadcast to [n]."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    words = philox(seeds, (ids >> np.uint64(2), positions, slots, int(purpose)))
    return gumbel_from_bits(np.choose((ids & np.uint64(3)).astype(np.intp), words))


def gumbel_row(
    seed: int, position: int, slot: int, purpose: Purpose, vocab_size: int
) -> DoubleArray:
    """Return the Gumbel noise [vocab_size] of a whole vocabulary under one key."""
    lanes = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    words = philox(np.uint64(seed), (lanes, position, slot, int(purpose)))
    return gumbel_from_bits(np.stack(words, axis=-1).reshape(-1)[:vocab_size])


def accept_uniforms(seeds: UIntArray, anchor_positions: Any, num_slots: int) -> DoubleArray:
    """Return the uniforms [R, num_slots] against which the drafts of one step are tested."""
    positions = np.asarray(anchor_positions)[:, None]
    return keyed_uniforms(seeds[:, None], positions, np.arange(num_slots)[None], Purpose.ACCEPT)


def final_uniforms(seeds: UIntArray, anchor_positions: Any) -> DoubleArray:
    """Return the uniforms [R] that draw the recovered or bonus tokens of one step."""
    return keyed_uniforms(seeds, anchor_positions, 0, Purpose.FINAL)
