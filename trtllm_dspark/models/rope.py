# SPDX-License-Identifier: Apache-2.0
"""Rotary tables, Llama 3's frequency scaling included. Made once per model, in float64."""

from __future__ import annotations

import math

import torch

from trtllm_dspark.config import RopeScaling


def build_rope_table(
    head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None = None
) -> torch.Tensor:
    """Rotary table [max_positions, 2, head_dim/2] float32 (cos at 0, sin at 1), made in float64.

    `scaling` is Llama 3's: low frequencies are divided by `factor`, a band in between is blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = theta**-exponents
    if scaling is not None:
        inv_freq = _scale_llama3(inv_freq, scaling)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inv_freq[None, :]
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(torch.float32)


def _scale_llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
