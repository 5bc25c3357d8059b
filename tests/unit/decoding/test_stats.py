# SPDX-License-Identifier: Apache-2.0
"""Counters and times of a loop."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tests.unit.scheduling.builders import make_outcome
from trtllm_dspark.decoding import outcome
from trtllm_dspark.decoding.stats import LoopStats


def test_the_keep_ratio_counts_plain_steps_as_steps_that_verified_nothing() -> None:
    stats = LoopStats(num_drafts=3)
    stats.record(make_outcome([3, 1], [1, 1], logits=np.zeros((2, 3))))
    assert stats.keep_ratio == pytest.approx(6 / 8)
    stats.record(make_outcome([0, 0], [0, 0], drafted=False))
    assert stats.keep_ratio == pytest.approx(8 / 16)


def test_without_a_drafter_every_row_is_kept() -> None:
    stats = LoopStats()
    stats.record(make_outcome([0], [0], drafted=False))
    assert stats.keep_ratio == 1.0


def test_work_of_another_step_is_left_out_of_the_times(monkeypatch):
    seconds = iter([1.0, 1.5, 4.0, 4.25])
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(outcome, "time", clock)
    times = outcome.StepTimes()
    times.mark("plan")
    times.skip()
    times.mark("verify")
    assert (times.plan_ms, times.draft_ms, times.verify_ms) == (500.0, 0.0, 250.0)
    assert times.step_ms == 750.0
