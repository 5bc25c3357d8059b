# SPDX-License-Identifier: Apache-2.0
"""The tokenizer inside a GGUF file works as `transformers` reads the files written from it."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.unit.checkpoints import tiny_gguf
from trtllm_dspark.checkpoints import load_tokenizer, prepare_model
from trtllm_dspark.checkpoints.gguf_reader import GgufFile
from trtllm_dspark.checkpoints.gguf_tokenizer import build_tokenizer
from trtllm_dspark.errors import CheckpointError

TEXTS = (
    "",
    " ",
    "hello world",
    "  two spaces \t\n\n tabs and lines  ",
    "1234 3.14 x12y ٣٤",
    "naïve café 日本語 👩‍👩‍👧 Ωß→",
    "def f(x):\n\treturn x**2  # ok\n",
    "it's we'll I'VE",
    "<|im_start|>user\nhello<|im_end|>\n",
    "\x00\x7f\r\n",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("gguf")
    tiny_gguf.write_gguf(root / "m.gguf")
    return prepare_model(str(root / "m.gguf"), root / "model")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_encoded_and_decoded_as_transformers_does(model_dir, text):
    ours, theirs = load_tokenizer(model_dir), AutoTokenizer.from_pretrained(model_dir)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids) == text


def test_digits_stay_apart_only_with_the_smollm_pre_tokenizer(tmp_path):
    tokens = tiny_gguf.vocabulary()
    for name, expected in (("smollm", ["1", "2"]), ("gpt-2", ["12"])):
        path = tmp_path / f"{name}.gguf"
        tiny_gguf.write_gguf(path, overrides={"tokenizer.ggml.pre": name})
        ids = build_tokenizer(GgufFile(path)).encode("12").ids
        assert [tokens[i] for i in ids] == expected


def test_merges_apply_in_their_order(model_dir):
    tokens = tiny_gguf.vocabulary()
    ids = load_tokenizer(model_dir).encode("hello wo")
    assert [tokens[i] for i in ids] == ["hell", "o", "Ġw", "o"]


def test_companion_files_name_the_special_tokens(model_dir):
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    specials = json.loads((model_dir / "special_tokens_map.json").read_text())
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert config["chat_template"] == tiny_gguf.TEMPLATE
    assert config["model_max_length"] == 512
    assert specials == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe' is not supported"),
        ({"tokenizer.ggml.add_bos_token": True}, "prepend BOS"),
        ({"tokenizer.ggml.merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path, overrides, message):
    tiny_gguf.write_gguf(tmp_path / "m.gguf", overrides=overrides)
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(GgufFile(tmp_path / "m.gguf"))
