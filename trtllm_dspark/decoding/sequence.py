# SPDX-License-Identifier: Apache-2.0
"""The state of one live request: its tokens, its pages, how far it is computed, its counters.

A sequence always has an anchor: the last committed token, not yet fed to the target. Before the
first output token that is the last prompt token.
"""

from __future__ import annotations

import numpy as np

from trtllm_dspark.decoding.acceptance import SequenceView
from trtllm_dspark.decoding.drafters.protocol import DraftSource
from trtllm_dspark.types import (
    DraftMode,
    FinishReason,
    GenerationRequest,
    IntArray,
    RequestStats,
)


class Sequence:
    """One request inside the loop. Mutable; only the loop touches it."""

    def __init__(
        self, request: GenerationRequest, key: int, noise_seed: int, drafts_greedily: bool
    ) -> None:
        self.request = request
        self.params = request.params
        self.key = key
        self.noise_seed = noise_seed
        self.drafts_greedily = drafts_greedily
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._tokens = np.empty(self.num_prompt_tokens + self.params.max_tokens, np.int32)
        self._tokens[: self.num_prompt_tokens] = request.prompt_token_ids
        self.num_tokens = self.num_prompt_tokens
        self.num_computed = 0
        """Rows whose K/V are in the pages and will not change; never more than num_tokens − 1."""
        self.page_ids: list[int] = []
        self.page_keys: list[bytes] = []
        """Keys of the prompt's full pages (prefix reuse)."""
        self.num_offered_pages = 0
        self.finish_reason: FinishReason | None = None
        self.num_emitted = 0
        """Output tokens that clients have been given."""
        self.log_probs: list[float] = []
        self.stats = RequestStats(
            num_prompt_tokens=self.num_prompt_tokens, arrival_time_s=request.priority_time_s
        )

    @property
    def token_ids(self) -> IntArray:
        """Committed tokens, anchor last. A view that the next commit may extend, never change."""
        return self._tokens[: self.num_tokens]

    @property
    def output_ids(self) -> IntArray:
        """Generated tokens so far."""
        return self._tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_pending(self) -> int:
        """Rows that must be fed before the next token can be drawn; 1 = ready to decode."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only the anchor is missing from the pages."""
        return self.num_pending == 1

    @property
    def num_wanted(self) -> int:
        """New tokens that max_tokens still allows."""
        return self.params.max_tokens - (self.num_tokens - self.num_prompt_tokens)

    @property
    def mode(self) -> DraftMode:
        """How acceptance will come about for this request."""
        if self.params.is_greedy:
            return DraftMode.GREEDY_TARGET
        if self.drafts_greedily:
            return DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS
        return DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS

    def append(self, token_ids: IntArray) -> None:
        """Commit tokens; the last one is the new anchor."""
        self._tokens[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.num_tokens += len(token_ids)

    def forget_pages(self) -> list[int]:
        """Give up all K/V (pre-emption, end): returns the pages to release."""
        pages, self.page_ids = self.page_ids, []
        self.num_computed = 0
        self.num_offered_pages = 0
        return pages

    def draft_source(self, max_draft_len: int) -> DraftSource:
        """What a drafter may see of this request."""
        return DraftSource(
            key=self.key,
            token_ids=self.token_ids,
            page_ids=np.asarray(self.page_ids, np.int32),
            params=self.params,
            noise_seed=self.noise_seed,
            is_coupled=self.params.seed is not None,
            draft_greedily=self.params.is_greedy or self.drafts_greedily,
            max_draft_len=max_draft_len,
        )

    def acceptance_view(self) -> SequenceView:
        """What acceptance may see of this request."""
        return SequenceView(
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params,
            noise_seed=self.noise_seed,
            is_coupled=self.params.seed is not None,
        )
