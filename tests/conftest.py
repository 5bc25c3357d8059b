# SPDX-License-Identifier: Apache-2.0
"""Test-wide settings: one torch thread, since tiny tensors lose more to barriers than they win, and
Triton-language kernels in the interpreter (decided when `triton` is first imported, by whomever).
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct where `dspark demo` keeps it too; prepared once per checkout."""
    from trtllm_dspark.checkpoints import prepare_model

    return prepare_model("smollm2", Path(__file__).resolve().parents[1] / "models" / "smollm2")
