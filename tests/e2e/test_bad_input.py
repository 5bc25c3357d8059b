# SPDX-License-Identifier: Apache-2.0
"""Bad input gets one clear sentence from the real server, which then still answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.support import post
from trtllm_dspark.serving.client import GrpcClient
from trtllm_dspark.serving.launcher import TritonServer

GOOD: dict[str, Any] = {"text_input": "hello", "max_tokens": 4}
NAN = float("nan")

BAD: list[tuple[str, dict[str, Any], str]] = [
    # the first ones are refused by the server itself, which gives a stream no status
    ("missing text_input", {"text_input": None}, "missing required input(s) ['text_input']"),
    ("missing max_tokens", {"max_tokens": None}, "missing required input(s) ['max_tokens']"),
    ("wrong dtype", {"max_tokens": np.ones((1, 1), np.float32)}, "data-type is 'FP32'"),
    ("wrong shape", {"temperature": np.ones((1, 2), np.float32)}, "unexpected shape for input"),
    ("uneven batch", {"text_input": np.array([[b"a"], [b"b"]], object)}, "batch size"),
    ("empty prompt", {"text_input": ""}, "text_input is empty"),
    ("long prompt", {"text_input": "x" * 9000}, "exceeds the maximum sequence length of 8192"),
    ("max_tokens 0", {"max_tokens": 0}, "max_tokens = 0 is not allowed: it must be between 1"),
    ("max_tokens negative", {"max_tokens": -3}, "max_tokens = -3 is not allowed"),
    ("max_tokens huge", {"max_tokens": 10**6}, "max_tokens = 1000000 is not allowed"),
    ("temperature negative", {"temperature": -1.0}, "temperature = -1.0 is not allowed"),
    ("temperature NaN", {"temperature": NAN}, "temperature = nan is not allowed"),
    ("top_p zero", {"top_p": 0.0}, "top_p = 0.0 is not allowed: it must be in (0, 1]"),
    ("top_p above one", {"top_p": 1.5}, "top_p = 1.5 is not allowed"),
    ("top_k negative", {"top_k": -1}, "top_k = -1 is not allowed: it must be ≥ 0"),
    ("invalid UTF-8", {"text_input": b"ab\xff"}, "not valid UTF-8: byte 0xff at offset 2"),
    ("100 kB of stop words", {"stop_words": ["x" * 1000] * 100}, "100 words of 100000 bytes"),
    ("beams", {"beam_width": 2}, "beam_width = 2 is not supported (beam search)"),
    ("sequences", {"num_return_sequences": 2}, "num_return_sequences = 2 is not supported"),
    ("LoRA", {"lora_task_id": 1}, "lora_task_id is not supported (LoRA)"),
    (
        "guided decoding",
        {"guided_decoding_guide_type": "json"},
        "guided_decoding_guide_type is not supported (guided decoding)",
    ),
    ("context logits", {"return_context_logits": True}, "return_context_logits = True is not"),
    ("bias without weight", {"embedding_bias_words": ["a"]}, "one weight a word is needed"),
]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("change, message", [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_answered_with_one_sentence(
    client: GrpcClient, model: str, change: dict[str, Any], message: str
) -> None:
    options = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    answer = client.ask(options, model=model)
    assert answer.error is not None and message in answer.error
    assert not answer.text and "Traceback" not in answer.error
    assert client.ask(GOOD, model=model).error is None


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_batch_of_prompts_is_refused_by_name(client: GrpcClient, model: str) -> None:
    answer = client.ask(
        {
            "text_input": np.array([[b"a"], [b"b"]], object),
            "max_tokens": np.array([[3], [3]], np.int32),
        },
        model=model,
    )
    assert "text_input has a batch of 2: send one prompt per request" in (answer.error or "")


def test_an_unknown_option_is_refused_by_name(server: TritonServer, client: GrpcClient) -> None:
    assert post(server, "ensemble", "generate", {**GOOD, "tempurature": 1}) == (
        400,
        {"error": "unknown option 'tempurature': see the model's metadata for the inputs it takes"},
    )
    answer = client.ask(GOOD, parameters={"tempurature": 1})
    assert "unknown option 'tempurature'" in (answer.error or "")
    answer = client.ask({**GOOD, "text_in": np.array([[b"x"]], object)})
    assert "text_in" in (answer.error or "")


def test_refusals_are_bad_requests_over_http(server: TritonServer) -> None:
    for verb in ("generate", "generate_stream"):
        status, _ = post(server, "ensemble", verb, {**GOOD, "top_p": 2.0})
        assert status == 400


def test_the_engine_model_refuses_its_own_bad_input(client: GrpcClient) -> None:
    good = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 2}
    for change, message in (
        ({"input_ids": [1, 2, 9999]}, "prompt token id 9999 is outside the vocabulary of 259"),
        ({"input_lengths": 4}, "input_lengths = 4 is not allowed"),
        ({"draft_input_ids": [1]}, "draft_input_ids is not supported"),
        ({"stop": True}, "stop needs the id of the request"),
    ):
        answer = client.ask({**good, **change}, model="tensorrt_llm", request_id="")
        assert message in (answer.error or "")
    assert client.ask(good, model="tensorrt_llm").error is None
