# SPDX-License-Identifier: Apache-2.0
"""One training step: sequences in, summed gradients out, over micro-batches on worker threads.

Workers are threads with one compute thread each: their operators meet no barriers, which on shared
cores is worth more than splitting every operator. Whoever is free takes the next micro-batch; sums
are taken in the order of the micro-batches, so a step is reproducible whatever the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.block_softmax import BlockSoftmax
from trtllm_dspark.training.objective import Objective, ObjectiveValues
from trtllm_dspark.training.packing import (
    PackedBlocks,
    TokenSequence,
    pack_blocks,
    sample_anchors,
)
from trtllm_dspark.training.state_cache import StateSource


def draw_batch(
    stream: Iterator[TokenSequence],
    num_blocks: int,
    num_drafts: int,
    rng: np.random.Generator,
    *,
    max_anchors: int = 512,
    share: float = 1.0,
    micro_blocks: int = 256,
) -> list[PackedBlocks]:
    """Take sequences until `num_blocks` blocks are drawn; cut into micro-batches."""
    batch: list[PackedBlocks] = []
    sequences: list[TokenSequence] = []
    anchors: list[np.ndarray] = []
    drawn = pending = 0
    while drawn < num_blocks:
        sequence = next(stream)
        chosen = sample_anchors(sequence, max_anchors, rng, share)
        sequences.append(sequence)
        anchors.append(chosen)
        drawn, pending = drawn + len(chosen), pending + len(chosen)
        if pending >= micro_blocks or drawn >= num_blocks:
            batch.append(pack_blocks(sequences, anchors, num_drafts))
            sequences, anchors, pending = [], [], 0
    return batch


class StepRunner:
    """Computes the gradients of a step. `sources` holds one source of target states per worker."""

    def __init__(
        self,
        model: DSparkModel,
        sources: Sequence[StateSource],
        objective: Objective,
        softmax: BlockSoftmax,
    ) -> None:
        self.model, self.objective, self.softmax = model, objective, softmax
        self._free: SimpleQueue[StateSource] = SimpleQueue()
        for source in sources:
            self._free.put(source)
        self._map: Callable[..., Iterable[Any]] = map
        if len(sources) > 1:
            pool = ThreadPoolExecutor(len(sources), "step", torch.set_num_threads, (1,))
            self._map = pool.map

    def run(
        self, batch: Sequence[PackedBlocks], seed: tuple[int, ...]
    ) -> tuple[dict[str, torch.Tensor], ObjectiveValues]:
        """Summed float32 gradients of the whole batch, and the sums of its losses."""
        self.objective.refresh(batch, np.random.default_rng((*seed, len(batch))))
        normalizer = sum(self.objective.total_weight(packed) for packed in batch)

        def work(index: int) -> tuple[dict[str, torch.Tensor], ObjectiveValues]:
            source = self._free.get()
            try:
                return self._one(source, batch[index], normalizer, (*seed, index))
            finally:
                self._free.put(source)

        return _sum(list(self._map(work, range(len(batch)))))

    def _one(
        self, source: StateSource, packed: PackedBlocks, normalizer: float, seed: tuple[int, ...]
    ) -> tuple[dict[str, torch.Tensor], ObjectiveValues]:
        taps, last = source.states(packed)
        hidden = forward_blocks(self.model, taps, packed, self.softmax)
        rng = np.random.default_rng(seed)
        return self.objective.gradients(hidden, last, packed, normalizer, rng)


def _sum(
    parts: Sequence[tuple[dict[str, torch.Tensor], ObjectiveValues]],
) -> tuple[dict[str, torch.Tensor], ObjectiveValues]:
    grads: dict[str, torch.Tensor] = {}
    for part, _ in parts:
        for name, grad in part.items():
            if name in grads:
                grads[name] += grad
            else:
                grads[name] = grad.float().clone(memory_format=torch.contiguous_format)
    values = parts[0][1]
    for _, other in parts[1:]:
        values = values + other
    return grads, values
