# SPDX-License-Identifier: Apache-2.0
"""Turns the tokenizer inside a GGUF file into tokenizer.json and its companion files.

Knows GGUF's `tokenizer.*` keys and the pre-tokenizers that llama.cpp names. Byte-level BPE only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trtllm_dspark.checkpoints.gguf_reader import GgufFile
from trtllm_dspark.checkpoints.staging import write_json
from trtllm_dspark.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that become added tokens (special and not special)."""


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "gpt-2": [byte_level],
    }
    if name not in known:
        raise CheckpointError(
            f"GGUF pre-tokenizer {name!r} is not supported: it must be one of {sorted(known)}. "
            "Use the model's Hugging Face directory instead."
        )
    return pre_tokenizers.Sequence(known[name])


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the byte-level BPE tokenizer that the GGUF file describes."""
    model = file.require("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer model {model!r} is not supported, only 'gpt2' (BPE)"
        )
    if file.get("tokenizer.ggml.add_bos_token", False):
        raise CheckpointError(
            f"{file.path}: tokenizers that prepend BOS are not supported in GGUF form"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.require("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(file.require("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def write_tokenizer_files(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json and the tokenizer, special token and generation configs."""
    build_tokenizer(file).save(str(directory / "tokenizer.json"))
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    specials: dict[str, str] = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            specials[f"{role}_token"] = tokens[token_id]
    tokenizer_config: dict[str, Any] = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.require("llama.context_length")),
        "tokenizer_class": "PreTrainedTokenizerFast",
        **specials,
    }
    template = file.get("tokenizer.chat_template")
    if template is not None:
        tokenizer_config["chat_template"] = template
    generation_config = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(file),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_json(directory / "special_tokens_map.json", specials)
    write_json(directory / "generation_config.json", generation_config)


def _eos_ids(file: GgufFile) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [file.get(key) for key in keys]
    return sorted({int(token_id) for token_id in found if token_id is not None})
