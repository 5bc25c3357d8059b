# SPDX-License-Identifier: Apache-2.0
"""`dspark convert-checkpoint`: both directions, every source, the drafter, and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoints import layouts, tiny_gguf
from trtllm_dspark import cli
from trtllm_dspark.checkpoints import load_drafter, load_model_config, load_trtllm_checkpoint
from trtllm_dspark.checkpoints.gguf_reader import GgufFile
from trtllm_dspark.config import load_json

SCRIPT = Path(__file__).resolve().parents[3] / "build_scripts" / "convert_checkpoint.py"


def convert(*arguments: str) -> int:
    return cli.main(["convert-checkpoint", *arguments])


@pytest.fixture
def model_dir(tmp_path):
    layouts.write_hf_target(tmp_path / "hf", layouts.TARGET, dtype=torch.bfloat16)
    return tmp_path / "hf"


def flags(source: Path, output: Path, *more: str) -> list[str]:
    return ["--model_dir", str(source), "--output_dir", str(output), *more]


def test_there_and_back_gives_the_same_bits(model_dir, tmp_path, capsys):
    checkpoint, back = tmp_path / "ckpt", tmp_path / "back"
    assert convert(*flags(model_dir, checkpoint, "--tp_size", "2")) == 0
    assert sorted(p.name for p in checkpoint.glob("rank*")) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    assert load_json(checkpoint / "config.json")["mapping"]["tp_size"] == 2
    assert convert(*flags(checkpoint, back, "--back")) == 0
    assert capsys.readouterr().out.split() == [str(checkpoint), str(back)]
    before, after = (load_file(p / "model.safetensors") for p in (model_dir, back))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_model_config(back) == load_model_config(model_dir)


def test_a_gguf_file_is_a_source_too(tmp_path):
    config = tiny_gguf.config()
    tiny_gguf.write_gguf(tmp_path / "m.gguf", config)
    assert convert(*flags(tmp_path / "m.gguf", tmp_path / "ckpt", "--dtype", "float32")) == 0
    found, weights = load_trtllm_checkpoint(tmp_path / "ckpt")
    assert found.num_layers == config.num_layers and found.vocab_size == config.vocab_size
    whole = dict(GgufFile(tmp_path / "m.gguf").hf_tensors())
    embedding = whole["model.embed_tokens.weight"]
    assert not torch.equal(embedding.bfloat16().float(), embedding)
    assert torch.equal(weights["embed_tokens.weight"], embedding), "not rounded on the way"


@pytest.fixture
def drafted(model_dir):
    """The model's own drafter, with a calibration beside it."""
    own = layouts.plain_dflash_config()
    layouts.write_zlab(model_dir / "drafter", own)
    (model_dir / "drafter" / "calibration.json").write_text('{"modes": {}}')
    return own


def test_the_models_own_drafter_and_its_calibration_travel_both_ways(drafted, model_dir, tmp_path):
    checkpoint, back = tmp_path / "ckpt", tmp_path / "back"
    assert convert(*flags(model_dir, checkpoint)) == 0
    assert convert(*flags(checkpoint, back, "--back")) == 0
    for place in (checkpoint, back):
        found, _ = load_drafter(place / "drafter", load_model_config(model_dir))
        assert found == drafted
        assert (place / "drafter" / "calibration.json").read_text() == '{"modes": {}}'


def test_no_drafter_travels_where_none_is_asked_for(drafted, model_dir, tmp_path):
    assert convert(*flags(model_dir, tmp_path / "ckpt", "--drafter-dir", "none")) == 0
    assert not (tmp_path / "ckpt" / "drafter").exists()


def test_a_drafter_travels_along_with_the_labels_that_are_named(model_dir, tmp_path):
    drafter = layouts.drafter_config()
    layouts.write_specforge(tmp_path / "drafter", drafter)
    more = ["--drafter_dir", str(tmp_path / "drafter"), "--labels", "shifted"]
    assert convert(*flags(model_dir, tmp_path / "ckpt", *more)) == 0
    found, _ = load_drafter(tmp_path / "ckpt" / "drafter", load_model_config(model_dir))
    assert found == drafter


@pytest.mark.parametrize(
    "source,more,message",
    [
        ("nowhere", [], "nowhere"),
        ("hf", ["--tp_size", "3"], "3"),
        ("hf", ["--back", "--drafter_dir", "d"], "drafter_dir = 'd' is not allowed"),
        ("hf", ["--back", "--tp_size", "2"], "tp_size = 2 is not allowed: it must be left out"),
        ("hf", ["--drafter-dir", "nowhere"], "drafter_dir = 'nowhere' is not a directory"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_exit_code_2(
    model_dir, tmp_path, capsys, source, more, message
):
    assert convert(*flags(tmp_path / source, tmp_path / "ckpt", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "ckpt").exists()


def test_it_runs_as_a_script(model_dir, tmp_path):
    command = [sys.executable, str(SCRIPT), *flags(model_dir, tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "ckpt")
