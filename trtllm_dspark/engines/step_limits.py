# SPDX-License-Identifier: Apache-2.0
"""The bounds of captured steps, and the attention plans that fit every step up to them.

A graph is keyed by a rung or a requests bucket, never by an arrangement, so that its launch shapes
come from bounds alone. Knows shapes, not tensors of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dspark.errors import EngineError
from trtllm_dspark.ops.kv_append import HeadShape
from trtllm_dspark.types import EngineInfo


@dataclass(frozen=True)
class StepLimits:
    """What a captured step must hold."""

    info: EngineInfo
    block_len: int = 0
    """Rows of one drafter block, 0 without a drafter."""
    request_buckets: tuple[int, ...] = ()
    """Ascending; the last is max_num_requests. Empty: powers of two."""

    def __post_init__(self) -> None:
        """Resolve the default buckets."""
        if not self.request_buckets:
            most = self.info.max_num_requests
            powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
            object.__setattr__(self, "request_buckets", (*powers, most))

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence, the drafter's block included."""
        rows = self.info.max_seq_len + self.block_len + 1
        return -(-rows // self.info.page_size)

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest step without prompt chunks; so many logits are wanted at most."""
        most = self.info.max_num_requests * (self.info.num_drafts + 1)
        return min(most, self.info.rungs[-1])

    def bucket_for(self, num_requests: int) -> int:
        """The requests bucket that runs."""
        index = bisect_left(self.request_buckets, num_requests)
        if index == len(self.request_buckets):
            raise EngineError(
                f"{num_requests} requests fit no requests bucket of {self.request_buckets}: load "
                "the engine with a larger max_num_requests"
            )
        return self.request_buckets[index]


def plan_rung(
    limits: StepLimits, heads: HeadShape, rung: int, num_requests: int, device: torch.device
) -> Any:
    """Attention plan of a target step: any arrangement of `rung` rows over `num_requests`.

    Tiles are chosen for verification where the rung can be a decode step, for chunks above.
    """
    row_len = limits.info.num_drafts + 1
    fewest = min(-(-rung // row_len), num_requests)
    longest = min(row_len, rung) if rung <= limits.max_decode_rows else rung
    return _plan(limits, heads, rung, num_requests, longest, fewest, device, is_causal=True)


def plan_blocks(
    limits: StepLimits, heads: HeadShape, num_requests: int, device: torch.device
) -> Any:
    """Attention plan of one drafter block per request."""
    length = limits.block_len
    return _plan(
        limits,
        heads,
        num_requests * length,
        num_requests,
        length,
        num_requests,
        device,
        is_causal=False,
    )


def _plan(
    limits: StepLimits,
    heads: HeadShape,
    num_rows: int,
    num_requests: int,
    max_query_len: int,
    num_typical: int,
    device: torch.device,
    *,
    is_causal: bool,
) -> Any:
    from dspark_plugins.ragged_attention import AttentionShape, plan_attention_bounds

    info = limits.info
    shape = AttentionShape(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        info.page_size,
        info.num_pages,
        is_causal=is_causal,
    )
    return plan_attention_bounds(
        shape,
        num_rows=num_rows,
        num_requests=num_requests,
        max_query_len=max_query_len,
        max_kv_rows=info.max_seq_len,
        total_kv_rows=num_typical * info.max_seq_len,
        device=device,
    )
