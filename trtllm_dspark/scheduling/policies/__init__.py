# SPDX-License-Identifier: Apache-2.0
"""One file per policy; importing this package registers all of them."""

from __future__ import annotations

from trtllm_dspark.scheduling.policies import autoregressive, fixed

__all__ = ["autoregressive", "fixed"]
