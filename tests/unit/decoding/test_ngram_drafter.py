# SPDX-License-Identifier: Apache-2.0
"""Prompt look-up: longest suffix, latest occurrence, a function of committed tokens only."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.decoding.drafters.ngram import NgramDrafter, match_confidence_logit
from trtllm_dspark.decoding.drafters.protocol import DraftSource
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.types import SamplingParams


def source(*tokens):
    return DraftSource(
        key=0,
        token_ids=np.array(tokens, np.int32),
        page_ids=np.zeros(1, np.int32),
        params=SamplingParams(),
        noise_seed=0,
        is_coupled=False,
        draft_greedily=True,
        max_draft_len=9,
    )


@pytest.mark.parametrize(
    "tokens,drafts,match_len",
    [
        ((1,), (), 0),
        ((1, 2, 3), (), 0),
        ((1, 2, 9, 1, 2), (9, 1, 2), 2),
        ((1, 2, 7, 6, 1, 2, 8, 5, 1, 2), (8, 5, 1), 2),
        ((3, 1, 2, 7, 4, 1, 2, 8, 3, 1, 2), (7, 4, 1), 3),
        ((4, 4, 4), (4,), 2),
        ((7, 1, 9, 1), (), 1),
    ],
)
def test_the_longest_then_latest_match_is_continued(tokens, drafts, match_len):
    found, length = NgramDrafter(3, 2, 4).look_up(np.array(tokens, np.int32))
    assert tuple(found) == drafts
    assert length == (match_len if drafts else 0)


def test_matches_longer_than_the_limit_are_not_looked_for():
    tokens = np.array([9, 1, 2, 3, 5, 8, 1, 2, 3, 6, 9, 1, 2, 3], np.int32)
    assert NgramDrafter(1, 1, 3).look_up(tokens)[0].tolist() == [6]
    assert NgramDrafter(1, 1, 4).look_up(tokens)[0].tolist() == [5]


def test_a_block_pads_what_is_not_proposed():
    block = NgramDrafter(3, 2, 4).propose([source(1, 2, 9, 1, 2), source(1, 2, 3), source(4, 4, 4)])
    assert block.draft_lens.tolist() == [3, 0, 1]
    assert block.token_ids.tolist() == [[9, 1, 2], [0, 0, 0], [4, 0, 0]]
    assert np.isneginf(block.confidence_logits[1]).all()
    assert np.isfinite(block.confidence_logits[0]).all()
    assert block.draft_probs is None and block.sampled is None


def test_no_request_at_all_is_an_empty_block():
    block = NgramDrafter(3).propose([])
    assert block.token_ids.shape == (0, 3)


def test_longer_matches_are_more_confident():
    logits = [match_confidence_logit(m) for m in range(1, 9)]
    assert logits == sorted(logits) and len(set(logits)) == 8
    assert match_confidence_logit(0) == -np.inf


@pytest.mark.parametrize("arguments", [(0,), (3, 0, 4), (3, 5, 4)])
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ConfigError, match="ngram"):
        NgramDrafter(*arguments)
