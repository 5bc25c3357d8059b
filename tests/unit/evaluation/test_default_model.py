# SPDX-License-Identifier: Apache-2.0
"""A clean clone has no model: the commands prepare the demonstration's, and only that one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dspark.errors import DSparkError
from trtllm_dspark.evaluation import bench_command, default_model, evaluate_command
from trtllm_dspark.serving.demo_command import DEMO_MODEL, DEMO_MODEL_DIR


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Path]]:
    """An empty directory to work in, and what was prepared there."""
    calls: list[tuple[str, Path]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default_model, "prepare_model", lambda *call: calls.append(call))
    return calls


def test_only_the_default_directory_is_prepared_and_only_if_it_is_absent(
    prepared: list[tuple[str, Path]],
) -> None:
    default_model.prepare_default_model("elsewhere")
    assert prepared == []
    default_model.prepare_default_model(DEMO_MODEL_DIR)
    assert prepared == [(DEMO_MODEL, Path(DEMO_MODEL_DIR))]
    Path(DEMO_MODEL_DIR).mkdir(parents=True)
    default_model.prepare_default_model(DEMO_MODEL_DIR)
    assert len(prepared) == 1


def test_evaluate_and_bench_prepare_what_they_run_on(prepared: list[tuple[str, Path]]) -> None:
    Path("prompts.jsonl").write_text('{"id": "a/0", "domain": "chat", "prompt": "hello"}\n')
    for command, more in ((evaluate_command, ["--prompts", "prompts.jsonl"]), (bench_command, [])):
        with pytest.raises(DSparkError, match=r"tokenizer\.json"):  # nothing was put there
            command.main(more)
    assert prepared == [(DEMO_MODEL, Path(DEMO_MODEL_DIR))] * 2
