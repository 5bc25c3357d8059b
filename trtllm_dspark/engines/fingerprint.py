# SPDX-License-Identifier: Apache-2.0
"""What makes a latency table or an engine file belong to one engine on one machine (design §5)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark._version import __version__


def hash_checkpoint(model_dir: str | Path) -> str:
    """Digest of config.json and of every weight file's name, size and both ends."""
    digest = hashlib.blake2b(digest_size=16)
    directory = Path(model_dir)
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()


def describe_device(device: str) -> str:
    """GPU name and compute capability, or CPU model and thread count."""
    if device == "cpu":
        return f"{_cpu_model()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} sm_{properties.major}{properties.minor}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({os.cpu_count()} cores)"
    except OSError:
        pass
    return platform.processor() or platform.machine()


def fingerprint(parts: dict[str, Any], device: str, *, description: str | None = None) -> str:
    """Digest of all a latency depends on: checkpoint, precision, grid, versions, device.

    `description`: of the device, where torch need not be asked.
    """
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "device": describe_device(device) if description is None else description,
        **parts,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
