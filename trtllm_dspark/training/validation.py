# SPDX-License-Identifier: Apache-2.0
"""Validation by a greedy acceptance walk over the target's own greedy answers.

Every position of an answer is drafted at once; the walk then jumps from anchor to anchor as
decoding would, so that the mean acceptance length is exactly what greedy speculation would commit
per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.scheduling.block_statistics import count_blocks, judge_forecast
from trtllm_dspark.scheduling.calibration import BlockSamples
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.packing import PackedBlocks, TokenSequence, pack_blocks, sample_anchors


@dataclass(frozen=True)
class WalkTable:
    """Blocks that a greedy decoding of the answers would have drafted."""

    accepted: npt.NDArray[np.int64]
    """[B] accepted drafts."""
    num_labels: npt.NDArray[np.int64]
    """[B] slots that have a true next token."""
    confidences: npt.NDArray[np.float64]
    """[B, γ] raw c_k."""
    sequence_ids: npt.NDArray[np.int64]
    """[B] which sequence the block belongs to."""

    def samples(self, num_drafts: int) -> BlockSamples:
        """The blocks as verified up to the end of the answer."""
        labels = np.minimum(self.num_labels, num_drafts).astype(np.int32)
        accepted = np.minimum(self.accepted, labels).astype(np.int32)
        with np.errstate(divide="ignore"):
            logits = np.log(self.confidences) - np.log1p(-self.confidences)
        return BlockSamples(logits.astype(np.float32), labels, accepted)


@torch.no_grad()
def walk_sequences(
    model: DSparkModel,
    target: DenseTarget,
    sequences: Sequence[TokenSequence],
    on_progress: Callable[[int], None] | None = None,
) -> WalkTable:
    """Draft at every answer position of every sequence and walk greedily."""
    parts = []
    for number, sequence in enumerate(sequences):
        anchors = sample_anchors(sequence, len(sequence.token_ids), np.random.default_rng(0))
        packed = pack_blocks([sequence], [anchors], model.config.num_drafts)
        accepted, confidences = _draft_all(model, target, packed)
        visited = walk_anchors(accepted, packed.num_labels, model.config.num_drafts)
        parts.append(
            (
                accepted[visited],
                packed.num_labels[visited],
                confidences[visited],
                np.full(len(visited), number),
            )
        )
        if on_progress is not None:
            on_progress(number + 1)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return WalkTable(*columns)


def _draft_all(
    model: DSparkModel, target: DenseTarget, packed: PackedBlocks
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(accepted [N], confidences [N, γ]) of a block at every anchor."""
    taps, _ = target.run(packed.token_ids, packed.cu_seq_lens)
    hidden = forward_blocks(model, taps, packed)
    anchor_ids = torch.from_numpy(packed.token_ids[packed.anchor_rows])
    drafted = model.draft_from_hidden(anchor_ids, hidden)
    num_drafts = model.config.num_drafts
    rows = np.minimum(packed.slot_rows(num_drafts) + 1, len(packed.token_ids) - 1)
    is_right = drafted.token_ids.numpy() == packed.token_ids[rows]
    is_right &= packed.label_mask(num_drafts)
    accepted = np.cumprod(is_right, axis=1).sum(axis=1)
    return accepted, torch.sigmoid(drafted.confidence_logits).double().numpy()


def walk_anchors(
    accepted: npt.NDArray[np.int64], num_labels: npt.NDArray[np.int64], num_drafts: int
) -> list[int]:
    """Rows visited when each step commits accepted + 1 tokens.

    Row i is a block anchored at answer token i. A last block that ran into the end of the answer
    with everything right so far says nothing about its acceptance length and is left out.
    """
    visited, row = [], 0
    while row < len(accepted):
        if num_labels[row] < num_drafts and accepted[row] >= num_labels[row]:
            break
        visited.append(row)
        row += int(accepted[row]) + 1
    return visited


def summarize_walk(table: WalkTable, num_drafts: int) -> dict[str, Any]:
    """Acceptance length (bonus included), survival@k, conditional@k, ECE and ROC-AUC per slot.

    Slot k is judged on blocks whose first k−1 drafts were accepted, against its own c_k; the joint
    event "first k accepted" is judged against the product of c_1..c_k. Counted as `dspark evaluate`
    counts: the acceptance length is that of blocks with γ tokens still to come.
    """
    samples = table.samples(num_drafts)
    one_group = np.zeros(len(table.accepted), np.int64)
    counts = count_blocks(samples, one_group, 1)
    products = np.cumprod(table.confidences, axis=1)
    own, joint = [], []
    for k in range(1, num_drafts + 1):
        reached, observed = samples.reached(k), samples.observed(k)
        is_hit = samples.accepted_lens >= k
        own.append(judge_forecast(table.confidences[reached, k - 1], is_hit[reached]))
        joint.append(judge_forecast(products[observed, k - 1], is_hit[observed]))
    return {
        "acceptance_length": float(np.nan_to_num(counts.acceptance_length[0])),
        "num_blocks": len(table.accepted),
        "survival": np.nan_to_num(counts.survival[0]).tolist(),
        "conditional": np.nan_to_num(counts.conditional[0]).tolist(),
        "ece": [quality.ece for quality in own],
        "joint_ece": [quality.ece for quality in joint],
        "roc_auc": [quality.roc_auc for quality in own],
    }
