# SPDX-License-Identifier: Apache-2.0
"""Which way of running a packed bfloat16 product gives each row the same bits in every batch.

oneDNN chooses its kernel by the number of rows, and kernels that add the products in another order
round differently: a token verified among eight rows could then differ from the same token decoded
alone. No interface says which row counts share a kernel, so it is measured, with rows whose sums
cancel so that nothing but the rounding is left.
"""

from __future__ import annotations

import bisect
import functools
import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

LAYOUT_BATCHES = (1, 16)
"""Row counts that the weight's layout is chosen for; the layout decides the kernels that follow."""

ROW_COUNTS = (*range(1, 9), *range(16, 513, 16))
"""The row counts that are run, each of them measured; other counts are padded up to the next."""

MIN_TILE = 16
"""Fewer invariant rows than this are not worth running one after the other."""

_MAX_PROBE_FLOPS = 4e9


@dataclass(frozen=True)
class Packing:
    """How to pack a weight and how many rows to run at once (0: any number)."""

    layout_batch: int
    tile: int


@functools.cache
def choose_packing(out_features: int, in_features: int, num_threads: int) -> Packing:
    """The packing with the most rows per call among those whose rows do not depend on the batch.

    `num_threads` is part of the key because oneDNN splits its work by it. Where no packing has
    MIN_TILE invariant rows, rows are run as they come and the log says so.
    """
    x, weight = cancelling_product(out_features, in_features)
    counts = [m for m in ROW_COUNTS if 2.0 * m * weight.numel() <= _MAX_PROBE_FLOPS]
    tiles: dict[int, int] = {}
    for batch in LAYOUT_BATCHES:
        tiles[batch] = count_invariant_rows(x, reorder(weight, batch), counts)
        if tiles[batch] == counts[-1]:
            break
    best = max(tiles, key=lambda batch: tiles[batch])
    if tiles[best] < MIN_TILE:
        logger.warning(
            "bfloat16 products of shape %d × %d depend on the number of rows on this machine: "
            "outputs may differ between batch sizes where two tokens are nearly tied",
            out_features,
            in_features,
        )
        return Packing(best, 0)
    return Packing(best, tiles[best])


def padded_count(num_rows: int) -> int:
    """The smallest of ROW_COUNTS that holds `num_rows` (at most the largest)."""
    return ROW_COUNTS[bisect.bisect_left(ROW_COUNTS, num_rows)]


def cancelling_product(out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [512, in] and weight [out, in] in bfloat16 whose exact product is 0: sums show rounding."""
    generator = torch.Generator().manual_seed(0)
    half, num_rows = in_features // 2, min(out_features, ROW_COUNTS[-1])
    weight = torch.randn(num_rows, in_features, generator=generator).to(torch.bfloat16)
    x = torch.randn(ROW_COUNTS[-1], in_features, generator=generator).to(torch.bfloat16)
    weight[:, half : 2 * half] = -weight[:, :half]
    x[:, half : 2 * half] = x[:, :half]
    # A fixed shuffle, or kernels that add both halves alike would give exact zeros.
    order = torch.randperm(in_features, generator=generator)
    x, weight = x[:, order].contiguous(), weight[:, order].contiguous()
    return x, weight.repeat(-(-out_features // num_rows), 1)[:out_features].contiguous()


def count_invariant_rows(x: torch.Tensor, packed: torch.Tensor, counts: list[int]) -> int:
    """The largest of the ascending `counts` up to which every one gives rows the same bits."""
    longest = run_packed(x[: counts[0]], packed)
    for count in counts[1:]:
        result = run_packed(x[:count].contiguous(), packed)
        if not torch.equal(result[: len(longest)], longest):
            break
        longest = result
    return len(longest)


def reorder(weight: torch.Tensor, layout_batch: int) -> torch.Tensor:
    """The weight in oneDNN's blocked layout for `layout_batch` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, layout_batch)


def run_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [N, in] times a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
