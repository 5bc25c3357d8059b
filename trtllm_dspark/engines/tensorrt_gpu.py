# SPDX-License-Identifier: Apache-2.0
"""The GPUs that CUDA's runtime finds, and the plugins compiled for the one that is built for."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.engines.graph_names import PLUGIN_OPS
from trtllm_dspark.errors import EngineError


@dataclass(frozen=True)
class Gpu:
    """What engines are locked to."""

    name: str
    compute_capability: str
    """Like 8.9."""

    def __str__(self) -> str:
        return f"{self.name} sm_{self.compute_capability.replace('.', '')}"


def import_cuda() -> Any:
    """cuda-python's runtime API; EngineError with what to install where it is missing."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EngineError(
            f"TensorRT engines need cuda-bindings ({error}): install the extra rtx or tensorrt"
        ) from error


def num_gpus(cuda: Any) -> int:
    """GPUs that can be used; 0 without one or without a driver."""
    error, count = cuda.cudaGetDeviceCount()
    return int(count) if error == cuda.cudaError_t.cudaSuccess else 0


def find_gpu(name: str, count: int) -> int:
    """Index of the GPU of a device name, cuda meaning the first (and so does cpu, the default)."""
    kind, _, number = name.partition(":")
    index = int(number) if number.isdigit() else 0
    if kind not in ("cuda", "cpu") or (number and not number.isdigit()) or index >= count:
        raise EngineError(
            f"device {name!r} was asked for and this machine has {count} GPU(s): "
            f"use cuda:0 to cuda:{count - 1}"
        )
    return index


def describe_gpu(cuda: Any, index: int) -> Gpu:
    """Name and compute capability of a GPU."""
    error, properties = cuda.cudaGetDeviceProperties(index)
    if error != cuda.cudaError_t.cudaSuccess:
        raise EngineError(f"cudaGetDeviceProperties failed on cuda:{index}: {error.name}")
    name = bytes(properties.name).split(b"\0")[0].decode()
    return Gpu(name, f"{properties.major}.{properties.minor}")


def built_on() -> tuple[str, str]:
    """(compute capability like 8.9, name) of this machine's first GPU; EngineError without one."""
    cuda = import_cuda()
    if not num_gpus(cuda):
        raise EngineError(
            "backend 'tensorrt' needs an NVIDIA GPU to build on, none was found: use "
            "tensorrt_rtx with --compute-capability, which builds without one"
        )
    gpu = describe_gpu(cuda, 0)
    return gpu.compute_capability, gpu.name


@functools.lru_cache(maxsize=1)
def register_plugins() -> tuple[str, ...]:
    """Register the plugins of the graphs' ops for this machine's GPU, once per process."""
    capability, _ = built_on()
    # Imported by name: the plugins' file imports tensorrt, which most machines lack.
    plugins = importlib.import_module("dspark_plugins.tensorrt_plugins")
    table = importlib.import_module("dspark_plugins.tensorrt_ops").OPS
    ops = tuple(spec for spec in table if spec.name in PLUGIN_OPS)
    ids: tuple[str, ...] = plugins.register_plugins(int(capability.replace(".", "")), ops)
    return ids
