# SPDX-License-Identifier: Apache-2.0
"""A benchmark round against a real server: what clients measured and what its metrics say agree."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from trtllm_dspark.evaluation.bench_load import BenchLoad, closed_load, open_load
from trtllm_dspark.evaluation.bench_triton import ServerContender
from trtllm_dspark.serving.launcher import TritonServer

TEXTS = ["ab ab ab ab ab", "one two one two one two", "zzzz"]


def loads() -> list[BenchLoad]:
    rng = np.random.default_rng(0)
    long, short = ({"max_tokens": count, "ignore_end": True} for count in (400, 24))
    return [closed_load(TEXTS, 3, 6, rng, **long), open_load(TEXTS, 20.0, 60, 8, rng, **short)]


@pytest.mark.parametrize("load", loads(), ids=["closed", "open"])
def test_a_round_through_the_server_is_measured(server: TritonServer, load: BenchLoad) -> None:
    contender = ServerContender("tiny", server.grpc_url, server.metrics_url, contextlib.ExitStack())
    row = contender.run_round(load)
    assert row["num_failed"] == 0 and row["num_requests"] == len(load.requests)
    assert all(value > 0 for value in row["first_token_ms"])
    assert 1.0 <= row["acceptance_length"] <= 8.0
    assert 0 < row["keep_ratio"] <= 1 and row["verified_per_request"] > 0
    assert row["step_ms"] >= row["scheduler_ms"] > 0
    assert sum(row["rungs"].values()) > 0
    assert 0 < row["steps_s"] < row["steady_s"]
    if not load.is_open:
        assert 0 < row["mean_active"] <= 3.0 + 1e-6
