# SPDX-License-Identifier: Apache-2.0
"""Test-wide settings: one torch thread, since tiny tensors lose more to barriers than they gain."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
