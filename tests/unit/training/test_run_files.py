# SPDX-License-Identifier: Apache-2.0
"""provenance.json tells of every start in a run directory, each command once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.training import run_files
from trtllm_dspark.training.run_files import RunFiles


def start(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    revision: str,
    resumed_at_step: int | None,
) -> dict[str, Any]:
    """One start of `dspark train` with an option; what it left in provenance.json."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/dspark", "train", option])
    monkeypatch.setattr(run_files, "_git_revision", lambda: revision)
    written = RunFiles(directory).write_provenance({"resumed_at_step": resumed_at_step})
    assert written == json.loads((directory / "provenance.json").read_text())
    return written


def test_a_resumed_run_keeps_what_is_known_of_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path, monkeypatch, "--lr=1", "r1", None)
    assert first["earlier"] == []
    second = start(tmp_path, monkeypatch, "--lr=2", "r1", 100)
    third = start(tmp_path, monkeypatch, "--lr=2", "r2", 200)
    assert third["argv"] == ["dspark", "train", "--lr=2"]
    assert third["resumed_at_step"] == 200
    found = [
        (entry["argv"][-1], entry["git_revision"], entry["resumed_at_step"], entry["num_starts"])
        for entry in third["earlier"]
    ]
    assert found == [("--lr=1", "r1", None, 1), ("--lr=2", "r1", 100, 1)]
    assert [entry["started"] for entry in third["earlier"]] == [first["started"], second["started"]]


def test_starts_of_one_command_are_counted_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    for step in (None, 50, 100, 150):
        monkeypatch.setattr(
            run_files, "describe_run", lambda now=step: {"argv": ["x"], "started": f"at {now}"}
        )
        started.append(RunFiles(tmp_path).write_provenance({"resumed_at_step": step})["started"])
    last = json.loads((tmp_path / "provenance.json").read_text())
    assert started == ["at None", "at 50", "at 100", "at 150"]
    (entry,) = last["earlier"]
    assert (entry["num_starts"], entry["resumed_at_step"]) == (3, None)
    assert (entry["started"], entry["last_started"]) == ("at None", "at 100")


def test_a_provenance_file_from_before_there_was_a_list_becomes_its_first_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"argv": ["train.py"], "started": "then", "git_revision": None, "resumed_at_step": 772}
    (tmp_path / "provenance.json").write_text(json.dumps(old))
    (entry,) = start(tmp_path, monkeypatch, "--lr=1", "r1", 800)["earlier"]
    assert {name: entry[name] for name in old} == old
