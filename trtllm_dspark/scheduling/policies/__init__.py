# SPDX-License-Identifier: Apache-2.0
"""One file per policy (two where they share their rule); importing this registers all of them."""

from __future__ import annotations

from trtllm_dspark.scheduling.policies import (
    adaptive,
    autoregressive,
    baselines,
    fixed,
    fixed_ratio,
    prefix,
    ratio_bucket,
    threshold,
)

__all__ = [
    "adaptive",
    "autoregressive",
    "baselines",
    "fixed",
    "fixed_ratio",
    "prefix",
    "ratio_bucket",
    "threshold",
]
