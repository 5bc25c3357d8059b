# SPDX-License-Identifier: Apache-2.0
"""The adapter between loop and drafter engine: lazy batched context, the invariant, sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.drafters.kept_rows import KeptRows
from trtllm_dspark.decoding.drafters.protocol import CommittedRows, DraftSource
from trtllm_dspark.decoding.pages import make_page_table
from trtllm_dspark.engines.protocol import ContextAppend, DrafterOutput, DrafterStep
from trtllm_dspark.errors import EngineError
from trtllm_dspark.types import EngineInfo, SamplingParams

GAMMA, WIDTH = 3, 4


class RecordingEngine:
    """Keeps what it is asked to do; drafts anchor + 1, + 2, …"""

    def __init__(self) -> None:
        self.info = EngineInfo(100, 4, 64, 4, 20, (1, 8), GAMMA, "test", "cpu")
        self.appended: list[ContextAppend] = []
        self.drafted: list[DrafterStep] = []

    def append_context(self, rows: ContextAppend) -> None:
        self.appended.append(rows)

    def run_drafter(self, step: DrafterStep) -> DrafterOutput:
        self.drafted.append(step)
        ids = step.anchor_ids[:, None] + np.arange(1, GAMMA + 1, dtype=np.int32)
        probs = torch.ones(len(ids), GAMMA, 100) if step.sampling.temperature.any() else None
        return DrafterOutput(ids, np.zeros(ids.shape, np.float32), probs)


def source(key: int, num_tokens: int, **changes: object) -> DraftSource:
    fields: dict[str, object] = dict(
        key=key,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        page_ids=np.array([key + 1, key + 5], np.int32),
        params=SamplingParams(temperature=0.0),
        noise_seed=key,
        is_coupled=False,
        draft_greedily=True,
        max_draft_len=GAMMA,
    )
    return DraftSource(**{**fields, **changes})  # type: ignore[arg-type]


def commit(drafter: DSparkDrafter, *parts: tuple[DraftSource, int, int]) -> torch.Tensor:
    """Commit a step whose rows of a request are (source, start, count); returns the step's taps.

    A row of position p tells it: 100 · key + p. Rows of no request lie between them.
    """
    rows, values = [], [-1.0]
    for of, start, num in parts:
        rows.append(CommittedRows(of, start, num, first_row=len(values)))
        values += [100.0 * of.key + start + i for i in range(num)] + [-1.0]
    taps = torch.tensor(values)[:, None].repeat(1, WIDTH)
    drafter.commit(rows, taps)
    return taps


def test_pending_rows_of_all_requests_are_written_in_one_call_before_the_draft() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine)
    commit(drafter, (source(0, 5), 0, 2), (source(1, 3), 0, 2))
    commit(drafter, (source(0, 5), 2, 2), (source(1, 3), 2, 0), (source(2, 9), 0, 8))
    assert not engine.appended
    block = drafter.propose([source(0, 5), source(1, 3)])
    (call,) = engine.appended
    assert call.cu_row_lens.tolist() == [0, 4, 6]
    assert call.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert call.taps[:, 0].tolist() == [0, 1, 2, 3, 100, 101]
    assert call.page_table.tolist() == [[1, 5], [2, 6]]
    assert engine.drafted[0].anchor_positions.tolist() == [4, 2]
    assert block.token_ids.tolist() == [[5, 6, 7], [3, 4, 5]]
    assert block.draft_lens.tolist() == [GAMMA, GAMMA]
    assert [drafter.synced_len(k) for k in (0, 1, 2, 3)] == [4, 2, 0, 0]


def test_steps_without_drafts_still_advance_the_context() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine)
    commit(drafter, (source(0, 5), 0, 4))
    for position in range(4, 10):
        commit(drafter, (source(0, position + 2), position, 1))
    drafter.propose([source(0, 11)])
    assert engine.appended[0].positions.tolist() == list(range(10))


def test_the_invariant_is_checked_at_every_draft() -> None:
    drafter = DSparkDrafter(RecordingEngine())
    commit(drafter, (source(0, 5), 0, 3))
    with pytest.raises(EngineError, match="3 drafter-context rows and its anchor at position 4"):
        drafter.propose([source(0, 5)])


def test_a_gap_in_the_committed_rows_is_refused() -> None:
    drafter = DSparkDrafter(RecordingEngine())
    commit(drafter, (source(0, 5), 0, 3))
    with pytest.raises(EngineError, match="expected position 3"):
        commit(drafter, (source(0, 6), 4, 1))


def test_a_preempted_request_comes_back_from_row_0() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine)
    commit(drafter, (source(0, 5), 0, 4))
    drafter.release(0)
    commit(drafter, (source(0, 5), 0, 4))
    drafter.propose([source(0, 5)])
    assert engine.appended[0].positions.tolist() == [0, 1, 2, 3]


def test_rows_of_a_shared_prefix_are_taken_as_written() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine)
    commit(drafter, (source(0, 7), 4, 2))
    assert drafter.synced_len(0) == 4
    drafter.propose([source(0, 7)])
    assert engine.appended[0].positions.tolist() == [4, 5]
    assert drafter.synced_len(0) == 6


def test_too_many_pending_rows_are_written_without_a_draft() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine, max_pending_rows=5)
    commit(drafter, (source(0, 5), 0, 4))
    assert not engine.appended
    commit(drafter, (source(1, 5), 0, 2))
    assert engine.appended[0].cu_row_lens.tolist() == [0, 4, 6]
    assert drafter.synced_len(0) == 4


def test_taps_are_copied_at_commit() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine)
    commit(drafter, (source(0, 3), 0, 2)).fill_(-1.0)
    drafter.propose([source(0, 3)])
    assert engine.appended[0].taps[:, 0].tolist() == [0, 1]


def test_rows_of_ended_requests_make_room_and_others_stay_what_they_were() -> None:
    engine, rng = RecordingEngine(), np.random.default_rng(0)
    drafter = DSparkDrafter(engine)
    lens: dict[int, int] = {}
    for step in range(400):
        for key in rng.integers(0, 6, 2).tolist():
            if rng.random() < 0.1:
                drafter.release(key)
                lens.pop(key, None)
        keys = sorted(set(rng.integers(0, 6, 4).tolist()))
        grown = {key: int(rng.integers(0, 4)) for key in keys}
        commit(drafter, *((source(k, 999), lens.get(k, 0), n) for k, n in grown.items()))
        lens.update({key: lens.get(key, 0) + n for key, n in grown.items()})
        if step % 7 == 0:
            engine.appended.clear()
            drafter.sync(keys)
            for call in engine.appended:
                owners = call.page_table[:, 0].repeat(np.diff(call.cu_row_lens)) - 1
                assert call.taps[:, 0].tolist() == (100 * owners + call.positions).tolist()
            assert all(drafter.synced_len(key) == lens[key] for key in keys)
    for key in lens:
        drafter.release(key)
    assert drafter.num_kept_rows == 0


def test_kept_rows_do_not_grow_with_the_requests_that_came_and_went() -> None:
    kept = KeptRows()
    for _ in range(100):
        places = kept.add(torch.zeros(3, WIDTH), np.array([0, 2]))
        kept.free(places)
    assert (kept.num_rows, kept.size) == (0, 2)


def test_only_requests_that_may_be_sampled_are_sampled() -> None:
    engine = RecordingEngine()
    drafter = DSparkDrafter(engine)
    hot = {"params": SamplingParams(temperature=0.8, top_p=0.9), "noise_seed": 2**63 + 1}
    sources = [
        source(0, 2, **hot, draft_greedily=False, is_coupled=True),
        source(1, 2, **hot, draft_greedily=True),
        source(2, 2),
    ]
    for each in sources:
        commit(drafter, (each, 0, 1))
    block = drafter.propose(sources)
    assert block.sampled.tolist() == [True, False, False]
    assert block.draft_probs is not None
    sampling = engine.drafted[0].sampling
    np.testing.assert_allclose(sampling.temperature, [0.8, 0.0, 0.0])
    assert sampling.seeds.tolist() == [2**63 + 1, 2**63 + 1, 2]
    assert sampling.coupled.tolist() == [True, False, False]
    assert drafter.propose(sources[2:]).sampled is None


def test_page_tables_are_padded_with_the_scratch_page() -> None:
    table = make_page_table([np.array([3, 4]), np.array([7])])
    assert table.tolist() == [[3, 4], [7, 0]]
