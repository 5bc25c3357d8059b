# SPDX-License-Identifier: Apache-2.0
"""Policies on the real model through the decoding loop: tokens/s at R requests, in paired rounds.

Every round runs the same prompts under every policy, in an order that rotates. Only steps with all
R requests decoding count. The best rival is picked on even rounds and compared on odd ones.

Run: python benchmarks/bench_policies.py --model-dir models/smollm2 --json policies.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import describe_run, format_table, paired_ratio, write_report
from trtllm_dspark.config import BucketConfig, CacheConfig, SchedulerConfig, SystemConfig
from trtllm_dspark.decoding.drafters.none import NoDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.runtime import System, build_loop, build_system
from trtllm_dspark.types import FinishReason, GenerationRequest, IntArray, SamplingParams

PLAIN = "plain server"
FULL = "full verification"
SCHEDULED = ("ratio_bucket", "prefix_async", "adaptive")
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


@dataclass(frozen=True)
class Contender:
    """One way to run the model; the loop lives as long as the benchmark, so it keeps learning."""

    name: str
    system: System
    loop: DecodingLoop


def make_contenders(config: SystemConfig, num_drafts_cap: int) -> list[Contender]:
    """A server without a drafter, full verification, fixed depths and the scheduled policies."""
    plain = build_system(dataclasses.replace(config, drafter="none", scheduler=plain_policy()))
    system = build_system(dataclasses.replace(config, scheduler=SchedulerConfig("adaptive")))
    gamma = system.info.num_drafts
    contenders = [
        Contender(PLAIN, plain, plain.loop),
        Contender(FULL, system, build_loop(system, SchedulerConfig("fixed"))),
    ]
    for depth in range(1, min(gamma, num_drafts_cap + 1)):
        chosen = SchedulerConfig("fixed", {"num_draft_tokens": depth})
        contenders.append(Contender(f"fixed {depth}", system, build_loop(system, chosen)))
    for name in SCHEDULED:
        contenders.append(Contender(name, system, build_loop(system, SchedulerConfig(name))))
    return contenders


def plain_policy() -> SchedulerConfig:
    """The policy of a server without a drafter."""
    return SchedulerConfig("autoregressive")


def run_round(contender: Contender, prompts: Sequence[IntArray], num_tokens: int) -> float:
    """Tokens per second while all requests decode, end tokens ignored."""
    loop = contender.loop
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        loop.add(GenerationRequest(str(index), prompt, params, time.monotonic()))
    committed, seconds, is_steady = 0, 0.0, False
    while loop.stats().num_running == len(prompts) or not is_steady:
        before, started = loop.counters.num_committed_tokens, time.perf_counter()
        outputs = loop.step()
        elapsed = time.perf_counter() - started
        outcome = loop.last_outcome
        is_steady = outcome is not None and len(outcome.verify_lens) == len(prompts)
        if is_steady:
            seconds += elapsed
            committed += loop.counters.num_committed_tokens - before
        if any(o.finish_reason is FinishReason.LENGTH for o in outputs):
            break
    for index in range(len(prompts)):
        loop.cancel(str(index))
    while loop.has_work:
        loop.step()
    return committed / seconds


def bench_requests(
    contenders: Sequence[Contender], num_requests: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens/s per contender and round at one number of requests."""
    rng = np.random.default_rng(num_requests)
    rates: dict[str, list[float]] = {c.name: [] for c in contenders}
    encoded = encode_prompts(contenders[0].system)
    for index in range(arguments.warm_up + arguments.rounds):
        prompts = [encoded[i] for i in rng.integers(0, len(encoded), num_requests)]
        turn = index % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            rate = run_round(contender, prompts, arguments.tokens)
            if index >= arguments.warm_up:
                rates[contender.name].append(rate)
        print(f"R={num_requests}: round {index + 1}", file=sys.stderr, flush=True)
    return rates


def encode_prompts(system: System) -> list[IntArray]:
    """The benchmark's prompts inside the chat template."""
    tokenizer = system.tokenizer
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPT_TEXTS
    ]
    return [np.array(tokenizer.encode(text, add_special=False), np.int32) for text in rendered]


def summarise(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and `adaptive` against plain, full verification and the best rival."""
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    rivals = [name for name in rates if name != "adaptive"]
    best = max(rivals, key=lambda name: float(np.median(rates[name][0::2])))
    odd = {name: values[1::2] for name, values in rates.items()}
    return {
        "tokens_per_s": medians,
        "best_rival": best,
        "adaptive_vs_best_rival": paired_ratio(odd["adaptive"], odd[best]),
        "adaptive_vs_plain": paired_ratio(rates["adaptive"], rates[PLAIN]),
        "adaptive_vs_full": paired_ratio(rates["adaptive"], rates[FULL]),
        "full_vs_plain": paired_ratio(rates[FULL], rates[PLAIN]),
        "rounds": rates,
    }


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
    parser.add_argument("--depths", type=int, default=7, help="fixed depths up to this")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--profile", default="auto", choices=("never", "auto", "force"))
    parser.add_argument("--json", help="write everything here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON."""
    arguments = build_parser().parse_args(argv)
    config = SystemConfig(
        model_dir=arguments.model_dir,
        drafter=arguments.drafter,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        max_seq_len=1024,
        buckets=BucketConfig(max_num_requests=max(arguments.requests), max_num_tokens=512),
        cache=CacheConfig(enable_prefix_reuse=False),
        profile=arguments.profile,
    )
    contenders = make_contenders(config, arguments.depths)
    assert isinstance(contenders[0].loop.drafter, NoDrafter)
    results: dict[str, Any] = {}
    for num_requests in arguments.requests:
        results[str(num_requests)] = summarise(bench_requests(contenders, num_requests, arguments))
        write_report(arguments.json, report(contenders, results))
    print(render(results))
    return 0


def report(contenders: Sequence[Contender], results: dict[str, Any]) -> dict[str, Any]:
    """The JSON report."""
    info = contenders[-1].system.info
    return {
        "benchmark": "policies",
        "run": describe_run(),
        "engine": json.loads(json.dumps(dataclasses.asdict(info), default=str)),
        "drafter": contenders[-1].loop.drafter.name,
        "results": results,
    }


def render(results: dict[str, Any]) -> str:
    """A table of ratios, one row per number of requests."""
    header = ("R", "plain tok/s", "full/plain", "adaptive/plain", "adaptive/best rival", "rival")
    rows = []
    for num_requests, result in results.items():
        ratio = result["adaptive_vs_best_rival"]
        rows.append(
            (
                num_requests,
                f"{result['tokens_per_s'][PLAIN]:.1f}",
                f"{result['full_vs_plain']['median']:.2f}",
                f"{result['adaptive_vs_plain']['median']:.2f}",
                f"{ratio['median']:.3f} [{ratio['low95']:.3f}, {ratio['high95']:.3f}]",
                result["best_rival"],
            )
        )
    return format_table(header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
