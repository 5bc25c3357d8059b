# SPDX-License-Identifier: Apache-2.0
"""Prompt look-up: the longest suffix of the context that occurred before predicts what followed it.

Needs no model. Drafts and confidences are functions of committed tokens only, so q is one-hot and
every policy is lossless with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_dspark.config import require
from trtllm_dspark.decoding.drafters.protocol import CommittedRows, DraftSource
from trtllm_dspark.types import DraftBlock, IntArray


class NgramDrafter:
    """Longest suffix match of `min_match` to `max_match` tokens, the latest occurrence first."""

    name = "ngram"
    needs_taps = False
    can_sample = False

    def __init__(self, num_drafts: int = 7, min_match: int = 2, max_match: int = 8) -> None:
        require(num_drafts >= 1, "ngram.num_drafts", num_drafts, "≥ 1")
        require(
            1 <= min_match <= max_match,
            "ngram.min_match/max_match",
            (min_match, max_match),
            "1 ≤ min_match ≤ max_match",
        )
        self.num_drafts = num_drafts
        self.min_match = min_match
        self.max_match = max_match

    def propose(self, sources: Sequence[DraftSource]) -> DraftBlock:
        """Look every context up; a context without a match proposes nothing."""
        count, gamma = len(sources), self.num_drafts
        token_ids = np.zeros((count, gamma), np.int32)
        draft_lens = np.zeros(count, np.int32)
        logits = np.full((count, gamma), -np.inf, np.float32)
        for row, source in enumerate(sources):
            drafts, match_len = self.look_up(source.token_ids)
            draft_lens[row] = len(drafts)
            token_ids[row, : len(drafts)] = drafts
            logits[row, : len(drafts)] = match_confidence_logit(match_len)
        return DraftBlock(token_ids, draft_lens, logits)

    def look_up(self, token_ids: IntArray) -> tuple[IntArray, int]:
        """Return (continuation of the latest longest match, ≤ γ tokens; length of the match)."""
        size = len(token_ids)
        longest = min(self.max_match, size - 1)
        if longest < self.min_match:
            return token_ids[:0], 0
        ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        match_len = 1
        while match_len < longest and len(ends):
            deeper = ends[ends >= match_len]
            deeper = deeper[token_ids[deeper - match_len] == token_ids[-1 - match_len]]
            if not len(deeper):
                break
            ends, match_len = deeper, match_len + 1
        if not len(ends) or match_len < self.min_match:
            return token_ids[:0], 0
        start = int(ends[-1]) + 1
        return token_ids[start : start + self.num_drafts], match_len

    def commit(self, rows: Sequence[CommittedRows], taps: Any | None) -> None:
        """Nothing to keep: every call looks at the committed tokens."""

    def sync(self, keys: Sequence[int]) -> None:
        """Nothing is pending."""

    def synced_len(self, key: int) -> int | None:
        """No K/V."""
        return None

    def release(self, key: int) -> None:
        """Nothing to forget."""


def match_confidence_logit(match_len: int) -> float:
    """Raw confidence of a draft after a match of this length: longer matches are likelier right.

    (1 + m) / (2 + m) with one failure assumed; online calibration corrects it per position.
    """
    return math.log1p(match_len) if match_len > 0 else -math.inf
