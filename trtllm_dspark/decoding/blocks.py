# SPDX-License-Identifier: Apache-2.0
"""Draft blocks of some requests laid out over all requests of a step."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.types import DraftBlock


def empty_block(num_requests: int, num_drafts: int) -> DraftBlock:
    """A block that proposes nothing."""
    shape = (num_requests, num_drafts)
    return DraftBlock(
        np.zeros(shape, np.int32),
        np.zeros(num_requests, np.int32),
        np.full(shape, -np.inf, np.float32),
    )


def spread_block(block: DraftBlock, rows: np.ndarray, num_requests: int) -> DraftBlock:
    """Put the rows of a block drafted for some requests at their places among all R requests.

    Example: a block of two rows at rows [0, 2] of three requests; request 1 proposes nothing.
    """
    if len(rows) == num_requests:
        return block
    full = empty_block(num_requests, block.token_ids.shape[1])
    full.token_ids[rows] = block.token_ids
    full.draft_lens[rows] = block.draft_lens
    full.confidence_logits[rows] = block.confidence_logits
    probs, sampled = block.draft_probs, None
    if block.sampled is not None:
        sampled = np.zeros(num_requests, np.bool_)
        sampled[rows] = block.sampled
    if probs is not None:
        spread = probs.new_zeros((num_requests, *probs.shape[1:]))
        spread[rows] = probs
        probs = spread
    return DraftBlock(full.token_ids, full.draft_lens, full.confidence_logits, probs, sampled)
