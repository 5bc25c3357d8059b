# SPDX-License-Identifier: Apache-2.0
"""`dspark bench`: speed of policies and drafters in one interleaved run, in this process or through
Triton's gRPC streaming, with ratios to plain decoding. Complete rounds go to JSON as they come, so
that a long run can be resumed.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.bench_inprocess import PLAIN, contender_name, make_loop_contenders
from trtllm_dspark.evaluation.bench_load import BenchLoad, closed_load, open_load
from trtllm_dspark.evaluation.bench_report import render_bench, summarize_bench
from trtllm_dspark.evaluation.bench_triton import make_server_contenders
from trtllm_dspark.evaluation.default_model import prepare_default_model
from trtllm_dspark.evaluation.progress import ProgressReport, make_console
from trtllm_dspark.evaluation.prompts import parse_slice
from trtllm_dspark.evaluation.sweep_file import loop_kind, settings_before
from trtllm_dspark.evaluation.throughput_plots import plot_budget, plot_pareto
from trtllm_dspark.options import (
    add_system_options,
    configure_logging,
    parse_json_object,
    system_config,
)
from trtllm_dspark.runtime import check_policy
from trtllm_dspark.serving.demo import PROMPTS
from trtllm_dspark.serving.demo_command import DEMO_MODEL_DIR
from trtllm_dspark.training.prompt_sources import read_prompts
from trtllm_dspark.training.run_files import describe_run, finite_json, write_json

FORMAT = "dspark-bench"
IGNORED_ON_RESUME = ("json", "pareto", "budget", "rounds", "concurrency", "arrivals", "verbose")


class Contender(Protocol):
    """One way to answer requests."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        ...

    def run_round(self, load: BenchLoad) -> dict[str, Any]:
        """Answer all requests of the load; measured numbers."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark bench`."""
    parser = argparse.ArgumentParser(
        prog="dspark bench",
        description="Throughput and latency of policies and drafters against plain decoding, "
        "interleaved round by round.",
        epilog="example: dspark bench --model-dir models/smollm2 --policies fixed adaptive "
        "--concurrency 1 4 8 --json bench.json --pareto pareto.png",
    )
    parser.add_argument("--transport", choices=("inprocess", "triton"), default="inprocess")
    parser.add_argument("--policies", nargs="+", default=["fixed", "adaptive"])
    parser.add_argument("--drafters", nargs="+", help="several drafters instead of --drafter")
    parser.add_argument(
        "--options", type=parse_json_object, default={}, help="JSON: policy → its options"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="closed loop")
    parser.add_argument("--arrivals", type=float, nargs="+", help="requests/s: open loop instead")
    parser.add_argument("--num-requests", type=int, default=32, help="of a round, open loop")
    parser.add_argument("--waves", type=int, default=4, help="requests per place, closed loop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-end", action="store_true", help="every answer has max-tokens")
    parser.add_argument("--prompts", nargs="+", help="JSONL files (default: the demo's prompts)")
    parser.add_argument("--slice", type=parse_slice, default=(0.0, 1.0), help="of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write (and resume from) this file")
    parser.add_argument("--pareto", help="PNG: throughput against tokens/s per user")
    parser.add_argument("--budget", help="PNG: verified drafts per request against load")
    parser.add_argument("--verbose", action="store_true")
    add_system_options(parser, model_dir=DEMO_MODEL_DIR)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, show."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    for policy in arguments.policies:
        check_policy(policy)
    prepare_default_model(arguments.model_dir)
    policies = [policy for policy in arguments.policies if policy != PLAIN]
    texts = list(PROMPTS)
    if arguments.prompts:
        texts = [prompt.text for prompt in read_prompts(arguments.prompts, *arguments.slice)]
    report = run_bench(arguments, policies, texts)
    console = make_console()
    for table in render_bench(report["rows"]):
        console.print(table)
    if arguments.pareto:
        plot_pareto(report["rows"], arguments.pareto)
    if arguments.budget:
        plot_budget(report["rows"], arguments.budget)
    return 1 if any(row["num_failed"] for row in report["rows"]) else 0


def run_bench(
    arguments: argparse.Namespace, policies: list[str], texts: Sequence[str]
) -> dict[str, Any]:
    """Run all rounds that the JSON file does not hold yet; the whole report."""
    path = Path(arguments.json) if arguments.json else None
    settings = run_settings(arguments)
    rounds = load_rounds(path, settings)
    loads = arguments.arrivals or arguments.concurrency
    done = {(row["load"], row["round"]) for row in rounds}
    cases = [
        (index, load)
        for index in range(arguments.warm_up + arguments.rounds)
        for load in loads
        if index < arguments.warm_up or (load, index) not in done
    ]
    if all(index < arguments.warm_up for index, _ in cases):
        cases = []
    report: dict[str, Any] = {"format": FORMAT, "settings": settings, "run": describe_run()}
    with contenders_of(arguments, policies, needed=bool(cases)) as contenders:
        names = contender_names(arguments, policies)
        with ProgressReport("rounds", len(cases)) as progress:
            for index, load in cases:
                found = run_round(contenders, make_load(arguments, texts, index, load), index)
                if index >= arguments.warm_up:
                    rounds.append({"load": load, "round": index, "contenders": found})
                    report.update(rounds=rounds, rows=summarize_bench(rounds, names))
                    if path is not None:
                        write_json(path, finite_json(report))
                progress.advance(f"load {load:g}")
    rounds.sort(key=lambda row: (row["load"], row["round"]))
    report.update(rounds=rounds, rows=summarize_bench(rounds, names))
    if path is not None:
        write_json(path, finite_json(report))
    return report


def run_round(
    contenders: Sequence[Contender], load: BenchLoad, index: int
) -> dict[str, dict[str, Any]]:
    """Every contender on the same load, in an order that rotates from round to round."""
    turn = index % len(contenders)
    return {c.name: c.run_round(load) for c in [*contenders[turn:], *contenders[:turn]]}


def make_load(
    arguments: argparse.Namespace, texts: Sequence[str], index: int, load: float
) -> BenchLoad:
    """The requests of a round: a function of seed, round and load."""
    rng = np.random.default_rng([arguments.seed, index, round(1000 * load)])
    fields = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "ignore_end": arguments.ignore_end,
    }
    if arguments.arrivals:
        limit = arguments.max_batch_size
        return open_load(texts, load, arguments.num_requests, limit, rng, **fields)
    return closed_load(texts, int(load), arguments.waves, rng, **fields)


@contextlib.contextmanager
def contenders_of(
    arguments: argparse.Namespace, policies: list[str], *, needed: bool
) -> Iterator[Sequence[Contender]]:
    """Loops of this process or servers; nothing is loaded where nothing is left to run."""
    if not needed:
        yield []
        return
    most = arguments.max_batch_size if arguments.arrivals else max(arguments.concurrency)
    arguments.max_batch_size = most
    drafters = arguments.drafters or [arguments.drafter]
    make = make_loop_contenders if arguments.transport == "inprocess" else make_server_contenders
    contenders = make(system_config(arguments), drafters, policies, arguments.options)
    try:
        yield contenders
    finally:
        for contender in contenders:
            contender.close()


def contender_names(arguments: argparse.Namespace, policies: Sequence[str]) -> list[str]:
    """All contenders, the plain one first."""
    drafters = arguments.drafters or [arguments.drafter]
    return [PLAIN, *(contender_name(p, d, drafters) for d in drafters for p in policies)]


def run_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What must be alike for rounds to stand in one file; loads and rounds may be added."""
    kept = {k: v for k, v in vars(arguments).items() if k not in IGNORED_ON_RESUME}
    return dict(finite_json({**kept, "loop": loop_kind(arguments.arrivals)}))


def load_rounds(path: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Complete rounds of an interrupted run; a file of other settings is refused."""
    if path is None or not path.is_file():
        return []
    data = load_json(path)
    before = settings_before(data["settings"], data["rounds"])
    differing = sorted(k for k, v in settings.items() if before.get(k) != v)
    if differing:
        raise ConfigError(
            f"{path} holds a run with other {', '.join(differing)}: name another file or delete it"
        )
    rounds: list[dict[str, Any]] = data["rounds"]
    return rounds


if __name__ == "__main__":
    raise SystemExit(main())
