# SPDX-License-Identifier: Apache-2.0
"""Text requests are checked under the client's names and mapped to the engine's."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest

from trtllm_dspark.errors import (
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
    UnsupportedError,
)
from trtllm_dspark.serving.tensors import BLS_INPUTS, ENGINE_INPUTS, TEXT_INPUTS, Support
from trtllm_dspark.serving.text_model import TextCall, check_text_inputs, engine_inputs

ENGINE = {spec.name: spec for spec in ENGINE_INPUTS}


def make_call(timeout_us: int = 0) -> TextCall:
    return TextCall({}, cast("Any", None), "id", timeout_us, ())


def text(value: bytes = b"hello") -> dict[str, np.ndarray]:
    return {"text_input": np.array([[value]], object)}


def test_every_option_of_the_text_models_reaches_the_engine_under_a_name_it_knows() -> None:
    for spec in TEXT_INPUTS:
        if spec.text_name:
            assert ENGINE[spec.text_name].support is spec.support
    passed = {s.name for s in TEXT_INPUTS if s.text_name and s.support is Support.YES}
    taken_here = {s.name for s in TEXT_INPUTS if not s.text_name and s.support is Support.YES}
    assert passed >= {"top_k", "top_p", "stop_words", "stream", "seed", "random_seed", "min_length"}
    assert taken_here == {
        "text_input", "bad_words", "embedding_bias_words", "embedding_bias_weights",
        "apply_chat_template",
    }  # fmt: skip


def test_options_are_renamed_and_get_a_batch_dimension() -> None:
    inputs = engine_inputs(
        {
            **text(),
            "top_k": np.array([5], np.int32),
            "stop_words": np.array([[b"a", b"b"]], object),
            "beam_width": np.array([1], np.int32),
        }
    )
    assert set(inputs) == {"runtime_top_k", "stop_strings"}
    assert inputs["runtime_top_k"].shape == (1, 1) and inputs["stop_strings"].shape == (1, 2)


def test_bad_text_is_refused_before_anything_is_tokenised() -> None:
    check_text_inputs(text())
    with pytest.raises(InvalidRequestError, match="text_input is not valid UTF-8"):
        check_text_inputs(text(b"\xff"))
    with pytest.raises(InvalidRequestError, match="stop_words holds 200 words"):
        check_text_inputs({**text(), "stop_words": np.array([[b"x"] * 200], object)})
    with pytest.raises(UnsupportedError, match="text_input has a batch of 2"):
        check_text_inputs({"text_input": np.array([[b"a"], [b"b"]], object)})


@pytest.mark.parametrize("name", [s.name for s in BLS_INPUTS if s.support is Support.REFUSED])
def test_unsupported_inputs_are_refused_under_the_client_s_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} is not supported"):
        check_text_inputs({**text(), name: np.ones((1, 1), np.int32)})


def test_waiting_for_a_thread_counts_against_the_time_out() -> None:
    call = make_call(timeout_us=10_000_000)
    call.arrival_s = time.monotonic() - 4
    assert 0 < call.start() <= 6_000_000
    late = make_call(timeout_us=1_000_000)
    late.arrival_s = time.monotonic() - 4
    with pytest.raises(RequestTimeoutError, match="time-out of 1 s"):
        late.start()
    assert make_call().start() == 0


def test_a_call_that_was_cancelled_while_it_waited_is_not_served() -> None:
    call = make_call()
    call.is_stopped = True
    with pytest.raises(RequestCancelledError):
        call.start()
