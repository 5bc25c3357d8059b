# SPDX-License-Identifier: Apache-2.0
"""The `trtllm-build` adapter, by golden commands."""

from __future__ import annotations

import os
import shlex

import pytest

from tests.unit.checkpoints import layouts, tiny_gguf
from trtllm_dspark import cli
from trtllm_dspark import trtllm_build_command as script
from trtllm_dspark.checkpoints import load_model_config, load_trtllm_checkpoint
from trtllm_dspark.errors import ConfigError


def parse(*extra):
    return script.build_parser().parse_args(["--checkpoint_dir", "C", "--output_dir", "E", *extra])


def test_the_command_of_the_defaults_is_exact():
    assert " ".join(script.build_command(parse())) == (
        "trtllm-build --checkpoint_dir C --output_dir E --max_batch_size 16 --max_input_len 1024 "
        "--max_seq_len 2048 --max_num_tokens 512 "
        "--speculative_decoding_mode draft_tokens_external --max_draft_len 7 "
        "--kv_cache_type paged --use_paged_context_fmha enable --tokens_per_block 32 --workers 1 "
        "--log_level info"
    )


def test_the_command_of_other_limits_is_exact():
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
    assert " ".join(script.build_command(parse(*flags))) == (
        "trtllm-build --checkpoint_dir C --output_dir E --max_batch_size 64 --max_input_len 1024 "
        "--max_seq_len 2048 --max_num_tokens 1024 "
        "--speculative_decoding_mode draft_tokens_external --max_draft_len 4 --kv_cache_type paged "
        "--use_paged_context_fmha enable --tokens_per_block 32 --workers 2 --log_level info"
    )


@pytest.mark.parametrize("version", ["1.3.0", "1.3.0rc1", "2.0"])
def test_versions_without_the_engine_flow_point_to_dspark_build(version):
    with pytest.raises(ConfigError, match=r"no engine flow any more.*dspark build"):
        script.check_version(version)


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", None])
def test_versions_with_the_flow_pass(version):
    script.check_version(version)


def test_versions_before_1_0_are_refused():
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
def test_impossible_limits_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        script.build_command(parse(*flags.split()))


def test_the_command_is_printed_and_the_missing_taps_are_said(tmp_path, capsys):
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
    tmp_path, monkeypatch, capfd
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


def test_run_without_the_tool_on_the_path_says_so(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("PATH", str(tmp_path))
    flags = ["--checkpoint_dir", str(tmp_path), "--output_dir", "E", "--run"]
    with pytest.raises(ConfigError, match=r"1\.2\.1 is installed but trtllm-build is not on"):
        script.run(script.build_parser().parse_args(flags), "1.2.1")


def test_the_checkpoint_of_a_gguf_file_is_written_for_as_many_ranks_as_asked(tmp_path, capsys):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    flags = ["--model-dir", tmp_path / "m.gguf", "--checkpoint-dir", tmp_path / "c"]
    more = ["--output-dir", "E", "--tp-size", "2", "--dtype", "float16", "--workers", "2"]
    assert cli.main(["trtllm-build", *map(str, flags), *more]) == 0
    assert "--workers 2" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "c").glob("rank*")) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]


def test_a_version_without_the_flow_writes_nothing(tmp_path, monkeypatch, capsys):
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
    assert cli.main(["trtllm-build", *map(str, flags)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "removed after 1.2.x" in err and not (tmp_path / "c").exists()
