# SPDX-License-Identifier: Apache-2.0
"""The comparison with other programs, end to end in processes on a tiny model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import compare_runtimes, compare_worker
from tests.e2e.tiny_model import write_tiny_model
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.sweep_file import SweepFile


def test_threads_are_the_same_number_for_every_runtime_never_its_own_choice() -> None:
    assert compare_runtimes.num_threads(3) == 3
    assert compare_runtimes.num_threads(0) == len(os.sched_getaffinity(0))


def options(path: Path, *more: str) -> argparse.Namespace:
    common = ["--model-dir", "m", "--json", str(path), "--rounds", "3", "--concurrency", "1", "8"]
    return compare_runtimes.build_parser().parse_args([*common, *more])


def held(path: Path, arguments: argparse.Namespace) -> SweepFile:
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    return SweepFile(str(path), settings, compare_runtimes.CHANGEABLE)


def test_only_missing_rounds_are_run_after_a_warm_up_of_their_concurrency(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    arguments = options(path)
    file = held(path, arguments)
    assert compare_runtimes.open_cases(arguments, file) == [
        (1, -1), (1, 0), (1, 1), (1, 2), (8, -1), (8, 0), (8, 1), (8, 2)
    ]  # fmt: skip
    for concurrency, index in ((1, 0), (1, 1), (1, 2), (8, 0)):
        file.add({"concurrency": concurrency, "round": index, "tokens_per_s": {"dspark": 1.0}})
    again = held(path, arguments)
    assert compare_runtimes.open_cases(arguments, again) == [(8, -1), (8, 1), (8, 2)]
    with pytest.raises(ConfigError, match="other tokens"):
        held(path, options(path, "--tokens", "7"))


def test_a_run_is_not_taken_up_again_with_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    model = write_tiny_model(tmp_path / "tiny")
    arguments = options(path, "--model-dir", str(model))
    file = held(path, arguments)
    file.add({"concurrency": 1, "round": 0, "tokens_per_s": {"llama.cpp": 1.0}})
    with pytest.raises(ConfigError, match="with or without llama"):
        compare_runtimes.measure([], arguments, file, [])


def test_rates_are_in_the_order_of_rounds_and_of_the_runtimes_asked_for(tmp_path: Path) -> None:
    arguments = options(tmp_path / "x", "--runtimes", "dspark", "transformers")
    rows = [
        {"concurrency": 8, "round": 1, "tokens_per_s": {"transformers": 3.0, "dspark": 9.0}},
        {"concurrency": 8, "round": 0, "tokens_per_s": {"transformers": 2.0, "dspark": 4.0}},
    ]
    found = compare_runtimes.collect_rates(arguments, rows)
    assert found == {"8": {"dspark": [4.0, 9.0], "transformers": [2.0, 3.0]}}
    assert list(found["8"]) == ["dspark", "transformers"]
    assert "2.50 [2.00, 3.00]" in compare_runtimes.render(found)


def test_llama_cpp_is_told_not_to_repack_by_its_default_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library is not installed with our tests: a stand-in has the one function that matters."""
    library = SimpleNamespace(
        llama_model_default_params=lambda: SimpleNamespace(use_extra_bufts=True, use_mmap=True)
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=library))
    compare_worker.keep_weights_as_they_are()
    found = library.llama_model_default_params()
    assert (found.use_extra_bufts, found.use_mmap) == (False, True)


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
    before = report["rows"]
    assert compare_runtimes.main([*arguments, "--rounds", "3"]) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert rows[:2] == before and [row["round"] for row in rows] == [0, 1, 2]
