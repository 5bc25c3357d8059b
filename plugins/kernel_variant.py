# SPDX-License-Identifier: Apache-2.0
"""What a specialisation of a kernel is: argument types, compile-time values, launch shape.

Knows no kernel. Shapes are those of the models this project serves (SmolLM2-135M, Qwen3-8B).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelVariant:
    """One specialisation of one kernel."""

    op: str
    name: str
    kernel: Any
    """The `triton.jit` function."""
    argument_types: dict[str, str]
    """Type of every run-time argument, in order: `*bf16`, `i32`, …"""
    constants: dict[str, Any]
    """Value of every compile-time argument."""
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = field(default=(80, 90, 100, 120))
    """Targets this variant is meant for (tile shapes depend on the target)."""


@dataclass(frozen=True)
class HeadSpec:
    """Attention heads of a model family."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SMOLLM2 = HeadSpec("smollm2_135m", 9, 3, 64)
QWEN3_8B = HeadSpec("qwen3_8b", 32, 8, 128)
