# SPDX-License-Identifier: Apache-2.0
"""Evaluates one drafter on prompts: answers them with full verification (or takes what a store
holds already) and adds up the report. Knows no command line and no figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.config import SystemConfig
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.drafters.protocol import Drafter
from trtllm_dspark.engines.fingerprint import hash_checkpoint
from trtllm_dspark.engines.protocol import Engine
from trtllm_dspark.engines.torch_loader import read_drafter
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.acceptance import (
    describe_group,
    group_answers,
    macro_average,
    sweep_thresholds,
)
from trtllm_dspark.evaluation.block_collection import (
    CollectedBlocks,
    PromptBlocks,
    iterate_blocks,
    join_blocks,
    mode_params,
)
from trtllm_dspark.evaluation.block_store import BlockStore, case_key
from trtllm_dspark.evaluation.progress import ProgressReport
from trtllm_dspark.evaluation.prompts import EncodedPrompt
from trtllm_dspark.evaluation.reliability import judge_positions
from trtllm_dspark.runtime import drafter_dir, load_engine
from trtllm_dspark.scheduling.calibration import Calibration
from trtllm_dspark.scheduling.logit_map import LogitMap
from trtllm_dspark.types import DraftMode

ROWS_PER_REQUEST = 32
"""max_num_tokens at least this many times the concurrency: room for full verification."""


@dataclass(frozen=True)
class EvaluationOptions:
    """What is asked of every drafter alike."""

    temperature: float = 0.0
    max_tokens: int = 128
    end_ids: tuple[int, ...] = ()
    seed: int = 0
    greedy_drafts: bool = False
    """Sampling target, deterministic drafts."""
    calibration: str | None = None
    """File to use instead of the drafter's own calibration.json."""


@dataclass(frozen=True)
class DrafterEvaluation:
    """One drafter's blocks and what they add up to."""

    name: str
    answers: list[PromptBlocks]
    """One per prompt, in order."""
    num_drafts: int
    report: dict[str, Any]


def evaluate_drafter(
    config: SystemConfig,
    options: EvaluationOptions,
    prompts: Sequence[EncodedPrompt],
    store: BlockStore,
) -> DrafterEvaluation:
    """Evaluate `config.drafter`; finished answers are appended to the store as they come."""
    engine, drafter = load_engine(config)
    mode = draft_mode(drafter, options)
    if mode is DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS and isinstance(drafter, DSparkDrafter):
        drafter = DSparkDrafter(engine, can_sample=False)
    facts = case_facts(config, engine, drafter, options, mode)
    answers = collect_answers(engine, drafter, options, mode, prompts, store, case_key(facts))
    calibration, source = find_calibration(config, options)
    if calibration is not None and calibration.num_drafts != drafter.num_drafts:
        raise ConfigError(
            f"{source} is for γ = {calibration.num_drafts}, the drafter has {drafter.num_drafts}: "
            "fit it again with `dspark calibrate`"
        )
    report = {
        "drafter": describe_drafter(config, drafter),
        "mode": mode.value,
        **acceptance_report(answers, prompts, drafter.num_drafts, options.seed),
        **confidence_report(
            answers,
            [prompt.domain for prompt in prompts],
            confidence_maps(drafter.num_drafts, mode, calibration),
            options.seed,
        ),
        "calibration_file": source,
        "facts": facts,
    }
    return DrafterEvaluation(config.drafter, answers, drafter.num_drafts, report)


def draft_mode(drafter: Drafter, options: EvaluationOptions) -> DraftMode:
    """How acceptance comes about with this drafter at this temperature."""
    if drafter.num_drafts == 0:
        raise ConfigError(
            "there is no drafter to evaluate: name one with --drafter (a directory or ngram)"
        )
    if options.temperature == 0.0:
        return DraftMode.GREEDY_TARGET
    if drafter.can_sample and not options.greedy_drafts:
        return DraftMode.SAMPLED_TARGET_SAMPLED_DRAFTS
    return DraftMode.SAMPLED_TARGET_GREEDY_DRAFTS


def case_facts(
    config: SystemConfig,
    engine: Engine,
    drafter: Drafter,
    options: EvaluationOptions,
    mode: DraftMode,
) -> dict[str, Any]:
    """All that the blocks of a prompt depend on. Concurrency is none of it."""
    directory = drafter_dir(config)
    return {
        "target": hash_checkpoint(config.model_dir),
        "drafter": drafter.name if directory is None else hash_checkpoint(directory),
        "num_drafts": drafter.num_drafts,
        "mode": mode.value,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "dtype": engine.info.extra.get("dtype"),
    }


def collect_answers(
    engine: Engine,
    drafter: Drafter,
    options: EvaluationOptions,
    mode: DraftMode,
    prompts: Sequence[EncodedPrompt],
    store: BlockStore,
    case: str,
) -> list[PromptBlocks]:
    """Answers to all prompts, in order; only those that the store lacks are computed."""
    tokens = {prompt.prompt_id: prompt.token_ids for prompt in prompts}
    found = store.load(case, tokens)
    missing = {name: ids for name, ids in tokens.items() if name not in found}
    params = mode_params(mode, options.max_tokens, options.end_ids, options.temperature)
    num_blocks = num_committed = 0
    with ProgressReport(f"evaluating ({mode.value})", len(tokens), len(found)) as progress:
        for blocks in iterate_blocks(engine, drafter, missing, mode, params, seed=options.seed):
            store.append(case, tokens[blocks.prompt_id], blocks)
            found[blocks.prompt_id] = blocks
            num_blocks += blocks.num_steps
            num_committed += blocks.num_tokens - 1
            progress.advance(f"{num_committed / max(1, num_blocks):.2f} tokens/step")
    return [found[prompt.prompt_id] for prompt in prompts]


def find_calibration(
    config: SystemConfig, options: EvaluationOptions
) -> tuple[Calibration | None, str | None]:
    """The calibration asked for, else the drafter's, else the model's; and where it is."""
    if options.calibration is not None:
        return Calibration.load(options.calibration), options.calibration
    directory = drafter_dir(config)
    for place in [] if directory is None else [directory, Path(config.model_dir)]:
        path = place / "calibration.json"
        if path.is_file():
            return Calibration.load(path), str(path)
    return None, None


def describe_drafter(config: SystemConfig, drafter: Drafter) -> dict[str, Any]:
    """What kind of drafter it is, for tables and sweeps."""
    directory = drafter_dir(config)
    data: dict[str, Any] = {"name": config.drafter, "num_drafts": drafter.num_drafts}
    if directory is None:
        return {**data, "kind": drafter.name, "num_layers": 0, "head": drafter.name}
    shape = read_drafter(directory, config.model_dir).config
    return {
        **data,
        "kind": drafter.name,
        "num_layers": shape.num_layers,
        "head": shape.head_type,
        "markov_rank": shape.markov_rank,
    }


def acceptance_report(
    answers: Sequence[PromptBlocks],
    prompts: Sequence[EncodedPrompt],
    num_drafts: int,
    seed: int,
) -> dict[str, Any]:
    """Macro average over domains first, then every domain and every set."""
    rng = np.random.default_rng(seed)
    estimates, domains, sets = {}, {}, {}
    for name, group in group_answers(answers, [p.domain for p in prompts]).items():
        estimates[name], domains[name] = describe_group(group, num_drafts, rng)
    for name, group in group_answers(answers, [p.set_name for p in prompts]).items():
        _, sets[name] = describe_group(group, num_drafts, rng)
    macro = macro_average(estimates)
    return {**macro.to_json_dict(), "domains": domains, "sets": sets}


def confidence_maps(
    num_drafts: int, mode: DraftMode, calibration: Calibration | None
) -> dict[str, LogitMap]:
    """Confidences as drafted, and as calibrated where this mode has been."""
    cases = {"before": LogitMap.neutral(num_drafts)}
    if calibration is not None and mode in calibration.modes:
        cases["after"] = calibration.logit_map(mode)
    return cases


def confidence_report(
    answers: Sequence[PromptBlocks],
    domains: Sequence[str],
    cases: Mapping[str, LogitMap],
    seed: int,
) -> dict[str, Any]:
    """Reliability over all blocks; static thresholds over all blocks and over each domain's."""
    num_drafts = len(next(iter(cases.values())).scale)
    groups = {
        name: join_blocks(group, num_drafts)
        for name, group in group_answers(answers, domains).items()
    }
    blocks = join_blocks(answers, num_drafts)

    def swept(found: CollectedBlocks, mapping: LogitMap) -> list[dict[str, Any]]:
        return sweep_thresholds(found.samples, mapping.confidences(found.samples.logits))

    return {
        "reliability": {
            name: judge_positions(blocks, mapping, np.random.default_rng(seed))
            for name, mapping in cases.items()
        },
        "thresholds": {name: swept(blocks, mapping) for name, mapping in cases.items()},
        "domain_thresholds": {
            domain: {name: swept(found, mapping) for name, mapping in cases.items()}
            for domain, found in groups.items()
        },
    }


def evaluation_config(
    config: SystemConfig, drafter: str, concurrency: int, longest: int
) -> SystemConfig:
    """A configuration that answers `concurrency` prompts at once, everything verified.

    `longest` is the longest prompt with its answer: pages are allocated for no more than that.
    """
    rows = max(config.buckets.max_num_tokens, ROWS_PER_REQUEST * concurrency)
    buckets = dataclasses.replace(config.buckets, max_num_requests=concurrency, max_num_tokens=rows)
    return dataclasses.replace(
        config,
        drafter=drafter,
        buckets=buckets,
        cache=dataclasses.replace(config.cache, num_pages=0),
        profile="never",
        max_seq_len=min(config.max_seq_len, max(longest, 2)),
    )
