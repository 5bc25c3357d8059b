# SPDX-License-Identifier: Apache-2.0
"""Runs a load on a decoding loop of this process, without server and transport.

Contenders of one drafter share an engine; each keeps its loop, so that it goes on learning from
round to round.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_dspark.config import SchedulerConfig, SystemConfig
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.bench_load import BenchLoad, BenchRequest, RequestRecord
from trtllm_dspark.evaluation.bench_measure import Window, measure_round, steady_window
from trtllm_dspark.runtime import System, build_loop, build_system
from trtllm_dspark.types import GenerationRequest, RequestOutput, SamplingParams, StepOutcome

PLAIN = "autoregressive"
"""A server without a drafter: what every ratio is against."""


@dataclass(frozen=True)
class LoopContender:
    """One way to run the model in this process."""

    name: str
    system: System
    loop: DecodingLoop

    def run_round(self, load: BenchLoad) -> dict[str, Any]:
        """Run one round and measure it."""
        records, outcomes = _RoundRun(self, load).run()
        window = steady_window(records, load)
        steps = describe_steps(outcomes, window, self.loop.drafter.num_drafts)
        return {**measure_round(records, load), **steps}

    def close(self) -> None:
        """Nothing runs between rounds."""


def make_loop_contenders(
    config: SystemConfig, drafters: list[str], policies: list[str], options: dict[str, Any]
) -> list[LoopContender]:
    """A plain server, then every policy with every drafter."""
    cache = dataclasses.replace(config.cache, enable_prefix_reuse=False)
    config = dataclasses.replace(config, cache=cache)
    plain = dataclasses.replace(config, drafter="none", scheduler=SchedulerConfig(PLAIN))
    system = build_system(plain)
    contenders = [LoopContender(PLAIN, system, system.loop)]
    for drafter in drafters:
        chosen = SchedulerConfig("adaptive")
        system = build_system(dataclasses.replace(config, drafter=drafter, scheduler=chosen))
        if system.drafter.num_drafts == 0:
            raise ConfigError(f"drafter {drafter!r} drafts nothing: name a directory or ngram")
        for policy in policies:
            loop = build_loop(system, SchedulerConfig(policy, options.get(policy, {})))
            contenders.append(
                LoopContender(contender_name(policy, drafter, drafters), system, loop)
            )
    return contenders


def contender_name(policy: str, drafter: str, drafters: list[str]) -> str:
    """The policy, with its drafter where there are several."""
    return policy if len(drafters) == 1 else f"{policy}@{drafter}"


class _RoundRun:
    """One round on one loop."""

    def __init__(self, contender: LoopContender, load: BenchLoad) -> None:
        self.loop, self.tokenizer, self.load = contender.loop, contender.system.tokenizer, load
        end_ids = () if load.ignore_end else tuple(self.tokenizer.eos_ids)
        self.params = SamplingParams(
            max_tokens=load.max_tokens, temperature=load.temperature, end_ids=end_ids
        )
        self.waiting = deque(load.requests)
        self.records: dict[str, RequestRecord] = {}
        self.outcomes: list[tuple[float, StepOutcome]] = []
        self.num_live = 0

    def run(self) -> tuple[list[RequestRecord], list[tuple[float, StepOutcome]]]:
        """Step until every request has ended."""
        self.begin_s = time.monotonic()
        while self.waiting or self.loop.has_work:
            self._admit()
            if not self.loop.has_work:
                time.sleep(max(0.0, self._due_s(self.waiting[0]) - time.monotonic()))
                continue
            self.loop.last_outcome = None
            outputs = self.loop.step()
            now = time.monotonic()
            if self.loop.last_outcome is not None:
                self.outcomes.append((now, self.loop.last_outcome))
            for output in outputs:
                self._note(output, now)
        return list(self.records.values()), self.outcomes

    def _due_s(self, request: BenchRequest) -> float:
        return self.begin_s + (request.arrival_s or 0.0)

    def _admit(self) -> None:
        """Add what has arrived, or what there is a place for."""
        while self.waiting:
            now = time.monotonic()
            if self.load.is_open:
                if self._due_s(self.waiting[0]) > now:
                    return
            elif self.num_live >= self.load.concurrency:
                return
            self._add(self.waiting.popleft(), now)

    def _add(self, request: BenchRequest, now: float) -> None:
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": request.text}])
        tokens = np.asarray(self.tokenizer.encode(text, add_special=False), np.int32)
        name = str(len(self.records))
        self.loop.add(GenerationRequest(name, tokens, self.params, now))
        start_s = now if request.arrival_s is None else self._due_s(request)
        self.records[name] = RequestRecord(start_s)
        self.num_live += 1

    def _note(self, output: RequestOutput, now: float) -> None:
        record = self.records[output.request_id]
        record.add(now, output.stats.num_output_tokens)
        if output.finish_reason is not None:
            record.end_s = now
            record.error = None if output.error is None else str(output.error)
            self.num_live -= 1


def describe_steps(
    outcomes: list[tuple[float, StepOutcome]], window: Window, num_drafts: int
) -> dict[str, Any]:
    """What the steps of the steady state did."""
    stats = LoopStats(num_drafts=num_drafts)
    for time_s, outcome in outcomes:
        if window.begin_s < time_s <= window.end_s:
            stats.record(outcome)
    steps = max(1, stats.num_steps)
    requests = max(1, sum(stats.tokens_per_step.values()))
    return {
        "acceptance_length": stats.acceptance_length,
        "keep_ratio": stats.keep_ratio,
        "verified_per_request": stats.num_verified_tokens / requests,
        "drafted_share": stats.num_drafted_steps / steps,
        "step_ms": stats.step_ms_total / steps,
        "draft_ms": stats.draft_ms_total / steps,
        "scheduler_ms": stats.plan_ms_total / steps,
        "rungs": {str(rung): count for rung, count in sorted(stats.steps_per_rung.items())},
    }
