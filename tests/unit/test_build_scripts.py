# SPDX-License-Identifier: Apache-2.0
"""Scripts that stand for a subcommand hand it their arguments."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from trtllm_dspark import cli

SCRIPTS = Path(__file__).resolve().parents[2] / "build_scripts"


COMMAND_OF = {
    "build_engines": "build",
    "profile_latency": "profile",
    "calibrate_confidence": "calibrate",
    "convert_checkpoint": "convert-checkpoint",
    "trtllm_build": "trtllm-build",
    "fill_template": "fill-template",
}


def test_every_script_is_listed_here():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(COMMAND_OF)


@pytest.mark.parametrize(("script", "command"), COMMAND_OF.items())
def test_a_script_is_its_subcommand(
    script: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda argv: seen.append(argv) or 7)
    path = SCRIPTS / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--model-dir", "M"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 7
    assert seen == [[command, "--model-dir", "M"]]
    assert command in cli.COMMANDS
