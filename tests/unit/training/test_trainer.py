# SPDX-License-Identifier: Apache-2.0
"""Training as a whole on a toy language: it learns, resumes exactly, logs and exports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.unit.training.toy import make_drafter, make_target, write_answers
from trtllm_dspark.checkpoints.drafter_reader import load_drafter
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.training.dataset import SequenceStream, load_sequence
from trtllm_dspark.training.objective import LossWeights
from trtllm_dspark.training.optimizer import OPTIMIZERS
from trtllm_dspark.training.run_files import RunFiles
from trtllm_dspark.training.state_cache import OnTheFly
from trtllm_dspark.training.trainer import TrainConfig, Trainer
from trtllm_dspark.training.warm_start import initialize_

CONFIG = TrainConfig(
    num_steps=200,
    blocks_per_step=64,
    micro_blocks=32,
    lr=1e-2,
    ema_decay=0.9,
    log_every=10,
    validate_every=50,
    save_every=1000,
    max_len=64,
)


def make_trainer(
    tmp_path: Path,
    config: TrainConfig,
    *,
    num_workers: int = 1,
    run: str = "run",
    **changes: object,
) -> Trainer:
    target = make_target()
    store = write_answers(tmp_path / f"data-{run}", 40, seed=1)
    unseen = write_answers(tmp_path / f"validation-{run}", 16, seed=2)
    model = make_drafter(target, **changes)
    initialize_(model, target, torch.Generator().manual_seed(0))
    dense = DenseTarget(target, model.config.target_layer_ids)
    return Trainer(
        config,
        model,
        dense,
        [OnTheFly(DenseTarget(target, dense.tap_layers)) for _ in range(num_workers)],
        SequenceStream([store], config.seed, config.max_len),
        [load_sequence(unseen, row, config.max_len) for row in range(len(unseen))],
        RunFiles(tmp_path / run),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_type": "rnn"},
        {"head_type": "gated", "label_shift": False, "markov_rank": 32},
        {"head_type": "none", "markov_rank": 0, "confidence_with_markov": False},
    ],
    ids=["markov", "rnn", "gated-unshifted", "none"],
)
def test_a_drafter_learns_a_deterministic_language(tmp_path: Path, changes: dict) -> None:
    trainer = make_trainer(tmp_path, CONFIG, **changes)
    before = trainer.validate()
    trainer.run()
    after = trainer.validate()
    assert before["survival"][0] < 0.2
    assert after["survival"][0] > 0.9
    if trainer.model.markov is not None:
        assert after["acceptance_length"] > 3.5
    assert after["joint_ece"][0] < 0.15


def test_muon_learns_a_deterministic_language(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dataclasses.replace(CONFIG, optimizer="muon"))
    trainer.run()
    assert trainer.validate()["survival"][0] > 0.9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_very_same_weights(tmp_path: Path, optimizer: str) -> None:
    short = dataclasses.replace(CONFIG, num_steps=8, validate_every=1000, optimizer=optimizer)
    whole = make_trainer(tmp_path, short, run="whole")
    whole.run()
    first = make_trainer(tmp_path, short, run="halves")
    for _ in range(5):
        first.train_step()
    first.save()
    second = make_trainer(tmp_path, short, run="halves")
    assert second.resume()
    assert second.step_number == 5
    second.run()
    for name, weight in whole.optimizer.masters.items():
        assert torch.equal(weight, second.optimizer.masters[name]), name
    for name, weight in whole.optimizer.ema.items():
        assert torch.equal(weight, second.optimizer.ema[name]), name


def test_the_number_of_workers_does_not_change_a_step(tmp_path: Path) -> None:
    sampled = dataclasses.replace(CONFIG, loss=LossWeights(sample_slots=True))
    one = make_trainer(tmp_path, sampled, run="one")
    two = make_trainer(tmp_path, sampled, run="two", num_workers=2)
    for _ in range(3):
        one.train_step()
        two.train_step()
    for name, weight in one.optimizer.masters.items():
        assert torch.equal(weight, two.optimizer.masters[name]), name


def test_the_log_and_the_exported_drafter_say_how_they_came_about(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dataclasses.replace(CONFIG, num_steps=20, validate_every=20))
    trainer.run({"provenance": trainer.files.write_provenance({"data_sha256": "x"})})
    lines = [json.loads(line) for line in trainer.files.log_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 20]
    assert {"ce", "tv", "confidence", "blocks_per_s", "lr"} <= set(lines[0])
    assert {"survival", "ece", "roc_auc", "acceptance_length"} <= set(lines[-1]["validation"])
    config, weights = load_drafter(trainer.files.best_dir, trainer.target.model.config)
    assert config == trainer.model.config
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    extra = json.loads((trainer.files.best_dir / "config.json").read_text())["extra"]
    assert extra["provenance"]["data_sha256"] == "x"
    assert "git_revision" in extra["provenance"]


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, CONFIG).save()
    other = make_trainer(tmp_path, dataclasses.replace(CONFIG, optimizer="muon"))
    with pytest.raises(ConfigError, match="not trained with optimizer = 'muon'"):
        other.resume()


def test_a_state_of_another_drafter_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, CONFIG).save()
    other = make_trainer(tmp_path, CONFIG, num_drafts=2)
    with pytest.raises(ConfigError, match="another shape"):
        other.resume()
