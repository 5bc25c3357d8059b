# SPDX-License-Identifier: Apache-2.0
"""Packs one step's requests into the arrays of a `TargetStep`: decode rows first, prefill after.

Example: two requests decode with 2 and 0 drafts, one prompt chunk of 4 rows that ends its prompt:
cu_query_lens [0, 3, 4, 8], logit_rows [0, 1, 2, 3, 7], cu_logit_rows [0, 3, 4, 5].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_dspark.decoding.batcher import ScheduledBatch
from trtllm_dspark.decoding.pages import make_page_table
from trtllm_dspark.decoding.sequence import Sequence
from trtllm_dspark.engines.protocol import TargetStep
from trtllm_dspark.types import DraftBlock, IntArray


@dataclass(frozen=True)
class PackedStep:
    """A target step and who its rows belong to."""

    step: TargetStep
    sequences: list[Sequence]
    """Every request with rows, in packed order."""
    sampled: list[Sequence]
    """Requests that draw a token in this step (decoding, or their prompt ends), in packed order."""
    cu_logit_rows: IntArray
    """[len(sampled)+1] prefix sums of each sampled request's logit rows."""
    num_decoding: int


def pack_step(
    batch: ScheduledBatch, block: DraftBlock, verify_lens: IntArray, rung: int
) -> PackedStep:
    """Lay out anchor + ℓ_r drafts of each decoding request, then the prompt chunks."""
    sequences = [*batch.decoding, *(s for s, _ in batch.prefill)]
    row_lens = [*(1 + verify_lens).tolist(), *(rows for _, rows in batch.prefill)]
    cu = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(row_lens, out=cu[1:])
    contexts = np.array([s.num_computed for s in sequences], np.int32)
    token_ids = np.empty(int(cu[-1]), np.int32)
    logit_rows: list[np.ndarray] = []
    sampled: list[Sequence] = []
    for index, sequence in enumerate(sequences):
        start, end = int(cu[index]), int(cu[index + 1])
        pending = sequence.token_ids[sequence.num_computed :]
        if index < len(batch.decoding):
            token_ids[start] = pending[0]
            token_ids[start + 1 : end] = block.token_ids[index, : end - start - 1]
            logit_rows.append(np.arange(start, end))
            sampled.append(sequence)
            continue
        token_ids[start:end] = pending[: end - start]
        if end - start == len(pending):
            logit_rows.append(np.array([end - 1]))
            sampled.append(sequence)
    cu_logits = np.zeros(len(sampled) + 1, np.int32)
    np.cumsum([len(rows) for rows in logit_rows], out=cu_logits[1:])
    offsets = np.arange(int(cu[-1])) - np.repeat(cu[:-1], np.diff(cu))
    step = TargetStep(
        token_ids=token_ids,
        positions=(np.repeat(contexts, np.diff(cu)) + offsets).astype(np.int32),
        cu_query_lens=cu,
        context_lens=contexts,
        page_table=make_page_table([s.page_ids for s in sequences]),
        logit_rows=np.concatenate(logit_rows).astype(np.int32)
        if logit_rows
        else np.zeros(0, np.int32),
        rung=rung,
    )
    return PackedStep(step, sequences, sampled, cu_logits, len(batch.decoding))
