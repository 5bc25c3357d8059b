# SPDX-License-Identifier: Apache-2.0
"""`dspark train` as a command on a tiny model: whose answers it takes, how it goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.tiny_model import VOCAB, write_tiny_model
from trtllm_dspark.engines.fingerprint import hash_checkpoint
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.training import train
from trtllm_dspark.training.token_store import TokenStoreWriter


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def write_store(directory: Path, model_hash: str) -> str:
    writer = TokenStoreWriter(directory, vocab_size=VOCAB, model_hash=model_hash)
    rng = np.random.default_rng(0)
    for number in range(4):
        writer.append(rng.integers(0, VOCAB, 10), 3, number)
    return str(directory)


def arguments(model_dir: Path, output: Path, *more: str) -> list[str]:
    fixed = "--num-layers 1 --tap-layers 0 --rank 4 --num-drafts 2 --dtype float32 --no-fuse"
    return ["--model-dir", str(model_dir), "--output", str(output), *fixed.split(), *more]


@pytest.mark.parametrize("wrong", ["data", "validation"])
def test_answers_of_another_model_are_refused(model_dir: Path, tmp_path: Path, wrong: str) -> None:
    own = hash_checkpoint(model_dir)
    stores = {
        name: write_store(tmp_path / name, "0ther" if name == wrong else own)
        for name in ("data", "validation")
    }
    options = ("--data", stores["data"], "--validation", stores["validation"])
    with pytest.raises(ConfigError, match="generate-data --model-dir") as refusal:
        train.main(arguments(model_dir, tmp_path / "run", *options))
    for fact in (stores[wrong], "0ther", str(model_dir), own):
        assert fact in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_and_says_so_and_its_cache_names_the_target(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    own = hash_checkpoint(model_dir)
    data, cache = write_store(tmp_path / "data", own), tmp_path / "states"
    options = ["--data", data, "--validation", data, "--blocks-per-step", "4", "--log-every", "1"]
    options += ["--cache-states", str(cache)]
    for num_steps in ("2", "3"):
        command = arguments(model_dir, tmp_path / "run", *options, "--num-steps", num_steps)
        assert train.main(command) == 0
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert provenance["resumed_at_step"] == 2
    assert [entry["resumed_at_step"] for entry in provenance["earlier"]] == [None]
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 3, 3]
    assert json.loads((cache / "meta.json").read_text())["identity"].startswith(own)
    assert (tmp_path / "run" / "best" / "config.json").is_file()
