# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has the device that a configuration names."""

from __future__ import annotations

import importlib.util

import torch

from trtllm_dspark.errors import ConfigError


def check_device(device: str) -> None:
    """Refuse a CUDA device that torch does not find, or kernels that cannot be imported."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise ConfigError(
            f"device {device!r} was asked for and torch {torch.__version__} (built {built}) finds "
            "no CUDA device: use --device cpu, or install a CUDA build of torch on a machine with "
            "a GPU and its driver"
        )
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r} was asked for and this machine has {torch.cuda.device_count()} "
            f"CUDA device(s): use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"device {device!r} needs the kernels' compiler, which is not installed: "
            "pip install triton"
        )
