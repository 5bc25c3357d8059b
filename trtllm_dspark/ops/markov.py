# SPDX-License-Identifier: Apache-2.0
"""`markov_sample`: one draft slot from U_k and the sequential head's features, in torch.

The reference of the fused pair `markov_tile` + `markov_select`: logits_k = U_k + W2 f_k, the
arg-max or a draw from the filtered distribution q, and q itself for requests that sample. It
knows rows of logits and noise keys, not heads, requests or caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.ops.filter_probs import argmax_lowest, filter_probs
from trtllm_dspark.ops.sample_tokens import sample_drafts
from trtllm_dspark.types import FloatArray, IntArray

PEAK_LIMIT = 12.0
"""A confidence head sees peaks within ±12: a token beyond is as good as certain."""


@dataclass(frozen=True)
class SlotSampling:
    """How the drafts of R requests are drawn; rows of temperature 0 or top_k 1 take the arg-max."""

    temperature: FloatArray
    """[R]"""
    top_k: IntArray
    """[R], 0 = off"""
    top_p: FloatArray
    """[R]"""
    min_p: FloatArray
    """[R]"""
    seeds: npt.NDArray[np.uint64]
    """[R] noise keys."""
    anchor_positions: IntArray
    """[R] absolute positions, part of every noise key."""
    coupled: npt.NDArray[np.bool_]
    """[R] share the Gumbel noise of acceptance."""

    @property
    def is_greedy(self) -> npt.NDArray[np.bool_]:
        """[R] rows whose q is one-hot."""
        return (np.asarray(self.temperature) == 0.0) | (np.asarray(self.top_k) == 1)


@dataclass(frozen=True)
class Choice:
    """The drafts of one slot."""

    token_ids: torch.Tensor
    """[R] int64"""
    draft_probs: torch.Tensor | None
    """[R, V] float32: exactly the distribution drawn from; None when every row is greedy."""
    peak_logits: torch.Tensor | None
    """[R] float32 log-odds of the largest probability at temperature 1, when asked for."""


def markov_sample(
    base_logits: torch.Tensor,
    features: torch.Tensor | None,
    project: Callable[[torch.Tensor], torch.Tensor] | None,
    slot: int,
    sampling: SlotSampling | None = None,
    *,
    with_peak: bool = False,
    find_best: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]
    | None = None,
) -> Choice:
    """Choose the draft of `slot` (0-based) for every request.

    base_logits U_k [R, V]; features [R, r] and `project` (f → W2 f, [R, V]) or both `None` for a
    drafter without a sequential head. Sums are float32. `sampling=None`: arg-max, of equals
    the lowest id; `find_best` (U_k, f → ids and their log-odds, or None) may know a shorter way,
    on which tokens that cannot win need not count for the log-odds.
    """
    is_greedy = sampling is None or bool(sampling.is_greedy.all())
    if is_greedy and find_best is not None and features is not None:
        best = find_best(base_logits, features)
        if best is not None:
            return Choice(best[0], None, best[1])
    logits = base_logits.float()
    if features is not None and project is not None:
        logits = logits + project(features).float()
    peak = peak_log_odds(logits) if with_peak else None
    if sampling is None or is_greedy:
        return Choice(argmax_lowest(logits), None, peak)
    probs = filter_probs(
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
    ids = sample_drafts(probs, sampling.seeds, sampling.anchor_positions, slot, sampling.coupled)
    rows = np.flatnonzero(sampling.is_greedy)
    if rows.size:
        index = torch.from_numpy(rows).to(logits.device)
        ids[index] = argmax_lowest(logits[index])
    return Choice(ids, probs, peak)


def peak_log_odds(logits: torch.Tensor) -> torch.Tensor:
    """log(p / (1−p)) of the largest probability p of each row: logits [R, V] float32 → [R].

    Confidence of drafters without a confidence head, and a feature of one. Written with the mass of
    the others, so that it neither overflows nor loses digits when p is close to 1.
    """
    top = logits.amax(dim=-1, keepdim=True)
    weights = (logits - top).exp()
    at_top = weights.argmax(dim=-1, keepdim=True)
    others = weights.scatter(1, at_top, 0.0).sum(dim=-1)
    return -others.clamp_min(torch.finfo(torch.float32).tiny).log()
