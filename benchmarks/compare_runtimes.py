# SPDX-License-Identifier: Apache-2.0
"""This project beside what a user would otherwise pick on the same machine and model: transformers
(plain, prompt look-up) and llama-cpp-python (plain, prompt look-up) on the model's GGUF.

Greedy, same prompt tokens, same number of new tokens (end tokens do not stop anybody), every
runtime in its own process that stays loaded; rounds rotate over the runtimes, so that drift of the
machine hits all alike. A runtime that is not installed is left out and named.

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

from benchmarks.timing import Spread, describe_run, format_table, paired_ratio, write_report
from trtllm_dspark.checkpoints.tokenizer import load_tokenizer
from trtllm_dspark.serving.demo import PROMPTS
from trtllm_dspark.training.prompt_sources import read_prompts

RUNTIMES = (
    "transformers", "transformers-lookup", "llama.cpp", "llama.cpp-lookup",
    "dspark-plain", "dspark-ngram", "dspark",
)  # fmt: skip
BASELINE = "transformers"


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
        self.process.wait(60)

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
        texts = [prompt.text for prompt in read_prompts(arguments.prompts, 0.0, 1.0)]
    rendered = [tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in texts]
    return [list(tokenizer.encode(text, add_special=False)) for text in rendered]


def measure(
    workers: Sequence[Worker], arguments: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second: concurrency → runtime → one value per round."""
    prompts = encode_prompts(arguments)
    results: dict[str, dict[str, list[float]]] = {}
    for concurrency in arguments.concurrency:
        rng = np.random.default_rng(concurrency)
        rates: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for index in range(arguments.warm_up + arguments.rounds):
            chosen = [prompts[i] for i in rng.integers(0, len(prompts), concurrency)]
            turn = index % len(workers)
            for worker in [*workers[turn:], *workers[:turn]]:
                found = worker.run(chosen, arguments.tokens)
                if index >= arguments.warm_up:
                    rates[worker.name].append(found["num_tokens"] / found["seconds"])
            print(f"concurrency {concurrency}: round {index + 1}", file=sys.stderr, flush=True)
        results[str(concurrency)] = rates
    return results


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--drafter", help="DSpark drafter directory (default: the model's own)")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--prompts", nargs="+", help="JSONL files (default: the demo's prompts)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores, for every runtime")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", help="write everything here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON."""
    arguments = build_parser().parse_args(argv)
    workers, missing = [], {}
    for name in arguments.runtimes:
        worker = Worker(name, arguments)
        if "missing" in worker.about:
            missing[name] = worker.about["missing"]
            worker.close()
        else:
            workers.append(worker)
    results = measure(workers, arguments)
    about = {worker.name: worker.about for worker in workers}
    for worker in workers:
        worker.close()
    threads = num_threads(arguments.threads)
    report = {
        "run": describe_run(),
        "num_threads": threads,
        "runtimes": about,
        "missing": missing,
        "tokens_per_s": results,
    }
    write_report(arguments.json, report)
    print(render(results))
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}")
    return 0


def render(results: dict[str, dict[str, list[float]]]) -> str:
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
