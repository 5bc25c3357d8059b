# SPDX-License-Identifier: Apache-2.0
"""Blocks of device memory and pinned host memory, seen as arrays. Knows addresses, not streams.

Memory comes from CUDA's runtime through cuda-python and goes back when nobody holds a view of it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_dspark.errors import EngineError

ALIGNMENT = 256
"""Bytes; what TensorRT asks of every address."""
ELEMENTS: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "UINT8": np.dtype(np.uint8),
}
"""TensorRT's names of the types our graphs use, and how the host holds them (BF16: its bits)."""

Free = Callable[[int], None]
"""Gives an address back; must not raise."""


class Block:
    """Owns one allocation: `free` is called once, when the last view of it is gone."""

    def __init__(self, address: int, free: Free) -> None:
        # At exit CUDA may be gone already, and the memory goes with the process.
        weakref.finalize(self, free, address).atexit = False


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array in device memory; a view of it keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    """TensorRT's name: BF16, INT32, …"""
    block: Block | None = field(default=None, repr=False, compare=False)

    @property
    def element(self) -> np.dtype[Any]:
        """How the host holds one element."""
        return element_type(self.dtype, "array")

    @property
    def num_bytes(self) -> int:
        """Length in memory."""
        return math.prod(self.shape) * self.element.itemsize

    def rows(self, num_rows: int) -> DeviceArray:
        """The first rows; EngineError where there are not as many."""
        if not 0 <= num_rows <= self.shape[0]:
            raise EngineError(f"{num_rows} rows of a buffer with {self.shape[0]} were asked for")
        return dataclasses.replace(self, shape=(num_rows, *self.shape[1:]))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What other libraries view this memory by; ordering their streams is the caller's."""
        return {
            "shape": self.shape,
            "typestr": self.element.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def element_type(dtype: str, name: str) -> np.dtype[Any]:
    """The host's type of a TensorRT type; EngineError names the tensor where it is unknown."""
    if dtype not in ELEMENTS:
        raise EngineError(
            f"tensor {name!r} has the type {dtype}; known are {sorted(ELEMENTS)}: "
            "build the engine again with this version"
        )
    return ELEMENTS[dtype]


def host_view(address: int, shape: tuple[int, ...], dtype: str, free: Free) -> np.ndarray:
    """Pinned host memory as an array that gives it back with its last view."""
    element = element_type(dtype, "array")
    size = math.prod(shape) * element.itemsize
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    memory.block = Block(address, free)
    return np.frombuffer(memory, np.uint8).view(element).reshape(shape)


def as_floats(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 [same shape] of floats as the host holds them; exact, BF16 included."""
    if dtype != "BF16":
        return values.astype(np.float32)
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_up(num_bytes: int) -> int:
    """To the next aligned size."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
