# SPDX-License-Identifier: Apache-2.0
"""The pool of K/V pages: reference counts, a free list, and reuse of equal prompt prefixes.

Pages are ids; the tensors behind them belong to the engine. Target and drafter rows of a position
share one page id, so a page may be offered for reuse only when both are written.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from trtllm_dspark.types import SCRATCH_PAGE, IntArray


def chain_keys(token_ids: IntArray, page_size: int) -> list[bytes]:
    """Key of each full page: a digest of the page's tokens and of every page before it."""
    keys: list[bytes] = []
    previous = b""
    for end in range(page_size, len(token_ids) + 1, page_size):
        page = np.ascontiguousarray(token_ids[end - page_size : end], np.int32).tobytes()
        previous = hashlib.blake2b(previous + page, digest_size=16).digest()
        keys.append(previous)
    return keys


def make_page_table(page_ids: Sequence[Sequence[int] | IntArray]) -> IntArray:
    """[R, P] padded with the scratch page. Example: [[3, 4], [7]] → [[3, 4], [7, 0]]."""
    width = max((len(ids) for ids in page_ids), default=0)
    table = np.full((len(page_ids), width), SCRATCH_PAGE, np.int32)
    for row, ids in enumerate(page_ids):
        table[row, : len(ids)] = ids
    return table


class PagePool:
    """Hands out pages; page SCRATCH_PAGE is never handed out. All counts are exact at all times."""

    def __init__(self, num_pages: int, page_size: int, enable_reuse: bool = True) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.enable_reuse = enable_reuse
        self._references = [0] * num_pages
        self._free = [page for page in range(num_pages - 1, -1, -1) if page != SCRATCH_PAGE]
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages nobody holds whose contents may still be reused, oldest first."""

    @property
    def num_free(self) -> int:
        """Pages that could be handed out now (idle cached ones included)."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages held by requests."""
        return self.num_pages - 1 - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each; None (nothing changes) if there are not enough."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; unreferenced cached pages stay reusable until needed."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of_page:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def reuse_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of `keys`, one reference added to each."""
        pages: list[int] = []
        if not self.enable_reuse:
            return pages
        for key in keys:
            page = self._page_of_key.get(key)
            if page is None:
                break
            self._references[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def offer(self, key: bytes, page: int) -> None:
        """Let later requests reuse a fully written page; the first page offered for a key wins."""
        if self.enable_reuse and key not in self._page_of_key and page not in self._key_of_page:
            self._page_of_key[key] = page
            self._key_of_page[page] = key

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of_key[self._key_of_page.pop(page)]
        return page
