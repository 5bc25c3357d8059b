# SPDX-License-Identifier: Apache-2.0
"""Filling templates behaves as upstream's tool does, its escapes and defaults included."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.serving.template import fill_template, main, parse_substitutions, template_keys


def test_given_keys_are_filled_and_others_stay() -> None:
    assert fill_template('"${a}" ${b}', {"a": "1"}) == '"1" ${b}'


def test_queue_keys_have_upstream_s_defaults() -> None:
    assert fill_template("${max_queue_size} ${max_queue_delay_microseconds}", {}) == "0 0"
    assert fill_template("${max_queue_size}", {"max_queue_size": "5"}) == "5"


def test_a_key_that_the_template_lacks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no key 'c'.*unfilled keys are a, b"):
        fill_template("${a} ${b}", {"c": "1"})


def test_colons_and_commas_in_values_are_escaped() -> None:
    assert parse_substitutions(r"a:/x\:y,b:1\,2") == {"a": "/x:y", "b": "1,2"}


def test_an_empty_value_is_a_value() -> None:
    assert fill_template("[${a}]", parse_substitutions("a:")) == "[]"


@pytest.mark.parametrize("text", ["a", "a:b:c", ""])
def test_what_is_not_key_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not key:value"):
        parse_substitutions(text)


def test_the_tool_prints_or_changes_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("name: ${a}")
    assert main([str(file), "a:1"]) == 0
    assert capsys.readouterr().out == "name: 1\n" and file.read_text() == "name: ${a}"
    assert main(["-i", str(file), "a:1"]) == 0
    assert file.read_text() == "name: 1"


def test_the_tool_says_what_is_wrong_and_returns_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("name: ${a}")
    assert main(["-i", str(file), "b:1"]) == 2
    assert "no key 'b'" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "b:1"]) == 2


def test_keys_are_listed_once_and_sorted() -> None:
    assert template_keys("${b} ${a} ${b}") == ("a", "b")
