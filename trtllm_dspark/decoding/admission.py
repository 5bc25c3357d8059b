# SPDX-License-Identifier: Apache-2.0
"""What a request must satisfy to ever be served by an engine; refusals name value and bound."""

from __future__ import annotations

import math

from trtllm_dspark.errors import InvalidRequestError
from trtllm_dspark.types import EngineInfo, GenerationRequest, SamplingParams


def check_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Refuse prompts and parameters that can never run here."""
    prompt = request.prompt_token_ids
    if len(prompt) == 0:
        raise InvalidRequestError("the prompt is empty: send at least one token")
    if int(prompt.min()) < 0 or int(prompt.max()) >= info.vocab_size:
        bad = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
        raise InvalidRequestError(
            f"prompt token id {bad} is outside the vocabulary of {info.vocab_size}"
        )
    check_params(request.params, info.vocab_size)
    total = len(prompt) + request.params.max_tokens
    if total > info.max_seq_len:
        raise InvalidRequestError(
            f"prompt of {len(prompt)} tokens + max_tokens {request.params.max_tokens} = {total} "
            f"exceeds the maximum sequence length of {info.max_seq_len}"
        )
    pages = -(-total // info.page_size)
    if pages > info.num_pages - 1:
        raise InvalidRequestError(
            f"the request needs {pages} K/V pages and the pool has {info.num_pages - 1}: "
            "shorten it or start the server with more pages"
        )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse sampling parameters outside their ranges, by name."""
    ranges: tuple[tuple[str, float, bool, str], ...] = (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "≥ 1"),
        ("temperature", params.temperature, 0.0 <= params.temperature < math.inf, "≥ 0"),
        ("top_k", params.top_k, params.top_k >= 0, "≥ 0 (0 = off)"),
        ("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "in (0, 1]"),
        ("min_p", params.min_p, 0.0 <= params.min_p <= 1.0, "in [0, 1]"),
        (
            "repetition_penalty",
            params.repetition_penalty,
            0.0 < params.repetition_penalty < math.inf,
            "> 0",
        ),
        (
            "presence_penalty",
            params.presence_penalty,
            math.isfinite(params.presence_penalty),
            "finite",
        ),
        (
            "frequency_penalty",
            params.frequency_penalty,
            math.isfinite(params.frequency_penalty),
            "finite",
        ),
        ("min_tokens", params.min_tokens, params.min_tokens >= 0, "≥ 0"),
        (
            "num_draft_tokens",
            params.num_draft_tokens or 0,
            (params.num_draft_tokens or 0) >= 0,
            "≥ 0",
        ),
        ("seed", params.seed or 0, 0 <= (params.seed or 0) < 2**64, "in [0, 2^64)"),
    )
    for name, found, is_allowed, allowed in ranges:
        if not is_allowed:
            raise InvalidRequestError(f"{name} = {found} is not allowed: it must be {allowed}")
    for name, sequences in (
        ("stop_token_ids", params.stop_token_ids),
        ("bad_token_ids", params.bad_token_ids),
        ("logit_bias", tuple((token,) for token, _ in params.logit_bias)),
    ):
        for sequence in sequences:
            if not sequence or not all(0 <= token < vocab_size for token in sequence):
                raise InvalidRequestError(
                    f"{name} holds {list(sequence)}: token ids must lie in the vocabulary of "
                    f"{vocab_size}, one or more a word"
                )
