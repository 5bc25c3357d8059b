# SPDX-License-Identifier: Apache-2.0
"""The drafter that never proposes: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_dspark.decoding.drafters.protocol import CommittedRows, DraftSource
from trtllm_dspark.types import DraftBlock


class NoDrafter:
    """γ = 0."""

    name = "none"
    num_drafts = 0
    needs_taps = False
    can_sample = False

    def propose(self, sources: Sequence[DraftSource]) -> DraftBlock:
        """An empty block for every request."""
        shape = (len(sources), 0)
        return DraftBlock(
            np.zeros(shape, np.int32), np.zeros(len(sources), np.int32), np.zeros(shape, np.float32)
        )

    def commit(self, rows: Sequence[CommittedRows], taps: Any | None) -> None:
        """Nothing to keep."""

    def sync(self, keys: Sequence[int]) -> None:
        """Nothing is pending."""

    def synced_len(self, key: int) -> int | None:
        """No K/V."""
        return None

    def release(self, key: int) -> None:
        """Nothing to forget."""
