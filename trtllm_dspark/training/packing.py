# SPDX-License-Identifier: Apache-2.0
"""Anchor sampling and anchor-bounded packing: many isolated blocks of many sequences in one batch.

A block is addressed by token-level indices into the packed context rows; it may see the context
rows before its anchor and its own rows, nothing else. Knows token ids and lengths, no tensors of
a model.

Example, γ = 2, one prompt of 2 tokens [a b] with the answer [c d e]: an anchor at position 2 (c)
has labels d, e, previous tokens c, d and target rows 2, 3; an anchor at position 3 (d) has the
label e only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its answer, as the target produced it."""

    token_ids: npt.NDArray[np.integer]
    """[total]"""
    prompt_len: int
    key: tuple[int, int] | None = None
    """(store number, row) where the sequence comes from a store: names its cached states."""


@dataclass(frozen=True)
class PackedBlocks:
    """N blocks of a batch of sequences whose C tokens are packed one after the other."""

    token_ids: Int64Array
    """[C]"""
    positions: Int64Array
    """[C] position within the own sequence."""
    cu_seq_lens: Int64Array
    """[S+1]"""
    anchors: Int64Array
    """[N] anchor positions, ascending within a sequence, sequences in order."""
    cu_blocks: Int64Array
    """[S+1] blocks of each sequence."""
    anchor_rows: Int64Array
    """[N] packed row of each anchor."""
    num_labels: Int64Array
    """[N] slots with a true next token, 1..γ (fewer near the end)."""
    sequence_keys: tuple[tuple[int, int] | None, ...]
    """[S] `TokenSequence.key` of each."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return len(self.anchors)

    def slot_rows(self, num_drafts: int) -> Int64Array:
        """[N, γ] packed row of the token before slot k: x_{k−1}, whose target row predicts slot k.

        Columns ≥ num_labels repeat the last valid row.
        """
        offsets = np.minimum(np.arange(num_drafts), self.num_labels[:, None] - 1)
        return self.anchor_rows[:, None] + offsets

    def label_mask(self, num_drafts: int) -> npt.NDArray[np.bool_]:
        """[N, γ] slots that have a label."""
        return np.arange(num_drafts) < self.num_labels[:, None]


def sample_anchors(
    sequence: TokenSequence, max_anchors: int, rng: np.random.Generator, share: float = 1.0
) -> Int64Array:
    """Draw anchors uniformly, without repetition, over answer positions that have a next token.

    `share` is the part of the candidates to take, at most `max_anchors`. Ascending; empty when the
    answer has fewer than two tokens.
    """
    candidates = np.arange(sequence.prompt_len, len(sequence.token_ids) - 1, dtype=np.int64)
    wanted = min(max_anchors, int(np.ceil(share * len(candidates))))
    if wanted >= len(candidates):
        return candidates
    return np.sort(rng.choice(candidates, size=wanted, replace=False))


def pack_blocks(
    sequences: Sequence[TokenSequence], anchors: Sequence[Int64Array], num_drafts: int
) -> PackedBlocks:
    """Pack sequences and their anchors (one ascending array per sequence, possibly empty)."""
    lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    counts = np.array([len(a) for a in anchors], dtype=np.int64)
    cu_seq_lens = np.concatenate(([0], np.cumsum(lengths)))
    owners = np.repeat(np.arange(len(sequences)), counts)
    flat = np.concatenate([np.zeros(0, np.int64), *anchors])
    return PackedBlocks(
        token_ids=np.concatenate([s.token_ids for s in sequences]).astype(np.int64),
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        cu_seq_lens=cu_seq_lens,
        anchors=flat,
        cu_blocks=np.concatenate(([0], np.cumsum(counts))),
        anchor_rows=cu_seq_lens[owners] + flat,
        num_labels=np.minimum(lengths[owners] - 1 - flat, num_drafts),
        sequence_keys=tuple(s.key for s in sequences),
    )
