# SPDX-License-Identifier: Apache-2.0
"""Prompts, word lists and templates become token ids; postprocessing turns ids back to text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.tiny_model import REPLY_ID, USER_ID, VOCAB, write_tiny_model
from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer
from trtllm_dspark.errors import InvalidRequestError, UnsupportedError
from trtllm_dspark.serving.postprocessing_model import decode_batch
from trtllm_dspark.serving.preprocessing_model import Preprocessor
from trtllm_dspark.serving.responses import Outputs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def run(
    tokenizer: Tokenizer, query: bytes = b"ab", template: bool = False, **words: object
) -> Outputs:
    tensors = {
        "QUERY": np.array([[query]], object),
        "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32),
        **{name: np.array([value]) for name, value in words.items()},
    }
    return Preprocessor(tokenizer, VOCAB, apply_chat_template=template).run(tensors)


def test_a_prompt_becomes_ids_and_a_length(tokenizer: Tokenizer) -> None:
    outputs = run(tokenizer, "é!".encode())
    assert outputs["INPUT_ID"].tolist() == [[0xC3, 0xA9, 33]]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[3]]
    assert outputs["EMBEDDING_BIAS"].shape == (1, 0)
    assert outputs["BAD_WORDS_IDS"].shape == (1, 2, 0)


def test_the_template_is_a_default_that_a_request_overrides(tokenizer: Tokenizer) -> None:
    wrapped = [[USER_ID, 97, 98, REPLY_ID]]
    assert run(tokenizer, template=True)["INPUT_ID"].tolist() == wrapped
    assert run(tokenizer, APPLY_CHAT_TEMPLATE=[True])["INPUT_ID"].tolist() == wrapped
    plain = run(tokenizer, template=True, APPLY_CHAT_TEMPLATE=[False])
    assert plain["INPUT_ID"].tolist() == [[97, 98]]


def test_bad_words_are_banned_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    outputs = run(tokenizer, BAD_WORDS_DICT=np.array([b"xy", b" z"], object))
    assert outputs["BAD_WORDS_IDS"].tolist() == [
        [[120, 121, 32, 120, 121, 32, 122], [2, 5, 7, -1, -1, -1, -1]]
    ]


def test_bias_words_bias_each_of_their_tokens(tokenizer: Tokenizer) -> None:
    bias = run(
        tokenizer,
        EMBEDDING_BIAS_WORDS=np.array([b"aa", b"ab"], object),
        EMBEDDING_BIAS_WEIGHTS=np.array([2.0, -1.0], np.float32),
    )["EMBEDDING_BIAS"]
    assert bias.shape == (1, VOCAB)
    assert {int(i): float(bias[0, i]) for i in np.flatnonzero(bias)} == {97: 1.0, 98: -1.0}


def test_end_and_pad_ids_default_to_the_tokenizer_s(tokenizer: Tokenizer) -> None:
    assert run(tokenizer)["OUT_END_ID"].tolist() == [[256]]
    assert run(tokenizer, END_ID=np.array([7], np.int32))["OUT_END_ID"].tolist() == [[7]]


@pytest.mark.parametrize(
    "query, words, message",
    [
        (b"", {}, "text_input is empty"),
        (b"\xfe", {}, "QUERY is not valid UTF-8: byte 0xfe at offset 0"),
        (b"a", {"EMBEDDING_BIAS_WORDS": np.array([b"x"], object)}, "1 words and .* 0 weights"),
        (b"a", {"BAD_WORDS_DICT": np.array([b"x"] * 200, object)}, "200 words"),
    ],
)
def test_bad_text_is_refused(
    tokenizer: Tokenizer, query: bytes, words: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        run(tokenizer, query, **words)


def test_images_are_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedError, match=r"IMAGE_URL is not supported \(multimodal models\)"):
        run(tokenizer, IMAGE_URL=np.array([b"http://x"], object))


def test_ids_become_text_cut_to_their_lengths(tokenizer: Tokenizer) -> None:
    tensors = {
        "TOKENS_BATCH": np.array([[[97, 98, 256]], [[0xC3, 0xA9, 99]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[3], [2]], np.int32),
    }
    assert decode_batch(tokenizer, tensors, True)["OUTPUT"].tolist() == [b"ab", "é".encode()]
    assert decode_batch(tokenizer, tensors, False)["OUTPUT"][0] == b"ab<|end|>"
    with pytest.raises(InvalidRequestError, match="they must be"):
        decode_batch(tokenizer, {**tensors, "SEQUENCE_LENGTH": np.array([3])}, True)
