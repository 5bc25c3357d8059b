# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of evaluations in which a domain has no block that was judged whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trtllm_dspark.evaluation import evaluation_plots
from trtllm_dspark.evaluation.block_collection import PromptBlocks
from trtllm_dspark.evaluation.evaluation_plots import plot_evaluation
from trtllm_dspark.evaluation.evaluation_report import (
    render_evaluation,
    render_sweep,
    sweep_rows,
)
from trtllm_dspark.evaluation.evaluation_run import acceptance_report, confidence_report
from trtllm_dspark.evaluation.prompts import EncodedPrompt
from trtllm_dspark.scheduling.logit_map import LogitMap
from trtllm_dspark.training.run_files import finite_json

GAMMA = 3


def answer(prompt_id: str, judged_lens: list[int]) -> PromptBlocks:
    judged = np.array(judged_lens, np.int32)
    logits = np.zeros((len(judged), GAMMA), np.float32)
    return PromptBlocks(prompt_id, logits, judged, judged // 2, 5, len(judged))


def evaluation(head: str, *, short: bool) -> dict[str, Any]:
    """A report as it is before it becomes JSON; `short`: the answers of chat end too early."""
    answers = [answer("a", [3, 3]), answer("b", [2, 1] if short else [3, 1])]
    prompts = [
        EncodedPrompt(a.prompt_id, domain, np.arange(3, dtype=np.int32))
        for a, domain in zip(answers, ("math", "chat"), strict=True)
    ]
    drafter = {"name": head, "head": head, "num_drafts": GAMMA, "num_layers": 1}
    domains = [prompt.domain for prompt in prompts]
    return {
        "drafter": drafter,
        "mode": "greedy",
        **acceptance_report(answers, prompts, GAMMA, 0),
        **confidence_report(answers, domains, {"before": LogitMap.neutral(GAMMA)}, 0),
    }


def shown(*tables: Any) -> str:
    written = io.StringIO()
    console = Console(file=written, width=200)
    for table in tables:
        console.print(table)
    return written.getvalue()


def row_of(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if f" {name} " in f"{line} ")
    return line.replace("│", " ").split()


def test_drafters_without_a_whole_block_in_a_domain_are_compared_with_dashes() -> None:
    reports = [evaluation("markov", short=True), evaluation("rnn", short=False)]
    text = shown(render_sweep(finite_json(sweep_rows(reports, "gamma"))))
    assert row_of(text, "markov") == ["markov", "markov", "1", "3", "–", "–", "2.000", "–"]
    whole = row_of(text, "rnn")
    assert whole[4] == "2.000" and whole[6:] == ["2.000", "2.000"] and "–" not in whole


@pytest.mark.parametrize("is_json", [False, True], ids=["NaN", "null"])
def test_a_report_shows_dashes_where_nothing_was_judged(is_json: bool) -> None:
    report = evaluation("markov", short=True)
    assert np.isnan(report["acceptance_length"])
    text = shown(*render_evaluation(finite_json(report) if is_json else report))
    assert "nan" not in text and "None" not in text
    acceptance, rest = text.split("survival@k")
    survival = rest.split("stop before")[0]
    assert row_of(acceptance, "macro")[:4] == ["macro", "average", "–", "–"]
    assert row_of(survival, "chat") == ["chat", "0.500", "0.000", "–"]


def test_a_drafter_without_an_acceptance_length_is_left_out_of_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [evaluation("markov", short=True), evaluation("rnn", short=False)]
    drawn: dict[str, list[str]] = {}
    original = evaluation_plots.save

    def spy(figure: Any, axes: Any, path: str) -> None:
        drawn[Path(path).name] = axes.get_legend_handles_labels()[1]
        original(figure, axes, path)

    monkeypatch.setattr(evaluation_plots, "save", spy)
    for count, labels in ((2, ["head rnn"]), (1, [])):
        chosen = sweep_rows(reports[:count], "gamma")
        report = finite_json({**reports[0], "sweep": "gamma", "drafters": chosen})
        assert tmp_path / "gamma.png" in plot_evaluation(report, tmp_path)
        assert drawn["gamma.png"] == labels and (tmp_path / "gamma.png").is_file()
