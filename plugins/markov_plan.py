# SPDX-License-Identifier: Apache-2.0
"""Records of the drafting launcher: shapes, weights, how drafts are drawn, and reusable buffers.

`plan_markov` allocates; what runs on these records is in `markov`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspark_plugins.heuristics import VocabularyTile, ceil_div, choose_vocabulary_tile

GREEDY, KEYED, COUPLED = 0, 1, 2
"""Values of `SlotDraws.modes`."""


@dataclass(frozen=True)
class MarkovShape:
    """What stays the same over a drafter's calls."""

    num_drafts: int
    vocab_size: int
    rank: int = 0
    """r of the sequential head; 0 = none."""
    hidden_size: int = 0
    """H of h_k for the confidence head; 0 = none, the peak's log-odds stand in for it."""
    with_markov: bool = False
    """Whether the confidence head sees W1[x_{k−1}]."""
    with_peak: bool = False
    """Whether it sees the log-odds of the likeliest token at temperature 1, by its last weight."""

    @property
    def needs_peak(self) -> bool:
        """Whether the tiles have to give their masses at temperature 1."""
        return self.with_peak or not self.hidden_size

    @property
    def num_confidence_features(self) -> int:
        """Weights of the confidence head."""
        return self.hidden_size + (self.rank if self.with_markov else 0) + int(self.with_peak)


@dataclass(frozen=True)
class HeadWeights:
    """Weights on the device; None where the shape has no such head."""

    w1: torch.Tensor | None = None
    """[V, r]"""
    w2: torch.Tensor | None = None
    """[V, r]"""
    confidence_weight: torch.Tensor | None = None
    """[H (+ r) (+ 1)]"""
    confidence_bias: torch.Tensor | None = None
    """[1]"""


@dataclass(frozen=True)
class SlotDraws:
    """How each request's drafts are drawn."""

    scales: torch.Tensor
    """[R] float32 inverse temperature; 1 for greedy rows."""
    thresholds: torch.Tensor
    """[R] float32 smallest logit that may be drawn in this slot, −inf = all."""
    modes: torch.Tensor
    """[R] int32 GREEDY, KEYED by (anchor, slot), or COUPLED to the position's noise."""
    seeds: torch.Tensor
    """[R] int64: the 64 bits of the noise key."""
    anchor_positions: torch.Tensor
    """[R] int32"""
    is_greedy: bool = False
    """All modes are GREEDY: no noise is made."""


def greedy_draws(num_requests: int, device: torch.device) -> SlotDraws:
    """Draws that take the arg-max everywhere."""
    zeros = torch.zeros(num_requests, dtype=torch.int32, device=device)
    return SlotDraws(
        scales=torch.ones(num_requests, dtype=torch.float32, device=device),
        thresholds=torch.full((num_requests,), float("-inf"), device=device),
        modes=zeros,
        seeds=zeros.long(),
        anchor_positions=zeros,
        is_greedy=True,
    )


@dataclass(frozen=True)
class MarkovPlan:
    """Tiles, scratch and outputs; a later call overwrites them."""

    shape: MarkovShape
    num_requests: int
    tile: VocabularyTile
    tile_scores: torch.Tensor
    """[5, R, num_tiles] float32: scores, logits, maxima, masses, plain masses"""
    tile_ids: torch.Tensor
    """[R, num_tiles] int32"""
    next_ids: torch.Tensor
    """[2, R] int32: the draft of slot k in row k % 2, so that a slot never writes what it reads."""
    next_features: torch.Tensor
    """[R, r]"""
    token_ids: torch.Tensor
    """[R, γ] int32: the drafts."""
    draft_probs: torch.Tensor
    """[R, γ] float32 q of each draft (1/mass for greedy rows: their q is one-hot)."""
    confidence: torch.Tensor
    """[R, γ] float32 logits"""
    stats: torch.Tensor
    """[R, γ, 2] float32: q_v = exp((logit_v − max) · scale) / mass"""

    @property
    def num_tiles(self) -> int:
        """Vocabulary tiles of a row."""
        return self.tile_ids.shape[1]


def plan_markov(
    shape: MarkovShape,
    num_requests: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tile: VocabularyTile | None = None,
) -> MarkovPlan:
    """Allocate scratch and outputs for blocks of `num_requests` requests."""
    tile = tile or choose_vocabulary_tile(num_requests, shape.rank)
    num_tiles = ceil_div(shape.vocab_size, tile.num_tokens)

    def allocate(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=kind, device=device)

    requests, drafts = num_requests, shape.num_drafts
    return MarkovPlan(
        shape,
        num_requests,
        tile,
        tile_scores=allocate(5, requests, num_tiles),
        tile_ids=allocate(requests, num_tiles, kind=torch.int32),
        next_ids=allocate(2, requests, kind=torch.int32),
        next_features=allocate(requests, max(shape.rank, 1), kind=dtype),
        token_ids=allocate(requests, drafts, kind=torch.int32),
        draft_probs=allocate(requests, drafts),
        confidence=allocate(requests, drafts),
        stats=allocate(requests, drafts, 2),
    )
