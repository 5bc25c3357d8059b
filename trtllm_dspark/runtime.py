# SPDX-License-Identifier: Apache-2.0
"""The one place that puts a system together from a configuration: engine, drafter, policy, loop.

Everything "auto" is resolved here into concrete objects and logged once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.checkpoints.packaged import DRAFTER_SUBDIR
from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer
from trtllm_dspark.config import SchedulerConfig, SystemConfig
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.drafters.ngram import NgramDrafter
from trtllm_dspark.decoding.drafters.none import NoDrafter
from trtllm_dspark.decoding.drafters.protocol import Drafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.decoding.profiling import measure_table
from trtllm_dspark.engines.engine_config import resolve_engine_dir
from trtllm_dspark.engines.engine_dir import DRAFTER_ENGINE, load_engine_dir
from trtllm_dspark.engines.protocol import Engine, RoundEngine
from trtllm_dspark.engines.tensorrt_engine_device import require_gpu
from trtllm_dspark.engines.tensorrt_loader import load_tensorrt_engine
from trtllm_dspark.engines.torch_loader import load_torch_engine, read_drafter
from trtllm_dspark.environment import cache_dir
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling import PolicyResources, create_policy, policy_names
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets
from trtllm_dspark.scheduling.calibration import Calibration
from trtllm_dspark.scheduling.latency_table import LatencyTable, usable_table
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import EngineInfo

logger = logging.getLogger(__name__)

NGRAM_DRAFTS = 7
PROFILE_BUDGET_S = 30.0
PLAIN_POLICY = "autoregressive"
STALE_POLICIES = ("adaptive", "prefix_async")
DECIDED_AHEAD_STALENESS = 1
"""Where a step is decided while the one before it runs, the newest survivals a policy has seen
are two steps old already."""
TABLE_POLICIES = ("adaptive", "prefix", "prefix_async", "ratio_bucket", "best_uniform")


@dataclass(frozen=True)
class System:
    """A loaded system. The loop belongs to one thread."""

    config: SystemConfig
    loop: DecodingLoop
    tokenizer: Tokenizer
    engine: Engine
    drafter: Drafter
    table: LatencyTable | None
    """The latency table policies may trust, None without one."""
    calibration: Calibration | None

    @property
    def info(self) -> EngineInfo:
        """What the engine is and can run."""
        return self.engine.info


def build_system(config: SystemConfig) -> System:
    """Load tokenizer, engine and drafter, measure what must be measured, join them to a loop."""
    config = resolve_engine_dir(config)
    check_policy(config.scheduler.policy)
    tokenizer = load_tokenizer(config.model_dir)
    engine, drafter = load_engine(config)
    table = None
    if config.scheduler.policy in TABLE_POLICIES and drafter.num_drafts:
        table = latency_table(config, engine, drafter)
    calibration = load_calibration(config)
    loop = make_loop(config, engine, drafter, table, calibration)
    if config.scheduler.policy in TABLE_POLICIES and table is None and drafter.num_drafts:
        loop.counters.fallback_reason = table_refusal(engine.info)
    policy = loop.policy
    logger.info(
        "loaded %s: dtype %s, drafter %s (γ=%d), policy %s, %d requests, %d pages of %d, rungs %s",
        config.model_dir,
        engine.info.extra.get("dtype"),
        drafter.name,
        drafter.num_drafts,
        policy.name,
        engine.info.max_num_requests,
        engine.info.num_pages,
        engine.info.page_size,
        list(engine.info.rungs),
    )
    return System(config, loop, tokenizer, engine, drafter, table, calibration)


def check_policy(name: str) -> None:
    """Refuse policies that exist for evaluation only (they see what no server can)."""
    servable = policy_names(servable=True)
    if name not in servable:
        raise ConfigError(f"policy {name!r} cannot serve: choose one of {', '.join(servable)}")


def build_loop(system: System, scheduler: SchedulerConfig) -> DecodingLoop:
    """Another loop with another policy on a system's engine (benchmarks).

    Loops of one engine write the same pages: only one may hold requests at a time, and none of
    these reuses prefixes, since another loop may have overwritten them.
    """
    cache = dataclasses.replace(system.config.cache, enable_prefix_reuse=False)
    config = dataclasses.replace(system.config, scheduler=scheduler, cache=cache)
    return make_loop(config, system.engine, system.drafter, system.table, system.calibration)


def make_loop(
    config: SystemConfig,
    engine: Engine,
    drafter: Drafter,
    table: LatencyTable | None,
    calibration: Calibration | None,
) -> DecodingLoop:
    """Estimator, policy and loop over loaded parts."""
    estimator = SurvivalEstimator(drafter.num_drafts, calibration)
    options = dict(config.scheduler.options)
    if isinstance(engine, RoundEngine) and config.scheduler.policy in STALE_POLICIES:
        options.setdefault("staleness", DECIDED_AHEAD_STALENESS)
    resources = PolicyResources(table=table, estimator=estimator)
    if drafter.num_drafts == 0 and config.scheduler.policy != PLAIN_POLICY:
        logger.info("nothing drafts: policy %s has nothing to decide", config.scheduler.policy)
        policy = create_policy(PLAIN_POLICY, {}, resources)
    else:
        policy = create_policy(config.scheduler.policy, options, resources)
    return DecodingLoop(
        engine,
        drafter,
        policy,
        estimator,
        max_queue_size=config.max_queue_size,
        enable_prefix_reuse=config.cache.enable_prefix_reuse,
        strict_policy=config.scheduler.strict,
    )


def load_engine(config: SystemConfig) -> tuple[Engine, Drafter]:
    """The engine of a configuration and the drafter that goes with it."""
    config = resolve_engine_dir(config)
    if config.backend != "torch":
        return _load_tensorrt(config)
    directory = drafter_dir(config)
    if directory is not None:
        loaded = read_drafter(directory, config.model_dir)
        gamma = loaded.config.num_drafts
        rungs = build_ladder(config.buckets, gamma)
        engine = load_torch_engine(
            config,
            rungs,
            num_drafts=gamma,
            drafter=loaded,
            request_buckets=request_buckets(config.buckets),
        )
        return engine, DSparkDrafter(engine)
    plain = config.scheduler.policy == PLAIN_POLICY or config.drafter == "none"
    drafter: Drafter = NoDrafter() if plain else NgramDrafter(NGRAM_DRAFTS)
    rungs = build_ladder(config.buckets, drafter.num_drafts)
    return load_torch_engine(config, rungs, num_drafts=drafter.num_drafts), drafter


def _load_tensorrt(config: SystemConfig) -> tuple[Engine, Drafter]:
    """The engines of a directory and what drafts for them: their own drafter, n-grams or nothing.

    The target's engine computes logits for γ drafts of each request: n-grams draft as many.
    """
    directory = load_engine_dir(config.model_dir)
    plain = config.scheduler.policy == PLAIN_POLICY or config.drafter == "none"
    own = not plain and config.drafter == "auto" and directory.facts.drafter is not None
    gamma = 0 if plain else directory.facts.limits.num_drafts
    engine = load_tensorrt_engine(
        directory, device_name=config.device, use_drafter=own, num_drafts=gamma
    )
    if own:
        return engine, DSparkDrafter(engine, can_sample=False)
    return engine, NgramDrafter(gamma) if gamma else NoDrafter()


def check_config(config: SystemConfig) -> SystemConfig:
    """The configuration as it will run; refuses what this machine cannot, before a server starts.

    What an engine directory decides is filled in.
    """
    config = resolve_engine_dir(config)
    check_policy(config.scheduler.policy)
    if config.backend != "torch":
        require_gpu()
    return config


def drafter_dir(config: SystemConfig) -> Path | None:
    """Directory of the configured DSpark drafter, None when there is none; 'auto' resolved here."""
    config = resolve_engine_dir(config)
    if config.scheduler.policy == PLAIN_POLICY or config.drafter in ("none", "ngram"):
        return None
    if config.backend != "torch":
        found = Path(config.model_dir)
        return found if (found / DRAFTER_ENGINE).is_file() else None
    if config.drafter != "auto":
        if not Path(config.drafter).is_dir():
            raise ConfigError(
                f"drafter {config.drafter!r} is neither auto, none or ngram nor a directory"
            )
        return Path(config.drafter)
    own = Path(config.model_dir) / DRAFTER_SUBDIR
    return own if own.is_dir() else None


def load_calibration(config: SystemConfig) -> Calibration | None:
    """calibration.json beside the drafter, if there is one."""
    directory = drafter_dir(config)
    path = None if directory is None else directory / "calibration.json"
    if path is None or not path.is_file():
        return None
    return Calibration.load(path)


def latency_table(config: SystemConfig, engine: Engine, drafter: Drafter) -> LatencyTable | None:
    """The table of this engine on this machine: cached by fingerprint, measured when allowed."""
    info = engine.info
    path = table_path(info)
    if config.profile != "force" and path.is_file():
        return usable_table(LatencyTable.load(path), info.fingerprint, info.rungs)
    if config.profile == "never":
        return usable_table(None, info.fingerprint, info.rungs)
    logger.info("measuring the latency table of this engine (about %.0f s)", PROFILE_BUDGET_S)
    table = profile_engine(config, engine, drafter, budget_s=PROFILE_BUDGET_S)
    return usable_table(table, info.fingerprint, info.rungs)


def measure_latency_table(
    config: SystemConfig,
    *,
    context_lens: Sequence[int] | None = None,
    budget_s: float = PROFILE_BUDGET_S,
) -> tuple[LatencyTable, Path]:
    """Load an engine, measure and cache its table; returns (table, where it is kept)."""
    config = resolve_engine_dir(config)
    engine, drafter = load_engine(config)
    if drafter.num_drafts == 0:
        raise ConfigError(
            f"drafter {config.drafter!r} drafts nothing: there is no step to schedule and no table "
            "to measure; name a drafter (a directory, auto or ngram)"
        )
    table = profile_engine(config, engine, drafter, context_lens=context_lens, budget_s=budget_s)
    return table, table_path(engine.info)


def profile_engine(
    config: SystemConfig,
    engine: Engine,
    drafter: Drafter,
    *,
    context_lens: Sequence[int] | None = None,
    budget_s: float = PROFILE_BUDGET_S,
) -> LatencyTable:
    """Measure the table of an idle engine and keep it under its fingerprint."""
    info = engine.info
    table = measure_table(
        engine,
        drafter,
        config.buckets,
        context_lens=tuple(context_lens or (profile_context_len(info),)),
        budget_s=budget_s,
        machine={"device": str(info.extra.get("machine", info.device))},
    )
    path = table_path(info)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path)
    return table


def table_path(info: EngineInfo) -> Path:
    """Where the table of an engine is kept."""
    return cache_dir() / "latency" / f"{info.fingerprint}.json"


def table_refusal(info: EngineInfo) -> str:
    """Why policies do without a table, in a word for metrics; the log has the sentence."""
    return "refused_table" if table_path(info).is_file() else "no_table"


def profile_context_len(info: EngineInfo) -> int:
    """One context length that every request of a full batch has pages for, 256 at most."""
    pages = (info.num_pages - 1) // info.max_num_requests
    room = pages * info.page_size - 2 * (info.num_drafts + 1)
    return max(1, min(256, info.max_seq_len // 2, room))
