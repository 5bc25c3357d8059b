# SPDX-License-Identifier: Apache-2.0
"""What a request is answered with, and its output tensors by name.

A response is immutable: the engine thread makes it, another thread may turn it into tensors.
Outputs that a request did not ask for hold placeholders, as upstream clients expect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtllm_dspark.types import FinishReason, IntArray, RequestStats

Outputs = dict[str, npt.NDArray]


@dataclass(frozen=True)
class TokenResponse:
    """New tokens of one request with their text; or all of them, without streaming."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """One per token; empty unless asked for."""
    cum_log_prob: float = 0.0
    text: str = ""
    """Text of the tokens, of the repeated input too."""
    finish_reason: FinishReason | None = None
    """Set on the last response."""
    num_output_tokens: int = 0
    """Tokens given out so far, this response included."""
    prompt_token_ids: IntArray | None = None
    """Set where the output repeats the input."""
    stats: RequestStats = field(default_factory=RequestStats)
    """A copy as of this response."""
    return_perf_metrics: bool = False
    page_size: int = 1


def make_engine_outputs(response: TokenResponse) -> Outputs:
    """Every output tensor of `tensorrt_llm`, batch dimension first."""
    prompt = response.prompt_token_ids
    ids = np.array(response.token_ids, np.int32)
    if prompt is not None:
        ids = np.concatenate([prompt.astype(np.int32), ids])
    return {
        "output_ids": ids.reshape(1, 1, -1),
        "sequence_length": np.array([[len(ids)]], np.int32),
        "output_text": np.array([[response.text.encode("utf-8")]], np.object_),
        **_log_prob_outputs(response),
        "context_logits": np.zeros((1, 1, 1), np.float32),
        "generation_logits": np.zeros((1, 1, 1, 1), np.float32),
        "batch_index": _int(0),
        "sequence_index": _int(0),
        **_perf_outputs(response),
        **_count_outputs(response),
    }


def _log_prob_outputs(response: TokenResponse) -> Outputs:
    log_probs = response.log_probs or (0.0,)
    return {
        "cum_log_probs": np.array([[response.cum_log_prob]], np.float32),
        "output_log_probs": np.array(log_probs, np.float32).reshape(1, 1, -1),
    }


def _count_outputs(response: TokenResponse) -> Outputs:
    stats, reason = response.stats, response.finish_reason
    text = "" if reason is None else reason.value
    return {
        "acceptance_rate": np.array([[stats.acceptance_rate]], np.float32),
        "total_accepted_draft_tokens": _int(stats.num_accepted_tokens),
        "total_draft_tokens": _int(stats.num_verified_tokens),
        "num_input_tokens": _int(stats.num_prompt_tokens),
        "num_output_tokens": _int(response.num_output_tokens),
        "num_decode_steps": _int(stats.num_steps),
        "finish_reason": np.array([[text.encode()]], np.object_),
    }


def _perf_outputs(response: TokenResponse) -> Outputs:
    """Monotonic times in nanoseconds and K/V pages; zeros unless asked for."""
    stats, asked = response.stats, response.return_perf_metrics
    times = {
        "arrival_time_ns": stats.arrival_time_s,
        "first_scheduled_time_ns": stats.first_scheduled_time_s,
        "first_token_time_ns": stats.first_token_time_s,
        "last_token_time_ns": stats.last_token_time_s,
    }
    num_tokens = stats.num_prompt_tokens + response.num_output_tokens
    num_pages = -(-num_tokens // response.page_size) if asked else 0
    return {
        "kv_cache_alloc_new_blocks": _int(num_pages),
        "kv_cache_reused_blocks": _int(0),
        "kv_cache_alloc_total_blocks": _int(num_pages),
        **{
            name: np.array([[int((time_s or 0.0) * 1e9) if asked else 0]], np.int64)
            for name, time_s in times.items()
        },
    }


def _int(value: int) -> npt.NDArray[np.int32]:
    return np.array([[value]], np.int32)
