# SPDX-License-Identifier: Apache-2.0
"""Engine directories: what is read is what was written, and damage is named."""

from __future__ import annotations

import dataclasses
import json

import pytest

from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.engine_dir import (
    EngineFacts,
    load_engine_dir,
    write_config,
    write_manifest,
)
from trtllm_dspark.errors import ConfigError, EngineError

FACTS = EngineFacts(
    backend="tensorrt_rtx",
    dtype="bfloat16",
    limits=EngineLimits((1, 2, 4), (1, 2), 7, 7, 64, 8, 20),
    tap_layers=(-1, 0),
    tap_width=512,
    drafter=DrafterConfig(target_layer_ids=(-1, 0)),
    compute_capabilities=("8.9",),
    backend_version="1.7.1",
)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "rank0.engine").write_bytes(b"target")
    (tmp_path / "drafter.engine").write_bytes(b"drafter")
    write_config(tmp_path, FACTS, {"architecture": "LlamaForCausalLM"}, {"max_batch_size": 2})
    write_manifest(tmp_path, FACTS)
    return tmp_path


def test_a_directory_is_read_as_it_was_written(directory):
    loaded = load_engine_dir(directory, verify=True)
    assert loaded.facts == FACTS
    assert loaded.fingerprint == FACTS.fingerprint
    assert loaded.build_config == {"max_batch_size": 2}
    config = json.loads((directory / "config.json").read_text())
    assert set(config) == {"version", "pretrained_config", "build_config", "dspark"}


def test_the_manifest_lists_every_other_file_with_size_and_digest(directory):
    files = json.loads((directory / "manifest.json").read_text())["files"]
    assert set(files) == {"config.json", "rank0.engine", "drafter.engine"}
    assert files["rank0.engine"]["bytes"] == 6


def test_what_may_be_measured_again_later_is_not_part_of_the_manifest(directory):
    (directory / "calibration.json").write_text("{}")
    write_manifest(directory, FACTS)
    (directory / "calibration.json").write_text('{"temperatures": []}')
    assert load_engine_dir(directory, verify=True).facts == FACTS


def test_a_cut_or_missing_file_is_named_with_both_sizes(directory):
    (directory / "rank0.engine").write_bytes(b"targ")
    with pytest.raises(EngineError, match=r"rank0.engine: found 4 bytes, the manifest says 6"):
        load_engine_dir(directory)
    (directory / "rank0.engine").unlink()
    with pytest.raises(EngineError, match=r"rank0.engine: found no file"):
        load_engine_dir(directory)


def test_changed_bytes_of_the_same_length_are_found_when_verifying(directory):
    (directory / "drafter.engine").write_bytes(b"drAfter")
    load_engine_dir(directory)
    with pytest.raises(EngineError, match="sha256"):
        load_engine_dir(directory, verify=True)


def test_files_of_two_builds_do_not_mix(directory):
    other = dataclasses.replace(FACTS, dtype="float16")
    write_config(directory, other, {}, {})
    with pytest.raises(EngineError, match="files of two builds are mixed"):
        load_engine_dir(directory)


def test_a_stock_engine_directory_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"version": "1.2.0", "pretrained_config": {}}')
    with pytest.raises(ConfigError, match="no 'dspark' section"):
        load_engine_dir(tmp_path)


def test_another_format_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    config["dspark"]["format"] = 99
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="format = 99"):
        load_engine_dir(directory)


def test_separate_engines_are_one_file_per_rung():
    separate = dataclasses.replace(FACTS, separate_engines=True)
    assert separate.target_files() == [f"rank0.rung{n}.engine" for n in (1, 2, 4)]
    assert dataclasses.replace(FACTS, backend="torch").target_files() == []


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"compute_capabilities": ("8.6",)},
        {"backend_version": "1.7.2"},
        {"checkpoint_hash": "x"},
        {"limits": dataclasses.replace(FACTS.limits, rungs=(1, 2))},
    ],
)
def test_a_fingerprint_changes_with_every_fact(change):
    assert dataclasses.replace(FACTS, **change).fingerprint != FACTS.fingerprint
