# SPDX-License-Identifier: Apache-2.0
"""`select_drafts`: the kernel in the interpreter and the torch op against the numpy policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from dspark_plugins.select_drafts import SelectPlan, plan_select_drafts, run_select_drafts

from trtllm_dspark.ops.select_drafts import Selection, select_drafts
from trtllm_dspark.scheduling.selection import select_drafts as select_in_numpy

CPU = torch.device("cpu")
POISON = -77


def make_ids(num_requests: int, num_drafts: int) -> tuple[torch.Tensor, ...]:
    anchors = torch.arange(num_requests, dtype=torch.int32) + 100
    positions = torch.arange(num_requests, dtype=torch.int32) * 10
    drafts = torch.arange(num_requests * num_drafts, dtype=torch.int32) + 1000
    return anchors, positions, drafts.view(num_requests, num_drafts)


def run_kernel(survivals: np.ndarray, capacity: int, caps: list[int], rung: int) -> SelectPlan:
    plan = plan_select_drafts(*survivals.shape, rung=rung, device=CPU)
    for out in (plan.verify_lens, plan.cu_query_lens, plan.token_ids, plan.positions):
        out.fill_(POISON)
    plan.row_requests.fill_(POISON)
    return run_select_drafts(
        plan,
        torch.from_numpy(survivals),
        torch.tensor([capacity], dtype=torch.int32),
        torch.tensor(caps, dtype=torch.int32),
        *make_ids(*survivals.shape),
    )


def run_torch(survivals: np.ndarray, capacity: int, caps: list[int], rung: int) -> Selection:
    return select_drafts(
        torch.from_numpy(survivals),
        torch.tensor([capacity], dtype=torch.int32),
        torch.tensor(caps, dtype=torch.int32),
        *make_ids(*survivals.shape),
        rung,
    )


def assert_same(kernel: SelectPlan, reference: Selection) -> None:
    for name in ("verify_lens", "cu_query_lens", "token_ids", "positions", "row_requests"):
        assert getattr(kernel, name).tolist() == getattr(reference, name).tolist(), name


THREE = np.array([[0.9, 0.5], [0.5, 0.4], [0.2, 0.0]], np.float32)


def test_the_example_of_three_requests() -> None:
    out = run_kernel(THREE, 3, [2, 2, 1], 8)
    assert out.verify_lens.tolist() == [2, 1, 0]
    assert out.cu_query_lens.tolist() == [0, 3, 5, 6]
    assert out.token_ids.tolist() == [100, 1000, 1001, 101, 1002, 102, 0, 0]
    assert out.positions.tolist() == [0, 1, 2, 10, 11, 20, 0, 0]
    assert out.row_requests.tolist() == [0, 0, 0, 1, 1, 2, -1, -1]
    assert_same(out, run_torch(THREE, 3, [2, 2, 1], 8))


LEVELS = (0.0, 0.5, 1.0)
FALLING_ROWS = [row for row in itertools.product(LEVELS, repeat=2) if row[0] >= row[1]]


def test_the_torch_op_equals_the_numpy_policy_on_every_small_case() -> None:
    for rows in itertools.product(FALLING_ROWS, repeat=2):
        survivals = np.array(rows, np.float32)
        for caps in itertools.product((0, 1, 2), repeat=2):
            for capacity in range(6):
                expected = select_in_numpy(survivals, capacity, np.array(caps, np.int32))
                found = run_torch(survivals, capacity, list(caps), 6)
                assert found.verify_lens.tolist() == expected.tolist(), (rows, caps, capacity)


def test_the_kernel_equals_the_torch_op_on_tied_survivals() -> None:
    # one launch per capacity; caps and rows cycle so that every pair of tied rows meets
    for index, rows in enumerate(itertools.product(FALLING_ROWS[1:5], repeat=2)):
        survivals = np.array([*rows, rows[0]], np.float32)
        caps = [2, 1 + index % 2, index % 3]
        capacity = 1 + index % 5
        found = run_kernel(survivals, capacity, caps, 9)
        assert_same(found, run_torch(survivals, capacity, caps, 9))


@pytest.mark.slow
def test_the_kernel_equals_the_numpy_policy_on_every_small_case() -> None:
    """Every pair of falling rows under every capacity, and all caps where all survivals tie."""
    cases = [(rows, (2, 2)) for rows in itertools.product(FALLING_ROWS, repeat=2)]
    cases += [(((0.5, 0.5),) * 2, caps) for caps in itertools.product((-1, 0, 1, 2), repeat=2)]
    for rows, caps in cases:
        survivals = np.array(rows, np.float32)
        for capacity in range(5):
            found = run_kernel(survivals, capacity, list(caps), 6)
            expected = select_in_numpy(survivals, capacity, np.maximum(caps, 0).astype(np.int32))
            assert found.verify_lens.tolist() == expected.tolist(), (rows, caps, capacity)
            assert_same(found, run_torch(survivals, capacity, list(caps), 6))


@pytest.mark.parametrize("capacity", [-3, 0, 1, 5, 12, 1000])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_the_kernel_equals_the_policy_on_random_batches(num_drafts: int, capacity: int) -> None:
    generator = np.random.default_rng(num_drafts * 31 + capacity)
    steps = generator.integers(0, 9, size=(11, num_drafts)).astype(np.float32) / 8
    survivals = np.minimum.accumulate(steps, axis=1)
    caps = generator.integers(0, num_drafts + 2, size=11).tolist()
    found = run_kernel(survivals, capacity, caps, 96)
    expected = select_in_numpy(survivals, capacity, np.minimum(caps, num_drafts).astype(np.int32))
    assert found.verify_lens.tolist() == expected.tolist()
    assert_same(found, run_torch(survivals, capacity, caps, 96))


@pytest.mark.parametrize(("capacity", "expected"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_one_request_takes_what_there_is(capacity: int, expected: int) -> None:
    out = run_kernel(THREE[:1], capacity, [2], 3)
    assert out.verify_lens.tolist() == [expected]
    assert out.row_requests.tolist() == [0] * (expected + 1) + [-1] * (2 - expected)
    assert_same(out, run_torch(THREE[:1], capacity, [2], 3))


def test_a_full_batch_fills_its_rung_without_padding() -> None:
    ones = np.ones((4, 3), np.float32)
    out = run_kernel(ones, 12, [3] * 4, 16)
    assert out.verify_lens.tolist() == [3] * 4
    assert (out.row_requests >= 0).all() and (out.token_ids > 0).all()
    assert_same(out, run_torch(ones, 12, [3] * 4, 16))


def test_without_ties_a_request_gets_the_same_in_any_arrangement() -> None:
    survivals = np.array([[0.9, 0.3], [0.8, 0.7], [0.6, 0.1], [0.95, 0.2]], np.float32)
    order = [2, 0, 3, 1]
    base = run_kernel(survivals, 4, [2] * 4, 8).verify_lens
    moved = run_kernel(np.ascontiguousarray(survivals[order]), 4, [2] * 4, 8).verify_lens
    assert base.tolist() == [1, 2, 0, 1]
    assert moved.tolist() == base[order].tolist()


def test_adjacent_floats_are_told_apart() -> None:
    below = np.nextafter(np.float32(0.7), np.float32(0))
    survivals = np.array([[below], [0.7], [below]], np.float32)
    assert run_kernel(survivals, 1, [1, 1, 1], 8).verify_lens.tolist() == [0, 1, 0]
    assert run_kernel(survivals, 2, [1, 1, 1], 8).verify_lens.tolist() == [1, 1, 0]


def test_the_smallest_positive_survival_is_chosen_and_zero_never() -> None:
    tiny = np.float32(1e-45)
    survivals = np.array([[1.0, tiny], [0.0, 0.0]], np.float32)
    assert run_kernel(survivals, 4, [2, 2], 8).verify_lens.tolist() == [2, 0]


def test_absent_requests_have_no_rows() -> None:
    out = run_kernel(THREE, 2, [-1, 2, -1], 8)
    assert out.verify_lens.tolist() == [0, 2, 0]
    assert out.cu_query_lens.tolist() == [0, 0, 3, 3]
    assert out.token_ids.tolist() == [101, 1002, 1003, 0, 0, 0, 0, 0]
    assert_same(out, run_torch(THREE, 2, [-1, 2, -1], 8))


def test_padding_requests_and_rungs_change_nothing() -> None:
    out = run_kernel(THREE, 3, [2, 2, 1], 6)
    wide = np.concatenate([THREE, np.ones((5, 2), np.float32)])
    padded = run_kernel(wide, 3, [2, 2, 1, -1, -1, -1, -1, -1], 20)
    assert padded.verify_lens[:3].tolist() == out.verify_lens.tolist()
    assert padded.cu_query_lens[:4].tolist() == out.cu_query_lens.tolist()
    assert padded.token_ids[:6].tolist() == out.token_ids.tolist()
    assert padded.row_requests.tolist() == [*out.row_requests.tolist(), *[-1] * 14]


def test_an_empty_batch_gives_padding_only() -> None:
    out = run_kernel(np.zeros((0, 2), np.float32), 3, [], 4)
    assert out.cu_query_lens.tolist() == [0]
    assert out.row_requests.tolist() == [-1] * 4


def test_rows_that_do_not_fit_the_rung_are_refused_by_the_reference() -> None:
    with pytest.raises(ValueError, match="6 rows do not fit rung 5"):
        run_torch(THREE, 3, [2, 2, 1], 5)


def test_too_many_survivals_for_one_program_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 32768"):
        plan_select_drafts(2049, 16, rung=4096, device=CPU)
