# SPDX-License-Identifier: Apache-2.0
"""A linear layer that, on a CPU in bfloat16, keeps its weight in oneDNN's blocked layout.

Plain `functional.linear` re-orders the weight at every call there; at one to 32 rows that costs as
much as a third of the pass (30 layers of SmolLM2's shape: 25 → 18 ms on two AMX cores). The layout
is the one in which a row's result does not depend on how many rows run with it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from trtllm_dspark.ops.row_invariance import (
    Packing,
    choose_packing,
    padded_count,
    reorder,
    run_packed,
)


class Linear(nn.Module):
    """y = x Wᵀ + b with weight [out, in]; `pack_()` swaps the weight for its blocked copy."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: torch.Tensor | None = None
        self._packing = Packing(0, 0)

    def tie_(self, embedding: nn.Embedding) -> None:
        """Use the embedding's weight as this layer's (a tied head)."""
        self.weight = embedding.weight  # type: ignore[assignment]

    def pack_(self) -> None:
        """Re-order the weight once, where this machine can; frees nothing that is shared."""
        if can_pack(self.weight):
            self._packing = choose_packing(*self.weight.shape, torch.get_num_threads())
            self._packed = reorder(self.weight.detach(), self._packing.layout_batch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] → [N, out]."""
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        tile = self._packing.tile
        if tile == 0:
            return run_packed(x, self._packed, self.bias)
        if len(x) <= tile:
            return self._run_tile(x, self._packed)
        return torch.cat([self._run_tile(rows, self._packed) for rows in x.split(tile)])

    def _run_tile(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """At most `tile` rows, padded to a row count whose kernel is known."""
        num_rows = len(x)
        padding = padded_count(num_rows) - num_rows
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
        return run_packed(x, packed, self.bias)[:num_rows]


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's blocked bfloat16 weights exist here (x86 CPU build with the operators)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
