# SPDX-License-Identifier: Apache-2.0
"""Huge pages are asked for whole and inside what is ours; numbers do not change."""

import ctypes
import mmap
import sys

import pytest
import torch

from trtllm_dspark.ops import huge_pages
from trtllm_dspark.ops.huge_pages import HUGE_PAGE_BYTES as HUGE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, HUGE, (0, HUGE)),
        (1, 3 * HUGE, (HUGE, 2 * HUGE)),
        (HUGE - 1, 2 * HUGE + 1, (HUGE, HUGE)),
        (HUGE + 1, 2 * HUGE + 5, (2 * HUGE, 0)),
        (5, 6, (HUGE, 0)),
    ],
)
def test_only_whole_huge_pages_inside_the_range_are_asked_for(start, end, expected):
    assert huge_pages._inner(start, end) == expected


def overlap(ranges, tensor):
    """Bytes of a tensor that the ranges hold."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return sum(max(0, min(a + size, last) - max(a, first)) for a, size in ranges)


def test_resident_memory_is_found_and_keeps_its_numbers():
    weights = torch.arange(8 << 20, dtype=torch.int32)  # 32 MB, touched
    assert overlap(huge_pages._resident_ranges(), weights) >= 15 * HUGE
    assert huge_pages.back_weights() >= 15 * HUGE
    assert torch.equal(weights, torch.arange(8 << 20, dtype=torch.int32))


def test_memory_that_nobody_has_touched_is_left_alone_wherever_it_lies():
    """Neighbouring mappings merge: a tensor's pages count, not the mapping they are in."""
    reserved = mmap.mmap(-1, 64 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    touched = huge_pages._inner(start, start + 64 * HUGE)[0] + 20 * HUGE
    ctypes.memset(touched, 1, 3 * HUGE)
    inside = [
        (max(a, start), min(a + n, start + 64 * HUGE))
        for a, n in huge_pages._resident_ranges()
        if a < start + 64 * HUGE and a + n > start
    ]
    assert (touched, touched + 3 * HUGE) in inside
    assert sum(b - a for a, b in inside) <= 4 * HUGE


def test_untouched_pages_stay_untouched(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *a, collapse: asked.append((a, collapse)))
    pages = torch.zeros(4 << 20)
    huge_pages.back_pages([pages])
    (((start, size), collapse),) = asked
    assert not collapse
    assert pages.data_ptr() <= start and start + size <= pages.data_ptr() + pages.nbytes


def test_a_kernel_that_refuses_changes_nothing(monkeypatch):
    class Refusing:
        class madvise:
            argtypes = None

            def __new__(cls, *arguments):
                return -1

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: Refusing)
    assert huge_pages._advise(0, HUGE, collapse=True) == 0
