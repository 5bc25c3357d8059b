# SPDX-License-Identifier: Apache-2.0
"""Scheduling room: survivals, calibration, latency table, buckets and policies, in numpy only.

Importing it registers every policy for `create_policy`.
"""

from __future__ import annotations

from trtllm_dspark.scheduling import policies
from trtllm_dspark.scheduling.policy import create_policy, policy_names
from trtllm_dspark.scheduling.policy_options import PolicyResources

__all__ = ["PolicyResources", "create_policy", "policies", "policy_names"]
