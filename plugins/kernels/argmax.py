# SPDX-License-Identifier: Apache-2.0
"""Arg-max that is the same however a row is cut into tiles: of equal scores the lowest id."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def lowest_best(scores, ids, AXIS: tl.constexpr):
    """(best score, its id, of equals the lowest) along an axis."""
    best = tl.max(scores, axis=AXIS)
    is_best = scores == tl.expand_dims(best, AXIS)
    return best, tl.min(tl.where(is_best, ids, NO_TOKEN), axis=AXIS)
