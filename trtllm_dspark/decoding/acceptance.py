# SPDX-License-Identifier: Apache-2.0
"""Acceptance of one step: from target logits and drafts to the tokens that each request commits.

Knows how a request's parameters become the inputs of the op `accept_drafts` (processed logits,
filter thresholds, rule, keyed noise) and how its results are read. Cuts by end tokens, stop words
and max_tokens are the step loop's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.decoding.log_probs import token_log_probs, top2_gaps
from trtllm_dspark.decoding.sampling import (
    filter_thresholds,
    has_filters,
    inverse_temperatures,
    needs_processing,
    process_logits_,
)
from trtllm_dspark.errors import EngineError
from trtllm_dspark.ops import noise
from trtllm_dspark.ops.accept_drafts import AcceptRule, accept_drafts
from trtllm_dspark.ops.filter_probs import argmax_lowest
from trtllm_dspark.types import FloatArray, IntArray, SamplingParams


@dataclass(frozen=True)
class SequenceView:
    """What acceptance must know of one request; set by the step loop."""

    token_ids: IntArray
    """Prompt + output, the anchor last."""
    num_prompt_tokens: int
    params: SamplingParams
    noise_seed: int
    """64-bit noise key: the explicit seed, or a random one."""
    is_coupled: bool
    """Explicit seed: coupled acceptance."""


@dataclass(frozen=True)
class AcceptanceBatch:
    """One step's drafts and their verification.

    Three requests verifying 2, 0, 1 drafts: cu_rows [0, 3, 4, 6].
    """

    cu_rows: IntArray
    """[R+1] rows of request r in the logits; ℓ_r = their number − 1; row j follows x_0..x_j."""
    draft_token_ids: IntArray
    """[R, γ], γ may be 0; columns ≥ ℓ_r were not verified."""
    draft_lens: IntArray
    """[R] proposed drafts, ℓ_r ≤ draft_lens[r] ≤ γ."""
    draft_probs: torch.Tensor | None
    """[≤ R, γ, V] q; row r must exist where sampled[r], the others are not read."""
    sampled: npt.NDArray[np.bool_]
    """[R] True where drafts were drawn from draft_probs; elsewhere q is one-hot."""
    sequences: Sequence[SequenceView]

    @property
    def verify_lens(self) -> IntArray:
        """ℓ [R]."""
        return np.diff(self.cu_rows) - 1


@dataclass(frozen=True)
class AcceptanceResult:
    """What each request commits."""

    accepted_lens: IntArray
    """[R] A_r ≤ ℓ_r"""
    token_ids: IntArray
    """[R, γ+1] accepted drafts, then the recovered or bonus token; −1 beyond num_tokens."""
    num_tokens: IntArray
    """[R] A_r + 1"""
    log_probs: FloatArray | None
    """[R, γ+1], None unless a request asks (see `log_probs`). NaN where not asked, or no token
    is."""
    dropped_accept_probs: FloatArray
    """[R] acceptance probability of x_{ℓ+1} where all ℓ were accepted and more was proposed, else
    NaN. For later steps only. Coupled and greedy: 1 or 0, whether it equals the committed token."""
    top2_gap: FloatArray
    """[R, γ+1] best − second processed logit of each committed token's row, NaN beyond
    num_tokens."""


class InvalidLogitsError(EngineError):
    """Logits of some requests have no finite maximum; `request_rows`: their indices in the
    batch."""

    def __init__(self, message: str, request_rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.request_rows = request_rows


def accept(logits: torch.Tensor, batch: AcceptanceBatch) -> AcceptanceResult:
    """Accept or reject the verified drafts of R requests and draw one more token for each.

    logits [≥ cu_rows[-1], V] float32 (float64 is honoured), not modified; rows beyond the last
    request are padding. Synchronises with the host. Raises `InvalidLogitsError` if a row contains
    NaN or +inf, or nothing but −inf.
    """
    logits = logits[: int(batch.cu_rows[-1])]
    best_ids = _checked_best_ids(logits, batch.cu_rows)
    processed, scale = _process(logits, batch)
    if processed is not logits:
        best_ids = argmax_lowest(processed)
    with torch.no_grad():
        accepted, next_ids, dropped = accept_drafts(
            **_op_arguments(processed, scale, batch), best_ids=best_ids
        )
    accepted_lens = accepted.cpu().numpy()
    token_ids = _committed_tokens(batch, accepted_lens, next_ids.cpu().numpy())
    used = token_ids >= 0
    owners, columns = np.nonzero(used)
    rows = batch.cu_rows[owners] + columns
    gaps = np.full(token_ids.shape, np.nan, dtype=np.float32)
    gaps[used] = top2_gaps(processed, rows, best_ids.cpu().numpy()[rows])
    params = [sequence.params for sequence in batch.sequences]
    return AcceptanceResult(
        accepted_lens=accepted_lens,
        token_ids=token_ids,
        num_tokens=accepted_lens + np.int32(1),
        log_probs=_log_probs(processed, scale, params, token_ids, batch.cu_rows),
        dropped_accept_probs=dropped.cpu().numpy(),
        top2_gap=gaps,
    )


def accept_rule(sequence: SequenceView) -> AcceptRule:
    """Return the rule under which a request's drafts are accepted (design §4)."""
    if sequence.params.is_greedy:
        return AcceptRule.GREEDY
    return AcceptRule.COUPLED if sequence.is_coupled else AcceptRule.REJECTION


def _checked_best_ids(logits: torch.Tensor, cu_rows: IntArray) -> torch.Tensor:
    """Return each row's arg-max [M]; a maximum that is NaN or infinite is an error."""
    best_ids = argmax_lowest(logits)
    largest = logits.gather(1, best_ids[:, None])[:, 0]
    bad_rows = np.nonzero(~torch.isfinite(largest).cpu().numpy())[0]
    if bad_rows.size == 0:
        return best_ids
    requests = np.unique(np.searchsorted(cu_rows, bad_rows, side="right") - 1)
    row = int(bad_rows[0])
    raise InvalidLogitsError(
        f"target logits of request row {int(requests[0])} "
        f"(draft position {row - int(cu_rows[requests[0]])}) have the maximum "
        f"{float(largest[row])}, in {bad_rows.size} row(s) in all; finite values are needed: "
        "check the checkpoint's weights and the engine's precision",
        tuple(int(r) for r in requests),
    )


def _process(
    logits: torch.Tensor, batch: AcceptanceBatch
) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
    """Return (processed logits, the temperature scale [R] that is still to be applied to them)."""
    scale = inverse_temperatures([sequence.params.temperature for sequence in batch.sequences])
    chosen = [
        r
        for r, s in enumerate(batch.sequences)
        if needs_processing(s.params, len(s.token_ids) - s.num_prompt_tokens)
    ]
    if not chosen:
        return logits, scale
    processed = logits.clone()
    for r in chosen:
        sequence = batch.sequences[r]
        rows = slice(int(batch.cu_rows[r]), int(batch.cu_rows[r + 1]))
        process_logits_(
            processed[rows],
            sequence.params,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            batch.draft_token_ids[r],
        )
        scale[r] = 1.0
    return processed, scale


def _op_arguments(
    logits: torch.Tensor, scale: npt.NDArray[np.float64], batch: AcceptanceBatch
) -> dict[str, Any]:
    rules = np.array([accept_rule(s) for s in batch.sequences], dtype=np.int32)
    seeds = np.array([s.noise_seed for s in batch.sequences], dtype=np.uint64)
    positions = np.array([len(s.token_ids) - 1 for s in batch.sequences], dtype=np.int64)
    num_slots = batch.draft_token_ids.shape[1]
    accept_uniforms = np.zeros((len(rules), num_slots))
    final_uniforms = np.zeros(len(rules))
    drawn = np.nonzero(rules == AcceptRule.REJECTION)[0]
    if drawn.size:
        accept_uniforms[drawn] = noise.accept_uniforms(seeds[drawn], positions[drawn], num_slots)
        final_uniforms[drawn] = noise.final_uniforms(seeds[drawn], positions[drawn])

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(logits.device)

    return {
        "logits": logits,
        "scale": on_device(scale).to(logits.dtype),
        "thresholds": _thresholds(logits, scale, batch),
        "cu_rows": on_device(batch.cu_rows),
        "draft_token_ids": on_device(batch.draft_token_ids),
        "draft_lens": on_device(batch.draft_lens),
        "draft_probs": batch.draft_probs,
        "sampled": on_device(batch.sampled),
        "rules": on_device(rules),
        "accept_uniforms": on_device(accept_uniforms),
        "final_uniforms": on_device(final_uniforms),
        "seeds": on_device(seeds.view(np.int64)),
        "anchor_positions": on_device(positions),
    }


def _thresholds(
    logits: torch.Tensor, scale: npt.NDArray[np.float64], batch: AcceptanceBatch
) -> torch.Tensor | None:
    """Return the filter pass over all rows, or None when no request filters."""
    params = [sequence.params for sequence in batch.sequences]
    filtered = np.array([has_filters(p) for p in params])
    if not filtered.any():
        return None
    num_rows = np.diff(batch.cu_rows)

    def per_row(values: Any) -> npt.NDArray[Any]:
        return np.repeat(np.asarray(values), num_rows)

    return filter_thresholds(
        logits,
        temperature=per_row(1.0 / scale),
        top_k=per_row(np.where(filtered, [p.top_k for p in params], 0)),
        top_p=per_row(np.where(filtered, [p.top_p for p in params], 1.0)),
        min_p=per_row(np.where(filtered, [p.min_p for p in params], 0.0)),
    )


def _committed_tokens(
    batch: AcceptanceBatch, accepted_lens: IntArray, next_ids: IntArray
) -> IntArray:
    num_requests, num_slots = batch.draft_token_ids.shape
    token_ids = np.full((num_requests, num_slots + 1), -1, dtype=np.int32)
    columns = np.arange(num_slots)[None]
    token_ids[:, :num_slots] = np.where(
        columns < accepted_lens[:, None], batch.draft_token_ids, np.int32(-1)
    )
    token_ids[np.arange(num_requests), accepted_lens] = next_ids
    return token_ids


def _log_probs(
    logits: torch.Tensor,
    scale: npt.NDArray[np.float64],
    params: Sequence[SamplingParams],
    token_ids: IntArray,
    cu_rows: IntArray,
) -> FloatArray | None:
    asked = np.array([p.return_log_probs for p in params])
    if not asked.any():
        return None
    log_probs = np.full(token_ids.shape, np.nan, dtype=np.float32)
    owners, columns = np.nonzero((token_ids >= 0) & asked[:, None])
    log_probs[owners, columns] = token_log_probs(
        logits, scale[owners], cu_rows[owners] + columns, token_ids[owners, columns]
    )
    return log_probs
