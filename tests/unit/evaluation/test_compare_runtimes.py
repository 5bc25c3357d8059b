# SPDX-License-Identifier: Apache-2.0
"""The comparison with other programs, end to end in processes on a tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import compare_runtimes
from tests.e2e.tiny_model import write_tiny_model


def test_threads_are_the_same_number_for_every_runtime_never_its_own_choice() -> None:
    assert compare_runtimes.num_threads(3) == 3
    assert compare_runtimes.num_threads(0) == len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_runtimes_answer_the_same_prompts_with_as_many_tokens_and_the_absent_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --gguf there is nothing for llama.cpp to load, installed or not."""
    model, path = write_tiny_model(tmp_path / "tiny"), tmp_path / "compare.json"
    arguments = [
        "--model-dir", str(model), "--dtype", "float32", "--tokens", "6", "--rounds", "2",
        "--warm-up", "0", "--concurrency", "2", "--json", str(path), "--threads", "1",
        "--runtimes", "transformers", "llama.cpp", "dspark-ngram",
    ]  # fmt: skip
    assert compare_runtimes.main(arguments) == 0
    report = json.loads(path.read_text("utf-8"))
    assert set(report["missing"]) == {"llama.cpp"} and report["num_threads"] == 1
    rates = report["tokens_per_s"]["2"]
    assert set(rates) == {"transformers", "dspark-ngram"}
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
    printed = capsys.readouterr().out
    assert "left out: llama.cpp" in printed and "ratio to transformers" in printed
