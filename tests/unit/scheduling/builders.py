# SPDX-License-Identifier: Apache-2.0
"""Small tables, views and outcomes for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.policy import BatchView
from trtllm_dspark.types import DraftMode, StepOutcome

# Additive fit of D-Cut's published verification costs (Qwen3-8B, one H20, milliseconds).
DCUT_ALPHA_MS = {4: 0.0, 8: 1.92, 16: 5.04, 32: 12.23, 64: 24.36}
DCUT_THETA_MS = {
    16: 8.2,
    32: 8.69,
    48: 9.7,
    64: 10.91,
    96: 14.38,
    128: 17.63,
    192: 24.76,
    256: 30.82,
    384: 44.37,
    512: 57.85,
    768: 83.54,
    1024: 109.54,
}
DCUT_PLAIN_MS = (7.505, 7.859, 8.967, 12.016, 18.572)


def make_table(
    step_ms: Sequence[Sequence[float]],
    *,
    buckets: tuple[int, ...],
    rungs: tuple[int, ...],
    no_draft: Sequence[float] | None = None,
    draft: Sequence[float] | None = None,
    num_drafts: int = 3,
    fingerprint: str = "f",
) -> LatencyTable:
    unknown = [float("nan")] * len(buckets)
    return LatencyTable(
        request_buckets=buckets,
        rungs=rungs,
        step_ms=np.array(step_ms, float),
        autoregressive_ms=np.array(no_draft or unknown, float),
        no_draft_ms=np.array(no_draft or unknown, float),
        draft_ms=np.array(draft or unknown, float),
        fingerprint=fingerprint,
        num_drafts=num_drafts,
    )


def dcut_table() -> LatencyTable:
    grid = np.add.outer(list(DCUT_ALPHA_MS.values()), list(DCUT_THETA_MS.values()))
    for row, bucket in enumerate(DCUT_ALPHA_MS):
        grid[row, np.array(list(DCUT_THETA_MS)) < bucket] = np.nan
    return make_table(
        grid.tolist(),
        buckets=tuple(DCUT_ALPHA_MS),
        rungs=tuple(DCUT_THETA_MS),
        no_draft=DCUT_PLAIN_MS,
        draft=[1.5, 1.6, 1.8, 2.5, 4.0],
        num_drafts=15,
    )


def make_view(
    caps: Sequence[int],
    *,
    rungs: tuple[int, ...],
    num_drafts: int,
    prefill: int = 0,
    max_num_tokens: int | None = None,
    keys: Sequence[int] | None = None,
    mode: DraftMode = DraftMode.GREEDY_TARGET,
) -> BatchView:
    return BatchView(
        request_keys=tuple(keys) if keys is not None else tuple(range(len(caps))),
        modes=(mode,) * len(caps),
        draft_caps=np.array(caps, np.int32),
        num_drafts=num_drafts,
        num_prefill_tokens=prefill,
        rungs=rungs,
        max_num_tokens=max_num_tokens or rungs[-1],
    )


def make_outcome(
    verify_lens: Sequence[int],
    accepted_lens: Sequence[int],
    *,
    draft_lens: Sequence[int] | None = None,
    logits: np.ndarray | None = None,
    dropped: Sequence[float] | None = None,
    keys: Sequence[int] | None = None,
    modes: Sequence[DraftMode] | None = None,
    drafted: bool = True,
    step_ms: float = 0.0,
) -> StepOutcome:
    count = len(verify_lens)
    num_drafts = 0 if logits is None else logits.shape[1]
    return StepOutcome(
        request_keys=tuple(keys) if keys is not None else tuple(range(count)),
        verify_lens=np.array(verify_lens, np.int32),
        accepted_lens=np.array(accepted_lens, np.int32),
        draft_lens=np.array(
            draft_lens if draft_lens is not None else [num_drafts] * count, np.int32
        ),
        confidence_logits=None if logits is None else logits.astype(np.float32),
        modes=tuple(modes or [DraftMode.GREEDY_TARGET] * count),
        dropped_accept_probs=np.array(dropped or [np.nan] * count, np.float32),
        rung=count + int(np.sum(verify_lens)),
        num_prefill_tokens=0,
        drafted=drafted,
        step_ms=step_ms,
    )
