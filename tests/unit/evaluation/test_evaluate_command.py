# SPDX-License-Identifier: Apache-2.0
"""`dspark evaluate` end to end on a tiny model: independent of concurrency, resumable, comparable
with an independent recount of the answers it wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.unit.evaluation.tiny_system import (
    GAMMA,
    write_model,
    write_prompts,
    write_random_drafter,
)
from trtllm_dspark import cli
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation import evaluate_command
from trtllm_dspark.evaluation.acceptance_models import TraceAcceptance
from trtllm_dspark.evaluation.block_store import from_json_row
from trtllm_dspark.evaluation.evaluation_report import render_thresholds
from trtllm_dspark.scheduling.calibration import Calibration, ModeCalibration
from trtllm_dspark.types import DraftMode


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def arguments(model_dir: Path, files: list[str], *more: str) -> list[str]:
    fixed = ["--max-tokens", "18", "--dtype", "float32", "--threads", "1", "--tokens-per-block"]
    return ["--model-dir", str(model_dir), "--prompts", *files, *fixed, "8", *more]


def evaluate(model_dir: Path, files: list[str], path: Path, *more: str) -> dict[str, Any]:
    assert evaluate_command.main(arguments(model_dir, files, "--json", str(path), *more)) == 0
    return json.loads(path.read_text())


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in report.items() if k not in ("run", "drafters")}


@pytest.fixture(scope="module")
def greedy(
    model_dir: Path, files: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("out") / "greedy.json"
    return evaluate(model_dir, files, path, "--drafter", "ngram"), path


def stored(path: Path) -> list[Any]:
    lines = Path(f"{path}.blocks.jsonl").read_text().splitlines()
    return [from_json_row(json.loads(line)) for line in lines]


def test_the_report_is_what_the_stored_blocks_add_up_to(
    greedy: tuple[dict[str, Any], Path],
) -> None:
    report, path = greedy
    answers = stored(path)
    assert len(answers) == report["num_prompts"] == 15
    macro = []
    for domain, name in (("math", "sums"), ("code", "snippets"), ("chat", "talk")):
        own = [a for a in answers if a.prompt_id.startswith(name)]
        full = [
            accepted + 1
            for a in own
            for judged, accepted in zip(a.judged_lens, a.accepted_lens, strict=True)
            if judged == 7
        ]
        row = report["domains"][domain]
        assert row["acceptance_length"] == pytest.approx(np.mean(full))
        assert row["num_prompts"] == 5
        assert report["sets"][name]["acceptance_length"] == row["acceptance_length"]
        low, high = row["acceptance_length_ci95"]
        assert low <= row["acceptance_length"] <= high
        macro.append(row["acceptance_length"])
    assert report["acceptance_length"] == pytest.approx(np.mean(macro))
    assert report["acceptance_length"] > 1.05


@pytest.mark.parametrize("drafter", ["auto", "ngram"])
@pytest.mark.parametrize("temperature", ["0", "1.0"])
def test_results_do_not_depend_on_concurrency(
    model_dir: Path, files: list[str], tmp_path: Path, drafter: str, temperature: str
) -> None:
    """Acceptance exactly; logits to rounding (a batch of another size sums in another order)."""
    common = ("--drafter", drafter, "--temperature", temperature, "--seed", "3")
    paths = [tmp_path / f"{n}.json" for n in (1, 6)]
    reports = [
        evaluate(model_dir, files, path, *common, "--concurrency", path.stem) for path in paths
    ]
    for name in ("acceptance_length", "survival", "conditional", "sets"):
        assert reports[0][name] == reports[1][name]
    alone, together = ({a.prompt_id: a for a in stored(path)} for path in paths)
    for prompt_id, answer in alone.items():
        other = together[prompt_id]
        assert answer.judged_lens.tolist() == other.judged_lens.tolist()
        assert answer.accepted_lens.tolist() == other.accepted_lens.tolist()
        np.testing.assert_allclose(answer.logits, other.logits, atol=1e-4)


def test_an_interrupted_run_goes_on_where_it_stopped(
    model_dir: Path, files: list[str], greedy: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    report, path = greedy
    lines = Path(f"{path}.blocks.jsonl").read_text().splitlines(keepends=True)
    copy = tmp_path / "resumed.json"
    store = Path(f"{copy}.blocks.jsonl")
    store.write_text("".join(lines[:8]) + lines[8][:40])
    resumed = evaluate(model_dir, files, copy, "--drafter", "ngram")
    assert numbers(resumed) == numbers(report)
    after = store.read_text().splitlines(keepends=True)
    assert after[:8] == lines[:8] and len(after) == 15
    # Blocks of other settings are not taken for these.
    evaluate(model_dir, files, copy, "--drafter", "ngram", "--max-tokens", "9")
    assert len(store.read_text().splitlines()) == 30


def test_calibration_thresholds_trace_and_figures_are_written(
    model_dir: Path, files: list[str], tmp_path: Path
) -> None:
    fitted = ModeCalibration((2.0,) * GAMMA, 500)
    calibration = tmp_path / "calibration.json"
    Calibration(GAMMA, {DraftMode.GREEDY_TARGET: fitted}).save(calibration)
    trace, plots = tmp_path / "trace.npz", tmp_path / "plots"
    report = evaluate(
        model_dir, files, tmp_path / "r.json", "--calibration", str(calibration),
        "--trace", str(trace), "--plot", str(plots),
    )  # fmt: skip
    assert set(report["reliability"]) == {"before", "after"}
    first = {k: report["reliability"][k]["joint"][0] for k in ("before", "after")}
    assert first["before"]["roc_auc"] == first["after"]["roc_auc"]
    assert first["before"]["ece"] != first["after"]["ece"]
    sweep = report["thresholds"]["before"]
    assert sweep[0]["verified_per_block"] == GAMMA
    verified = [row["verified_per_block"] for row in sweep]
    assert verified == sorted(verified, reverse=True) and verified[-1] < GAMMA
    assert TraceAcceptance.load(str(trace)).num_drafts == GAMMA
    names = {p.name for p in plots.iterdir()}
    assert {
        "survival.png", "thresholds.png", "thresholds_domains.png", "reliability_after.png"
    } <= names  # fmt: skip


def test_thresholds_per_domain_add_up_to_those_of_all_prompts(
    greedy: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = greedy
    domains = report["domain_thresholds"]
    assert set(domains) == {"math", "code", "chat"}
    blocks = {
        name: sum(
            judged == 7
            for a in stored(path) if a.prompt_id.startswith(prefix)
            for judged in a.judged_lens
        )
        for name, prefix in (("math", "sums"), ("code", "snippets"), ("chat", "talk"))
    }  # fmt: skip
    for index, row in enumerate(report["thresholds"]["before"]):
        for name in ("verified_per_block", "acceptance_length"):
            sums = sum(blocks[d] * domains[d]["before"][index][name] for d in domains)
            assert row[name] == pytest.approx(sums / sum(blocks.values()))
    lengths = {d: domains[d]["before"][0]["acceptance_length"] for d in domains}
    assert lengths == {d: pytest.approx(report["domains"][d]["acceptance_length"]) for d in domains}
    assert len(set(lengths.values())) > 1
    Console().print(render_thresholds(report))
    assert "stop before the first c_k < t" in capsys.readouterr().out


def test_a_sweep_compares_drafters_on_the_same_prompts(
    model_dir: Path, files: list[str], tmp_path: Path
) -> None:
    names = []
    for layers, head in ((2, "markov"), (1, "none"), (1, "rnn")):
        directory = tmp_path / f"{head}{layers}"
        write_random_drafter(directory, model_dir, head=head, num_layers=layers)
        names.append(str(directory))
    report = evaluate(
        model_dir, files, tmp_path / "sweep.json", "--slice", "0:0.4", "--drafters", *names,
        "--sweep", "depth", "--plot", str(tmp_path / "plots"),
    )  # fmt: skip
    rows = report["drafters"]
    assert [r["sweep_value"] for r in rows] == [1, 1, 2]
    assert {r["drafter"]["head"] for r in rows} == {"markov", "none", "rnn"}
    assert report["drafter"]["name"] == names[0]
    assert (tmp_path / "plots" / "depth.png").is_file()


@pytest.mark.parametrize(
    "more, said",
    [
        (("--drafter", "none"), "no drafter to evaluate"),
        (("--sweep", "gamma"), "two or more"),
        (("--concurrency", "0"), "concurrency"),
        (("--temperature", "-1"), "temperature"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    model_dir: Path, files: list[str], more: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate_command.main(arguments(model_dir, files, *more))


@pytest.mark.parametrize("text", ["0.9:0.1", "0.5", "a:b", "0:1.5"])
def test_a_part_that_is_none_is_refused(
    model_dir: Path, files: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate_command.main(arguments(model_dir, files, "--slice", text))
    assert ended.value.code == 2 and "FIRST" in capsys.readouterr().err


def test_the_command_is_listed() -> None:
    assert "evaluate" in cli.COMMANDS
