# SPDX-License-Identifier: Apache-2.0
"""Conversion to the unified format loses nothing and never leaves half a drafter behind."""

from __future__ import annotations

import json

import pytest
import torch

from tests.unit.checkpoints import layouts
from trtllm_dspark.checkpoints import convert_drafter, is_unified, load_drafter, write_drafter
from trtllm_dspark.errors import CheckpointError

WRITERS = {
    "zlab": (layouts.write_zlab, None),
    "deepspec": (layouts.write_deepspec, None),
    "speculators": (layouts.write_speculators, None),
    "specforge": (layouts.write_specforge, True),
}


@pytest.mark.parametrize("layout", sorted(WRITERS))
def test_a_converted_drafter_equals_its_original(tmp_path, layout):
    write, label_shift = WRITERS[layout]
    layouts.write_hf_target(tmp_path / "target")
    write(tmp_path / "original")
    before = load_drafter(tmp_path / "original", layouts.TARGET, label_shift=label_shift)
    config = convert_drafter(
        tmp_path / "original", tmp_path / "target", tmp_path / "out", label_shift=label_shift
    )
    after = load_drafter(tmp_path / "out", layouts.TARGET)
    assert is_unified(tmp_path / "out") and not is_unified(tmp_path / "original")
    assert config == before[0] == after[0]
    assert set(before[1]) == set(after[1])
    for name, tensor in before[1].items():
        assert torch.equal(after[1][name], tensor), name


def test_the_unified_directory_has_two_files_with_documented_keys(tmp_path):
    layouts.write_hf_target(tmp_path / "target")
    layouts.write_zlab(tmp_path / "original")
    convert_drafter(tmp_path / "original", tmp_path / "target", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "drafter.safetensors",
    ]
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (data["format"], data["version"]) == ("dspark-drafter", 1)
    assert data["drafter"]["label_shift"] is False
    assert data["drafter"]["target_layer_ids"] == [1, 3]
    assert data["extra"] == {"converted_from": "original"}


def test_copies_that_differ_from_the_targets_tensors_are_refused(tmp_path):
    layouts.write_hf_target(tmp_path / "target")
    layouts.write_deepspec(tmp_path / "own")
    convert_drafter(tmp_path / "own", tmp_path / "target", tmp_path / "a")
    other = layouts.hf_target_tensors(layouts.TARGET, seed=1)
    layouts.write_deepspec(tmp_path / "other", target=other)
    with pytest.raises(CheckpointError, match="differs from the target's"):
        convert_drafter(tmp_path / "other", tmp_path / "target", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_copies_rounded_to_the_drafters_dtype_are_accepted(tmp_path):
    target = layouts.write_hf_target(tmp_path / "target")
    config = layouts.drafter_config()
    tensors = layouts.random_drafter_tensors(config, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = target["lm_head.weight"].to(torch.bfloat16)
    layouts.write_checkpoint(tmp_path / "own", layouts.deepspec_config(config), tensors)
    assert convert_drafter(tmp_path / "own", tmp_path / "target", tmp_path / "out") == config


def test_existing_directories_are_not_overwritten_unless_asked(tmp_path):
    layouts.write_deepspec(tmp_path / "own")
    config, weights = load_drafter(tmp_path / "own", layouts.TARGET)
    write_drafter(tmp_path / "out", config, weights, extra={"step": 1})
    with pytest.raises(CheckpointError, match="pass overwrite"):
        write_drafter(tmp_path / "out", config, weights)
    (tmp_path / "out" / "calibration.json").write_text("{}")
    write_drafter(tmp_path / "out", config, weights, extra={"step": 2}, overwrite=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["extra"] == {"step": 2}
    assert not (tmp_path / "out" / "calibration.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "own"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"choose another directory$"):
        write_drafter(tmp_path / "mine", config, weights, overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    layouts.write_deepspec(tmp_path / "own")
    config, weights = load_drafter(tmp_path / "own", layouts.TARGET)
    del weights["fc.weight"]
    with pytest.raises(CheckpointError, match=r"missing: fc\.weight"):
        write_drafter(tmp_path / "out", config, weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own"]
