# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of a Hugging Face directory: text ↔ ids, raw token bytes, chat template.

A thin wrapper over `tokenizers` and a sandboxed jinja2. Knows no streaming: incremental
detokenisation builds on `decode` and `token_bytes`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtllm_dspark.checkpoints.hf_config import read_eos_ids
from trtllm_dspark.config import load_json
from trtllm_dspark.errors import CheckpointError, InvalidRequestError, UnsupportedError

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Text ↔ token ids of one model directory. Thread-safe: nothing changes after construction."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._inner = inner
        self._specials = dict(special_tokens or {})
        self.eos_ids = eos_ids
        """Ids that end a request, in the order of the model's own configuration."""
        self.chat_template = chat_template
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `decode` leaves out by default."""
        self._added = {i: token.content for i, token in added.items()}
        self._byte_of = _byte_alphabet() if _uses_byte_level(inner) else None

    @property
    def vocab_size(self) -> int:
        """Ids that have a token, added tokens included (the model's vocabulary may be padded)."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence token, None where the model names none."""
        return self._role_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding token, None where the model names none."""
        return self._role_id("pad_token")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds what the tokenizer's own post-processor adds."""
        return list(self._inner.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; incomplete UTF-8 at either end becomes U+FFFD."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact vocabulary entry, None where there is none."""
        return self._inner.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; b"" for ids beyond the vocabulary.

        Concatenated over a sequence they are the UTF-8 of its text (special tokens included).
        Exact for byte-level BPE, which all supported models use; byte-fallback vocabularies
        (▁ for a space, <0xNN> for a byte) are understood too.
        """
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        token = self._inner.id_to_token(int(token_id))
        if token is None:
            return b""
        if self._byte_of is not None and all(c in self._byte_of for c in token):
            return bytes(self._byte_of[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode("utf-8")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render `messages` ({role, content} each) to a prompt; encode it with add_special=False.

        Further keyword arguments are variables of the template (e.g. enable_thinking=False).
        """
        if self.chat_template is None:
            raise UnsupportedError("this model has no chat template; send the prompt as plain text")
        try:
            return _compile_template(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self._specials, **variables},
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _role_id(self, role: str) -> int | None:
        token = self._specials.get(role)
        return None if token is None else self.token_id(token)


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Load tokenizer.json and its companions (tokenizer_config, chat template, end tokens)."""
    directory = Path(model_dir)
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing; slow tokenizers (sentencepiece files) are not read"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"cannot read {path}: {error}") from error
    config = _optional_json(directory / "tokenizer_config.json")
    specials = _special_tokens(directory, config)
    eos_ids = read_eos_ids(directory, _optional_json(directory / "config.json"))
    if not eos_ids and specials.get("eos_token") is not None:
        token_id = inner.token_to_id(specials["eos_token"])
        eos_ids = () if token_id is None else (token_id,)
    return Tokenizer(
        inner,
        eos_ids=eos_ids,
        special_tokens=specials,
        chat_template=_chat_template(directory, config),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.exists() else {}


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    merged = {**_optional_json(directory / "special_tokens_map.json"), **config}
    values = {role: merged.get(role) for role in _ROLES}
    return {
        role: value["content"] if isinstance(value, dict) else value
        for role, value in values.items()
        if value is not None
    }


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _compile_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _uses_byte_level(inner: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {d.get("type") for d in decoder.get("decoders", [])}
    return "ByteLevel" in kinds


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet
