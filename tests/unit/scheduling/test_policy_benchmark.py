# SPDX-License-Identifier: Apache-2.0
"""`bench_policies.py`: the rival of the other half, the bars, resuming, a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_policies
from benchmarks.policy_report import (
    FULL,
    MET,
    NOT_APPLICABLE,
    NOT_MET,
    PLAIN,
    judge_policies,
    render_policies,
    summarize_policies,
)
from tests.unit.evaluation.tiny_system import write_model
from trtllm_dspark.errors import ConfigError


def rounds_of(num_requests: int, **rates: list[float]) -> list[dict[str, Any]]:
    """Rounds of the contenders plain, full, other and adaptive."""
    names = {"plain": PLAIN, "full": FULL}
    columns = zip(*rates.values(), strict=True)
    return [
        {
            "num_requests": num_requests,
            "round": index,
            "tokens_per_s": {names.get(n, n): v for n, v in zip(rates, row, strict=True)},
        }
        for index, row in enumerate(columns)
    ]


def test_the_rival_is_picked_on_even_rounds_and_compared_on_odd_ones() -> None:
    rounds = rounds_of(
        4, plain=[1, 1, 1, 1], full=[9, 2, 9, 2], other=[5, 8, 5, 8], adaptive=[7, 4, 7, 4]
    )
    (found,) = summarize_policies(rounds[::-1])
    assert found["best_rival"] == FULL  # `other` is better, but only on the other half
    assert found["adaptive_vs_best_rival"] == {"median": 2.0, "low95": 2.0, "high95": 2.0}
    assert found["num_compared_rounds"] == 2 and found["halves_differ"]
    assert found["tokens_per_s"] == {PLAIN: 1.0, FULL: 5.5, "other": 6.5, "adaptive": 5.5}


@pytest.mark.parametrize(
    ("plain", "full", "other", "adaptive", "verdicts"),
    [
        (100.0, 80.0, 99.0, 101.0, (MET, MET, MET)),
        (100.0, 80.0, 99.0, 97.0, (MET, MET, NOT_MET)),
        (100.0, 60.0, 99.0, 96.9, (NOT_MET, NOT_MET, MET)),
        (100.0, 100.0, 120.0, 110.0, (NOT_MET, MET, NOT_APPLICABLE)),
    ],
)
def test_each_bar_is_judged_by_its_ratio(
    plain: float, full: float, other: float, adaptive: float, verdicts: tuple[str, ...]
) -> None:
    rates = {"plain": plain, "full": full, "other": other, "adaptive": adaptive}
    results = summarize_policies(rounds_of(1, **{n: [v, v] for n, v in rates.items()}))
    assert tuple(results[0]["bars"].values()) == verdicts


def test_a_bar_is_met_overall_where_it_is_met_at_every_size_it_applies_to() -> None:
    good = rounds_of(1, plain=[100, 100], full=[120, 120], adaptive=[121, 121])
    trimmed = rounds_of(32, plain=[100, 100], full=[50, 50], adaptive=[98, 98])
    bad = rounds_of(8, plain=[100, 100], full=[90, 90], adaptive=[90, 90])
    verdicts = {k: b["verdict"] for k, b in judge_policies(summarize_policies(good)).items()}
    assert verdicts == {"best_rival": MET, "plain": MET, "full": NOT_APPLICABLE}
    judged = judge_policies(summarize_policies([*trimmed, *good]))
    assert {b["verdict"] for b in judged.values()} == {MET}
    assert judged["full"]["by_size"] == {"1": NOT_APPLICABLE, "32": MET}
    judged = judge_policies(summarize_policies([*trimmed, *good, *bad]))
    assert {b["verdict"] for b in judged.values()} == {NOT_MET}
    text = render_policies(summarize_policies([*trimmed, *good, *bad]))
    assert "| R=8 " in text and NOT_APPLICABLE in text and "full verification" in text


def run(path: Path, *more: str) -> int:
    return bench_policies.main(["--model-dir", "m", "--json", str(path), "--warm-up", "1", *more])


def test_an_interrupted_run_is_taken_up_and_one_of_other_settings_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "policies.json", []

    def rates(_: Any, num_requests: int, index: int, num_tokens: int) -> dict[str, float]:
        if (num_requests, index) == (2, 1) and len(ran) < 6:
            raise KeyboardInterrupt
        ran.append((num_requests, index))
        return {PLAIN: 10.0, FULL: 8.0, "adaptive": 11.0}

    monkeypatch.setattr(bench_policies, "make_contenders", lambda *_: [])
    monkeypatch.setattr(bench_policies, "describe", lambda _: {"dtype": "bfloat16"})
    monkeypatch.setattr(bench_policies, "run_contenders", rates)
    sizes = ("--requests", "1", "2")
    with pytest.raises(KeyboardInterrupt):
        run(path, *sizes, "--rounds", "2")
    assert ran == [(1, -1), (1, 0), (1, 1), (2, -1), (2, 0)]
    ran.append((0, 0))
    assert run(path, *sizes, "--rounds", "2") == 0
    assert ran[6:] == [(2, -1), (2, 1)]  # warmed up again, nothing repeated
    report = json.loads(path.read_text())
    assert [(r["num_requests"], r["num_rounds"]) for r in report["results"]] == [(1, 2), (2, 2)]
    assert report["bars"]["plain"]["verdict"] == MET and report["dtype"] == "bfloat16"
    assert run(path, *sizes, "--rounds", "2") == 0 and len(ran) == 8
    with pytest.raises(ConfigError, match="other tokens"):
        run(path, *sizes, "--rounds", "2", "--tokens", "32")


def test_a_tiny_model_runs_every_contender_and_the_report_says_on_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DSPARK_NATIVE", "0")  # nothing is compiled into the private cache
    path, model_dir = tmp_path / "policies.json", write_model(tmp_path / "tiny")
    options = ("--requests", "1", "3", "--rounds", "2", "--warm-up", "2", "--tokens", "3")
    model = ("--model-dir", str(model_dir), "--dtype", "float32", "--threads", "1")
    table = ("--profile", "never", "--json", str(path))
    assert bench_policies.main([*model, *options, *table]) == 0
    report = json.loads(path.read_text())
    assert report["dtype"] == "float32" and report["machine"] and report["run"]["argv"]
    assert report["num_drafts"] == 4 and report["latency_table"] is None
    names = [PLAIN, FULL, "fixed 1", "fixed 2", "fixed 3"]
    names += ["ratio_bucket", "prefix_async", "adaptive"]
    for result in report["results"]:
        assert list(result["tokens_per_s"]) == names
        assert all(rate > 0 for rate in result["tokens_per_s"].values())
    shown = capsys.readouterr().out
    assert all(f"| {name} " in shown for name in names) and "at least" in shown
