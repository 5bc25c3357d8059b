# SPDX-License-Identifier: Apache-2.0
"""What an engine directory decides, on paper: limits, precision, the model inside."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.unit.engines.test_engine_dir import FACTS
from trtllm_dspark.config import BucketConfig, CacheConfig, SchedulerConfig, SystemConfig
from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.engine_config import (
    apply_engine_dir,
    is_engine_dir,
    resolve_engine_dir,
)
from trtllm_dspark.engines.engine_dir import EngineDirectory
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.buckets import build_ladder

BUCKETS = BucketConfig(max_num_requests=6, max_num_tokens=96, ratios=(0.5, 1.0))
ASKED = SystemConfig(model_dir="e", scheduler=SchedulerConfig(policy="fixed"), num_threads=3)


def directory(tmp_path, backend: str) -> EngineDirectory:
    rungs = build_ladder(BUCKETS, 7)
    limits = EngineLimits(rungs, (1, 2, 4, 6), 7, 7, 500, 16, 99)
    facts = dataclasses.replace(FACTS, backend=backend, limits=limits, ratios=BUCKETS.ratios)
    return EngineDirectory(tmp_path, facts, {}, {}, facts.fingerprint)


@pytest.mark.parametrize("backend,inside", [("torch", "model"), ("tensorrt_rtx", "")])
def test_limits_and_precision_are_the_directorys_and_the_rest_is_kept(tmp_path, backend, inside):
    found = apply_engine_dir(ASKED, directory(tmp_path, backend))
    assert found.model_dir == str(tmp_path / inside)
    assert (found.backend, found.dtype, found.max_seq_len) == (backend, "bfloat16", 500)
    assert found.cache == CacheConfig(page_size=16, num_pages=99)
    assert (found.scheduler, found.num_threads) == (ASKED.scheduler, 3)


def test_the_ladder_made_from_the_resolved_buckets_is_the_one_that_was_built(tmp_path):
    found = directory(tmp_path, "torch")
    buckets = apply_engine_dir(ASKED, found).buckets
    assert build_ladder(buckets, 7) == found.facts.limits.rungs
    assert build_ladder(dataclasses.replace(buckets, ratios=(0.25,)), 7) != found.facts.limits.rungs


def test_a_named_precision_holds_where_the_model_is_loaded_and_not_where_it_was_built(tmp_path):
    asked = dataclasses.replace(ASKED, dtype="float32")
    assert apply_engine_dir(asked, directory(tmp_path, "torch")).dtype == "float32"
    assert apply_engine_dir(asked, directory(tmp_path, "tensorrt")).dtype == "bfloat16"


def test_a_drafter_from_elsewhere_cannot_join_built_engines(tmp_path):
    asked = dataclasses.replace(ASKED, drafter="drafters/other")
    with pytest.raises(ConfigError, match=r"drafters/other.*build again with --drafter-dir"):
        apply_engine_dir(asked, directory(tmp_path, "tensorrt_rtx"))
    assert apply_engine_dir(asked, directory(tmp_path, "torch")).drafter == "drafters/other"


def test_a_model_directory_passes_unchanged_and_is_refused_for_a_built_backend(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    asked = dataclasses.replace(ASKED, model_dir=str(tmp_path))
    assert resolve_engine_dir(asked) is asked and not is_engine_dir(tmp_path)
    with pytest.raises(ConfigError, match=r"backend = 'tensorrt_rtx' needs an engine directory"):
        resolve_engine_dir(dataclasses.replace(asked, backend="tensorrt_rtx"))


def test_a_stock_engine_directory_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_config": {}}))
    with pytest.raises(ConfigError, match="another tool"):
        resolve_engine_dir(dataclasses.replace(ASKED, model_dir=str(tmp_path)))
