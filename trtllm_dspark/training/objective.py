# SPDX-License-Identifier: Apache-2.0
"""The training objective of one packed batch: CE, TV and confidence losses, and their gradients.

L = Σ_k w_k (ce·CE_k + tv·Σ|p_d−p_t| + confidence·BCE(c_k, 1 − ½Σ|p_d−p_t|)) / Σ w_k with weights
w_k = exp(−(k−1)/decay) and teacher forcing. Knows hidden states and heads, not how they were
computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.training.packing import PackedBlocks
from trtllm_dspark.training.vocab_loss import (
    DEFAULT_TILE_ROWS,
    VocabKernels,
    VocabLossResult,
    compute_vocab_loss,
    make_targets,
)
from trtllm_dspark.training.vocabulary import ActiveVocabulary, Selection


@dataclass(frozen=True)
class LossWeights:
    """Defaults are DSpark's (reference configuration)."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    """Slot k weighs exp(−(k−1)/decay)."""
    sample_slots: bool = False
    """Keep slot k with probability w_k and weight 1 instead: the same expectation, fewer rows."""

    def of_slots(self, num_drafts: int) -> np.ndarray:
        """[γ] float64, the first is 1."""
        return np.exp(-np.arange(num_drafts) / self.decay)


@dataclass(frozen=True)
class ObjectiveValues:
    """Sums over rows, each row with its slot weight, so that batches can be added up."""

    weight: float
    """Σ of the row weights before normalisation."""
    ce: float
    tv: float
    confidence: float
    num_blocks: int
    first_acceptance: float
    """Σ over blocks of 1 − TV/2 at slot 1."""

    def __add__(self, other: ObjectiveValues) -> ObjectiveValues:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return ObjectiveValues(*(a + b for a, b in pairs))


class Objective:
    """Holds what does not change between batches: frozen head, kernels, buffers."""

    def __init__(
        self,
        model: DSparkModel,
        lm_head_weight: torch.Tensor,
        weights: LossWeights,
        kernels: VocabKernels,
        tile_rows: int = DEFAULT_TILE_ROWS,
        vocabulary: ActiveVocabulary | None = None,
    ) -> None:
        self.model, self.weights = model, weights
        self.kernels, self.tile_rows = kernels, tile_rows
        self.vocabulary = vocabulary
        rank = 0 if model.markov is None else model.markov.rank
        vocab, self._num_frozen = lm_head_weight.shape
        self._joint = lm_head_weight.new_zeros(vocab, self._num_frozen + rank)
        self._joint[:, : self._num_frozen] = lm_head_weight
        self._columns = _Columns(self._joint, lm_head_weight, None)
        self._full = self._columns

    def refresh(self, batch: Sequence[PackedBlocks], rng: np.random.Generator) -> None:
        """Take over W2 as it is now and choose the columns of the step; before its gradients."""
        if self.model.markov is not None:
            self._joint[:, self._num_frozen :] = self.model.markov.w2.weight.detach()
        if self.vocabulary is None:
            return
        labels = np.concatenate([packed.token_ids for packed in batch])
        selection = self.vocabulary.select(labels, rng)
        ids = torch.from_numpy(selection.ids)
        joint = self._full.joint[ids]
        head = joint[:, : self._num_frozen].contiguous()
        self._columns = _Columns(joint, head, selection)

    def total_weight(self, packed: PackedBlocks) -> float:
        """Σ of slot weights over all labelled slots; a step is normalised by the sum of these."""
        num_drafts = self.model.config.num_drafts
        return float((packed.label_mask(num_drafts) @ self.weights.of_slots(num_drafts)).sum())

    def gradients(
        self,
        hidden: torch.Tensor,
        target_hidden: torch.Tensor,
        packed: PackedBlocks,
        normalizer: float,
        rng: np.random.Generator,
    ) -> tuple[dict[str, torch.Tensor], ObjectiveValues]:
        """Gradients by parameter name (parameters' dtype; W2's in float32), and the sums.

        hidden [N, γ, H] of the drafter with its graph, target_hidden [C, H] after the target's
        final norm for every packed row.
        """
        slots, weights = self._choose_rows(packed, rng)
        row_weights = weights / normalizer
        previous = torch.from_numpy(packed.slot_rows(hidden.shape[1]))
        token_ids = torch.from_numpy(packed.token_ids)
        rows = hidden.flatten(0, 1)[slots]
        inputs, embedded = rows, None
        if self.model.markov is not None:
            embedded = self.model.markov.embed(token_ids[previous]).to(hidden.dtype)
            features = self.model.markov.scan(embedded, hidden).flatten(0, 1)[slots]
            embedded = embedded.flatten(0, 1)[slots]
            inputs = torch.cat((rows, features), dim=-1)
        target_rows = previous.view(-1)[slots]
        result = self._vocab_loss(
            inputs.detach(), target_hidden, target_rows, token_ids, row_weights
        )
        outputs, output_grads = [inputs], [result.grad_inputs]
        bce = torch.zeros(())
        if self.model.confidence is not None:
            losses = functional.binary_cross_entropy_with_logits(
                self.model.confidence(rows, embedded),
                (1.0 - 0.5 * result.tv).clamp(0.0, 1.0),
                reduction="none",
            )
            bce = (losses * row_weights).sum()
            outputs.append(bce * self.weights.confidence)
            output_grads.append(torch.ones(()))
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(outputs, list(named.values()), output_grads, allow_unused=True)
        grads = {n: g for n, g in zip(named, found, strict=True) if g is not None}
        if result.grad_weight is not None:
            grads["markov.w2.weight"] = self._columns.spread(result.grad_weight.t())
        first = slots % hidden.shape[1] == 0
        return grads, ObjectiveValues(
            weight=float(weights.sum()),
            ce=float((weights * result.ce).sum()),
            tv=float((weights * result.tv).sum()),
            confidence=float(bce.detach()) * normalizer,
            num_blocks=packed.num_blocks,
            first_acceptance=float((1.0 - 0.5 * result.tv[first]).sum()),
        )

    def _choose_rows(
        self, packed: PackedBlocks, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(flat indices into [N·γ], slot weights); slot 1 is always among them."""
        num_drafts = self.model.config.num_drafts
        mask = packed.label_mask(num_drafts)
        weights = np.broadcast_to(self.weights.of_slots(num_drafts), mask.shape)
        if self.weights.sample_slots:
            mask = mask & (rng.random(mask.shape) < weights)
            weights = np.ones(mask.shape)
        slots = np.flatnonzero(mask)
        chosen = weights.reshape(-1)[slots].astype(np.float32)
        return torch.from_numpy(slots), torch.from_numpy(chosen)

    def _vocab_loss(
        self,
        inputs: torch.Tensor,
        target_hidden: torch.Tensor,
        target_rows: torch.Tensor,
        token_ids: torch.Tensor,
        row_weights: torch.Tensor,
    ) -> VocabLossResult:
        distinct, rows = torch.unique(target_rows, return_inverse=True)
        columns = self._columns
        labels = columns.of_tokens(token_ids[target_rows + 1])
        targets = make_targets(
            target_hidden[distinct],
            columns.head,
            rows,
            labels,
            row_weights,
            self.kernels,
            num_exact=columns.num_exact,
            offset=columns.offset,
        )
        return compute_vocab_loss(
            inputs,
            columns.joint,
            targets,
            num_frozen=self._num_frozen,
            ce_weight=self.weights.ce,
            tv_weight=self.weights.tv,
            kernels=self.kernels,
            tile_rows=self.tile_rows,
        )


class _Columns:
    """[lm_head | W2] and lm_head over the columns of a step."""

    def __init__(
        self, joint: torch.Tensor, head: torch.Tensor, selection: Selection | None
    ) -> None:
        self.joint, self.head, self._selection = joint, head, selection
        self.num_exact = len(joint) if selection is None else selection.num_exact
        self.offset = 0.0 if selection is None else selection.offset

    def of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids → columns."""
        if self._selection is None:
            return token_ids
        return torch.from_numpy(self._selection.columns)[token_ids]

    def spread(self, grad: torch.Tensor) -> torch.Tensor:
        """[A, r] → [V, r], zero where no column is."""
        if self._selection is None:
            return grad
        full = grad.new_zeros(len(self._selection.columns), grad.shape[1])
        return full.index_copy_(0, torch.from_numpy(self._selection.ids), grad)
