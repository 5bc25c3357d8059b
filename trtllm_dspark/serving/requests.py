# SPDX-License-Identifier: Apache-2.0
"""Input tensors of `tensorrt_llm` → a generation request and its text options.

Every refusal is one sentence with the option's name, the value found and what is allowed. Knows
limits and the tokenizer's special tokens; nothing of threads or servers.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from trtllm_dspark.errors import InvalidRequestError
from trtllm_dspark.serving.inputs import (
    Tensors,
    read_bool,
    read_float,
    read_int,
    read_word_ids,
    read_words,
    refuse_batches,
    refuse_unsupported,
)
from trtllm_dspark.serving.tensors import ENGINE_INPUTS, find_refused
from trtllm_dspark.types import GenerationRequest, SamplingParams

T = TypeVar("T")

_REFUSED = find_refused(ENGINE_INPUTS)


@dataclass(frozen=True)
class RequestDefaults:
    """What the server decides where a request says nothing."""

    end_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    max_tokens: int = 0
    """Upper bound on max_tokens, 0 = only the sequence length bounds it."""
    exclude_input: bool = False
    skip_special: bool = True
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Special tokens by their text: stop words that are one of them stop at the token."""


@dataclass(frozen=True)
class TextOptions:
    """What a request asks of text and of the form of its responses."""

    streaming: bool = False
    exclude_input: bool = False
    stop_strings: tuple[str, ...] = ()
    skip_special: bool = True
    return_perf_metrics: bool = False


@dataclass(frozen=True)
class EngineRequest:
    """One request as the engine thread takes it."""

    generation: GenerationRequest
    text: TextOptions
    client_id: str = ""
    """The request id that the client chose; need not be unique."""
    handle: str = ""
    """A unique name given by a calling model, for exact cancellation."""


def read_request(
    tensors: Tensors,
    defaults: RequestDefaults,
    *,
    client_id: str = "",
    handle: str = "",
    timeout_us: int = 0,
) -> EngineRequest:
    """Build the request of one `tensorrt_llm` call; InvalidRequestError says what is wrong."""
    refuse_batches(tensors, "input_lengths")
    refuse_unsupported(tensors, _REFUSED)
    stop_strings, special_stops = split_stop_words(
        read_words(tensors, "stop_strings"), defaults.special_tokens
    )
    params = read_params(tensors, defaults, special_stops)
    generation = GenerationRequest(
        request_id=handle or uuid.uuid4().hex,
        prompt_token_ids=read_prompt(tensors),
        params=params,
        priority_time_s=time.monotonic(),
        timeout_s=timeout_us / 1e6 if timeout_us else None,
    )
    text = TextOptions(
        streaming=read_bool(tensors, "streaming"),
        exclude_input=read_bool(tensors, "exclude_input_in_output", defaults.exclude_input),
        stop_strings=stop_strings,
        skip_special=defaults.skip_special,
        return_perf_metrics=read_bool(tensors, "return_perf_metrics"),
    )
    return EngineRequest(generation, text, client_id, handle)


def read_prompt(tensors: Tensors) -> np.ndarray:
    """The prompt's token ids [n], cut to input_lengths."""
    if "input_ids" not in tensors or tensors["input_ids"].size == 0:
        raise InvalidRequestError("input_ids is missing or empty: send at least one token")
    ids = tensors["input_ids"].reshape(-1).astype(np.int32)
    length = read_int(tensors, "input_lengths")
    if length is not None and not 1 <= length <= len(ids):
        raise InvalidRequestError(
            f"input_lengths = {length} is not allowed: it must be between 1 and the "
            f"{len(ids)} tokens of input_ids"
        )
    return ids[:length]


def read_params(
    tensors: Tensors, defaults: RequestDefaults, special_stops: tuple[int, ...] = ()
) -> SamplingParams:
    """Sampling parameters with every range checked."""
    temperature, top_k, top_p = _read_sampling(tensors)
    min_p = read_float(tensors, "min_p")
    return SamplingParams(
        max_tokens=read_max_tokens(tensors, "request_output_len", defaults.max_tokens),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=_require(
            "min_p", 0.0 if min_p is None else min_p, lambda v: 0 <= v <= 1, "in [0, 1]"
        ),
        repetition_penalty=_read_penalty(tensors, "repetition_penalty", 1.0),
        presence_penalty=_read_penalty(tensors, "presence_penalty", 0.0),
        frequency_penalty=_read_penalty(tensors, "frequency_penalty", 0.0),
        min_tokens=_require(
            "min_tokens",
            read_int(tensors, "min_tokens", "min_length") or 0,
            lambda v: v >= 0,
            "≥ 0",
        ),
        seed=read_int(tensors, "seed", "random_seed"),
        end_ids=_read_end_ids(tensors, defaults),
        pad_id=_read_token(tensors, "pad_id", defaults.vocab_size),
        stop_token_ids=(
            *read_word_ids(tensors, "stop_words_list"),
            *((token,) for token in special_stops),
        ),
        bad_token_ids=read_word_ids(tensors, "bad_words_list"),
        logit_bias=_read_bias(tensors, defaults.vocab_size),
        return_log_probs=read_bool(tensors, "return_log_probs"),
        num_draft_tokens=_read_num_drafts(tensors),
    )


def read_max_tokens(tensors: Tensors, name: str, bound: int) -> int:
    """max_tokens, at least 1 and within the bound (0 = none)."""
    value = read_int(tensors, name)
    if value is None:
        raise InvalidRequestError("max_tokens is missing: say how many tokens are wanted at most")
    allowed = f"between 1 and {bound}" if bound else "≥ 1"
    return _require("max_tokens", value, lambda v: v >= 1 and (not bound or v <= bound), allowed)


def split_stop_words(
    words: tuple[str, ...], special_tokens: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop words that are text, and the tokens of those that are a special token."""
    text = tuple(word for word in words if word not in special_tokens)
    return text, tuple(special_tokens[word] for word in words if word in special_tokens)


def _read_sampling(tensors: Tensors) -> tuple[float, int, float]:
    """Temperature, top_k and top_p. A request that sets nothing but neutral values is greedy.

    Sampling is asked for by top_k, top_p, min_p, a seed, or a temperature other than 1.
    """
    temperature = read_float(tensors, "temperature")
    top_k = read_int(tensors, "runtime_top_k")
    top_p = read_float(tensors, "runtime_top_p")
    if temperature is not None:
        _require(
            "temperature", temperature, lambda v: 0 <= v < math.inf, "a number ≥ 0 (0 = greedy)"
        )
    if top_k is not None:
        _require("top_k", top_k, lambda v: v >= 0, "≥ 0 (0 = off, 1 = greedy)")
    if top_p is not None:
        _require("top_p", top_p, lambda v: 0 < v <= 1, "in (0, 1] (1 = off)")
    asked = {"runtime_top_k", "runtime_top_p", "min_p", "seed", "random_seed"} & set(tensors)
    if not asked and temperature in (None, 1.0):
        return 0.0, 0, 1.0
    return (
        1.0 if temperature is None else temperature,
        top_k or 0,
        1.0 if top_p is None else top_p,
    )


def _read_penalty(tensors: Tensors, name: str, default: float) -> float:
    value = read_float(tensors, name)
    if value is None:
        return default
    if name == "repetition_penalty":
        return _require(name, value, lambda v: 0 < v < math.inf, "a number > 0 (1 = off)")
    return _require(name, value, math.isfinite, "a finite number (0 = off)")


def _read_end_ids(tensors: Tensors, defaults: RequestDefaults) -> tuple[int, ...]:
    value = read_int(tensors, "end_id")
    if value is None:
        return defaults.end_ids
    token = _read_token(tensors, "end_id", defaults.vocab_size)
    return () if token is None else (token,)


def _read_token(tensors: Tensors, name: str, vocab_size: int) -> int | None:
    """A token id; absent and −1 mean none."""
    value = read_int(tensors, name)
    if value is None or value == -1:
        return None
    return _require(
        name,
        value,
        lambda v: 0 <= v < vocab_size,
        f"between 0 and {vocab_size - 1}, or −1 for none",
    )


def _read_num_drafts(tensors: Tensors) -> int | None:
    value = read_int(tensors, "num_draft_tokens")
    if value is None:
        return None
    return _require("num_draft_tokens", value, lambda v: v >= 0, "≥ 0 (0 = never speculate)")


def _read_bias(tensors: Tensors, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if "embedding_bias" not in tensors or tensors["embedding_bias"].size == 0:
        return ()
    bias = tensors["embedding_bias"].reshape(-1)
    if len(bias) != vocab_size:
        raise InvalidRequestError(
            f"embedding_bias has {len(bias)} entries: it must have one for each of the "
            f"{vocab_size} entries of the vocabulary"
        )
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise InvalidRequestError("embedding_bias holds NaN or +inf: biases must be below +inf")
    return tuple((int(i), float(bias[i])) for i in np.flatnonzero(bias))


def _require(name: str, value: T, is_allowed: Callable[[T], bool], allowed: str) -> T:
    """`value`, or InvalidRequestError with name, value found and what is allowed."""
    if not is_allowed(value):
        raise InvalidRequestError(f"{name} = {value} is not allowed: it must be {allowed}")
    return value
