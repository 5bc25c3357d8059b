# SPDX-License-Identifier: Apache-2.0
"""build_scripts/convert_checkpoint.py: both directions, every source, and its errors."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoints import layouts, tiny_gguf
from trtllm_dspark.checkpoints import load_drafter, load_model_config, load_trtllm_checkpoint
from trtllm_dspark.config import load_json

SCRIPT = Path(__file__).resolve().parents[3] / "build_scripts" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model_dir(tmp_path):
    layouts.write_hf_target(tmp_path / "hf", layouts.TARGET, dtype=torch.bfloat16)
    return tmp_path / "hf"


def flags(source: Path, output: Path, *more: str) -> list[str]:
    return ["--model_dir", str(source), "--output_dir", str(output), *more]


def test_there_and_back_gives_the_same_bits(script, model_dir, tmp_path, capsys):
    checkpoint, back = tmp_path / "ckpt", tmp_path / "back"
    assert script.main(flags(model_dir, checkpoint, "--tp_size", "2")) == 0
    assert sorted(p.name for p in checkpoint.glob("rank*")) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    assert load_json(checkpoint / "config.json")["mapping"]["tp_size"] == 2
    assert script.main(flags(checkpoint, back, "--back")) == 0
    assert capsys.readouterr().out.split() == [str(checkpoint), str(back)]
    before, after = (load_file(p / "model.safetensors") for p in (model_dir, back))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_model_config(back) == load_model_config(model_dir)


def test_a_gguf_file_is_a_source_too(script, tmp_path):
    config = tiny_gguf.config()
    tiny_gguf.write_gguf(tmp_path / "m.gguf", config)
    assert script.main(flags(tmp_path / "m.gguf", tmp_path / "ckpt", "--dtype", "float32")) == 0
    found, weights = load_trtllm_checkpoint(tmp_path / "ckpt")
    assert found.num_layers == config.num_layers and found.vocab_size == config.vocab_size
    assert next(iter(weights.values())).dtype is torch.float32


def test_a_drafter_travels_along_with_the_labels_that_are_named(script, model_dir, tmp_path):
    drafter = layouts.drafter_config()
    layouts.write_specforge(tmp_path / "drafter", drafter)
    more = ["--drafter_dir", str(tmp_path / "drafter"), "--labels", "shifted"]
    assert script.main(flags(model_dir, tmp_path / "ckpt", *more)) == 0
    found, _ = load_drafter(tmp_path / "ckpt" / "drafter", load_model_config(model_dir))
    assert found == drafter


@pytest.mark.parametrize(
    "source,more,message",
    [
        ("nowhere", [], "nowhere"),
        ("hf", ["--tp_size", "3"], "3"),
        ("hf", ["--back", "--drafter_dir", "d"], "drafter_dir = 'd' is not allowed"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_exit_code_2(
    script, model_dir, tmp_path, capsys, source, more, message
):
    assert script.main(flags(tmp_path / source, tmp_path / "ckpt", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "ckpt").exists()


def test_it_runs_as_a_script(model_dir, tmp_path):
    command = [sys.executable, str(SCRIPT), *flags(model_dir, tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "ckpt")
