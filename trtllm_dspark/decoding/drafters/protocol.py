# SPDX-License-Identifier: Apache-2.0
"""The drafter seam of the decoding loop. A drafter sees requests through `DraftSource`; the loop
feeds it every committed row (prefill chunks too), so that its context never goes stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_dspark.types import DraftBlock, IntArray, SamplingParams


@dataclass(frozen=True)
class DraftSource:
    """One request as a drafter sees it at the start of a step."""

    key: int
    token_ids: IntArray
    """Committed tokens, the anchor last. A view: do not keep it."""
    page_ids: IntArray
    """Pages of the request (target and drafter rows share page ids)."""
    params: SamplingParams
    noise_seed: int
    """64-bit noise key: the explicit seed, or a random one."""
    is_coupled: bool
    """Explicit seed: drafts share the Gumbel noise of acceptance."""
    draft_greedily: bool
    """True: draft the arg-max (one-hot q) whatever the request samples."""
    max_draft_len: int
    """Drafts that can be of use (the request's cap); a drafter may ignore it."""

    @property
    def anchor_position(self) -> int:
        """Absolute position of the anchor = committed rows before it."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class CommittedRows:
    """Target rows of one request that became part of its context in a step."""

    source: DraftSource
    start_position: int
    num_rows: int
    first_row: int
    """Row of the step that is the first of them."""
    is_written: bool = False
    """The drafter's K/V of the rows is in the pages already (a round on the device wrote it)."""


class Drafter(Protocol):
    """Proposes blocks; owns whatever per-request state it needs, keyed by `DraftSource.key`."""

    name: str
    num_drafts: int
    """γ, 0 for a drafter that never proposes."""
    needs_taps: bool
    """Whether `commit` wants tapped states; then blocks of γ+1 rows live in the request's pages."""
    can_sample: bool
    """Whether drafts of sampling requests may be drawn from q (else they are deterministic)."""

    def propose(self, sources: Sequence[DraftSource]) -> DraftBlock:
        """Draft for these requests, in this order, from committed tokens only."""
        ...

    def commit(self, rows: Sequence[CommittedRows], taps: Any | None) -> None:
        """Take note of rows that became context, after every step (prefill, no drafts too).

        taps [N, T·H] are the tapped states of the step's rows, good for this call only; None when
        the drafter does not want them or a round on the device has written its rows.
        """
        ...

    def sync(self, keys: Sequence[int]) -> None:
        """Write rows that are still pending for these requests now, in one batch."""
        ...

    def synced_len(self, key: int) -> int | None:
        """Rows of the request whose drafter K/V are written; None = the drafter keeps no K/V.

        Pages are offered for prefix reuse only below this.
        """
        ...

    def release(self, key: int) -> None:
        """Forget a request that ended or was pre-empted (it then comes back from row 0)."""
        ...
