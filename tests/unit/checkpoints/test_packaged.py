# SPDX-License-Identifier: Apache-2.0
"""A packaged drafter reaches the model directory, is renewed, and never replaces a user's own."""

from __future__ import annotations

import json

import pytest

from trtllm_dspark.checkpoints import packaged
from trtllm_dspark.checkpoints.packaged import install_packaged_drafter, packaged_drafter


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships one drafter, of version 1."""
    directory = tmp_path / "packaged" / "tiny"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"version": 1}))
    (directory / "drafter.safetensors").write_bytes(b"one")
    monkeypatch.setattr(packaged, "PACKAGED_DIR", tmp_path / "packaged")
    return directory


def test_a_model_without_a_packaged_drafter_stays_without_one(shipped, tmp_path):
    for source in ("other", "/models/tiny", "../packaged/tiny", "tiny.gguf"):
        assert packaged_drafter(source) is None
        assert install_packaged_drafter(source, tmp_path / "model") is None
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("changed", ["config.json", "drafter.safetensors", "calibration.json"])
def test_a_packaged_drafter_is_installed_once_and_renewed_when_any_of_its_files_changes(
    shipped, tmp_path, changed
):
    model = tmp_path / "model"
    installed = install_packaged_drafter("tiny", model)
    assert installed == model / "drafter"
    weights = installed / "drafter.safetensors"
    assert weights.read_bytes() == b"one"
    before = weights.stat().st_mtime_ns
    install_packaged_drafter("tiny", model)
    assert weights.stat().st_mtime_ns == before, "nothing is written twice"
    (shipped / changed).write_bytes(b'{"version": 2}')
    install_packaged_drafter("tiny", model)
    assert (installed / changed).read_bytes() == b'{"version": 2}'
    assert [p.name for p in model.iterdir()] == ["drafter"], "no scratch directory is left"


def test_a_drafter_of_the_users_own_is_kept(shipped, tmp_path):
    own = tmp_path / "model" / "drafter"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert install_packaged_drafter("tiny", tmp_path / "model") == own
    assert [p.name for p in own.iterdir()] == ["config.json"]
