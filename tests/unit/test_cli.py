# SPDX-License-Identifier: Apache-2.0
"""The command table: every entry exists, explains itself, and errors become exit codes."""

from __future__ import annotations

import importlib
import json

import pytest

from trtllm_dspark import __version__, cli
from trtllm_dspark.config import SystemConfig, from_json_dict, to_json_dict
from trtllm_dspark.errors import ConfigError, EngineError


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_main_and_a_help_with_an_example(name, capsys):
    module = importlib.import_module(cli.COMMANDS[name].module)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert "example: dspark" in " ".join(capsys.readouterr().out.split())


def test_no_argument_lists_every_command(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_an_unknown_command_is_named_and_exits_2(capsys):
    assert cli.main(["frobnicate"]) == 2
    assert "'frobnicate' is not a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error,code",
    [
        (ConfigError("bad grid"), 2),
        (EngineError("no device"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_expected_errors_become_one_line_and_an_exit_code(error, code, monkeypatch, capsys):
    class Module:
        @staticmethod
        def main(argv):
            raise error

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Module)
    assert cli.main(["generate"]) == code
    err = capsys.readouterr().err
    assert err.startswith("dspark generate: ") and err.count("\n") == 1


def test_a_missing_model_directory_is_a_configuration_error(tmp_path, capsys):
    assert cli.main(["generate", "--model-dir", str(tmp_path / "none"), "hello"]) == 2
    assert "none" in capsys.readouterr().err


def test_a_system_configuration_survives_json():
    config = SystemConfig(model_dir="m", max_seq_len=77)
    text = json.dumps(to_json_dict(config))
    assert from_json_dict(SystemConfig, json.loads(text)) == config


def test_unknown_keys_of_a_configuration_are_refused_by_name():
    with pytest.raises(ConfigError, match="max_seq_length"):
        from_json_dict(SystemConfig, {"max_seq_length": 5})
