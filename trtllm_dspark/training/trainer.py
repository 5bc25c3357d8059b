# SPDX-License-Identifier: Apache-2.0
"""The training loop: batches, steps, logs, validation, exports, exact resume.

Everything random in step n is drawn from (seed, n), so the state is weights, moments, the average,
the data cursor and the step number. Knows no command line.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtllm_dspark.checkpoints.drafter_writer import write_drafter
from trtllm_dspark.config import require, to_json_dict
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.training.block_softmax import make_block_softmax
from trtllm_dspark.training.dataset import SequenceStream
from trtllm_dspark.training.objective import LossWeights, Objective, ObjectiveValues
from trtllm_dspark.training.optimizer import OPTIMIZERS, MasterOptimizer, learning_rate_factor
from trtllm_dspark.training.packing import TokenSequence
from trtllm_dspark.training.run_files import RunFiles
from trtllm_dspark.training.state_cache import StateSource
from trtllm_dspark.training.step import StepRunner, draw_batch
from trtllm_dspark.training.validation import summarize_walk, walk_sequences
from trtllm_dspark.training.vocab_loss import DEFAULT_TILE_ROWS, make_kernels
from trtllm_dspark.training.vocabulary import ActiveVocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainConfig:
    """How to train; what to train is a `DrafterConfig`."""

    num_steps: int = 4000
    blocks_per_step: int = 512
    micro_blocks: int = 256
    """Blocks that one worker holds at once."""
    max_anchors: int = 512
    """Anchors per sequence and visit at most."""
    anchor_share: float = 1.0
    """Part of the answer positions taken as anchors per visit."""
    max_len: int = 768
    """Tokens of a sequence at most."""
    optimizer: str = "adamw"
    lr: float = 6e-4
    warmup: float = 0.04
    """Part of the steps."""
    schedule: str = "cosine"
    max_norm: float = 1.0
    ema_decay: float = 0.998
    """Average of the weights that is validated and exported; 0 = the weights themselves."""
    loss: LossWeights = dataclasses.field(default_factory=LossWeights)
    tile_rows: int = DEFAULT_TILE_ROWS
    log_every: int = 10
    validate_every: int = 200
    save_every: int = 100
    max_minutes: float = 0.0
    """Stop (resumably) after this time; 0 = no limit."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "num_steps", self.num_steps, "≥ 1")
        require(self.blocks_per_step >= 1, "blocks_per_step", self.blocks_per_step, "≥ 1")
        require(0.0 < self.anchor_share <= 1.0, "anchor_share", self.anchor_share, "in (0, 1]")
        require(
            self.schedule in ("cosine", "linear", "constant"),
            "schedule",
            self.schedule,
            "cosine, linear or constant",
        )
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, " or ".join(OPTIMIZERS))
        require(0.0 <= self.ema_decay < 1.0, "ema_decay", self.ema_decay, "in [0, 1)")


class Trainer:
    """Trains one drafter. `model` is changed in place; `fuse` compiles what runs per element."""

    def __init__(
        self,
        config: TrainConfig,
        model: DSparkModel,
        target: DenseTarget,
        sources: Sequence[StateSource],
        stream: SequenceStream,
        validation: Sequence[TokenSequence],
        files: RunFiles,
        *,
        fuse: bool = False,
        vocabulary: ActiveVocabulary | None = None,
    ) -> None:
        self.config, self.model, self.stream, self.files = config, model, stream, files
        self.target, self.validation = target, list(validation)
        prepare_for_training_(model)
        head = target.model.lm_head.weight
        objective = Objective(
            model, head, config.loss, make_kernels(fuse), config.tile_rows, vocabulary
        )
        self.runner = StepRunner(model, sources, objective, make_block_softmax(fuse))
        self.optimizer = MasterOptimizer(
            model, lr=config.lr, ema_decay=config.ema_decay, optimizer=config.optimizer
        )
        self.best = float("-inf")
        self._blocks_done = 0

    @property
    def step_number(self) -> int:
        """Steps done."""
        return self.optimizer.num_steps

    def resume(self) -> bool:
        """Take over a saved state, if there is one."""
        state = self.files.load_state()
        if state is None:
            return False
        if state["drafter"] != to_json_dict(self.model.config):
            raise ConfigError(
                f"{self.files.state_path} belongs to a drafter of another shape: choose another "
                "output directory or the same options"
            )
        if not self.optimizer.can_load(state["optimizer"]):
            raise ConfigError(
                f"{self.files.state_path} was not trained with optimizer = "
                f"{self.config.optimizer!r}: choose another output directory or its optimizer"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.restore(state["stream"])
        self.best, self._blocks_done = float(state["best"]), int(state["blocks_done"])
        self.files.trim_log(self.step_number)
        return True

    def save(self) -> None:
        """Write the resumable state."""
        self.files.save_state(
            {
                "drafter": to_json_dict(self.model.config),
                "optimizer": self.optimizer.state_dict(),
                "stream": self.stream.state(),
                "best": self.best,
                "blocks_done": self._blocks_done,
            }
        )

    def run(
        self,
        provenance: dict[str, Any] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the last step, the time limit or `should_stop`; leave a resumable state."""
        config = self.config
        started = mark = time.monotonic()
        sums: ObjectiveValues | None = None
        while self.step_number < config.num_steps and not should_stop():
            values, norm = self.train_step()
            sums = values if sums is None else sums + values
            step = self.step_number
            if step % config.log_every == 0:
                now = time.monotonic()
                self._log_losses(sums, norm, now - mark)
                sums, mark = None, now
            if step % config.validate_every == 0 or step == config.num_steps:
                self.validate(provenance)
                mark = time.monotonic()
            if step % config.save_every == 0:
                self.save()
            if config.max_minutes and time.monotonic() - started > 60 * config.max_minutes:
                break
        logger.info("stopped after step %d", self.step_number)
        self.save()
        self.export(self.files.last_dir, provenance or {})

    def train_step(self) -> tuple[ObjectiveValues, float]:
        """One step; returns its loss sums and the gradient norm before clipping."""
        config, step = self.config, self.step_number
        batch = draw_batch(
            self.stream,
            config.blocks_per_step,
            self.model.config.num_drafts,
            np.random.default_rng((config.seed, step)),
            max_anchors=config.max_anchors,
            share=config.anchor_share,
            micro_blocks=config.micro_blocks,
        )
        grads, values = self.runner.run(batch, (config.seed, step))
        factor = learning_rate_factor(step, config.num_steps, config.warmup, config.schedule)
        norm = self.optimizer.step(grads, factor, config.max_norm)
        self._blocks_done += values.num_blocks
        return values, norm

    def _log_losses(self, sums: ObjectiveValues, norm: float, seconds: float) -> None:
        config, weight = self.config, sums.weight
        ce, tv, confidence = sums.ce / weight, sums.tv / weight, sums.confidence / weight
        record = {
            "step": self.step_number,
            "epoch": self.stream.epoch,
            "blocks": self._blocks_done,
            "loss": config.loss.ce * ce + config.loss.tv * tv + config.loss.confidence * confidence,
            "ce": ce,
            "tv": tv,
            "confidence": confidence,
            "acceptance_1": sums.first_acceptance / sums.num_blocks,
            "grad_norm": norm,
            "lr": config.lr
            * learning_rate_factor(
                self.step_number - 1, config.num_steps, config.warmup, config.schedule
            ),
            "blocks_per_s": sums.num_blocks / max(seconds, 1e-9),
        }
        self.files.log(record)
        logger.info(
            "step %d loss %.3f ce %.3f tv %.3f acceptance@1 %.3f %.0f blocks/s",
            *(record[k] for k in ("step", "loss", "ce", "tv", "acceptance_1", "blocks_per_s")),
        )

    def validate(self, provenance: dict[str, Any] | None = None) -> dict[str, Any]:
        """Walk the validation answers with the averaged weights; export if better than ever."""
        if not self.validation:
            self.export(self.files.best_dir, provenance or {})
            return {}
        self.optimizer.write_(self.optimizer.weights_to_export())
        try:
            table = walk_sequences(self.model, self.target, self.validation)
        finally:
            self.optimizer.write_(self.optimizer.masters)
        summary = summarize_walk(table, self.model.config.num_drafts)
        self.files.log(
            {"step": self.step_number, "blocks": self._blocks_done, "validation": summary}
        )
        length = float(summary["acceptance_length"])
        logger.info(
            "step %d validation acceptance length %.3f survival %s",
            self.step_number,
            length,
            [round(s, 3) for s in summary["survival"]],
        )
        if length > self.best:
            self.best = length
            self.export(self.files.best_dir, {**(provenance or {}), "validation": summary})
        return summary

    def export(self, directory: Any, extra: dict[str, Any]) -> None:
        """Write the averaged weights as a unified drafter in bfloat16."""
        weights = {n: w.to(torch.bfloat16) for n, w in self.optimizer.weights_to_export().items()}
        extra = {**extra, "step": self.step_number, "blocks": self._blocks_done}
        write_drafter(directory, self.model.config, weights, extra=extra, overwrite=True)


def prepare_for_training_(model: DSparkModel) -> None:
    """Let every own weight take part; W1 stays float32: its sparse gradients must add up."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if model.markov is not None:
        model.markov.w1.float()
