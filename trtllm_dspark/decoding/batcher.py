# SPDX-License-Identifier: Apache-2.0
"""Which requests run in a step, with how many rows: admission, chunked prefill, pre-emption.

Requests wait in order of arrival. When pages run out, the youngest running request gives up its
pages and is recomputed later; nothing is lost. Knows pages and rows, not tokens or policies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.decoding.pages import PagePool, chain_keys
from trtllm_dspark.decoding.sequence import Sequence
from trtllm_dspark.types import IntArray


@dataclass
class ScheduledBatch:
    """What runs in one step."""

    decoding: list[Sequence] = field(default_factory=list)
    """Only the anchor is pending; may be drafted for."""
    draft_caps: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] drafts that may be verified."""
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    """(request, rows of its chunk)."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prefill rows of this step."""
        return sum(rows for _, rows in self.prefill)


class Batcher:
    """Owns the waiting queue, the running set and the page pool."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        num_drafts: int,
        block_rows: int,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self.pool = pool
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.num_drafts = num_drafts
        self.block_rows = block_rows
        """Rows after the anchor that a drafter writes whatever is verified (0: none)."""
        self.on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        sequence.page_keys = chain_keys(sequence.token_ids, self.pool.page_size)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out for good and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence.forget_pages())

    def schedule(self) -> ScheduledBatch:
        """Choose this step's rows and reserve their pages."""
        batch = ScheduledBatch()
        caps: list[int] = []
        for sequence in list(self.running):
            if sequence.is_decoding and sequence in self.running and self._reserve_anchor(sequence):
                batch.decoding.append(sequence)
        batch.decoding = [s for s in batch.decoding if s in self.running]
        for sequence in batch.decoding:
            caps.append(self._reserve_drafts(sequence))
        batch.draft_caps = np.asarray(caps, np.int32)
        self._schedule_prefill(batch)
        return batch

    def _reserve_anchor(self, sequence: Sequence) -> bool:
        """Make room for the anchor row, pre-empting the youngest; False if that is this one."""
        while not self._reserve(sequence, sequence.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _reserve_drafts(self, sequence: Sequence) -> int:
        """Reserve rows for drafts; returns how many may be verified (0 when pages are short)."""
        limit = self.num_drafts
        if sequence.params.num_draft_tokens is not None:
            limit = min(limit, sequence.params.num_draft_tokens)
        limit = min(limit, sequence.num_wanted - 1)
        if limit <= 0:
            return 0
        if self._reserve(sequence, sequence.num_tokens + max(limit, self.block_rows)):
            return limit
        if self.block_rows:
            return 0
        room = len(sequence.page_ids) * self.pool.page_size - sequence.num_tokens
        return max(0, min(limit, room))

    def _reserve(self, sequence: Sequence, num_rows: int) -> bool:
        missing = -(-num_rows // self.pool.page_size) - len(sequence.page_ids)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        sequence.page_ids.extend(pages)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.forget_pages())
        self.waiting.appendleft(sequence)
        sequence.stats.num_preemptions += 1
        self.num_preemptions += 1
        self.on_preempt(sequence)

    def _schedule_prefill(self, batch: ScheduledBatch) -> None:
        """Fill the step with prompt chunks: running ones first, then requests that are admitted."""
        num_decoding = len(batch.decoding)
        room = self.max_num_tokens - num_decoding
        drafts = min(int(batch.draft_caps.sum()), room // 2)
        budget = room - drafts
        for sequence in self.running:
            if not sequence.is_decoding and budget > 0:
                budget -= self._add_chunk(batch, sequence, budget)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_requests:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self._insert_running(sequence)
            budget -= self._add_chunk(batch, sequence, budget)

    def _add_chunk(self, batch: ScheduledBatch, sequence: Sequence, budget: int) -> int:
        rows = min(sequence.num_pending, budget)
        batch.prefill.append((sequence, rows))
        return rows

    def _admit(self, sequence: Sequence) -> bool:
        """Take pages for all pending rows, cached prompt pages first; False (no change) else."""
        reusable = (sequence.num_tokens - 1) // self.pool.page_size
        reused = self.pool.reuse_prefix(sequence.page_keys[:reusable])
        sequence.page_ids = list(reused)
        if not self._reserve(sequence, sequence.num_tokens):
            self.pool.release(sequence.forget_pages())
            return False
        sequence.num_computed = len(reused) * self.pool.page_size
        sequence.num_offered_pages = len(reused)
        return True

    def _insert_running(self, sequence: Sequence) -> None:
        """Keep `running` in order of arrival (a pre-empted request comes back to its place)."""
        index = len(self.running)
        while index > 0 and self.running[index - 1].key > sequence.key:
            index -= 1
        self.running.insert(index, sequence)

    def offer_pages(self, sequence: Sequence, num_synced: int | None) -> None:
        """Offer fully written prompt pages for reuse; `num_synced` limits to the drafter's rows."""
        num_rows = (
            sequence.num_computed if num_synced is None else min(sequence.num_computed, num_synced)
        )
        num_full = min(num_rows // self.pool.page_size, len(sequence.page_keys))
        for index in range(sequence.num_offered_pages, num_full):
            self.pool.offer(sequence.page_keys[index], sequence.page_ids[index])
        sequence.num_offered_pages = max(sequence.num_offered_pages, num_full)
