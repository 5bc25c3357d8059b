# SPDX-License-Identifier: Apache-2.0
"""Where every tensor of an engine file lies: sizes, staging offsets, which page pool, which file.

Pure arithmetic on what an engine says of its tensors and on its profiles; allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.engines.build_profiles import Profile
from trtllm_dspark.engines.graph_names import pages_in, pages_out
from trtllm_dspark.engines.tensorrt_engine_memory import ALIGNMENT, element_type, round_up
from trtllm_dspark.errors import EngineError

_ROWS_OF = {
    "logits": "logit_rows",
    "taps": "token_ids",
    "token_ids": "anchor_ids",
    "confidence_logits": "anchor_ids",
}
"""Output → input with as many rows."""
DEVICE_INPUTS = ("taps",)
"""Inputs that are written on the device, not staged on the host; pages besides."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output as the engine states it."""

    name: str
    dtype: str
    """TensorRT's name: BF16, INT32, …"""
    shape: tuple[int, ...]
    """−1 where it varies (the first axis)."""
    is_input: bool

    @property
    def element(self) -> np.dtype[Any]:
        """How the host holds one element."""
        return element_type(self.dtype, self.name)


@dataclass(frozen=True)
class StagedInput:
    """Where one host input lies inside the staging block."""

    offset: int
    capacity_bytes: int
    element: np.dtype[Any]


def largest_shape(spec: TensorSpec, profiles: Sequence[Profile]) -> tuple[int, ...]:
    """The shape of a buffer that every profile's calls fit into (pages are not asked for here).

    Example: token_ids with rungs 1, 8, 32 → (32,); logits [−1, V] with 16 logit rows → (16, V).
    """
    name = spec.name if spec.is_input else _ROWS_OF.get(spec.name)
    ranges = [p.inputs[name].max for p in profiles if name is not None and name in p.inputs]
    if not ranges:
        raise EngineError(
            f"the engine has a tensor {spec.name!r} that this version does not know: build again"
        )
    if spec.is_input:
        return tuple(max(sizes) for sizes in zip(*ranges, strict=True))
    return (max(shape[0] for shape in ranges), *spec.shape[1:])


def plan_staging(
    specs: Iterable[TensorSpec], profiles: Sequence[Profile], pages: Iterable[str]
) -> dict[str, StagedInput]:
    """Fixed offsets of all host inputs in one block, so that one copy moves them all."""
    skipped, staged, offset = {*DEVICE_INPUTS, *pages}, {}, 0
    for spec in specs:
        if not spec.is_input or spec.name in skipped:
            continue
        size = math.prod(largest_shape(spec, profiles)) * spec.element.itemsize
        staged[spec.name] = StagedInput(offset, size, spec.element)
        offset += round_up(size)
    return staged


def staging_bytes(staged: Mapping[str, StagedInput]) -> int:
    """Length of the staging block."""
    return max((s.offset + round_up(s.capacity_bytes) for s in staged.values()), default=ALIGNMENT)


def write_inputs(
    block: np.ndarray, arrays: Mapping[str, np.ndarray], staged: Mapping[str, StagedInput]
) -> int:
    """Put arrays where the staging block [bytes] has their places; bytes up to the last one's end.

    Arrays that the engine does not take are left out (with plugins there is no query_offsets).
    """
    end = 0
    for name, values in arrays.items():
        place = staged.get(name)
        if place is None:
            continue
        data = np.ascontiguousarray(values, place.element).reshape(-1).view(np.uint8)
        block[place.offset : place.offset + data.nbytes] = data
        end = max(end, place.offset + data.nbytes)
    return end


def page_specs(specs: Sequence[TensorSpec], num_pages: int) -> list[TensorSpec]:
    """The page inputs in layer order, with their real number of pages."""
    by_name = {spec.name: spec for spec in specs if spec.is_input}
    found: list[TensorSpec] = []
    while pages_in(len(found)) in by_name:
        spec = by_name[pages_in(len(found))]
        found.append(TensorSpec(spec.name, spec.dtype, (num_pages, *spec.shape[1:]), is_input=True))
    return found


def is_in_place(aliases: Mapping[str, str], num_layers: int) -> bool:
    """Whether the engine writes pages where it reads them (output → aliased input, by name)."""
    wanted = {pages_out(i): pages_in(i) for i in range(num_layers)}
    found = {name: source for name, source in aliases.items() if source}
    if found and found != wanted:
        raise EngineError(
            f"the engine aliases {found}; all pages in place or none were expected: build again"
        )
    return bool(found)


def pool_of(call: int, in_place: bool) -> tuple[int, int]:
    """(pool read, pool written) of the n-th call: two pools take turns unless pages are in place.

    Example without plugins: calls 0, 1, 2 → (0, 1), (1, 0), (0, 1).
    """
    return (0, 0) if in_place else (call % 2, 1 - call % 2)


def locate_profile(profile: int, num_files: int) -> tuple[int, int]:
    """(file, profile inside it): one file holds all profiles, or every rung has its own file."""
    return (0, profile) if num_files == 1 else (profile, 0)


def split_rows(num_rows: int, most: int) -> list[slice]:
    """Slices of at most `most` rows: 5 rows, 2 → 0:2, 2:4, 4:5."""
    return [slice(start, min(start + most, num_rows)) for start in range(0, num_rows, most)]
