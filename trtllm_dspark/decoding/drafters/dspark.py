# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter of the decoding loop: an engine's drafter model behind the `Drafter` protocol.

Committed rows are kept until somebody drafts (or too many are pending) and then written in one
batch for all requests concerned. Invariant, checked at every draft: drafter-context rows of a
request == position of its anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_dspark.decoding.drafters.kept_rows import Int64Array, KeptRows
from trtllm_dspark.decoding.drafters.protocol import CommittedRows, DraftSource
from trtllm_dspark.decoding.pages import make_page_table
from trtllm_dspark.engines.protocol import ContextAppend, DrafterStep, DraftSampling, Engine
from trtllm_dspark.errors import EngineError
from trtllm_dspark.types import DraftBlock, IntArray

MAX_PENDING_ROWS = 4096
"""Rows kept for later over all requests; one more commit writes them. While nobody drafts, requests
that end before have cost nothing; pages are shared with others once their rows are written."""


@dataclass
class _Context:
    """Drafter context of one request."""

    synced_len: int
    """Rows whose K/V is written."""
    page_ids: IntArray
    kept: list[Int64Array] = field(default_factory=list)
    """Where `KeptRows` holds the tapped states of the rows after `synced_len`."""
    num_pending: int = 0
    """Rows in `kept`: counted, since every step of every request asks for it."""

    def keep(self, places: Int64Array) -> None:
        """Take note of rows that were kept for later."""
        self.kept.append(places)
        self.num_pending += len(places)

    def written(self) -> None:
        """What was pending has its K/V now."""
        self.synced_len += self.num_pending
        self.num_pending = 0
        self.kept.clear()


class DSparkDrafter:
    """Drafts with `engine.run_drafter`; owns the bookkeeping, not the K/V."""

    name = "dspark"
    needs_taps = True

    def __init__(
        self,
        engine: Engine,
        max_pending_rows: int = MAX_PENDING_ROWS,
        *,
        can_sample: bool = True,
    ) -> None:
        self.engine = engine
        self.can_sample = can_sample
        """False: drafts are deterministic whatever a request samples."""
        self.num_drafts = engine.info.num_drafts
        self.max_pending_rows = max_pending_rows
        self._contexts: dict[int, _Context] = {}
        self._kept = KeptRows()

    @property
    def num_kept_rows(self) -> int:
        """Rows of all requests whose tapped states are held for later."""
        return self._kept.num_rows

    def propose(self, sources: Sequence[DraftSource]) -> DraftBlock:
        """Bring the contexts up to date and draft γ tokens for each source."""
        step = self.prepare(sources)
        output, sampling = self.engine.run_drafter(step), step.sampling
        sampled = (sampling.temperature > 0.0) & (sampling.top_k != 1)
        return DraftBlock(
            token_ids=output.token_ids,
            draft_lens=np.full(len(sources), self.num_drafts, np.int32),
            confidence_logits=output.confidence_logits,
            draft_probs=output.draft_probs if sampled.any() else None,
            sampled=sampled if sampled.any() else None,
        )

    def prepare(self, sources: Sequence[DraftSource]) -> DrafterStep:
        """Bring the contexts up to date; returns the drafting call for these sources."""
        self.sync([source.key for source in sources])
        for source in sources:
            rows = self.synced_len(source.key)
            if rows != source.anchor_position:
                raise EngineError(
                    f"request {source.key} has {rows} drafter-context rows and its anchor at "
                    f"position {source.anchor_position}: both must agree (commit every step)"
                )
        return DrafterStep(
            anchor_ids=np.array([s.token_ids[-1] for s in sources], np.int32),
            anchor_positions=np.array([s.anchor_position for s in sources], np.int32),
            page_table=make_page_table([s.page_ids for s in sources]),
            sampling=make_sampling(sources),
        )

    def commit(self, rows: Sequence[CommittedRows], taps: Any | None) -> None:
        """Keep the rows' tapped states (copied: the engine's are good for one step only)."""
        contexts = [self._take_note(row, taps) for row in rows]
        if taps is not None:
            self._keep(contexts, rows, taps)
        if self.num_kept_rows > self.max_pending_rows:
            self.sync(list(self._contexts))

    def _keep(self, contexts: Sequence[_Context], rows: Sequence[CommittedRows], taps: Any) -> None:
        counts = [0 if row.is_written else row.num_rows for row in rows]
        ends = np.cumsum(counts)
        first_rows = np.array([row.first_row for row in rows])
        if not rows or not ends[-1]:
            return
        places = self._kept.add(
            taps, np.arange(ends[-1]) + np.repeat(first_rows - (ends - counts), counts)
        )
        for context, end, count in zip(contexts, ends.tolist(), counts, strict=True):
            if count:
                context.keep(places[end - count : end])

    def _take_note(self, row: CommittedRows, taps: Any | None) -> _Context:
        """Check that the rows follow on what is known; advance what is written already."""
        key = row.source.key
        context = self._contexts.get(key)
        if context is None:
            # Rows before the first commit came with shared prefix pages.
            context = _Context(row.start_position, row.source.page_ids)
            self._contexts[key] = context
        known = context.synced_len + context.num_pending
        if row.start_position != known or (taps is None and not row.is_written):
            raise EngineError(
                f"request {key}: rows from position {row.start_position} were committed, "
                f"expected position {known} and tapped states"
            )
        context.page_ids = np.array(row.source.page_ids, np.int32)
        if row.is_written:
            context.synced_len += row.num_rows
        return context

    def sync(self, keys: Sequence[int]) -> None:
        """Write all pending rows of these requests in one call."""
        contexts = [self._contexts[key] for key in keys if key in self._contexts]
        contexts = [context for context in contexts if context.num_pending]
        if not contexts:
            return
        counts = np.array([context.num_pending for context in contexts])
        positions = [c.synced_len + np.arange(n) for c, n in zip(contexts, counts, strict=True)]
        kept = np.concatenate([places for context in contexts for places in context.kept])
        self.engine.append_context(
            ContextAppend(
                taps=self._kept.take(kept),
                positions=np.concatenate(positions).astype(np.int32),
                cu_row_lens=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
                page_table=make_page_table([context.page_ids for context in contexts]),
            )
        )
        for context in contexts:
            context.written()

    def synced_len(self, key: int) -> int | None:
        """Rows of the request whose drafter K/V are written; 0 for an unknown request."""
        context = self._contexts.get(key)
        return 0 if context is None else context.synced_len

    def release(self, key: int) -> None:
        """Forget a request and what is pending for it."""
        context = self._contexts.pop(key, None)
        if context is not None and context.kept:
            self._kept.free(np.concatenate(context.kept))


def make_sampling(sources: Sequence[DraftSource]) -> DraftSampling:
    """Sampling of each source; temperature 0 where drafts are to be deterministic."""
    greedy = [s.draft_greedily or s.params.is_greedy for s in sources]
    return DraftSampling(
        temperature=np.array(
            [0.0 if g else s.params.temperature for s, g in zip(sources, greedy, strict=True)],
            np.float32,
        ),
        top_k=np.array([s.params.top_k for s in sources], np.int32),
        top_p=np.array([s.params.top_p for s in sources], np.float32),
        min_p=np.array([s.params.min_p for s in sources], np.float32),
        seeds=np.array([s.noise_seed for s in sources], np.uint64),
        coupled=np.array([s.is_coupled for s in sources], np.bool_),
    )
