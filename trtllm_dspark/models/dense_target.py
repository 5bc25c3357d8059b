# SPDX-License-Identifier: Apache-2.0
"""One dense pass of the target over whole sequences: taps and last hidden states of every row.

Runs the very module that serves, with one page buffer for all layers (a layer's K/V is dead once
the layer is done). Used by training and measurement; knows nothing of blocks or losses.
"""

from __future__ import annotations

import numpy as np
import torch

from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.attention import plan_attention
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots

PAGE_SIZE = 32


class DenseTarget:
    """A frozen target without a cache. Not thread-safe: it owns the page buffer."""

    def __init__(self, model: TargetModel, tap_layers: tuple[int, ...]) -> None:
        self.model = model
        self.tap_layers = tap_layers
        self._pages = torch.zeros(0)

    @property
    def dtype(self) -> torch.dtype:
        """What the states come in."""
        return self.model.embed_tokens.weight.dtype

    @torch.no_grad()
    def run(
        self, token_ids: np.ndarray, cu_seq_lens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (taps [C, T·H], last hidden states after the final norm [C, H]).

        token_ids [C] int64 of sequences packed one after the other, cu_seq_lens [S+1].
        """
        config = self.model.config
        batch = self._batch(cu_seq_lens.astype(np.int32))
        num_pages = batch.page_table.max() + 1
        if len(self._pages) < num_pages:
            shape = (int(num_pages), PAGE_SIZE, 2, config.num_kv_heads, config.head_dim)
            self._pages = torch.zeros(shape, dtype=self.dtype)
        pages = [self._pages] * config.num_layers
        hidden, taps = self.model(torch.from_numpy(token_ids), pages, batch, self.tap_layers)
        if taps is None:
            raise ValueError("tap_layers is empty: name one layer or more")
        return taps, self.model.norm(hidden)

    def _batch(self, cu_lens: np.ndarray) -> RaggedBatch:
        config = self.model.config
        lengths = np.diff(cu_lens)
        num_pages = -(-lengths // PAGE_SIZE)
        ends = np.cumsum(num_pages)
        table = (ends - num_pages)[:, None] + np.arange(num_pages.max())
        table = np.minimum(table, ends[-1] - 1).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
        starts = np.zeros(len(lengths), np.int32)
        plan = plan_attention(
            cu_lens,
            starts,
            table,
            PAGE_SIZE,
            q_per_kv=config.num_heads // config.num_kv_heads,
            dtype=self.dtype,
        )
        slots = flatten_slots(positions, cu_lens, table, PAGE_SIZE)
        return RaggedBatch(
            positions=torch.from_numpy(positions.astype(np.int64)),
            slots=torch.from_numpy(slots),
            cu_query_lens=torch.from_numpy(cu_lens),
            context_lens=torch.from_numpy(starts),
            page_table=torch.from_numpy(table),
            page_size=PAGE_SIZE,
            plan=plan,
        )
