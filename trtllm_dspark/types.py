# SPDX-License-Identifier: Apache-2.0
"""The records of one decode step, and the glossary. Knows nothing of torch, engines or servers.

Shape symbols: R active requests, γ drafts per block, D = γ+1, N = Σ(1+ℓ_r) verified tokens,
V vocabulary, H hidden size, T tapped layers, S context length.

Glossary (no synonyms anywhere in the code):
  anchor      the last committed token of a request, not yet fed to the target
  draft       a token proposed by the drafter; slot k (1-based in prose, column k−1 in arrays)
  survival    a_{r,j} = Π_{i≤j} c_{r,i}: probability that drafts 1..j of request r are all accepted
  budget      number of drafts that a step may verify, over all requests (capacity)
  rung        one token total of the shared ladder that a step can be padded up to
  bucket      (requests bucket, rung): the key of the latency table; the rung alone keys graphs
  verified    drafts that are fed to the target (ℓ_r of them for request r)
  accepted    verified drafts that the acceptance rule keeps (A_r ≤ ℓ_r)
  recovered   the token drawn after a rejection;   bonus: the token drawn after full acceptance
  committed   tokens that are part of the request for good: A_r accepted + 1 recovered or bonus
p = target probability, q = draft probability, everywhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

SCRATCH_PAGE = 0
"""Page id that padding rows point at. It never belongs to a request."""


class FinishReason(str, enum.Enum):
    """Why a request ended; the value is what clients see."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class DraftMode(str, enum.Enum):
    """How acceptance comes about; calibrations and survivals are kept per mode (design §4)."""

    GREEDY_TARGET = "greedy_target"
    SAMPLED_TARGET_GREEDY_DRAFTS = "sampled_target_greedy_drafts"
    SAMPLED_TARGET_SAMPLED_DRAFTS = "sampled_target_sampled_drafts"


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of sampling; ranges are checked where requests enter."""

    max_tokens: int = 128
    """New tokens at most (≥ 1)."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means off; 1 means greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 means off."""
    min_p: float = 0.0
    """Keep tokens with p ≥ min_p · max p; 0 means off."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    """End tokens are masked until this many new tokens exist."""
    seed: int | None = None
    """Explicit seed: coupled acceptance; output is a function of (prompt, seed, params)."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end the request (EOS); resolved before the request reaches the loop."""
    pad_id: int | None = None
    stop_token_ids: tuple[tuple[int, ...], ...] = ()
    """Stop words as token sequences. The matched sequence is cut from the output."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Bad words as token sequences: the last token is banned where the prefix matches."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Additive bias per token id (embedding_bias)."""
    return_log_probs: bool = False
    num_draft_tokens: int | None = None
    """Verified drafts per step at most; 0 = never speculate, None = no cap."""

    @property
    def is_greedy(self) -> bool:
        """Whether the target distribution is a point mass on the arg-max."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True)
class GenerationRequest:
    """A request as the decoding loop takes it: token ids in, token ids out."""

    request_id: str
    prompt_token_ids: IntArray
    params: SamplingParams
    priority_time_s: float = 0.0
    """Monotonic arrival time; the youngest is pre-empted first."""
    timeout_s: float | None = None


@dataclass
class RequestStats:
    """Counters of one request, filled by the loop, read by clients and metrics."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    """Decode steps that committed at least one token."""
    num_verified_tokens: int = 0
    """Verified drafts (total_draft_tokens for clients)."""
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    arrival_time_s: float = 0.0
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    last_token_time_s: float | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean committed tokens per decode step, recovered/bonus token included."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified drafts; 0 when nothing was verified."""
        return (
            self.num_accepted_tokens / self.num_verified_tokens if self.num_verified_tokens else 0.0
        )


@dataclass(frozen=True)
class RequestOutput:
    """What one step gave one request (new tokens only), or how it ended."""

    request_id: str
    new_token_ids: tuple[int, ...]
    """Committed in this step, cut at EOS (itself excluded), stop words and max_tokens."""
    log_probs: tuple[float, ...] | None
    finish_reason: FinishReason | None
    stats: RequestStats
    error: Exception | None = None


@dataclass(frozen=True)
class DraftBlock:
    """What a drafter proposes for R requests.

    Example, R=3, γ=2: token_ids [[5, 7], [9, 0], [0, 0]], draft_lens [2, 1, 0].
    """

    token_ids: IntArray
    """[R, γ]; columns ≥ draft_lens[r] are padding."""
    draft_lens: IntArray
    """[R]; a drafter may propose fewer than γ, or nothing."""
    confidence_logits: FloatArray
    """[R, γ] raw (uncalibrated) logits of c_{r,k}; −inf where nothing is proposed."""
    draft_probs: Any | None = None
    """Handle on q ([R, γ, V], engine memory); None: every draft deterministic (one-hot q)."""
    sampled: npt.NDArray[np.bool_] | None = None
    """[R] whether the request's drafts were drawn from q; None = all deterministic."""


@dataclass(frozen=True)
class StepOutcome:
    """What happened in one step, for policies, calibration and metrics.

    Rows are the R requests that decoded; `request_keys` are stable over steps.
    """

    request_keys: tuple[int, ...]
    verify_lens: IntArray
    """[R]"""
    accepted_lens: IntArray
    """[R]"""
    draft_lens: IntArray
    """[R]; 0 where nothing was drafted."""
    confidence_logits: FloatArray | None
    """[R, γ] of this step's drafts, None when nothing was drafted."""
    modes: tuple[DraftMode, ...]
    dropped_accept_probs: FloatArray
    """[R] acceptance probability of the first dropped draft x_{ℓ+1} where all ℓ verified drafts
    were accepted, NaN elsewhere. For later steps only, never for this one."""
    rung: int
    num_prefill_tokens: int
    drafted: bool
    """Whether the drafter ran in this step."""
    step_ms: float
    """0 = not timed."""
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plan_ms: float = 0.0
    expected_tokens: float = float("nan")
    """R + Σ of the verified survivals the policy counted on."""


@dataclass(frozen=True)
class EngineInfo:
    """What the loop must know of an engine; fixed at load."""

    vocab_size: int
    max_num_requests: int
    max_seq_len: int
    page_size: int
    num_pages: int
    """Pages in the pool, the scratch page included."""
    rungs: tuple[int, ...]
    """Ascending token totals that can run; the last is max_num_tokens."""
    num_drafts: int
    """γ of the engine's drafter, 0 without one."""
    fingerprint: str
    device: str
    extra: dict[str, Any] = field(default_factory=dict)
