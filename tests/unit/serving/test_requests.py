# SPDX-License-Identifier: Apache-2.0
"""Tensors become requests; what cannot be served is refused in one sentence that names it."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_dspark.errors import InvalidRequestError, UnsupportedError
from trtllm_dspark.serving.inputs import (
    read_word_ids,
    refuse_unknown_parameters,
    write_word_ids,
)
from trtllm_dspark.serving.requests import EngineRequest, RequestDefaults, read_request
from trtllm_dspark.serving.tensors import ENGINE_INPUTS, Support

DEFAULTS = RequestDefaults(
    end_ids=(2,), vocab_size=10, max_tokens=63, special_tokens={"<|im_end|>": 2}
)
_DTYPES = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "UINT8": np.uint8,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}
SPECS = {spec.name: spec for spec in ENGINE_INPUTS}


def tensor(name: str, value: object) -> np.ndarray:
    """A value as the server hands it over: scalars have only the batch dimension."""
    if isinstance(value, np.ndarray):
        return value
    dtype = _DTYPES.get(SPECS[name].datatype, np.float32)
    return np.array([value], dtype)


def read(**values: object) -> EngineRequest:
    base: dict[str, object] = {
        "input_ids": [5, 6, 7],
        "input_lengths": 3,
        "request_output_len": 8,
        **values,
    }
    tensors = {name: tensor(name, value) for name, value in base.items() if value is not None}
    return read_request(tensors, DEFAULTS)


def test_a_bare_request_is_greedy_and_ends_at_the_model_s_end_tokens() -> None:
    request = read()
    params = request.generation.params
    assert params.is_greedy and params.end_ids == (2,) and params.seed is None
    assert request.generation.prompt_token_ids.tolist() == [5, 6, 7]
    assert not request.text.streaming and request.generation.timeout_s is None


def test_every_option_arrives() -> None:
    params = read(
        temperature=0.7, runtime_top_k=5, runtime_top_p=0.9, min_p=0.05, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, min_tokens=4, seed=2**63, end_id=9, pad_id=0,
        return_log_probs=True, num_draft_tokens=3,
        stop_words_list=np.array([[[5, 6, 7], [2, 3, -1]]], np.int32),
        bad_words_list=np.array([[[8], [1]]], np.int32),
        embedding_bias=np.array([[0, 0, -1.5, 0, 0, 0, 0, 0, 0, 2]], np.float32),
    ).generation.params  # fmt: skip
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 5, 0.9, 0.05)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.2)
    assert (params.frequency_penalty, params.min_tokens, params.seed) == (-0.3, 4, 2**63)
    assert (params.end_ids, params.pad_id, params.return_log_probs) == ((9,), 0, True)
    assert params.stop_token_ids == ((5, 6), (7,)) and params.bad_token_ids == ((8,),)
    assert params.logit_bias == ((2, -1.5), (9, 2.0)) and params.num_draft_tokens == 3


@pytest.mark.parametrize(
    "values, is_greedy",
    [
        ({}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0, "runtime_top_p": 0.9}, True),
        ({"runtime_top_k": 1}, True),
        ({"runtime_top_k": 0}, False),
        ({"runtime_top_p": 1.0}, False),
        ({"seed": 3}, False),
        ({"min_p": 0.1}, False),
    ],
)
def test_sampling_is_on_when_asked_for(values: dict[str, object], is_greedy: bool) -> None:
    assert read(**values).generation.params.is_greedy is is_greedy


@pytest.mark.parametrize("name", ["min_length", "min_tokens"])
def test_both_spellings_of_min_tokens_work(name: str) -> None:
    assert read(**{name: 4}).generation.params.min_tokens == 4


@pytest.mark.parametrize("name", ["seed", "random_seed"])
def test_both_spellings_of_the_seed_work(name: str) -> None:
    assert read(**{name: 11}).generation.params.seed == 11


def test_two_spellings_that_disagree_are_refused() -> None:
    assert read(seed=1, random_seed=1).generation.params.seed == 1
    with pytest.raises(InvalidRequestError, match="seed = 1 and random_seed = 2 contradict"):
        read(seed=1, random_seed=2)


def test_end_id_minus_one_means_no_end_token() -> None:
    assert read(end_id=-1).generation.params.end_ids == ()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"request_output_len": 0}, r"max_tokens = 0 is not allowed: it must be between 1 and 63"),
        ({"request_output_len": -5}, r"max_tokens = -5 is not allowed"),
        ({"request_output_len": 64}, r"max_tokens = 64 is not allowed"),
        ({"request_output_len": None}, r"max_tokens is missing"),
        ({"temperature": -0.5}, r"temperature = -0.5 is not allowed: it must be a number ≥ 0"),
        ({"temperature": float("nan")}, r"temperature = nan is not allowed"),
        ({"temperature": float("inf")}, r"temperature = inf is not allowed"),
        ({"runtime_top_p": 0.0}, r"top_p = 0.0 is not allowed: it must be in \(0, 1\]"),
        ({"runtime_top_p": 1.1}, r"top_p = 1.1 is not allowed"),
        ({"runtime_top_p": float("nan")}, r"top_p = nan is not allowed"),
        ({"runtime_top_k": -1}, r"top_k = -1 is not allowed: it must be ≥ 0"),
        ({"min_p": 1.5}, r"min_p = 1.5 is not allowed"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty = 0.0 is not allowed"),
        ({"presence_penalty": float("nan")}, r"presence_penalty = nan is not allowed"),
        ({"min_tokens": -1}, r"min_tokens = -1 is not allowed: it must be ≥ 0"),
        ({"num_draft_tokens": -1}, r"num_draft_tokens = -1 is not allowed"),
        ({"end_id": 10}, r"end_id = 10 is not allowed: it must be between 0 and 9"),
        ({"pad_id": -2}, r"pad_id = -2 is not allowed"),
        ({"input_ids": None}, r"input_ids is missing or empty"),
        ({"input_lengths": 4}, r"input_lengths = 4 is not allowed: .* between 1 and the 3 tokens"),
        ({"input_lengths": 0}, r"input_lengths = 0 is not allowed"),
        ({"temperature": np.zeros((1, 2), np.float32)}, r"temperature has 2 elements"),
        ({"embedding_bias": np.zeros((1, 3), np.float32)}, r"embedding_bias has 3 entries: .* 10"),
        (
            {"embedding_bias": np.full((1, 10), np.nan, np.float32)},
            r"embedding_bias holds NaN",
        ),
        ({"stop_strings": np.array([[b"x" * 1000] * 100], object)}, r"100 words of 100000 bytes"),
        ({"stop_strings": np.array([[b"x"] * 129], object)}, r"129 words of 129 bytes"),
        ({"stop_strings": np.array([[b"a\xff"]], object)}, r"byte 0xff at offset 1"),
        (
            {"stop_words_list": np.array([[[5, 6], [2, 1]]], np.int32)},
            r"stop_words_list has end offsets \[2, 1\]",
        ),
    ],
)
def test_values_out_of_range_are_refused_with_value_and_range(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(**values)


def test_several_prompts_in_one_request_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="batch of 2: send one prompt per request"):
        read(input_lengths=np.array([3, 3], np.int32))


@pytest.mark.parametrize("name", [s.name for s in ENGINE_INPUTS if s.support is Support.REFUSED])
def test_every_unsupported_input_is_refused_by_name(name: str) -> None:
    value: object = np.array([[b"x"]], object) if SPECS[name].datatype == "STRING" else 1
    with pytest.raises(UnsupportedError, match=f"^{name} is not supported"):
        read(**{name: value})


@pytest.mark.parametrize(
    "name", [s.name for s in ENGINE_INPUTS if s.support is Support.NEUTRAL_ONLY]
)
def test_neutral_values_are_accepted_and_others_refused(name: str) -> None:
    for neutral in SPECS[name].neutral:
        read(**{name: neutral})
    other = 7 if SPECS[name].datatype != "BOOL" else True
    with pytest.raises(UnsupportedError, match=f"^{name} = "):
        read(**{name: other})


def test_empty_tensors_of_unsupported_inputs_ask_for_nothing() -> None:
    read(decoder_input_ids=np.zeros((1, 0), np.int32), lora_weights=np.zeros((1, 0, 0), np.float16))


def test_stop_words_that_are_special_tokens_stop_at_the_token() -> None:
    request = read(stop_strings=np.array([[b"<|im_end|>", b"END", b""]], object))
    assert request.text.stop_strings == ("END",)
    assert request.generation.params.stop_token_ids == ((2,),)


def test_words_survive_their_tensor_form() -> None:
    words = [[5, 6], [7], [8, 9, 1]]
    array = write_word_ids(words)
    assert array.tolist() == [[5, 6, 7, 8, 9, 1], [2, 3, 6, -1, -1, -1]]
    assert read_word_ids({"w": array[None]}, "w") == tuple(tuple(word) for word in words)
    assert write_word_ids([]).shape == (2, 0)


def test_unknown_options_are_refused_by_name() -> None:
    refuse_unknown_parameters('{"triton_enable_empty_final_response": true}')
    refuse_unknown_parameters("")
    with pytest.raises(InvalidRequestError, match="unknown option 'tempurature'"):
        refuse_unknown_parameters('{"tempurature": 1}')


def test_the_server_s_time_out_becomes_seconds() -> None:
    tensors = {
        "input_ids": np.array([[5]], np.int32),
        "input_lengths": np.array([1], np.int32),
        "request_output_len": np.array([1], np.int32),
    }
    request = read_request(tensors, DEFAULTS, client_id="c", handle="h", timeout_us=1500000)
    assert (request.generation.timeout_s, request.client_id, request.handle) == (1.5, "c", "h")
