# SPDX-License-Identifier: Apache-2.0
"""Systems put together from configurations: what is loaded, measured, cached, and said."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from tests.e2e.tiny_model import write_tiny_drafter, write_tiny_model
from tests.unit.decoding.loops import generate, request
from trtllm_dspark import runtime
from trtllm_dspark.config import BucketConfig, SchedulerConfig, SystemConfig
from trtllm_dspark.decoding import profiling
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling import policy_names
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.measurement import Cell, StepKind


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    write_tiny_drafter(directory, head_type="markov", markov_rank=8, confidence_head=True)
    return directory


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def quick_private_cache(shared_cache, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(shared_cache))
    monkeypatch.setattr(runtime, "PROFILE_BUDGET_S", 0.2)


def config_for(model_dir, **changes) -> SystemConfig:
    fields = dict(
        model_dir=str(model_dir),
        dtype="float32",
        num_threads=1,
        max_seq_len=256,
        buckets=BucketConfig(max_num_requests=4, max_num_tokens=64, request_buckets=(1, 4)),
        scheduler=SchedulerConfig(policy="fixed"),
        profile="never",
    )
    return SystemConfig(**{**fields, **changes})


PROMPTS = [list(np.random.default_rng(i).integers(0, 256, 12 + 7 * i)) for i in range(5)]


def tokens(config: SystemConfig, **params) -> dict[str, list[int]]:
    system = runtime.build_system(config)
    return generate(system.loop, [request(i, p, **params) for i, p in enumerate(PROMPTS)])


def test_auto_takes_the_models_own_drafter_and_the_others_are_taken_by_name(model_dir):
    for drafter, name in (
        ("auto", "dspark"),
        ("ngram", "ngram"),
        ("none", "none"),
        (str(model_dir / "drafter"), "dspark"),
    ):
        system = runtime.build_system(config_for(model_dir, drafter=drafter))
        assert system.loop.drafter.name == name
    plain = config_for(model_dir, scheduler=SchedulerConfig(policy="autoregressive"))
    assert runtime.build_system(plain).loop.drafter.name == "none"
    with pytest.raises(ConfigError, match="nowhere"):
        runtime.build_system(config_for(model_dir, drafter="nowhere"))


@pytest.mark.parametrize("policy", policy_names(servable=True))
def test_no_policy_changes_a_greedy_or_a_seeded_token(model_dir, policy):
    """With a random DSpark drafter, a measured table and prefix reuse."""
    plain = config_for(model_dir, scheduler=SchedulerConfig(policy="autoregressive"))
    options = {"threshold": {"threshold": 0.3}}.get(policy, {})
    config = config_for(
        model_dir, profile="auto", scheduler=SchedulerConfig(policy=policy, options=options)
    )
    assert tokens(config) == tokens(plain)
    seeded = dict(temperature=0.9, seed=5, top_p=0.95)
    assert tokens(config, **seeded) == tokens(plain, **seeded)


def test_a_table_is_measured_once_per_fingerprint_and_trusted_afterwards(
    model_dir, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path))
    config = config_for(model_dir, profile="auto", scheduler=SchedulerConfig(policy="adaptive"))
    with caplog.at_level(logging.INFO):
        first = runtime.build_system(config)
        assert "measuring the latency table" in caplog.text
        caplog.clear()
        second = runtime.build_system(config)
        assert "measuring the latency table" not in caplog.text
    table = LatencyTable.load(runtime.table_path(first.info))
    assert table.fingerprint == second.info.fingerprint
    assert table.num_drafts == 4
    assert np.all(table.autoregressive_ms > 0) and np.all(table.no_draft_ms > 0)
    assert first.loop.stats().num_free_pages == first.loop.stats().num_pages
    other = runtime.build_system(dataclasses.replace(config, drafter="ngram", profile="never"))
    assert other.info.fingerprint != table.fingerprint


def test_a_plain_step_of_the_table_keeps_its_rows_and_a_drafted_one_writes_them(
    model_dir, monkeypatch
):
    system = runtime.build_system(config_for(model_dir))
    profiler = profiling.StepProfiler(system.engine, system.drafter)
    written, append = [], system.engine.append_context
    monkeypatch.setattr(
        system.engine,
        "append_context",
        lambda step: written.append(step.cu_row_lens.tolist()) or append(step),
    )
    assert profiler.time_cell(Cell(StepKind.NO_DRAFT, 2, 2, 0, 24)).step_ms > 0
    assert written == []
    assert {context.num_pending for context in system.drafter._contexts.values()} == {3}
    profiler.time_cell(Cell(StepKind.DRAFTED, 2, 4, 2, 24))
    assert written == [[0, 2, 4]]


def test_without_a_table_everything_is_verified_and_the_log_says_why(
    model_dir, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path))
    config = config_for(model_dir, scheduler=SchedulerConfig(policy="adaptive"))
    with caplog.at_level(logging.WARNING):
        system = runtime.build_system(config)
    assert "every draft is verified" in caplog.text
    generate(system.loop, [request("a", PROMPTS[0])])
    stats = system.loop.stats()
    assert stats.fallback_reason == "no_table"
    cut_by_max_tokens = 1 + 2 + 3
    assert stats.num_verified_tokens == stats.num_drafted_tokens - cut_by_max_tokens > 0


def test_without_a_drafter_no_table_is_missed_and_none_can_be_measured(model_dir, caplog):
    scheduler = SchedulerConfig(policy="adaptive")
    config = config_for(model_dir, drafter="none", scheduler=scheduler, profile="auto")
    with caplog.at_level(logging.WARNING):
        system = runtime.build_system(config)
    assert system.loop.stats().fallback_reason == "" and "every draft" not in caplog.text
    with pytest.raises(ConfigError, match="drafts nothing"):
        runtime.measure_latency_table(config)


def test_a_backend_that_cannot_run_yet_is_refused_by_name(model_dir):
    with pytest.raises(ConfigError, match="tensorrt_rtx"):
        runtime.build_system(config_for(model_dir, backend="tensorrt_rtx"))


@pytest.mark.parametrize("policy", ["oracle", "best_uniform"])
def test_a_policy_for_evaluation_only_cannot_serve(model_dir, policy):
    with pytest.raises(ConfigError, match="adaptive"):
        runtime.build_system(config_for(model_dir, scheduler=SchedulerConfig(policy=policy)))
