# SPDX-License-Identifier: Apache-2.0
"""The GPU that full TensorRT builds for, and the plugins of the paged ops compiled for it."""

from __future__ import annotations

import functools
import importlib

import torch

from trtllm_dspark.engines.graph_names import PLUGIN_OPS
from trtllm_dspark.errors import EngineError


def built_on() -> tuple[str, str]:
    """(compute capability like 8.9, name) of this machine's GPU; EngineError without one."""
    if not torch.cuda.is_available():
        raise EngineError(
            "backend 'tensorrt' needs an NVIDIA GPU to build on, none was found: use "
            "tensorrt_rtx with --compute-capability, which builds without one"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}", torch.cuda.get_device_name()


@functools.lru_cache(maxsize=1)
def register_plugins() -> tuple[str, ...]:
    """Register the plugins of the paged ops for this machine's GPU, once per process."""
    capability, _ = built_on()
    # Imported by name: the plugins' file imports tensorrt, which most machines lack.
    plugins = importlib.import_module("dspark_plugins.tensorrt_plugins")
    table = importlib.import_module("dspark_plugins.tensorrt_ops").OPS
    ops = tuple(spec for spec in table if spec.name in PLUGIN_OPS)
    ids: tuple[str, ...] = plugins.register_plugins(int(capability.replace(".", "")), ops)
    return ids
