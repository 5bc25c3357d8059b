# SPDX-License-Identifier: Apache-2.0
"""`dspark simulate` and `dspark plan`: resumed sweeps, refusals, defaults, answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation import plan_command, simulate_command
from trtllm_dspark.evaluation.acceptance_models import BetaAcceptance, model_for_length
from trtllm_dspark.evaluation.published_numbers import h20_table
from trtllm_dspark.evaluation.roofline import Roofline
from trtllm_dspark.scheduling.interchange import table_to_sglang_additive, table_to_tensorrt_llm


def test_simulate_writes_json_and_resumes_only_its_own_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.json"
    common = ["--steps", "10", "--warm-up", "2", "--json", str(path), "--policies", "fixed"]
    assert simulate_command.main([*common, "--concurrency", "4"]) == 0
    first = json.loads(path.read_text("utf-8"))["rows"]
    first[0]["tokens_per_s"] = -1.0
    data = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**data, "rows": first}), encoding="utf-8")
    assert simulate_command.main([*common, "--concurrency", "4", "8"]) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [r["load"] for r in rows] == [4, 8] and rows[0]["tokens_per_s"] == -1.0
    with pytest.raises(ConfigError, match="other seed"):
        simulate_command.main([*common, "--seed", "3"])
    printed = capsys.readouterr()
    assert "eagle3" in printed.out and "mtp" in printed.out  # published, beside ours
    assert "γ = 15" in printed.out and "simulating: 1/1 fixed at 8" in printed.err
    assert "drafted steps" in printed.out  # the last column: a file is not cut off at 80


def test_an_estimated_gpu_holds_back_requests_whose_kv_do_not_fit(tmp_path: Path) -> None:
    common = ["--gpu", "h100", "--model", "qwen3-32b", "--precision", "fp8", "--gamma", "3"]
    common += ["--policies", "fixed", "--concurrency", "64", "--prompt-tokens", "4000", "4000"]
    common += ["--steps", "2", "--warm-up", "0"]
    waiting = {}
    for name, more in (("fits", []), ("none", ["--kv-tokens", "0"])):
        path = tmp_path / f"{name}.json"
        assert simulate_command.main([*common, *more, "--json", str(path)]) == 0
        waiting[name] = json.loads(path.read_text("utf-8"))["rows"][0]["num_waiting"]
    room = Roofline("h100", "qwen3-32b", "fp8", num_drafts=3, max_num_requests=64).kv_tokens
    assert waiting == {"fits": 64 - room // 4004, "none": 0} and waiting["fits"] > 0


@pytest.mark.parametrize("is_named", [True, False], ids=["now", "earlier"])
def test_loads_of_a_closed_loop_are_not_taken_for_arrivals(tmp_path: Path, is_named: bool) -> None:
    path = tmp_path / "sweep.json"
    common = ["--steps", "3", "--warm-up", "1", "--json", str(path), "--policies", "fixed"]
    common += ["--output-tokens", "64", "512"]
    closed, opened = ["--concurrency", "1", "2"], ["--arrivals", "1", "2"]
    for first, other in ((closed, opened), (opened, closed)):
        path.unlink(missing_ok=True)
        assert simulate_command.main([*common, *first]) == 0
        data = json.loads(path.read_text("utf-8"))
        assert data["settings"]["loop"] == ("closed" if first is closed else "open")
        if not is_named:  # as files were written before
            del data["settings"]["loop"]
            path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(ConfigError, match="a sweep with other loop: name another file"):
            simulate_command.main([*common, *other])
        assert len(json.loads(path.read_text("utf-8"))["rows"]) == 2
        if is_named or first is closed:
            assert simulate_command.main([*common, *first]) == 0


@pytest.mark.parametrize(
    "form", [table_to_tensorrt_llm, table_to_sglang_additive], ids=["tensorrt-llm", "sglang"]
)
def test_tables_of_other_servers_are_simulated_and_what_they_lack_is_said(
    form: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps(form(h20_table())), encoding="utf-8")
    common = ["--policies", "fixed", "--concurrency", "8", "--steps", "20", "--warm-up", "2"]
    rates = []
    for name, more in (("own", []), ("foreign", ["--table", str(table)])):
        path = tmp_path / f"{name}.json"
        assert simulate_command.main([*common, *more, "--json", str(path)]) == 0
        rates.append(json.loads(path.read_text("utf-8"))["rows"][0]["tokens_per_s"])
    assert rates[1] == pytest.approx(rates[0], rel=0.01)
    assert "no times of plain steps" in caplog.text


def test_simulate_refuses_unknown_policies_and_two_sources_of_costs() -> None:
    with pytest.raises(ConfigError, match="policies \\['nope'\\] are unknown"):
        simulate_command.main(["--policies", "nope"])
    with pytest.raises(ConfigError, match="one of them"):
        simulate_command.main(["--table", "x.json", "--gpu", "h100"])


def test_a_closed_loop_above_the_costs_is_refused_unless_the_others_shall_wait(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sweep.json"
    common = ["--policies", "fixed", "--steps", "2", "--warm-up", "0", "--json", str(path)]
    with pytest.raises(ConfigError, match="--concurrency 128: the costs end at 64 requests"):
        simulate_command.main([*common, "--concurrency", "8", "128"])
    assert not path.exists()
    more = ["--concurrency", "128", "--max-batch-size", "64"]
    assert simulate_command.main([*common, *more]) == 0
    row = json.loads(path.read_text("utf-8"))["rows"][0]
    assert row["mean_active"] == pytest.approx(64) and row["num_waiting"] == 64


def test_requests_of_an_open_loop_finish_by_default_and_those_of_a_closed_one_do_not(
    tmp_path: Path,
) -> None:
    common = ["--policies", "fixed", "--steps", "200", "--warm-up", "0"]
    finished = {}
    for name, more in (
        ("open", ["--arrivals", "2"]),
        ("long", ["--arrivals", "2", "--output-tokens", "9999", "9999"]),
        ("closed", ["--concurrency", "4"]),
    ):
        path = tmp_path / f"{name}.json"
        assert simulate_command.main([*common, *more, "--json", str(path)]) == 0
        finished[name] = json.loads(path.read_text("utf-8"))["rows"][0]["num_finished"]
    assert finished["open"] > 0 and finished["long"] == finished["closed"] == 0


def test_an_open_loop_on_an_estimated_gpu_has_costs_up_to_the_batch_size(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    common = ["--gpu", "b200", "--gamma", "3", "--policies", "fixed", "--steps", "20"]
    common += ["--warm-up", "40", "--arrivals", "2e4", "--kv-tokens", "0", "--json", str(path)]
    assert simulate_command.main([*common, "--max-batch-size", "200"]) == 0
    row = json.loads(path.read_text("utf-8"))["rows"][0]
    assert 150 < row["mean_active"] <= 200  # 64 with costs of the default --concurrency
    rungs = Roofline("b200", num_drafts=3, max_num_requests=200).latency_table().rungs
    assert set(map(int, row["rungs"])) <= set(rungs) and max(map(int, row["rungs"])) > 4 * 64


def test_names_of_gpus_and_models_are_taken_in_either_case(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["--gammas", "3", "--steps", "2", "--concurrency", "8"]
    assert plan_command.main(["--gpu", "H100", "--model", "Qwen3-8B", "--sla", "5", *common]) == 0
    assert "1 × h100" in capsys.readouterr().out


def test_plan_answers_with_a_load_that_meets_the_target_and_says_what_it_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    common = ["--gpu", "h20", "--gammas", "7", "--steps", "10", "--concurrency", "8", "64"]
    assert plan_command.main([*common, "--sla", "60", "--json", str(path)]) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert {(r["concurrency"], r["policy"]) for r in rows} >= {(8, "adaptive"), (64, "fixed")}
    printed = capsys.readouterr().out
    assert "assumed:" in printed and "policy adaptive" in printed and "--ratios" in printed
    assert plan_command.main([*common, "--sla", "5000"]) == 1


def plan_arguments(*more: str) -> argparse.Namespace:
    arguments = plan_command.build_parser().parse_args(["--sla", "5", *more])
    plan_command.resolve_defaults(arguments)
    return arguments


def test_every_planned_gamma_is_the_same_drafter() -> None:
    fitted = plan_command.acceptance_models(plan_arguments("--acceptance-length", "3.5"))
    assert list(fitted) == [3, 7, 15] and [m.num_drafts for m in fitted.values()] == [3, 7, 15]
    lengths = {}
    for gamma, model in fitted.items():
        assert isinstance(model, BetaAcceptance)
        lengths[gamma] = model.expected_length()
    whole = model_for_length(3.5, 15)
    assert lengths == {g: pytest.approx(whole.expected_length(g)) for g in (3, 7, 15)}
    assert lengths[3] < lengths[7] < lengths[15] == pytest.approx(3.5, abs=1e-3)
    at_7 = plan_arguments("--acceptance-length", "3.5", "--acceptance-gamma", "7")
    model = plan_command.acceptance_models(at_7)[7]
    assert model == model_for_length(3.5, 7)


def test_a_length_above_the_smallest_gamma_is_planned_and_part_of_what_a_file_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--sla", "5", "--steps", "2", "--concurrency", "8", "--acceptance-length", "6"]
    common += ["--json", str(tmp_path / "plan.json")]
    assert plan_command.main([*common, "--gammas", "3", "7"]) == 0
    assert "acceptance length 6.0 at γ = 7" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="other acceptance_gamma"):
        plan_command.main([*common, "--gammas", "3", "15"])
    assert plan_command.main([*common, "--gammas", "3", "15", "--acceptance-gamma", "7"]) == 0
    with pytest.raises(ConfigError, match="cannot be reached with γ = 3"):
        plan_command.main(["--sla", "5", "--gammas", "3", "--acceptance-length", "6"])


def test_a_trace_is_planned_at_its_own_gamma(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.npz", tmp_path / "plan.json"
    np.savez(trace, logits=np.zeros((4, 5), np.float32), accepted_lens=np.array([0, 2, 5, 1]),
             prompt_ids=np.array([0, 0, 1, 1]))  # fmt: skip
    common = ["--sla", "5", "--steps", "2", "--concurrency", "8", "--trace", str(trace)]
    assert plan_command.main([*common, "--json", str(path)]) == 0
    assert {row["gamma"] for row in json.loads(path.read_text("utf-8"))["rows"]} == {5}
    with pytest.raises(ConfigError, match="holds blocks of γ = 5, the costs are for γ = 7"):
        plan_command.main([*common, "--gammas", "5", "7", "--json", str(tmp_path / "new.json")])
    assert not (tmp_path / "new.json").exists()  # refused before anything ran


def test_an_interrupted_plan_goes_on_and_only_with_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, runs = tmp_path / "plan.json", []
    original = plan_command.simulate_candidate

    def interrupted(*case: Any) -> plan_command.PlanRow:
        if len(runs) == 4:
            raise KeyboardInterrupt
        runs.append(case[1:])
        return original(*case)

    common = ["--gpu", "h20", "--gammas", "7", "--steps", "5", "--concurrency", "8", "64"]
    common += ["--sla", "60", "--json", str(path)]
    monkeypatch.setattr(plan_command, "simulate_candidate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_command.main(common)
    assert len(json.loads(path.read_text("utf-8"))["rows"]) == 4
    monkeypatch.setattr(plan_command, "simulate_candidate", original)
    assert plan_command.main(common) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert len(rows) == 6 and len({(r["concurrency"], r["policy"]) for r in rows}) == 6
    monkeypatch.setattr(plan_command, "simulate_candidate", interrupted)
    assert plan_command.main([*common, "--sla", "50"]) == 0  # nothing is left to run
    with pytest.raises(ConfigError, match="other steps"):
        plan_command.main([*common, "--steps", "6"])
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no sweep"):
        plan_command.main(common)


def test_the_ratios_to_build_are_those_of_the_rungs_that_run() -> None:
    row = plan_command.PlanRow(
        7, 8, "adaptive", 1.0, 1.0, 0.5, 2.0, {"8": 30, "22": 40, "40": 29, "64": 1}
    )
    assert row.ratios == [0.25, 0.571]
    plain = plan_command.PlanRow(7, 8, "autoregressive", 1.0, 1.0, 0.1, 0.0, {"8": 10})
    assert plain.ratios == [] and plan_command.build_advice(plain) == ""
