# SPDX-License-Identifier: Apache-2.0
"""Bias, temperature order, penalties and masks of a request, evaluated along its drafted prefix.

Row j of a request predicts the token after x_0..x_j, so it sees prompt + output + x_1..x_j, exactly
as plain decoding would. Conventions are TensorRT-LLM's: embedding bias, then temperature, then
repetition (l < 0 ? l·r : l/r), presence (− p) and frequency (− f·count) penalties over *prompt and
output* alike, then min tokens and bad words. Filters (top-k, top-p, min-p) come after and live in
`ops.filter_probs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from trtllm_dspark.ops.filter_probs import filter_probs, filter_thresholds, inverse_temperatures
from trtllm_dspark.types import IntArray, SamplingParams

__all__ = [
    "bad_next_ids",
    "filter_probs",
    "filter_thresholds",
    "has_filters",
    "inverse_temperatures",
    "needs_processing",
    "process_logits",
    "process_logits_",
]


def has_filters(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p cut the distribution (a greedy request needs none of them)."""
    if params.is_greedy:
        return False
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def needs_processing(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `process_logits` would change anything for a request with that many new tokens."""
    return bool(
        params.logit_bias
        or params.bad_token_ids
        or _has_penalties(params)
        or (num_output_tokens < params.min_tokens and _end_ids(params))
    )


def process_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    token_ids: IntArray,
    num_prompt_tokens: int,
    draft_ids: Sequence[int] | IntArray = (),
) -> torch.Tensor:
    """Return the scaled, penalised and masked logits [n, V] of one request's rows; a new tensor.

    logits [n, V]: row j follows token_ids (prompt + output, the anchor last) + draft_ids[:j], so
    n ≤ len(draft_ids) + 1. The result is *after* temperature (temperature 0 counts as 1). A row of
    which the masks would leave nothing keeps its unmasked values: masks never make a request fail.
    Ids outside the vocabulary are ignored.
    """
    rows = logits.clone()
    process_logits_(rows, params, token_ids, num_prompt_tokens, draft_ids)
    return rows


def process_logits_(
    rows: torch.Tensor,
    params: SamplingParams,
    token_ids: IntArray,
    num_prompt_tokens: int,
    draft_ids: Sequence[int] | IntArray = (),
) -> None:
    """Do what `process_logits` does in place."""
    vocab_size = rows.shape[1]
    drafts = np.asarray(draft_ids, dtype=np.int32)[: rows.shape[0] - 1]
    for token, bias in params.logit_bias:
        if 0 <= token < vocab_size:
            rows[:, token] += bias
    scale = float(inverse_temperatures(params.temperature))
    if scale != 1.0:
        rows *= scale
    if _has_penalties(params):
        _penalise_(rows, params, token_ids, drafts)
    _mask_(rows, params, token_ids, len(token_ids) - num_prompt_tokens, drafts)


def bad_next_ids(
    sequences: Sequence[tuple[int, ...]], token_ids: IntArray, drafts: IntArray
) -> list[int]:
    """Return the last ids of those sequences whose beginning ends token_ids + drafts."""
    longest = max((len(s) for s in sequences), default=1) - 1
    tail = [*token_ids[max(len(token_ids) - longest, 0) :], *drafts] if longest else []
    found = []
    for sequence in sequences:
        size = len(sequence) - 1
        if size == 0 or (size <= len(tail) and tuple(tail[-size:]) == tuple(sequence[:-1])):
            found.append(sequence[-1])
    return found


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _end_ids(params: SamplingParams) -> list[int]:
    """Ids that would end the request at once: EOS and stop words of a single token."""
    return [*params.end_ids, *(s[0] for s in params.stop_token_ids if len(s) == 1)]


def _penalise_(
    rows: torch.Tensor, params: SamplingParams, token_ids: IntArray, drafts: IntArray
) -> None:
    """Apply the penalties; row j counts token_ids and drafts[:j]."""
    ids, places = np.unique(np.concatenate([token_ids, drafts]), return_inverse=True)
    counts = np.tile(np.bincount(places[: len(token_ids)], minlength=len(ids)), (rows.shape[0], 1))
    for j, place in enumerate(places[len(token_ids) :]):
        counts[j + 1 :, place] += 1
    is_known = (ids >= 0) & (ids < rows.shape[1])
    index = torch.from_numpy(ids[is_known].astype(np.int64)).to(rows.device)
    times = torch.from_numpy(counts[:, is_known]).to(device=rows.device, dtype=rows.dtype)
    old = rows[:, index]
    new = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    new -= params.presence_penalty + params.frequency_penalty * times
    rows[:, index] = torch.where(times > 0, new, old)


def _mask_(
    rows: torch.Tensor,
    params: SamplingParams,
    token_ids: IntArray,
    num_output_tokens: int,
    drafts: IntArray,
) -> None:
    """Ban end ids until min_tokens exist, and the last ids of matching bad words."""
    if not params.bad_token_ids and num_output_tokens >= params.min_tokens:
        return
    for j in range(rows.shape[0]):
        banned = bad_next_ids(params.bad_token_ids, token_ids, drafts[:j])
        if num_output_tokens + j < params.min_tokens:
            banned += _end_ids(params)
        known = [token for token in set(banned) if 0 <= token < rows.shape[1]]
        if not known:
            continue
        index = torch.tensor(known, device=rows.device)
        kept = rows[j, index].clone()
        rows[j, index] = -math.inf
        if float(rows[j].amax()) == -math.inf:
            rows[j, index] = kept
