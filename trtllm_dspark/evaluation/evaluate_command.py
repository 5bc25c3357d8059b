# SPDX-License-Identifier: Apache-2.0
"""`dspark evaluate`: acceptance and confidence quality of drafters on prompt files, full
verification, no load. Finished answers are kept beside the JSON, so that a run can be resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.checkpoints.tokenizer import load_tokenizer
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.block_collection import join_blocks
from trtllm_dspark.evaluation.block_store import BlockStore
from trtllm_dspark.evaluation.default_model import prepare_default_model
from trtllm_dspark.evaluation.evaluation_report import render_evaluation, render_sweep, sweep_rows
from trtllm_dspark.evaluation.evaluation_run import (
    DrafterEvaluation,
    EvaluationOptions,
    evaluate_drafter,
    evaluation_config,
)
from trtllm_dspark.evaluation.progress import make_console
from trtllm_dspark.evaluation.prompts import EncodedPrompt, add_prompt_options, load_prompts
from trtllm_dspark.options import add_system_options, configure_logging, system_config
from trtllm_dspark.serving.demo_command import DEMO_MODEL_DIR
from trtllm_dspark.training.run_files import describe_run, finite_json, write_json

FORMAT = "dspark-evaluation"
VERSION = 1


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark evaluate`."""
    parser = argparse.ArgumentParser(
        prog="dspark evaluate",
        description="Acceptance length, survival, static thresholds and reliability of drafters.",
        epilog="example: dspark evaluate --model-dir models/smollm2 --prompts prompts/*.jsonl "
        "--slice 0.8:1.0 --temperature 0 --max-tokens 128 --json evaluation.json",
    )
    add_prompt_options(parser, "0.0:1.0")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0 (greedy)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--max-prompts", type=int, default=0, help="of each set; 0 = all")
    parser.add_argument("--concurrency", type=int, default=16, help="prompts answered at once")
    parser.add_argument("--seed", type=int, default=0, help="noise of sampling and bootstrap")
    parser.add_argument(
        "--greedy-drafts", action="store_true", help="deterministic drafts, sampling target"
    )
    parser.add_argument("--drafters", nargs="+", help="several drafters instead of --drafter")
    parser.add_argument(
        "--sweep",
        choices=("depth", "gamma"),
        help="what the drafters are compared over: layers or drafts per block, a line per head",
    )
    parser.add_argument("--calibration", help="default: calibration.json of drafter or model")
    parser.add_argument("--json", help="write the report here; FILE.blocks.jsonl keeps the answers")
    parser.add_argument("--trace", help="write the blocks here (npz) for `dspark simulate --trace`")
    parser.add_argument("--plot", help="directory for PNG figures (needs the extra `plots`)")
    parser.add_argument("--verbose", action="store_true")
    add_system_options(parser, policy="fixed", model_dir=DEMO_MODEL_DIR)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, write, show."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    check_arguments(arguments)
    prepare_default_model(arguments.model_dir)
    tokenizer = load_tokenizer(arguments.model_dir)
    prompts = load_prompts(arguments.prompts, arguments.slice, tokenizer)
    prompts = first_of_each_set(prompts, arguments.max_prompts)
    found = run(arguments, prompts, tuple(tokenizer.eos_ids))
    report = make_report(arguments, prompts, found)
    if arguments.json:
        write_json(Path(arguments.json), report)
    if arguments.trace:
        write_trace(arguments.trace, found[0], prompts)
    if arguments.plot:
        from trtllm_dspark.evaluation.evaluation_plots import plot_evaluation

        plot_evaluation(report, Path(arguments.plot))
    console = make_console()
    for evaluation in found:
        for table in render_evaluation(evaluation.report):
            console.print(table)
    if len(found) > 1:
        console.print(render_sweep(report["drafters"]))
    return 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be run, by name."""
    for name in ("max_tokens", "concurrency"):
        value = getattr(arguments, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} = {value} must be ≥ 1")
    if arguments.temperature < 0:
        raise ConfigError(f"--temperature = {arguments.temperature} must be ≥ 0")
    if arguments.sweep and len(arguments.drafters or ()) < 2:
        raise ConfigError("--sweep compares drafters: name two or more with --drafters")
    if arguments.trace and len(arguments.drafters or ()) > 1:
        raise ConfigError("--trace records one drafter: name one with --drafter")


def first_of_each_set(prompts: Sequence[EncodedPrompt], limit: int) -> list[EncodedPrompt]:
    """At most `limit` prompts of each set, 0 = all."""
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.set_name] = taken.get(prompt.set_name, 0) + 1
        if not limit or taken[prompt.set_name] <= limit:
            kept.append(prompt)
    return kept


def run(
    arguments: argparse.Namespace, prompts: Sequence[EncodedPrompt], end_ids: tuple[int, ...]
) -> list[DrafterEvaluation]:
    """Evaluate every drafter, one after the other."""
    options = EvaluationOptions(
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        end_ids=end_ids,
        seed=arguments.seed,
        greedy_drafts=arguments.greedy_drafts,
        calibration=arguments.calibration,
    )
    store = BlockStore(Path(f"{arguments.json}.blocks.jsonl") if arguments.json else None)
    longest = max(len(prompt.token_ids) for prompt in prompts) + arguments.max_tokens
    base = system_config(arguments)
    found = []
    for drafter in arguments.drafters or [arguments.drafter]:
        config = evaluation_config(base, drafter, arguments.concurrency, longest)
        found.append(evaluate_drafter(config, options, prompts, store))
    return found


def make_report(
    arguments: argparse.Namespace,
    prompts: Sequence[EncodedPrompt],
    found: Sequence[DrafterEvaluation],
) -> dict[str, Any]:
    """The JSON form: the first drafter's report on top, all of them under `drafters`."""
    reports = [evaluation.report for evaluation in found]
    data = {
        "format": FORMAT,
        "version": VERSION,
        **reports[0],
        "num_prompts": len(prompts),
        "slice": list(arguments.slice),
        "sweep": arguments.sweep,
        "drafters": sweep_rows(reports, arguments.sweep),
        "run": describe_run(),
    }
    return dict(finite_json(data))


def write_trace(path: str, evaluation: DrafterEvaluation, prompts: Sequence[EncodedPrompt]) -> None:
    """Blocks that were judged at all γ positions, with the prompt and domain of each."""
    blocks = join_blocks(evaluation.answers, evaluation.num_drafts)
    full = blocks.samples.verify_lens >= evaluation.num_drafts
    domains = np.asarray([prompt.domain for prompt in prompts])
    with Path(path).open("wb") as file:
        np.savez_compressed(
            file,
            logits=blocks.samples.logits[full],
            accepted_lens=blocks.samples.accepted_lens[full],
            prompt_ids=blocks.prompt_ids[full].astype(np.int32),
            domains=domains[blocks.prompt_ids[full]],
        )


if __name__ == "__main__":
    raise SystemExit(main())
