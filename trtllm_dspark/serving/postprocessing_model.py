# SPDX-License-Identifier: Apache-2.0
"""The `postprocessing` model: token ids → text. Stateless: `tensorrt_llm` sends text-stable groups,
so each group decodes by itself and the texts of a stream join to the text of the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer
from trtllm_dspark.errors import ConfigError, InvalidRequestError
from trtllm_dspark.serving.inputs import Tensors
from trtllm_dspark.serving.model_parameters import parse_model_args
from trtllm_dspark.serving.responses import Outputs
from trtllm_dspark.serving.text import decode_tokens
from trtllm_dspark.serving.triton_io import (
    backend,
    configure_logging,
    make_error,
    make_tensors,
    read_tensors,
)

POSTPROCESSING_PARAMETERS = ("tokenizer_dir", "skip_special_tokens")


def decode_batch(tokenizer: Tokenizer, tensors: Tensors, skip_special: bool) -> Outputs:
    """OUTPUT [batch · beams] of TOKENS_BATCH [batch, beams, n] cut to SEQUENCE_LENGTH."""
    tokens, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
    if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
        raise InvalidRequestError(
            f"TOKENS_BATCH has shape {list(tokens.shape)} and SEQUENCE_LENGTH "
            f"{list(lengths.shape)}: they must be [batch, beams, n] and [batch, beams]"
        )
    rows = tokens.reshape(-1, tokens.shape[-1])
    texts = [
        decode_tokens(tokenizer, row[: max(int(length), 0)].tolist(), skip_special).encode("utf-8")
        for row, length in zip(rows, lengths.reshape(-1), strict=True)
    ]
    return {"OUTPUT": np.array(texts, np.object_)}


class PostprocessingModel:
    """What `postprocessing/1/model.py` exposes as TritonPythonModel."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        configure_logging()
        _, parameters = parse_model_args(args)
        parameters.log_unused(POSTPROCESSING_PARAMETERS)
        if not parameters.text("tokenizer_dir"):
            raise ConfigError("tokenizer_dir is not filled: give the model directory")
        self._tokenizer = load_tokenizer(parameters.text("tokenizer_dir"))
        self._skip_special = parameters.flag("skip_special_tokens", True)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, with an error where it has one."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        pb = backend()
        try:
            outputs = decode_batch(self._tokenizer, read_tensors(request), self._skip_special)
            return pb.InferenceResponse(
                output_tensors=make_tensors(outputs, request.requested_output_names())
            )
        except Exception as error:
            return pb.InferenceResponse(error=make_error(error))
