# SPDX-License-Identifier: Apache-2.0
"""Makes the repository importable without installing it, and records what ran where."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """Let `trtllm_dspark` and `dspark_plugins` (= plugins/) be imported from this checkout."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if importlib.util.find_spec("dspark_plugins") is not None:
        return
    folder = ROOT / "plugins"
    spec = importlib.util.spec_from_file_location(
        "dspark_plugins", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{folder} cannot be loaded as a package: is the checkout complete?")
    module = importlib.util.module_from_spec(spec)
    sys.modules["dspark_plugins"] = module
    spec.loader.exec_module(module)


def interpret_kernels() -> None:
    """Run kernels on the CPU; must be called before Triton-language is imported."""
    if "triton" in sys.modules:
        raise RuntimeError("triton is imported already: --interpret must be decided before that")
    os.environ["TRITON_INTERPRET"] = "1"


@dataclass(frozen=True)
class Target:
    """Where kernels run, and how large the shapes are."""

    device: Any
    """torch.device"""
    is_interpreted: bool
    seed: int

    @property
    def is_cuda(self) -> bool:
        """Whether timings mean anything."""
        return not self.is_interpreted


def describe_machine(device: Any) -> dict[str, Any]:
    """Versions, processor and git revision, for the report."""
    import torch
    import triton

    found: dict[str, Any] = {
        "argv": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "git_revision": git_revision(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["num_sms"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def git_revision() -> str:
    """Short revision of the checkout, or "unknown" where git is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
