# SPDX-License-Identifier: Apache-2.0
"""The `trtllm-build` adapter, by golden commands."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

import pytest

from tests.unit.checkpoints import layouts
from trtllm_dspark.checkpoints import load_model_config, load_trtllm_checkpoint
from trtllm_dspark.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[3] / "build_scripts"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("trtllm_build", SCRIPTS / "trtllm_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(script, *extra):
    return script.build_parser().parse_args(["--checkpoint_dir", "C", "--output_dir", "E", *extra])


def test_the_command_of_the_defaults_is_exact(script):
    assert " ".join(script.build_command(parse(script))) == (
        "trtllm-build --checkpoint_dir C --output_dir E --max_batch_size 16 --max_input_len 1024 "
        "--max_seq_len 2048 --max_num_tokens 512 "
        "--speculative_decoding_mode draft_tokens_external --max_draft_len 7 "
        "--kv_cache_type paged --tokens_per_block 32 --workers 1 --log_level info"
    )


def test_the_command_of_other_limits_is_exact(script):
    flags = [
        "--max_draft_len",
        "4",
        "--max_batch_size",
        "64",
        "--max_num_tokens",
        "1024",
        "--workers",
        "2",
    ]
    assert " ".join(script.build_command(parse(script, *flags))) == (
        "trtllm-build --checkpoint_dir C --output_dir E --max_batch_size 64 --max_input_len 1024 "
        "--max_seq_len 2048 --max_num_tokens 1024 "
        "--speculative_decoding_mode draft_tokens_external --max_draft_len 4 --kv_cache_type paged "
        "--tokens_per_block 32 --workers 2 --log_level info"
    )


@pytest.mark.parametrize("version", ["1.3.0", "1.3.0rc1", "2.0"])
def test_versions_without_the_engine_flow_point_to_dspark_build(script, version):
    with pytest.raises(ConfigError, match=r"no engine flow any more.*dspark build"):
        script.check_version(version)


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", None])
def test_versions_with_the_flow_pass(script, version):
    script.check_version(version)


def test_versions_before_1_0_are_refused(script):
    with pytest.raises(ConfigError, match=r"tensorrt-llm = '0\.20\.0'"):
        script.check_version("0.20.0")


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--max_draft_len 0", "max_draft_len = 0"),
        ("--max_batch_size 65", "max_num_tokens = 512 .* ≥ 520"),
        ("--max_input_len 2048", "max_input_len = 2048"),
    ],
)
def test_impossible_limits_are_refused(script, flags, message):
    with pytest.raises(ConfigError, match=message):
        script.build_command(parse(script, *flags.split()))


def test_the_command_is_printed_and_the_missing_taps_are_said(script, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    arguments = script.build_parser().parse_args(
        ["--checkpoint_dir", str(tmp_path), "--output_dir", "E"]
    )
    assert script.run(arguments, None) == 0
    out, err = capsys.readouterr()
    assert out.startswith("trtllm-build --checkpoint_dir") and "DSpark cannot draft from it" in err
    arguments.run = True
    with pytest.raises(ConfigError, match="not installed here"):
        script.run(arguments, None)


def test_run_writes_the_checkpoint_and_executes_exactly_the_printed_command(
    script, tmp_path, monkeypatch, capfd
):
    """A stand-in for `trtllm-build` on the PATH writes down what it was called with."""
    layouts.write_hf_target(tmp_path / "hf", layouts.TARGET)
    tool, seen = tmp_path / "bin" / "trtllm-build", tmp_path / "seen"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" trtllm-build "$@" > {seen}\nexit 3\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    checkpoint = tmp_path / "a checkpoint"
    flags = ["--model_dir", tmp_path / "hf", "--checkpoint_dir", checkpoint, "--output_dir", "E"]
    arguments = script.build_parser().parse_args([*map(str, flags), "--run"])
    assert script.run(arguments, "1.2.1") == 3
    printed = shlex.split(capfd.readouterr().out.splitlines()[0])
    assert printed == seen.read_text().splitlines() == script.build_command(arguments)
    found, _ = load_trtllm_checkpoint(checkpoint)
    assert found == load_model_config(tmp_path / "hf")


def test_a_version_without_the_flow_writes_nothing(script, tmp_path, monkeypatch, capsys):
    layouts.write_hf_target(tmp_path / "hf", layouts.TARGET)
    monkeypatch.setattr(script, "installed_version", lambda: "1.3.0")
    flags = [
        "--model_dir",
        tmp_path / "hf",
        "--checkpoint_dir",
        tmp_path / "c",
        "--output_dir",
        "E",
    ]
    assert script.main(list(map(str, flags))) == 2
    out, err = capsys.readouterr()
    assert out == "" and "removed after 1.2.x" in err and not (tmp_path / "c").exists()
