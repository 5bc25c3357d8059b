# SPDX-License-Identifier: Apache-2.0
"""Puts weights and K/V pages on huge pages of memory where Linux offers them on request.

A step on the CPU reads every weight once. In pages of 4 KiB that is a translation miss every few
hundred cycles, most of all in a virtual machine, where each miss walks two tables.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable

import torch

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 1 << 21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def back_weights() -> int:
    """Move this process's resident anonymous memory onto huge pages; returns bytes asked for.

    Meant for the moment after the weights are loaded. Packed weights live where oneDNN's allocator
    put them, small ones side by side on the heap, so whole mappings are moved. Elsewhere than on
    Linux, or where the kernel refuses, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return 0
    ranges = [_inner(*mapping) for mapping in _resident_mappings()]
    moved = sum(_advise(start, size, collapse=True) for start, size in ranges)
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


def _resident_mappings() -> list[tuple[int, int]]:
    """Private anonymous writable mappings that are mostly in memory, [start, end)."""
    found, bounds = [], (0, 0)
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                fields = line.split()
                if not fields[0].endswith(":"):
                    is_anonymous = len(fields) == 5 or fields[5] == "[heap]"
                    start, end = (int(value, 16) for value in fields[0].split("-"))
                    bounds = (start, end) if fields[1] == "rw-p" and is_anonymous else (0, 0)
                elif fields[0] == "Rss:" and int(fields[1]) * 2048 > bounds[1] - bounds[0] > 0:
                    found.append(bounds)
    except OSError as error:
        logger.info("weights stay on small pages: %s", error)
    return found


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
