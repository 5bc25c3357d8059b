# SPDX-License-Identifier: Apache-2.0
"""The `preprocessing` model: prompt text and word lists → token ids. Stateless, no engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer
from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError, InvalidRequestError
from trtllm_dspark.serving.inputs import (
    Tensors,
    read_bool,
    read_int,
    read_text,
    read_words,
    refuse_batches,
    refuse_unsupported,
    write_word_ids,
)
from trtllm_dspark.serving.model_parameters import ModelParameters, parse_model_args
from trtllm_dspark.serving.responses import Outputs
from trtllm_dspark.serving.tensors import PREPROCESSING_INPUTS, find_refused
from trtllm_dspark.serving.triton_io import (
    backend,
    configure_logging,
    make_error,
    make_tensors,
    read_tensors,
)

logger = logging.getLogger(__name__)

PREPROCESSING_PARAMETERS = ("tokenizer_dir", "add_special_tokens", "apply_chat_template")
_REFUSED = find_refused(PREPROCESSING_INPUTS)


class Preprocessor:
    """Tokenises requests with one tokenizer and the server's defaults."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        add_special_tokens: bool = True,
        apply_chat_template: bool = False,
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._add_special_tokens = add_special_tokens
        self._apply_chat_template = apply_chat_template

    def run(self, tensors: Tensors) -> Outputs:
        """Every output tensor of one request, batch dimension first."""
        refuse_batches(tensors, "QUERY")
        refuse_unsupported(tensors, _REFUSED)
        ids = self.encode_prompt(tensors)
        eos = self._tokenizer.eos_ids[0] if self._tokenizer.eos_ids else -1
        pad = self._tokenizer.pad_id
        return {
            "INPUT_ID": np.array([ids], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
            "DECODER_INPUT_ID": np.zeros((1, 0), np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.zeros((1, 1), np.int32),
            "BAD_WORDS_IDS": write_word_ids(self._bad_word_ids(tensors))[None],
            "STOP_WORDS_IDS": write_word_ids(
                [self._encode_word(w) for w in read_words(tensors, "STOP_WORDS_DICT")]
            )[None],
            "EMBEDDING_BIAS": self._bias(tensors)[None],
            "REQUEST_OUTPUT_LEN": np.array(
                [[read_int(tensors, "REQUEST_OUTPUT_LEN") or 0]], np.int32
            ),
            "OUT_END_ID": _token(read_int(tensors, "END_ID"), eos),
            "OUT_PAD_ID": _token(read_int(tensors, "PAD_ID"), eos if pad is None else pad),
            "OUT_PROMPT_TABLE_EXTRA_IDS": np.zeros((1, len(ids)), np.uint64),
        }

    def encode_prompt(self, tensors: Tensors) -> list[int]:
        """Token ids of the prompt, through the chat template where it applies."""
        text = read_text(tensors, "QUERY")
        if not text:
            raise InvalidRequestError("text_input is empty: send at least one character")
        if read_bool(tensors, "APPLY_CHAT_TEMPLATE", self._apply_chat_template):
            prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
            return self._tokenizer.encode(prompt, add_special=False)
        return self._tokenizer.encode(text, add_special=self._add_special_tokens)

    def _bad_word_ids(self, tensors: Tensors) -> list[list[int]]:
        """Bad words as they are and, because words in a text follow a space, with one before."""
        words = read_words(tensors, "BAD_WORDS_DICT")
        forms = [form for w in words for form in ([w] if w[0].isspace() else [w, " " + w])]
        return [self._encode_word(form) for form in forms]

    def _bias(self, tensors: Tensors) -> np.ndarray:
        words = read_words(tensors, "EMBEDDING_BIAS_WORDS")
        weights = tensors.get("EMBEDDING_BIAS_WEIGHTS", np.zeros(0, np.float32)).reshape(-1)
        if len(words) != len(weights):
            raise InvalidRequestError(
                f"embedding_bias_words has {len(words)} words and embedding_bias_weights "
                f"{len(weights)} weights: one weight a word is needed"
            )
        bias = np.zeros(self._vocab_size if words else 0, np.float32)
        for word, weight in zip(words, weights, strict=True):
            bias[sorted(set(self._encode_word(word)))] += weight
        return bias

    def _encode_word(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special=False)


def _token(value: int | None, default: int) -> np.ndarray:
    return np.array([[default if value is None else value]], np.int32)


def load_preprocessor(parameters: ModelParameters) -> Preprocessor:
    """The preprocessor that the parameters of a `preprocessing` model describe."""
    directory = parameters.text("tokenizer_dir")
    if not directory:
        raise ConfigError("tokenizer_dir is not filled: give the model directory to preprocessing")
    tokenizer = load_tokenizer(directory)
    apply_chat_template = parameters.flag("apply_chat_template", False)
    if apply_chat_template and tokenizer.chat_template is None:
        logger.warning("%s has no chat template: prompts are taken as they are", directory)
        apply_chat_template = False
    return Preprocessor(
        tokenizer,
        load_vocab_size(directory, tokenizer),
        add_special_tokens=parameters.flag("add_special_tokens", True),
        apply_chat_template=apply_chat_template,
    )


class PreprocessingModel:
    """What `preprocessing/1/model.py` exposes as TritonPythonModel."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        configure_logging()
        _, parameters = parse_model_args(args)
        parameters.log_unused(PREPROCESSING_PARAMETERS)
        self._preprocessor = load_preprocessor(parameters)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, with an error where it has one."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        pb = backend()
        try:
            outputs = self._preprocessor.run(read_tensors(request))
        except Exception as error:
            return pb.InferenceResponse(error=make_error(error))
        return pb.InferenceResponse(
            output_tensors=make_tensors(outputs, request.requested_output_names())
        )


def load_vocab_size(directory: str, tokenizer: Tokenizer) -> int:
    """Entries of the model's vocabulary, which may be padded beyond the tokenizer's."""
    try:
        config = load_json(Path(directory) / "config.json")
        return int(config.get("pretrained_config", config)["vocab_size"])
    except (ConfigError, KeyError):
        logger.warning("no vocab_size in %s/config.json: using the tokenizer's", directory)
        return tokenizer.vocab_size
