# SPDX-License-Identifier: Apache-2.0
"""The engine seam: one shaped step at a time, the same call for torch, CUDA graphs and TensorRT.

Host-side inputs are numpy (the loop owns and fills them); outputs are handles in the engine's own
memory (torch tensors). An engine never sees requests, policies or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trtllm_dspark.types import EngineInfo, FloatArray, IntArray


@dataclass(frozen=True)
class TargetStep:
    """One packed ragged batch; rows of request r are cu_query_lens[r]:cu_query_lens[r+1].

    Example with three requests (decode with 2 drafts, decode with 0, a prefill chunk of 4):
    cu_query_lens [0, 3, 4, 8], context_lens [10, 7, 0].
    """

    token_ids: IntArray
    """[N]"""
    positions: IntArray
    """[N] absolute positions; row i of request r is at context_lens[r] + i."""
    cu_query_lens: IntArray
    """[R+1]"""
    context_lens: IntArray
    """[R] K/V rows of the request that exist before this step."""
    page_table: IntArray
    """[R, P] page ids; unused entries are SCRATCH_PAGE. Covers context and new rows."""
    logit_rows: IntArray
    """[M] rows (0 ≤ row < N) whose logits are wanted."""
    rung: int
    """Rows that really run: the engine pads N up to it; padding rows write to the scratch page."""


@dataclass(frozen=True)
class TargetOutput:
    """What a target step returns; valid until the engine's next target step."""

    logits: Any
    """[M, V] float32."""
    taps: Any | None
    """[N, T·H] tapped hidden states in the drafter's tap order, None without a drafter."""


@dataclass(frozen=True)
class ContextAppend:
    """New drafter-context rows of a ragged set (3 requests, 2/0/4 rows: cu [0, 2, 2, 6])."""

    taps: Any
    """[C, T·H] tapped target states of the rows."""
    positions: IntArray
    """[C] absolute positions (= target positions)."""
    cu_row_lens: IntArray
    """[R+1]"""
    page_table: IntArray
    """[R, P] the same pages as the target's rows."""


@dataclass(frozen=True)
class DraftSampling:
    """How each request's drafts are drawn; greedy rows have temperature 0."""

    temperature: FloatArray
    """[R]"""
    top_k: IntArray
    """[R], 0 = off"""
    top_p: FloatArray
    """[R]"""
    min_p: FloatArray
    """[R]"""
    seeds: npt.NDArray[np.uint64]
    """[R] noise key; see ops/noise.py."""
    coupled: npt.NDArray[np.bool_]
    """[R] seeded requests: Gumbel noise is keyed by absolute position, shared with acceptance."""


@dataclass(frozen=True)
class DrafterStep:
    """One drafting call for R requests (every request has a committed anchor)."""

    anchor_ids: IntArray
    """[R]"""
    anchor_positions: IntArray
    """[R] = number of drafter-context rows of the request (the invariant)."""
    page_table: IntArray
    """[R, P]"""
    sampling: DraftSampling


@dataclass(frozen=True)
class DrafterOutput:
    """What a drafter step returns; valid until the engine's next drafter step."""

    token_ids: IntArray
    """[R, γ]"""
    confidence_logits: FloatArray
    """[R, γ]"""
    draft_probs: Any | None
    """[R, γ, V] float32 q for requests that sample (other rows unspecified), or None."""


@dataclass(frozen=True)
class AcceptSampling:
    """How each request's drafts are accepted; the parameters are the target's."""

    rules: IntArray
    """[R] `ops.accept_drafts.AcceptRule`"""
    temperature: FloatArray
    """[R] 0 = greedy"""
    top_k: IntArray
    """[R] 0 = off"""
    top_p: FloatArray
    """[R]"""
    min_p: FloatArray
    """[R]"""
    accept_uniforms: npt.NDArray[np.float64]
    """[R, γ]"""
    final_uniforms: npt.NDArray[np.float64]
    """[R]"""


@dataclass(frozen=True)
class RoundStep:
    """A whole round of R decoding requests: draft, select, verify, accept, append context.

    The host decides the capacity beforehand; everything after that happens on the device.
    """

    draft: DrafterStep
    draft_caps: IntArray
    """[R] drafts that may be verified, 0 = none (the bucket drafts as a whole)."""
    capacity: int
    """Drafts to verify over all requests; R + capacity rows fit the rung."""
    rung: int
    confidence_scale: FloatArray
    """[R, γ] survival = Π σ(scale · logit + offset)."""
    confidence_offset: FloatArray
    """[R, γ]"""
    accept: AcceptSampling


@dataclass(frozen=True)
class RoundOutput:
    """What the host reads of a finished round, copied: [R, γ] or [R] each."""

    token_ids: IntArray
    confidence_logits: FloatArray
    verify_lens: IntArray
    accepted_lens: IntArray
    next_token_ids: IntArray
    """The recovered or bonus token."""
    dropped_accept_probs: FloatArray
    is_finite: npt.NDArray[np.bool_]
    """Whether every verified row of the request had a finite maximum."""


class PendingRound(Protocol):
    """A round that the device is working on."""

    def read(self) -> RoundOutput:
        """Wait for the round and copy its results; the only wait of a round."""
        ...


class Engine(Protocol):
    """Target and (optionally) drafter of one model on one device."""

    info: EngineInfo

    def run_target(self, step: TargetStep) -> TargetOutput:
        """Append K/V of the new rows and return logits and taps."""
        ...

    def append_context(self, rows: ContextAppend) -> None:
        """Write the drafter's K/V of new context rows (no drafting)."""
        ...

    def run_drafter(self, step: DrafterStep) -> DrafterOutput:
        """Draft one block per request."""
        ...


@runtime_checkable
class RoundEngine(Protocol):
    """An engine that can run a whole round without the host."""

    info: EngineInfo

    def start_round(self, step: RoundStep) -> PendingRound:
        """Launch a round and return at once; one round at a time."""
        ...


@runtime_checkable
class QueueingEngine(Protocol):
    """An engine whose work is queued on a stream that torch does not know."""

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        ...
