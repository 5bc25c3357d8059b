# SPDX-License-Identifier: Apache-2.0
"""SwiGLU: silu(gate) · up of fused projections."""

from __future__ import annotations

import torch
from torch.nn import functional

from trtllm_dspark.ops import native_rows


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2n] = gate | up → silu(gate) · up [..., n]."""
    native = native_rows.swiglu(x)
    if native is not None:
        return native
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
