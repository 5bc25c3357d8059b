# SPDX-License-Identifier: Apache-2.0
"""The page pool: counts are exact, prefixes are shared, idle pages are reused last."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dspark.decoding.pages import PagePool, chain_keys
from trtllm_dspark.types import SCRATCH_PAGE


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_the_scratch_page_is_never_handed_out_and_short_pools_say_none():
    pool = PagePool(5, 4)
    assert pool.num_free == 4
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4] and SCRATCH_PAGE not in pages
    assert pool.allocate(1) is None
    pool.release(pages[:2])
    assert pool.num_free == 2 and pool.num_used == 2


def test_asking_for_too_many_pages_changes_nothing():
    pool = PagePool(5, 4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_page_keys_depend_on_everything_before_the_page():
    assert len(chain_keys(ids(1, 2, 3, 4, 5), 2)) == 2
    a, b = chain_keys(ids(1, 2, 3, 4), 2), chain_keys(ids(9, 2, 3, 4), 2)
    assert a[1] != b[1] and a[0] == chain_keys(ids(1, 2), 2)[0]
    assert chain_keys(ids(1), 2) == []


def test_a_shared_page_returns_when_its_last_holder_releases_it():
    pool = PagePool(6, 2)
    keys = chain_keys(ids(1, 2, 3, 4), 2)
    mine = pool.allocate(2)
    for key, page in zip(keys, mine, strict=True):
        pool.offer(key, page)
    theirs = pool.reuse_prefix(keys)
    assert theirs == mine
    pool.release(mine)
    assert pool.num_free == 3, "still held by the second request"
    pool.release(theirs)
    assert pool.num_free == 5
    assert pool.reuse_prefix(keys) == mine, "idle pages keep their contents until needed"


def test_a_reused_prefix_ends_at_the_first_page_that_is_not_cached():
    pool = PagePool(6, 2)
    keys = chain_keys(ids(1, 2, 3, 4), 2)
    pages = pool.allocate(2)
    pool.offer(keys[1], pages[1])
    assert pool.reuse_prefix(keys) == []


def test_the_oldest_idle_page_is_evicted_first_and_forgotten():
    pool = PagePool(3, 2)
    old, new = chain_keys(ids(1, 2), 2)[0], chain_keys(ids(3, 4), 2)[0]
    first, second = pool.allocate(1), pool.allocate(1)
    pool.offer(old, first[0])
    pool.offer(new, second[0])
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == first
    assert pool.reuse_prefix([old]) == []
    assert pool.reuse_prefix([new]) == second


def test_reuse_can_be_switched_off():
    pool = PagePool(3, 2, enable_reuse=False)
    key = chain_keys(ids(1, 2), 2)[0]
    page = pool.allocate(1)
    pool.offer(key, page[0])
    assert pool.reuse_prefix([key]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_no_sequence_of_calls_loses_or_doubles_a_page(calls):
    pool = PagePool(8, 2)
    held: list[list[int]] = []
    keys = chain_keys(np.arange(12, dtype=np.int32) % 3, 2)
    for kind, size in calls:
        if kind == 0 and (pages := pool.allocate(size)) is not None:
            held.append(pages)
        elif kind == 1 and held:
            pool.release(held.pop(size % len(held)))
        elif kind == 2 and held and held[-1]:
            pool.offer(keys[size], held[-1][0])
        elif kind == 3:
            held.append(pool.reuse_prefix(keys[size:]))
        distinct = {page for pages in held for page in pages}
        assert pool.num_used == len(distinct)
        assert SCRATCH_PAGE not in distinct
    for pages in held:
        pool.release(pages)
    assert pool.num_free == 7
    assert sorted(pool.allocate(7)) == list(range(1, 8))
