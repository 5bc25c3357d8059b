# SPDX-License-Identifier: Apache-2.0
"""`dspark bench` in this process on a tiny model: rows, interleaving, resuming, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_dspark import runtime
from trtllm_dspark.config import BucketConfig, SystemConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation import bench_command
from trtllm_dspark.evaluation.bench_inprocess import LoopContender, make_loop_contenders
from trtllm_dspark.evaluation.bench_load import open_load


@pytest.fixture(autouse=True)
def quick_private_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "bench_cache"))
    monkeypatch.setattr(runtime, "PROFILE_BUDGET_S", 0.2)


def arguments(model_dir: Path, path: Path, *more: str) -> list[str]:
    return [
        "--model-dir", str(model_dir), "--json", str(path), "--concurrency", "1", "3",
        "--waves", "3", "--max-tokens", "12", "--dtype", "float32", "--threads", "1",
        "--max-num-tokens", "64", "--max-seq-len", "256", "--policies", "fixed", "adaptive",
        *more,
    ]  # fmt: skip


def test_rounds_are_interleaved_counted_after_the_warm_up_and_resumed(
    drafted_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, order = tmp_path / "bench.json", []
    original = LoopContender.run_round

    def spy(self: LoopContender, load: Any) -> dict[str, Any]:
        order.append((self.name, load))
        return original(self, load)

    monkeypatch.setattr(LoopContender, "run_round", spy)
    assert bench_command.main(arguments(drafted_model_dir, path, "--rounds", "1")) == 0
    names = ["autoregressive", "fixed", "adaptive"]
    assert [name for name, _ in order[:3]] == names  # the warm-up, load 1
    assert [name for name, _ in order[6:9]] == names[1:] + names[:1]
    assert len({id(load) for _, load in order[6:9]}) == 1
    rows = {(r["load"], r["policy"]): r for r in json.loads(path.read_text())["rows"]}
    assert len(rows) == 6
    for load in (1, 3):
        assert rows[load, "autoregressive"]["vs_plain"]["median"] == 1.0
        assert rows[load, "autoregressive"]["verified_per_request"] == 0
        full = rows[load, "fixed"]
        assert full["drafted_share"] > 0.5 and full["verified_per_request"] > 2
        assert full["keep_ratio"] > 0.7 and full["num_rounds"] == 1
        assert full["mean_active"] <= load + 1e-6
        assert set(full["ms_per_token"]) == {"p50", "p95", "p99"}
        assert full["scheduler_ms"] > 0 and sum(full["rungs"].values()) > 0
    order.clear()
    assert bench_command.main(arguments(drafted_model_dir, path, "--rounds", "2")) == 0
    assert len(json.loads(path.read_text())["rounds"]) == 4
    assert len(order) == 12  # a warm-up again, and the round that was missing
    order.clear()
    plots = tmp_path / "pareto.png", tmp_path / "budget.png"
    more = ("--rounds", "2", "--pareto", str(plots[0]), "--budget", str(plots[1]))
    assert bench_command.main(arguments(drafted_model_dir, path, *more)) == 0
    assert not order and all(plot.is_file() for plot in plots)
    with pytest.raises(ConfigError, match="other max_tokens"):
        bench_command.main(arguments(drafted_model_dir, path, "--max-tokens", "13"))


def test_rounds_of_the_other_loop_are_refused(tmp_path: Path) -> None:
    closed = bench_command.build_parser().parse_args(["--concurrency", "1", "2"])
    opened = bench_command.build_parser().parse_args(["--arrivals", "1", "2"])
    settings = {name: bench_command.run_settings(a) for name, a in (("c", closed), ("o", opened))}
    assert settings["c"]["loop"] == "closed" and settings["o"]["loop"] == "open"
    path = tmp_path / "bench.json"

    def resume(stored: dict[str, Any], load: float, asked: str) -> int:
        rounds = [{"load": load, "round": 1, "contenders": {}}]
        path.write_text(json.dumps({"settings": stored, "rounds": rounds}), encoding="utf-8")
        return len(bench_command.load_rounds(path, settings[asked]))

    unnamed = {k: v for k, v in settings["c"].items() if k != "loop"}  # as written before
    assert resume(settings["c"], 1, "c") == resume(settings["o"], 1.0, "o") == 1
    assert resume(unnamed, 1, "c") == 1
    for stored, load, asked in (
        (settings["c"], 1, "o"),
        (settings["o"], 1.0, "c"),
        (unnamed, 1, "o"),
        (unnamed, 1.0, "c"),
        (unnamed, 1.0, "o"),
    ):
        with pytest.raises(ConfigError, match="a run with other loop: name another file"):
            resume(stored, load, asked)


def test_requests_of_an_open_loop_wait_for_their_time(drafted_model_dir: Path) -> None:
    config = SystemConfig(
        model_dir=str(drafted_model_dir), dtype="float32", num_threads=1, max_seq_len=256,
        buckets=BucketConfig(max_num_requests=4, max_num_tokens=64),
    )  # fmt: skip
    contenders = make_loop_contenders(config, ["ngram"], ["fixed"], {})
    load = open_load(["a b a b", "c"], 200.0, 12, 4, np.random.default_rng(0), max_tokens=6)
    for contender in contenders:
        row = contender.run_round(load)
        assert row["num_failed"] == 0 and row["num_requests"] == 12
        assert row["tokens_per_s"] >= 0 and min(row["first_token_ms"]) > 0
        arrivals = [request.arrival_s for request in load.requests]
        assert 0 < row["steady_s"] <= arrivals[-1] - arrivals[0] + 1e-6


def test_a_policy_that_cannot_serve_is_refused(drafted_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="oracle"):
        bench_command.main(
            arguments(drafted_model_dir, tmp_path / "x.json", "--policies", "oracle")
        )
