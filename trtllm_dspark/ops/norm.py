# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, with float32 statistics whatever the activations' dtype."""

from __future__ import annotations

import torch
from torch.nn import functional

from trtllm_dspark.ops import native_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] / rms(x) · weight [n]; statistics in float32, result in x's dtype."""
    if x.device.type == "cuda":  # one fused kernel
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    native = native_rows.rms_norm(x, weight, eps)
    if native is not None:
        return native
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
