# SPDX-License-Identifier: Apache-2.0
"""The tokenizer wrapper: bytes of tokens, end tokens, chat templates in a sandbox, clear errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, processors

from tests.unit.checkpoints import tiny_gguf
from trtllm_dspark.checkpoints import Tokenizer, load_tokenizer, prepare_model
from trtllm_dspark.errors import CheckpointError, InvalidRequestError, UnsupportedError

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizer")
    tiny_gguf.write_gguf(root / "m.gguf")
    return prepare_model(str(root / "m.gguf"), root / "model")


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return load_tokenizer(prepared)


@pytest.fixture
def copy_of(prepared, tmp_path):
    """A directory with the tokenizer files only, to be changed by the test."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text((prepared / name).read_text())
    return tmp_path


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@given(st.text())
def test_bytes_of_tokens_spell_the_text(tokenizer, text):
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_partial_characters_have_bytes_but_no_text(tokenizer):
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids) == "é"


def test_special_tokens_are_text_only_when_asked_for(tokenizer):
    ids = [1, *tokenizer.encode("he"), 2]
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>he<|im_end|>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_ids_beyond_the_vocabulary_are_empty(tokenizer):
    assert tokenizer.vocab_size == len(tiny_gguf.vocabulary())
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_roles_are_resolved_to_ids(tokenizer):
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_ids) == (1, 2, (2,))
    assert tokenizer.token_id("<|endoftext|>") == 0 and tokenizer.token_id("no such") is None


def test_post_processors_add_their_tokens_only_when_asked(copy_of):
    inner = Inner.from_file(str(copy_of / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    inner.save(str(copy_of / "tokenizer.json"))
    tokenizer = load_tokenizer(copy_of)
    assert tokenizer.encode("he")[0] == 1
    assert tokenizer.encode("he", add_special=False)[0] != 1


def test_byte_fallback_vocabularies_have_bytes_too():
    vocab = {"<unk>": 0, "▁he": 1, "<0xC3>": 2, "<0xA9>": 3}
    inner = Inner(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert [Tokenizer(inner).token_bytes(i) for i in (1, 2, 3)] == [b" he", b"\xc3", b"\xa9"]


def test_end_tokens_fall_back_to_the_tokenizers_own(copy_of):
    (copy_of / "generation_config.json").unlink()
    assert load_tokenizer(copy_of).eos_ids == (2,)
    change(copy_of / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert load_tokenizer(copy_of).eos_ids == (0,)


def test_the_chat_template_renders_with_and_without_a_generation_prompt(tokenizer):
    head = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.apply_chat_template(MESSAGES) == head + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == head


@pytest.mark.parametrize("where", ["string", "list", "file"])
def test_chat_templates_are_found_in_every_place(copy_of, where):
    template = "{{ bos_token }}{{ messages[0].content }}{% if flag %}!{% endif %}"
    if where == "string":
        change(copy_of / "tokenizer_config.json", chat_template=template)
    elif where == "list":
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
        change(copy_of / "tokenizer_config.json", chat_template=named)
    else:
        (copy_of / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(copy_of)
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_start|>hi"
    assert tokenizer.apply_chat_template(MESSAGES, flag=True) == "<|im_start|>hi!"


def test_templates_use_what_published_ones_use(copy_of):
    template = (
        "{%- for m in messages %}\n{%- if loop.index0 == 1 %}{%- break %}{%- endif %}\n"
        "{{- m | tojson }}\n{%- endfor %}{% if tools is not none %}tools{% endif %}"
        "{{ strftime_now('%Y') | length }}"
    )
    change(copy_of / "tokenizer_config.json", chat_template=template)
    rendered = load_tokenizer(copy_of).apply_chat_template(MESSAGES * 2)
    assert rendered == '{"role": "user", "content": "hi"}4'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "chat template refused"),
        ("{% for %}", "chat template refused"),
        ("{{ messages[0].content + 1 }}", "chat template refused"),
        ("{{ messages.append(1) }}", "chat template refused"),
    ],
)
def test_templates_cannot_escape_and_their_errors_are_the_requests(copy_of, template, message):
    change(copy_of / "tokenizer_config.json", chat_template=template)
    tokenizer = load_tokenizer(copy_of)
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_model_without_a_template_says_so(copy_of):
    change(copy_of / "tokenizer_config.json", chat_template=None)
    with pytest.raises(UnsupportedError, match="no chat template"):
        load_tokenizer(copy_of).apply_chat_template(MESSAGES)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)
