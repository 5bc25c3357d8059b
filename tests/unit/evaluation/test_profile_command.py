# SPDX-License-Identifier: Apache-2.0
"""`dspark profile` on a tiny model: the files it writes, the exit code, measuring again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.evaluation.tiny_system import GAMMA
from trtllm_dspark import runtime
from trtllm_dspark.config import BucketConfig, SystemConfig
from trtllm_dspark.evaluation import profile_command
from trtllm_dspark.scheduling import latency_table
from trtllm_dspark.scheduling.interchange import table_from_json_form
from trtllm_dspark.scheduling.latency_table import LatencyTable

pytestmark = pytest.mark.usefixtures("private_cache")


def arguments(model_dir: Path, *more: str) -> list[str]:
    return [
        "--model-dir", str(model_dir), "--dtype", "float32", "--threads", "1",
        "--max-batch-size", "2", "--max-num-tokens", "32", "--max-seq-len", "64",
        "--seconds", "0.1", *more,
    ]  # fmt: skip


def test_the_table_is_kept_exported_and_plotted(
    drafted_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(latency_table, "MIN_RELATIVE_RISE", -1.0)  # however flat this machine is
    paths = {n: tmp_path / n for n in ("own.json", "sglang.json", "trtllm.json", "cost.png")}
    own, sglang, trtllm, plot = map(str, paths.values())
    options = ("--output", own, "--sglang", sglang, "--tensorrt-llm", trtllm, "--plot", plot)
    code = profile_command.main(arguments(drafted_model_dir, *options, "--context-lens", "8", "24"))
    assert code == 0
    table = LatencyTable.load(own)
    (kept,) = (tmp_path / "cache" / "latency").iterdir()
    assert kept.name == f"{table.fingerprint}.json" and kept.read_text() == Path(own).read_text()
    assert table.context_lens == (8, 24) and table.num_drafts == GAMMA
    assert np.all(table.autoregressive_ms > 0) and np.all(table.no_draft_ms > 0)
    for name in ("sglang.json", "trtllm.json"):
        form = json.loads(paths[name].read_text())
        again = table_from_json_form(form, request_buckets=(1, 2), num_drafts=4, fingerprint="x")
        assert again.rungs == table.rungs
    assert paths["cost.png"].read_bytes()[:4] == b"\x89PNG"


def test_a_table_that_no_policy_may_trust_is_said_so_by_the_exit_code(
    drafted_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency_table, "MIN_RELATIVE_RISE", 1e9)
    assert profile_command.main(arguments(drafted_model_dir)) == 1
    assert "policies will not trim" in capsys.readouterr().out


def test_never_reads_auto_measures_once_and_force_measures_again(
    drafted_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, original = [], runtime.profile_engine

    def count(config: SystemConfig, *rest: Any, **options: Any) -> LatencyTable:
        measured.append(config.profile)
        return original(config, *rest, **options)

    monkeypatch.setattr(runtime, "PROFILE_BUDGET_S", 0.1)
    monkeypatch.setattr(runtime, "profile_engine", count)
    monkeypatch.setattr(latency_table, "MIN_RELATIVE_RISE", -1.0)
    tables = []
    for profile in ("never", "auto", "auto", "never", "force"):
        config = SystemConfig(
            model_dir=str(drafted_model_dir),
            dtype="float32",
            num_threads=1,
            max_seq_len=64,
            buckets=BucketConfig(max_num_requests=2, max_num_tokens=32),
            profile=profile,
        )
        tables.append(runtime.build_system(config).table)
    assert measured == ["auto", "force"]
    assert tables[0] is None and all(table is not None for table in tables[1:])
