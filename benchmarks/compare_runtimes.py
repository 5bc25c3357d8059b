# SPDX-License-Identifier: Apache-2.0
"""This project beside what a user would otherwise pick on the same machine and model: transformers
(plain, prompt look-up) and llama-cpp-python (plain, prompt look-up) on the model's GGUF.

Greedy, same prompt tokens, same number of new tokens (end tokens do not stop anybody), every
runtime in its own process that stays loaded; rounds rotate over the runtimes, so that drift of the
machine hits all alike. A runtime that is not installed is left out and named. Complete rounds go to
the JSON file as they come; the same command takes an interrupted run up again.

Run: python benchmarks/compare_runtimes.py --model-dir models/smollm2 --gguf model.gguf \
       --json compare.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import Spread, describe_run, format_table, paired_ratio
from trtllm_dspark.checkpoints.tokenizer import load_tokenizer
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.progress import ProgressReport
from trtllm_dspark.evaluation.prompts import parse_slice
from trtllm_dspark.evaluation.sweep_file import SweepFile
from trtllm_dspark.serving.demo import PROMPTS
from trtllm_dspark.training.prompt_sources import read_prompts

RUNTIMES = (
    "transformers", "transformers-lookup", "llama.cpp", "llama.cpp-lookup",
    "dspark-plain", "dspark-ngram", "dspark",
)  # fmt: skip
BASELINE = "transformers"
CHANGEABLE = ("rounds", "warm_up")
"""Options that may differ when a run is taken up again."""
Rates = dict[str, dict[str, list[float]]]
"""Concurrency → runtime → tokens per second, one value per round."""


class Worker:
    """One runtime in its own process."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        command = [
            sys.executable, str(Path(__file__).with_name("compare_worker.py")),
            "--runtime", name, "--model-dir", arguments.model_dir,
            "--threads", str(num_threads(arguments.threads)), "--dtype", arguments.dtype,
            "--concurrency", str(max(arguments.concurrency)),
        ]  # fmt: skip
        if arguments.gguf:
            command += ["--gguf", arguments.gguf]
        if arguments.no_repack:
            command += ["--no-repack"]
        if arguments.drafter:
            command += ["--drafter", arguments.drafter]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._read()

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """Answer the prompts, all of them at once where the runtime can."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")


def num_threads(wanted: int) -> int:
    """Threads that every runtime gets: left alone, each would take another share of the cores."""
    return wanted or len(os.sched_getaffinity(0))


def encode_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """User turns in the model's chat template, as the token ids that every runtime gets."""
    tokenizer = load_tokenizer(arguments.model_dir)
    texts = list(PROMPTS)
    if arguments.prompts:
        texts = [prompt.text for prompt in read_prompts(arguments.prompts, *arguments.slice)]
    rendered = [tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in texts]
    return [list(tokenizer.encode(text, add_special=False)) for text in rendered]


def open_cases(arguments: argparse.Namespace, file: SweepFile) -> list[tuple[int, int]]:
    """(concurrency, round) still to run; warm-up rounds count down to −1 before the first."""
    done = {(row["concurrency"], row["round"]) for row in file.rows}
    cases = []
    for concurrency in arguments.concurrency:
        missing = [i for i in range(arguments.rounds) if (concurrency, i) not in done]
        if missing:
            cases += [(concurrency, i) for i in (*range(-arguments.warm_up, 0), *missing)]
    return cases


def measure(
    workers: Sequence[Worker],
    arguments: argparse.Namespace,
    file: SweepFile,
    cases: Sequence[tuple[int, int]],
) -> None:
    """Run the cases; every complete round that counts is kept in the file."""
    prompts, names = encode_prompts(arguments), {worker.name for worker in workers}
    others = sorted({name for row in file.rows for name in row["tokens_per_s"]} ^ names)
    if file.rows and others:
        raise ConfigError(
            f"{file.path} was begun with or without {', '.join(others)}: install the same "
            "programs, or name another file"
        )
    with ProgressReport("rounds", len(cases)) as progress:
        for concurrency, index in cases:
            rng = np.random.default_rng([concurrency, arguments.warm_up + index])
            chosen = [prompts[i] for i in rng.integers(0, len(prompts), concurrency)]
            turn, rates = index % len(workers), {}
            for worker in [*workers[turn:], *workers[:turn]]:
                found = worker.run(chosen, arguments.tokens)
                rates[worker.name] = found["num_tokens"] / found["seconds"]
            if index >= 0:
                file.add({"concurrency": concurrency, "round": index, "tokens_per_s": rates})
            progress.advance(f"concurrency {concurrency}")


def collect_rates(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Rates:
    """Rounds in order, runtimes in the order in which they were named."""
    results: Rates = {}
    for row in sorted(rows, key=lambda row: (row["concurrency"], row["round"])):
        rates = results.setdefault(str(row["concurrency"]), {})
        for name in arguments.runtimes:
            if name in row["tokens_per_s"]:
                rates.setdefault(name, []).append(row["tokens_per_s"][name])
    return results


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="llama.cpp: weights as they are in the file (its AMX kernels crash on some machines)",
    )
    parser.add_argument("--drafter", help="DSpark drafter directory (default: the model's own)")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--prompts", nargs="+", help="JSONL files (default: the demo's prompts)")
    parser.add_argument("--slice", type=parse_slice, default=(0.0, 1.0), help="of each file")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores, for every runtime")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", help="write (and resume from) this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the JSON file does not hold yet, print a table."""
    arguments = build_parser().parse_args(argv)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    file = SweepFile(arguments.json, settings, CHANGEABLE)
    cases = open_cases(arguments, file)
    missing = run_cases(arguments, file, cases) if cases else {}
    print(render(collect_rates(arguments, file.rows)))
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}")
    return 0


def run_cases(
    arguments: argparse.Namespace, file: SweepFile, cases: Sequence[tuple[int, int]]
) -> dict[str, str]:
    """Start the runtimes, measure, end them; returns which are left out, and why."""
    started = [Worker(name, arguments) for name in arguments.runtimes]
    missing = {w.name: w.about["missing"] for w in started if "missing" in w.about}
    workers = [worker for worker in started if worker.name not in missing]
    try:
        measure(workers, arguments, file, cases)
    finally:
        for worker in started:
            worker.close()
    file.save(
        run=describe_run(),
        num_threads=num_threads(arguments.threads),
        runtimes={worker.name: worker.about for worker in workers},
        missing=missing,
        tokens_per_s=collect_rates(arguments, file.rows),
    )
    return missing


def render(results: Rates) -> str:
    """Median tokens/s with its spread, and the paired ratio to transformers."""
    rows = []
    for concurrency, rates in results.items():
        for name, values in rates.items():
            spread = Spread.of(values)
            ratio = ""
            if BASELINE in rates:
                found = paired_ratio(values, rates[BASELINE])
                ratio = f"{found['median']:.2f} [{found['low95']:.2f}, {found['high95']:.2f}]"
            rows.append(
                (concurrency, name, f"{spread.median:.1f}",
                 f"{spread.p10:.1f}–{spread.p90:.1f}", ratio)
            )  # fmt: skip
    header = ("concurrency", "runtime", "tokens/s", "p10–p90", f"ratio to {BASELINE}")
    return format_table(header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
