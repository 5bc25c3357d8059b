# SPDX-License-Identifier: Apache-2.0
"""The demonstration measures what it says and prints whole answers where there is no terminal."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from trtllm_dspark.serving.client import Answer, StreamEvent, make_arrays
from trtllm_dspark.serving.demo import AnswerBoard, summarise, summary_table
from trtllm_dspark.serving.scrape import Metrics


def event(text: str, time_s: float, count: int = 0, final: bool = False) -> StreamEvent:
    outputs = {
        "text_output": np.array([text.encode()], object),
        "num_output_tokens": np.array([[count]], np.int32),
        "finish_reason": np.array([[b"eos" if final else b""]], object),
    }
    return StreamEvent("id", time_s, outputs, final)


def answer(start_s: float, *events: StreamEvent, error: str | None = None) -> Answer:
    return Answer("id", start_s, "".join(e.text for e in events), list(events), error)


def metrics(committed: int, steps: int, decode: int, block: int) -> Metrics:
    return Metrics(
        f'# TYPE x counter\ndspark_committed_tokens_total{{model="m"}} {committed}\n'
        f"dspark_accepted_tokens_per_step_count {steps}\n"
        f"dspark_decode_rows_total {decode}\ndspark_block_rows_total {block}\n"
        f'dspark_bucket_steps_total{{rung="8"}} {steps}\n'
        f'dspark_bucket_steps_total{{rung="64"}} 2\n'
    )


def test_the_summary_is_made_of_answers_and_metric_differences() -> None:
    answers = [
        answer(0.0, event("a", 0.1, 1), event("b", 0.5, 10, True)),
        answer(0.0, event("c", 0.3, 20, True)),
        answer(0.0, error="refused"),
    ]
    summary = summarise(answers, 2.0, metrics(5, 5, 10, 20), metrics(35, 17, 40, 80))
    assert (summary.num_requests, summary.num_output_tokens) == (3, 30)
    assert summary.tokens_per_s == 15.0
    assert summary.acceptance_length == 2.5
    assert summary.keep_ratio == 0.5
    assert summary.steps_per_bucket == {8: 12}
    assert summary.first_token_ms == pytest.approx(200.0)


def test_without_drafts_everything_is_kept() -> None:
    zero = metrics(0, 0, 0, 0)
    summary = summarise([], 0.0, zero, zero)
    assert (summary.keep_ratio, summary.acceptance_length, summary.tokens_per_s) == (1.0, 0.0, 0.0)


def test_plain_output_prints_each_answer_once_and_whole() -> None:
    output = io.StringIO()
    with AnswerBoard(["first [x]", "second"], Console(file=output, width=60)) as board:
        board.add(0, event("Hello ", 0.0))
        board.add(1, event("Other", 0.0, 1, True))
        board.add(0, event("world [red]", 0.0, 2, True))
    text = output.getvalue()
    assert text.count("Hello world [red]") == 1 and text.count("Other") == 1
    assert "first [x]" in text and text.index("Other") < text.index("Hello")


def test_the_table_has_every_number() -> None:
    output = io.StringIO()
    zero = metrics(0, 0, 0, 0)
    Console(file=output, width=80).print(summary_table(summarise([], 1.0, zero, zero)))
    for word in ("tokens/s", "acceptance length", "keep ratio", "bucket", "first token"):
        assert word in output.getvalue()


def test_options_get_their_tensor_types() -> None:
    arrays = make_arrays({"text_input": "é", "max_tokens": 3, "stop_words": ["a", "b"], "seed": 7})
    assert arrays["text_input"].tolist() == [["é".encode()]]
    assert arrays["max_tokens"].dtype == np.int32 and arrays["seed"].dtype == np.uint64
    assert arrays["stop_words"].shape == (1, 2)
