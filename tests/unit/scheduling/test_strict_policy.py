# SPDX-License-Identifier: Apache-2.0
"""Sampling requests under a policy that does not cover sampled drafts: drafted greedily and
counted, or refused by name (`--strict-policy`). A real loop, a drafter of random weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.decoding.loops import request
from trtllm_dspark.config import BucketConfig, SchedulerConfig, SystemConfig
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.errors import InvalidRequestError
from trtllm_dspark.runtime import build_system
from trtllm_dspark.types import DraftMode

HOT = {"temperature": 1.0, "max_tokens": 6}


pytestmark = pytest.mark.usefixtures("private_cache")


def config_for(model_dir: Path, policy: str, *, strict: bool) -> SystemConfig:
    return SystemConfig(
        model_dir=str(model_dir),
        dtype="float32",
        num_threads=1,
        max_seq_len=64,
        buckets=BucketConfig(max_num_requests=2, max_num_tokens=32),
        scheduler=SchedulerConfig(policy, strict=strict),
        profile="never",
    )


def loop_of(model_dir: Path, policy: str, *, strict: bool) -> DecodingLoop:
    return build_system(config_for(model_dir, policy, strict=strict)).loop


def modes_of(loop: DecodingLoop, **params: Any) -> set[DraftMode]:
    """Run one request to its end; the modes it was drafted in."""
    loop.add(request("a", [1, 2, 3], **{**HOT, **params}))
    modes: set[DraftMode] = set()
    while loop.has_work:
        loop.step()
        if loop.last_outcome is not None:
            modes |= set(loop.last_outcome.modes)
    return modes


def test_sampling_requests_that_a_policy_does_not_cover_are_drafted_greedily_and_counted(
    drafted_model_dir: Path,
) -> None:
    loop = loop_of(drafted_model_dir, "ratio_bucket", strict=False)
    assert modes_of(loop) == {DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS}
    assert loop.stats().num_greedily_drafted_requests == 1
    assert modes_of(loop, seed=3) == {DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS}
    assert modes_of(loop, temperature=0.0) == {DraftMode.GREEDY_TARGET}
    assert loop.stats().num_greedily_drafted_requests == 1


def test_a_strict_server_refuses_them_and_names_the_policy(drafted_model_dir: Path) -> None:
    loop = loop_of(drafted_model_dir, "ratio_bucket", strict=True)
    with pytest.raises(InvalidRequestError, match="policy 'ratio_bucket' is not lossless"):
        loop.add(request("a", [1, 2, 3], **HOT))
    assert not loop.has_work
    assert modes_of(loop, seed=3) and modes_of(loop, temperature=0.0)
    assert loop.stats().num_greedily_drafted_requests == 0


def test_a_strict_server_samples_drafts_under_a_policy_that_covers_them(
    drafted_model_dir: Path,
) -> None:
    loop = loop_of(drafted_model_dir, "adaptive", strict=True)
    assert modes_of(loop) == {DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS}
    assert loop.stats().num_greedily_drafted_requests == 0
