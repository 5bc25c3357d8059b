# SPDX-License-Identifier: Apache-2.0
"""Policies on the real model through the decoding loop: tokens/s at R requests, in paired rounds.

Every round runs the same prompts under every policy, in an order that rotates, until R · `--tokens`
tokens have come since all R requests decode: equal work for everybody. Complete rounds go to the
JSON file as they come; the same command takes an interrupted run up again.

Run: python benchmarks/bench_policies.py --model-dir models/smollm2 --json policies.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.policy_report import (
    ADAPTIVE,
    FULL,
    PLAIN,
    judge_policies,
    render_policies,
    summarize_policies,
)
from benchmarks.timing import describe_run, write_report
from trtllm_dspark.config import (
    BucketConfig,
    SchedulerConfig,
    SystemConfig,
    load_json,
    require,
)
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.bench_inprocess import LoopContender
from trtllm_dspark.evaluation.progress import ProgressReport
from trtllm_dspark.options import configure_logging
from trtllm_dspark.runtime import System, build_loop, build_system
from trtllm_dspark.types import GenerationRequest, IntArray, SamplingParams

SCHEDULED = ("ratio_bucket", "prefix_async", ADAPTIVE)
MAX_TOKENS = 384
"""Far more than is measured: no request ends while others catch up."""
MAX_SEQ_LEN = 512
SEED = 1000
"""Of the prompts of round 0; warm-up rounds lie below."""
CHANGEABLE = ("json", "rounds", "requests", "profile", "warm_up")
"""Options that may differ when a run is taken up again."""
PROMPT_TEXTS = (
    "Write a Python class with three methods: add, subtract and multiply.",
    "A baker makes 24 rolls and sells them in bags of 6. How many bags are there? Show each step.",
    "Tell me a short story about a dragon and a knight.",
    "List the days of the week, then list them again in reverse order.",
    "Explain how a bicycle works to a child.",
    "Solve 3x + 5 = 20 and show each step.",
    "Write an email to my manager asking for a day off.",
    "Write SQL that creates a table of users with id, name and email, then queries it.",
)


def make_contenders(config: SystemConfig, most_depth: int) -> list[LoopContender]:
    """A server without a drafter, full verification, fixed depths and the scheduled policies.

    A loop lives as long as the benchmark, so it goes on learning from round to round.
    """
    alone = dataclasses.replace(config, drafter="none", scheduler=SchedulerConfig("autoregressive"))
    plain = build_system(alone)
    system = build_system(dataclasses.replace(config, scheduler=SchedulerConfig(ADAPTIVE)))
    gamma = system.drafter.num_drafts
    if gamma == 0:
        raise ConfigError(f"drafter {config.drafter!r} drafts nothing: name a directory or ngram")
    schedulers = {FULL: SchedulerConfig("fixed")}
    for depth in range(1, min(gamma, most_depth + 1)):
        schedulers[f"fixed {depth}"] = SchedulerConfig("fixed", {"num_draft_tokens": depth})
    schedulers.update({name: SchedulerConfig(name) for name in SCHEDULED})
    drafted = [LoopContender(n, system, make_loop(system, s)) for n, s in schedulers.items()]
    return [LoopContender(PLAIN, plain, plain.loop), *drafted]


def make_loop(system: System, scheduler: SchedulerConfig) -> DecodingLoop:
    """A loop that shares the pages of the system's own: prompts are computed once for all loops.

    Safe because one loop at a time holds requests, and each round ends with none.
    """
    loop = build_loop(system, scheduler)
    loop.pool = loop.batcher.pool = system.loop.pool
    return loop


def run_round(contender: LoopContender, prompts: Sequence[IntArray], num_tokens: int) -> float:
    """Tokens per second from when all requests decode; end tokens ignored."""
    loop, counts = contender.loop, dict.fromkeys(map(str, range(len(prompts))), 0)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    for name, prompt in zip(counts, prompts, strict=True):
        loop.add(GenerationRequest(name, prompt, params, time.monotonic()))
    begin_s, before, wanted = 0.0, -1, num_tokens * len(prompts)
    is_done = False
    while not is_done:
        outputs = loop.step()
        now_s = time.perf_counter()
        for output in outputs:
            counts[output.request_id] = output.stats.num_output_tokens
            is_done |= output.finish_reason is not None
        if before < 0 and min(counts.values()) > 0:
            begin_s, before = now_s, sum(counts.values())
        is_done |= before >= 0 and sum(counts.values()) >= before + wanted
    rate = (sum(counts.values()) - before) / (now_s - begin_s)
    for name in counts:
        loop.cancel(name)
    while loop.has_work:
        loop.step()
    return rate


def run_contenders(
    contenders: Sequence[LoopContender], num_requests: int, index: int, num_tokens: int
) -> dict[str, float]:
    """One round: every contender on the prompts of this round, in an order that rotates.

    Warm-up rounds before the last one (−1) are only for contenders that learn.
    """
    if index < -1:
        contenders = [c for c in contenders if c.name in SCHEDULED]
    encoded = encode_prompts(contenders[0].system)
    rng = np.random.default_rng([num_requests, SEED + index])
    chosen = rng.integers(0, len(encoded), num_requests)
    prompts, turn = [encoded[i] for i in chosen], index % len(contenders)
    order = [*contenders[turn:], *contenders[:turn]]
    rates = {c.name: run_round(c, prompts, num_tokens) for c in order}
    return {c.name: rates[c.name] for c in contenders}


def encode_prompts(system: System) -> list[IntArray]:
    """The benchmark's prompts inside the chat template."""
    tokenizer = system.tokenizer
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPT_TEXTS
    ]
    return [np.array(tokenizer.encode(text, add_special=False), np.int32) for text in rendered]


def run_benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds that the JSON file does not hold yet; the whole report."""
    settings = {k: v for k, v in vars(arguments).items() if k not in CHANGEABLE}
    settings["max_num_requests"] = max(arguments.requests)
    found = load_report(arguments.json, settings)
    rounds: list[dict[str, Any]] = found.get("rounds", [])
    cases = open_cases(arguments, {(row["num_requests"], row["round"]) for row in rounds})
    if not cases:
        return found
    contenders = make_contenders(system_config(arguments), arguments.depths)
    report = {"benchmark": "policies", "settings": settings, **describe(contenders)}
    with ProgressReport("rounds", len(cases)) as progress:
        for num_requests, index in cases:
            rates = run_contenders(contenders, num_requests, index, arguments.tokens)
            if index >= 0:
                row = {"num_requests": num_requests, "round": index, "tokens_per_s": rates}
                rounds = [*rounds, row]
                report.update(summarize(rounds))
                write_report(arguments.json, report)
            best = max(rates, key=lambda name: rates[name])
            progress.advance(f"R={num_requests} best {best} {rates[best]:.1f} tok/s")
    return report


def open_cases(arguments: argparse.Namespace, done: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """(R, round) still to run; warm-up rounds count down to −1 before the first of an R."""
    cases = []
    for num_requests in arguments.requests:
        missing = [i for i in range(arguments.rounds) if (num_requests, i) not in done]
        if missing:
            cases += [(num_requests, i) for i in (*range(-arguments.warm_up, 0), *missing)]
    return cases


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything in the report that follows from the rounds."""
    results = summarize_policies(rounds)
    return {"bars": judge_policies(results), "results": results, "rounds": rounds}


def describe(contenders: Sequence[LoopContender]) -> dict[str, Any]:
    """What was measured where: dtype, machine, drafter, table, versions, engine."""
    system = contenders[-1].system
    table = system.table
    return {
        "dtype": system.info.extra.get("dtype"),
        "machine": system.info.extra.get("machine"),
        "run": describe_run(),
        "drafter": system.drafter.name,
        "num_drafts": system.drafter.num_drafts,
        "is_calibrated": system.calibration is not None,
        "latency_table": None if table is None else table.to_json_dict(),
        "engine": json.loads(json.dumps(dataclasses.asdict(system.info), default=str)),
    }


def load_report(path: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The report of an interrupted run; a file of other settings is refused."""
    if path is None or not Path(path).is_file():
        return {}
    found = load_json(path)
    held = found.get("settings", {})
    differing = sorted(key for key, value in settings.items() if held.get(key) != value)
    if differing:
        raise ConfigError(
            f"{path} holds a run with other {', '.join(differing)}: name another file or delete it"
        )
    return found


def system_config(arguments: argparse.Namespace) -> SystemConfig:
    """The system that all contenders but the plain one share."""
    return SystemConfig(
        model_dir=arguments.model_dir,
        drafter=arguments.drafter,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        max_seq_len=MAX_SEQ_LEN,
        buckets=BucketConfig(max_num_requests=max(arguments.requests), max_num_tokens=512),
        profile=arguments.profile,
    )


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per request and round")
    parser.add_argument("--depths", type=int, default=15, help="fixed depths up to this")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--profile", default="auto", choices=("never", "auto", "force"))
    parser.add_argument("--json", help="write (and resume from) this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print three tables, write JSON."""
    arguments = build_parser().parse_args(argv)
    configure_logging(verbose=False)
    require(arguments.rounds >= 1, "--rounds", arguments.rounds, "≥ 1")
    require(1 <= arguments.tokens <= 96, "--tokens", arguments.tokens, "1 to 96")
    report = run_benchmark(arguments)
    print(render_policies(report["results"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
