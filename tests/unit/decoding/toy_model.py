# SPDX-License-Identifier: Apache-2.0
"""A toy target for acceptance tests: logits are a fixed function of the last three tokens.

`decode` is a step loop without engine, pages or policies: it drafts with a given function, verifies
a given number of drafts and commits what the product's `accept` returns, for several requests at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_dspark.decoding.acceptance import AcceptanceBatch, SequenceView, accept
from trtllm_dspark.types import SamplingParams

VOCAB = 12
Drafts = Callable[[list[int]], list[int]]
"""Committed tokens → proposed tokens (γ of them)."""


def toy_logits(context: Sequence[int]) -> np.ndarray:
    """Logits [VOCAB] after a context."""
    key = [len(context) % 5, *(int(t) + 1 for t in context[-3:])]
    return np.random.default_rng(key).normal(size=VOCAB).astype(np.float32) * 2.5


@dataclass
class ToyRequest:
    """One request of `decode`; tokens grow."""

    tokens: list[int]
    params: SamplingParams
    seed: int = 0
    is_coupled: bool = False
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.num_prompt_tokens = len(self.tokens)

    @property
    def output(self) -> list[int]:
        """What was generated."""
        return self.tokens[self.num_prompt_tokens :]


def decode(
    requests: Sequence[ToyRequest],
    num_tokens: int,
    drafts: Drafts = lambda tokens: [],
    verify_len: Callable[[int], int] = lambda step: 0,
) -> list[list[int]]:
    """Generate until every request has num_tokens; returns the outputs, cut to that."""
    step = 0
    while min(len(r.output) for r in requests) < num_tokens:
        proposed = np.array([drafts(r.tokens) for r in requests], dtype=np.int32)
        lens = np.full(len(requests), min(verify_len(step), proposed.shape[1]))
        rows = [
            toy_logits([*r.tokens, *x[:j]])
            for r, x, n in zip(requests, proposed.tolist(), lens, strict=True)
            for j in range(n + 1)
        ]
        batch = AcceptanceBatch(
            cu_rows=np.concatenate([[0], np.cumsum(lens + 1)]).astype(np.int32),
            draft_token_ids=proposed,
            draft_lens=np.full(len(requests), proposed.shape[1], dtype=np.int32),
            draft_probs=None,
            sampled=np.zeros(len(requests), dtype=np.bool_),
            sequences=[
                SequenceView(
                    np.array(r.tokens, np.int32),
                    r.num_prompt_tokens,
                    r.params,
                    r.seed,
                    r.is_coupled,
                )
                for r in requests
            ],
        )
        result = accept(torch.from_numpy(np.stack(rows)), batch)
        for r, tokens, count in zip(requests, result.token_ids, result.num_tokens, strict=True):
            r.tokens += tokens[:count].tolist()
        step += 1
    return [r.output[:num_tokens] for r in requests]
