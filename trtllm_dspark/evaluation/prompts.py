# SPDX-License-Identifier: Apache-2.0
"""Prompts of JSONL files as the token ids that a model is given, with their domain and set."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.checkpoints.tokenizer import Tokenizer
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.training.prompt_sources import Prompt, read_prompts
from trtllm_dspark.types import IntArray


@dataclass(frozen=True)
class EncodedPrompt:
    """One user turn inside the chat template."""

    prompt_id: str
    domain: str
    token_ids: IntArray

    @property
    def set_name(self) -> str:
        """Which set it is of: its id up to the first slash."""
        return self.prompt_id.split("/")[0]


def add_prompt_options(parser: argparse.ArgumentParser, default_slice: str) -> None:
    """--prompts and --slice."""
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL: id, domain, prompt")
    parser.add_argument(
        "--slice",
        type=parse_slice,
        default=parse_slice(default_slice),
        help=f"FIRST:LAST part of each file (default: {default_slice})",
    )


def parse_slice(text: str) -> tuple[float, float]:
    """'0.8:1.0' → (0.8, 1.0)."""
    try:
        first, last = (float(part) for part in text.split(":"))
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 0.8:1.0") from error
    if not 0.0 <= first < last <= 1.0:
        raise ArgumentTypeError(f"{text!r} is not allowed: it must be 0 ≤ FIRST < LAST ≤ 1")
    return first, last


def load_prompts(
    paths: Sequence[str], part: tuple[float, float], tokenizer: Tokenizer
) -> list[EncodedPrompt]:
    """Read a part of each file and encode it; ids must differ."""
    prompts = read_prompts(paths, *part)
    ids = [prompt.prompt_id for prompt in prompts]
    twice = sorted({i for i in ids if ids.count(i) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise ConfigError(f"prompt ids {twice[:3]} occur more than once: ids must differ")
    return [encode_prompt(prompt, tokenizer) for prompt in prompts]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> EncodedPrompt:
    """A user turn in the model's chat template."""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    token_ids = tokenizer.encode(rendered, add_special=False)
    return EncodedPrompt(prompt.prompt_id, prompt.domain, np.asarray(token_ids, np.int32))
