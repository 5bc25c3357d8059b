# SPDX-License-Identifier: Apache-2.0
"""Training data: a store that survives interruption, prompts that are functions of their number."""

from __future__ import annotations

import json
import random
import types

import numpy as np
import pytest

from tests.e2e.tiny_model import write_tiny_model
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.training import generate_data
from trtllm_dspark.training.prompt_sources import change_numbers, make_item, read_prompts
from trtllm_dspark.training.token_store import TokenStore, TokenStoreWriter


def write_prompts(path, count=10):
    rows = [
        {"id": f"p/{i}", "domain": ["math", "code", "chat"][i % 3], "prompt": f"Add {i} and 12."}
        for i in range(count)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_store_gives_back_what_was_appended(tmp_path):
    writer = TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    writer.append([1, 2, 299], 2, 7)
    writer.append([5, 6, 7, 8], 1, 3)
    store = TokenStore(tmp_path / "s")
    assert len(store) == 2 and store.num_answer_tokens == 4
    assert store[0].token_ids.tolist() == [1, 2, 299]
    assert (store[1].prompt_len, store[1].source_id) == (1, 3)


def test_a_reader_sees_what_is_appended_after_refresh(tmp_path):
    writer = TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    store = TokenStore(tmp_path / "s")
    assert len(store) == 0
    writer.append([1, 2], 1, 0)
    store.refresh()
    assert store[0].token_ids.tolist() == [1, 2]


def test_an_interrupted_write_is_dropped_and_the_rest_kept(tmp_path):
    writer = TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    writer.append([1, 2, 3], 1, 0)
    with (tmp_path / "s" / "tokens.bin").open("ab") as file:
        file.write(b"\x01\x00\x02")
    with (tmp_path / "s" / "index.bin").open("ab") as file:
        file.write(b"\x01" * 11)
    again = TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    assert again.source_ids == {0}
    again.append([9, 9], 1, 5)
    store = TokenStore(tmp_path / "s")
    assert [store[i].token_ids.tolist() for i in range(2)] == [[1, 2, 3], [9, 9]]


def test_items_without_a_sequence_are_remembered(tmp_path):
    writer = TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    writer.append([1, 2], 1, 4)
    writer.skip(6)
    with (tmp_path / "s" / "skipped.bin").open("ab") as file:
        file.write(b"\x01\x00")  # torn by an interruption
    again = TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    assert again.source_ids == {4, 6} and again.num_sequences == 1
    again.skip(9)
    assert TokenStoreWriter(again.directory, vocab_size=300, model_hash="m").source_ids == {4, 6, 9}
    assert len(TokenStore(tmp_path / "s")) == 1


def test_a_store_of_another_model_is_refused(tmp_path):
    TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="m")
    with pytest.raises(ConfigError, match="another model"):
        TokenStoreWriter(tmp_path / "s", vocab_size=300, model_hash="other")


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path):
    writer = TokenStoreWriter(tmp_path / "s", vocab_size=151936, model_hash="m")
    writer.append([151935], 0, 0)
    assert TokenStore(tmp_path / "s")[0].token_ids.tolist() == [151935]


def test_slices_of_a_prompt_file_are_disjoint_and_complete(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl")
    parts = [read_prompts([path], a, b) for a, b in ((0, 0.7), (0.7, 0.8), (0.8, 1.0))]
    assert [len(p) for p in parts] == [7, 1, 2]
    assert len({p.prompt_id for part in parts for p in part}) == 10


def test_a_prompt_without_a_needed_key_is_refused_by_name(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": "x"}\n')
    with pytest.raises(ConfigError, match="domain"):
        read_prompts([tmp_path / "p.jsonl"], 0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "domain": "math", "prompt": "x"}\n\n{"id": \n', "line 3 is not valid JSON"),
        ('\n["a", "math", "x"]\n', "line 2 holds list"),
        ('{"id": "a", "domain": "math"}\n', "line 1: prompt = None is no text"),
        ('{"id": 7, "domain": "math", "prompt": "x"}\n', "line 1: id = 7 is no text"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_with_the_form_it_should_have(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_prompts([path], 0, 1)
    assert str(path) in str(refusal.value)
    assert 'JSON lines such as {"id": ' in str(refusal.value)


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file"):
        read_prompts([tmp_path / "none.jsonl"], 0, 1)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"latin\.jsonl is not UTF-8"):
        read_prompts([tmp_path / "latin.jsonl"], 0, 1)


def test_a_line_separator_inside_a_prompt_does_not_end_the_line(tmp_path):
    row = {"id": "a", "domain": "chat", "prompt": "one\u2028two\x85three"}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts([path], 0, 1)] == [row["prompt"]]


def test_an_item_is_a_function_of_its_number(tmp_path):
    prompts = read_prompts([write_prompts(tmp_path / "p.jsonl")], 0, 1)
    items = [make_item(prompts, i, (0.0, 1.0), 0.5, 3) for i in range(60)]
    assert items == [make_item(prompts, i, (0.0, 1.0), 0.5, 3) for i in range(60)]
    assert 10 < sum(item.is_start for item in items) < 50
    assert {item.temperature for item in items} == {0.0, 1.0}
    assert len({item.seed for item in items}) == 60


def test_other_numbers_keep_the_words():
    text = "Tom has 24 apples and 1 pear, worth $3.50 and x^{2}."
    changed = change_numbers(text, random.Random(0))
    assert changed != text
    assert changed.replace(changed.split()[2], "24") == text, "only whole numbers above 1 change"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def run(model_dir, prompts, output, *extra):
    return generate_data.main(
        [
            *("--model-dir", str(model_dir), "--prompts", str(prompts), "--output", str(output)),
            *("--dtype", "float32", "--concurrency", "4", "--max-new-tokens", "12"),
            *("--threads", "1", "--max-seq-len", "256"),
            *extra,
        ]
    )


def test_plain_generation_answers_each_prompt_once_and_resuming_adds_nothing(model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl")
    options = ("--plain", "--temperatures", "0", "--slice", "0:1")
    assert run(model_dir, prompts, tmp_path / "out", *options) == 0
    store = TokenStore(tmp_path / "out")
    assert sorted(store.index[:, 3].tolist()) == list(range(10))
    before = {store[i].source_id: store[i].token_ids.tolist() for i in range(10)}
    assert run(model_dir, prompts, tmp_path / "out", *options) == 0
    assert len(TokenStore(tmp_path / "out")) == 10
    assert run(model_dir, prompts, tmp_path / "again", *options, "--concurrency", "1") == 0
    again = TokenStore(tmp_path / "again")
    assert {again[i].source_id: again[i].token_ids.tolist() for i in range(10)} == before


def test_generation_stops_at_the_wanted_tokens_and_goes_on_from_there(model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl")
    out = tmp_path / "out"
    assert run(model_dir, prompts, out, "--num-answer-tokens", "60") == 0
    first = TokenStore(out)
    assert first.num_answer_tokens >= 60
    assert run(model_dir, prompts, out, "--num-answer-tokens", "120") == 0
    second = TokenStore(out)
    assert second.num_answer_tokens >= 120
    assert np.array_equal(second.index[: len(first)], first.index)
    assert len(set(second.index[:, 3].tolist())) == len(second)


def test_an_item_that_gives_no_answer_is_not_tried_again(model_dir, tmp_path, monkeypatch):
    prompts = write_prompts(tmp_path / "p.jsonl")
    items = [make_item(read_prompts([prompts], 0, 1), i, (1.0,), 1.0, 0) for i in range(6)]
    started: list[int] = []

    def open_items(arguments, done):
        for item in items:
            if item.item_id not in done:
                started.append(item.item_id)
                yield item

    monkeypatch.setattr(generate_data, "iterate_items", open_items)
    monkeypatch.setattr(generate_data, "SENTENCE_ENDS", ("never",))  # what is cut gives nothing
    for _ in range(2):
        assert run(model_dir, prompts, tmp_path / "out") == 0
        assert started == [0, 1, 2, 3, 4, 5]
    assert len(TokenStore(tmp_path / "out")) < 6


class WordTokenizer:
    """Ids of pieces of text."""

    pieces = ("What", " is", " 3", ".", "5", "?", " And", "\n", " then")
    eos_ids = (0,)

    def apply_chat_template(self, messages):
        return f"<user>{messages[0]['content']}<end>"

    def encode(self, text, add_special=False):
        return []

    def decode(self, token_ids):
        return "".join(self.pieces[i] for i in token_ids)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 8], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2, 7], [0, 1, 2, 7]),
        ([0, 1, 2, 6], []),
    ],
)
def test_a_user_turn_cut_by_the_limit_keeps_its_whole_sentences(written, kept):
    system = types.SimpleNamespace(tokenizer=WordTokenizer())
    generator = generate_data.DataGenerator(system, None, 8)
    assert generator._whole_sentences(written) == kept
