# SPDX-License-Identifier: Apache-2.0
"""Puts weights and K/V pages on huge pages of memory where Linux offers them on request.

A step on the CPU reads every weight once. In pages of 4 KiB that is a translation miss every few
hundred cycles, most of all in a virtual machine, where each miss walks two tables.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 1 << 21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def back_weights() -> int:
    """Move this process's resident anonymous memory onto huge pages; returns bytes asked for.

    Meant for the moment after the weights are loaded. Packed weights live where oneDNN's allocator
    put them, small ones side by side on the heap, so it is memory that is moved, not tensors.
    Elsewhere than on Linux, or where the kernel refuses, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return 0
    moved = sum(_advise(start, size, collapse=True) for start, size in _resident_ranges())
    logger.info("asked for huge pages for %d MB of weights", moved >> 20)
    return moved


def back_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Let K/V pages that are not touched yet come as huge pages when they are."""
    if sys.platform.startswith("linux"):
        for tensor in tensors:
            _advise(*_inner(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes), collapse=False)


def _inner(start: int, end: int) -> tuple[int, int]:
    """The whole huge pages inside [start, end), as (start, size)."""
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return first, max(0, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first)


def _resident_ranges() -> list[tuple[int, int]]:
    """Runs of whole huge pages, (start, size), that are at least half in memory."""
    found = []
    for start, size in (_inner(*mapping) for mapping in _anonymous_mappings()):
        is_resident = _is_resident(start, size)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_resident, [False]))))
        for first, last in edges.reshape(-1, 2).tolist():
            found.append((start + first * HUGE_PAGE_BYTES, (last - first) * HUGE_PAGE_BYTES))
    return found


def _anonymous_mappings() -> list[tuple[int, int]]:
    """Private writable mappings of no file, [start, end)."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        logger.info("weights stay on small pages: %s", error)
        return []
    for fields in map(str.split, lines):
        if fields[1] == "rw-p" and (len(fields) == 5 or fields[5] == "[heap]"):
            start, end = (int(value, 16) for value in fields[0].split("-"))
            found.append((start, end))
    return found


def _is_resident(start: int, size: int) -> npt.NDArray[np.bool_]:
    """Per huge page of a range: whether at least half of it is in memory."""
    per_huge_page = HUGE_PAGE_BYTES // mmap.PAGESIZE
    pages = np.zeros(size // mmap.PAGESIZE, np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if pages.size and mincore(start, size, pages.ctypes.data):
        pages[:] = 0  # unmapped meanwhile
    resident = (pages & 1).reshape(-1, per_huge_page).sum(axis=1, dtype=np.int64)
    return np.asarray(2 * resident >= per_huge_page)


def _advise(start: int, size: int, *, collapse: bool) -> int:
    """Ask for huge pages in a range; returns how many bytes the kernel took the advice for."""
    if size == 0:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(start, size, _MADV_HUGEPAGE):
        return 0
    if collapse:  # Linux 6.1; before that the kernel's own daemon does it in time
        madvise(start, size, _MADV_COLLAPSE)
    return size
