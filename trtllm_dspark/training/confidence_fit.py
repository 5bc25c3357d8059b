# SPDX-License-Identifier: Apache-2.0
"""The confidence head of a finished drafter, fitted alone: a convex problem with one answer.

Collects, by teacher forcing on the target's answers, what the head sees of every slot that a greedy
draft reaches, and what becomes of that slot; then runs a logistic regression. Knows models and
sequences, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from trtllm_dspark.config import require
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.ops.markov import peak_log_odds
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.packing import PackedBlocks, TokenSequence, pack_blocks, sample_anchors

MAX_STEPS = 200


@dataclass(frozen=True)
class FitConfig:
    """How to fit."""

    anchor_share: float = 0.3
    """Part of the answer positions taken as anchors."""
    sampled_share: float = 0.5
    """Weight of acceptance at temperature 1 (1 − TV); the rest is the greedy match."""
    decay: float = 2.0
    """Slot k weighs exp(−(k−1)/decay)."""
    ridge: float = 1e-3
    """Penalty on the squares of the weights, features being of unit spread."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(0.0 < self.anchor_share <= 1.0, "anchor_share", self.anchor_share, "in (0, 1]")
        require(0.0 <= self.sampled_share <= 1.0, "sampled_share", self.sampled_share, "in [0, 1]")
        require(self.decay > 0.0, "decay", self.decay, "> 0")
        require(self.ridge >= 0.0, "ridge", self.ridge, "≥ 0")


@dataclass(frozen=True)
class ConfidenceEvents:
    """n slots that were reached: all drafts before them were right."""

    features: torch.Tensor
    """[n, F] float32: what the confidence head multiplies with its weight."""
    slots: npt.NDArray[np.int64]
    """[n] 0-based"""
    matches: npt.NDArray[np.bool_]
    """[n] the greedy draft is the target's greedy token."""
    survivals: npt.NDArray[np.float32]
    """[n] 1 − TV(q, p) at temperature 1: how likely a sampled draft is accepted."""


@torch.no_grad()
def collect_events(
    model: DSparkModel,
    target: DenseTarget,
    sequences: Sequence[TokenSequence],
    config: FitConfig,
    on_progress: Callable[[int], None] | None = None,
) -> ConfidenceEvents:
    """The reached slots of sampled anchors of these sequences."""
    rng = np.random.default_rng(config.seed)
    parts: list[ConfidenceEvents] = []
    for number, sequence in enumerate(sequences, start=1):
        anchors = sample_anchors(sequence, len(sequence.token_ids), rng, config.anchor_share)
        if len(anchors):
            packed = pack_blocks([sequence], [anchors], model.config.num_drafts)
            parts += _events(model, target, packed)
        if on_progress is not None:
            on_progress(number)
    return ConfidenceEvents(
        torch.cat([p.features for p in parts]),
        np.concatenate([p.slots for p in parts]),
        np.concatenate([p.matches for p in parts]),
        np.concatenate([p.survivals for p in parts]),
    )


def _events(
    model: DSparkModel, target: DenseTarget, packed: PackedBlocks
) -> list[ConfidenceEvents]:
    """One record per slot."""
    confidence, lm_head = model.confidence, target.model.lm_head
    assert confidence is not None
    taps, last = target.run(packed.token_ids, packed.cu_seq_lens)
    hidden = forward_blocks(model, taps, packed)
    num_drafts = model.config.num_drafts
    rows, has_label = packed.slot_rows(num_drafts), packed.label_mask(num_drafts)
    token_ids = torch.from_numpy(packed.token_ids)
    embedded = features = None
    if model.markov is not None:
        embedded = model.markov.embed(token_ids[torch.from_numpy(rows)]).to(hidden.dtype)
        features = model.markov.scan(embedded, hidden)
    events = []
    reached = np.arange(packed.num_blocks)
    for slot in range(num_drafts):
        reached = reached[has_label[reached, slot]]
        if not len(reached):
            break
        h, at = hidden[reached, slot], torch.from_numpy(rows[reached, slot])
        logits = lm_head(h).float()
        if model.markov is not None and features is not None:
            logits += model.markov.w2(features[reached, slot]).float()
        wanted = lm_head(last[at]).float()
        drafts = logits.argmax(dim=-1)
        distance = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
        seen = None if embedded is None else embedded[reached, slot]
        events.append(
            ConfidenceEvents(
                confidence.join(h, seen, peak_log_odds(logits)),
                np.full(len(reached), slot),
                (drafts == wanted.argmax(dim=-1)).numpy(),
                (1.0 - 0.5 * distance).clamp(0.0, 1.0).numpy(),
            )
        )
        reached = reached[(drafts == token_ids[at + 1]).numpy()]
    return events


def fit_head(events: ConfidenceEvents, config: FitConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [1, F] and bias [1] (float32) of the weighted logistic regression."""
    share = config.sampled_share
    wanted = (1.0 - share) * events.matches + share * events.survivals
    weights = np.exp(-events.slots / config.decay)
    labels = torch.from_numpy(wanted.astype(np.float32))
    importance = torch.from_numpy((weights / weights.sum()).astype(np.float32))
    center, spread = events.features.mean(0), events.features.std(0).clamp_min(1e-6)
    inputs = (events.features - center) / spread
    weight = torch.zeros(inputs.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=MAX_STEPS, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        solver.zero_grad()
        terms = functional.binary_cross_entropy_with_logits(
            inputs @ weight + bias, labels, reduction="none"
        )
        total = (importance * terms).sum() + config.ridge * weight.square().sum()
        total.backward()
        return total

    solver.step(loss)
    with torch.no_grad():
        scaled = weight / spread
        return scaled[None], bias - (scaled * center).sum()
