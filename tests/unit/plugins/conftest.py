# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of this room in the Triton-language interpreter, on CPU tensors; makes the
benchmarks importable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # gpu_bench

if not triton.knobs.runtime.interpret:
    raise RuntimeError(
        "triton was imported before tests/unit/plugins without TRITON_INTERPRET=1: set it in the "
        "environment, or keep module-level imports of triton out of the other tests"
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: handing them to a pool of threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
