# SPDX-License-Identifier: Apache-2.0
"""A test double of graph capture: it holds calls to what a CUDA graph would hold them to.

Captured calls may read static storages and what they make themselves, and must do exactly the same
operations on the same addresses, shapes and numbers at every replay. Outside of them nothing may be
allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Entry = tuple[Any, ...]


def storage_of(value: Any) -> int | None:
    """Address of the memory behind a tensor or a storage; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr()
    if isinstance(value, torch.UntypedStorage):
        return value.data_ptr()
    return None


class Tracer(TorchDispatchMode):
    """Notes every operation, its static operands by address and its numbers by value."""

    def __init__(self, static: set[int]) -> None:
        super().__init__()
        self.static, self.made = static, set[int]()
        self.trace: list[Entry] = []
        self.foreign: list[str] = []
        self.kept: list[Any] = []
        """What the call made stays alive, so that no address is used twice."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        leaves = tree_leaves((args, kwargs or {}))
        self.trace.append((str(func), *(self._describe(x) for x in leaves)))
        known = self.static | self.made
        for value in leaves:
            address = storage_of(value)
            if address and address not in known:
                self.foreign.append(f"{func} reads {_shape(value)}")
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            address = storage_of(value)
            if address and address not in self.static:
                self.made.add(address)
                self.kept.append(value)
        return result

    def _describe(self, value: Any) -> Any:
        address = storage_of(value)
        if address is None:
            return repr(value)
        shape = _shape(value)
        if isinstance(value, torch.Tensor) and address in self.static:
            return (value.data_ptr(), shape, value.dtype)
        return shape


class NoAllocation(TorchDispatchMode):
    """Fails on any operation that gives a new storage, except inside a replay of the double."""

    def __init__(self, capture: CaptureDouble) -> None:
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not self.capture.is_replaying:
            inputs = {storage_of(x) for x in tree_leaves((args, kwargs or {}))}
            for value in tree_leaves(result):
                address = storage_of(value)
                assert not address or address in inputs, f"{func} allocates {_shape(value)}"
        return result


class CaptureDouble:
    """See the module docstring. Register the static tensors before the first step."""

    def __init__(self) -> None:
        self.static: set[int] = set()
        self.num_captured = self.num_replayed = 0
        self.is_replaying = False

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare memory that lives as long as the engine."""
        self.static |= {x.untyped_storage().data_ptr() for x in tensors}

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        captured = self._trace(call)
        self.num_captured += 1

        def replay() -> None:
            again = self._trace(call)
            self.num_replayed += 1
            assert len(again) == len(captured), "a replay does other operations than the capture"
            for old, new in zip(captured, again, strict=True):
                assert old == new, f"captured {old}, replayed {new}"

        return replay

    def _trace(self, call: Callable[[], None]) -> list[Entry]:
        self.is_replaying = True
        try:
            with Tracer(self.static) as tracer:
                call()
        finally:
            self.is_replaying = False
        assert not tracer.foreign, f"memory that is neither static nor made: {tracer.foreign[:3]}"
        return tracer.trace


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else "storage"
