# SPDX-License-Identifier: Apache-2.0
"""The one place that puts a system together from a configuration: engine, drafter, policy, loop.

Everything "auto" is resolved here into concrete objects and logged once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trtllm_dspark.checkpoints.tokenizer import Tokenizer, load_tokenizer
from trtllm_dspark.config import SystemConfig
from trtllm_dspark.decoding.drafters.ngram import NgramDrafter
from trtllm_dspark.decoding.drafters.none import NoDrafter
from trtllm_dspark.decoding.drafters.protocol import Drafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.protocol import Engine
from trtllm_dspark.engines.torch_loader import load_torch_engine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.buckets import build_ladder
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import EngineInfo

logger = logging.getLogger(__name__)

NGRAM_DRAFTS = 7


@dataclass(frozen=True)
class System:
    """A loaded system. The loop belongs to one thread."""

    config: SystemConfig
    loop: DecodingLoop
    tokenizer: Tokenizer
    engine: Engine

    @property
    def info(self) -> EngineInfo:
        """What the engine is and can run."""
        return self.engine.info


def build_system(config: SystemConfig) -> System:
    """Load tokenizer, engine and drafter, and join them to a decoding loop."""
    if config.backend != "torch":
        raise ConfigError(f"backend {config.backend!r} cannot be run yet: use 'torch'")
    tokenizer = load_tokenizer(config.model_dir)
    drafter = build_drafter(config)
    rungs = build_ladder(config.buckets, drafter.num_drafts)
    engine = load_torch_engine(config, rungs, num_drafts=drafter.num_drafts)
    policy = create_policy(config.scheduler.policy, config.scheduler.options)
    loop = DecodingLoop(
        engine,
        drafter,
        policy,
        SurvivalEstimator(drafter.num_drafts),
        max_queue_size=config.max_queue_size,
        enable_prefix_reuse=config.cache.enable_prefix_reuse,
        strict_policy=config.scheduler.strict,
    )
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
        list(rungs),
    )
    return System(config, loop, tokenizer, engine)


def build_drafter(config: SystemConfig) -> Drafter:
    """The configured drafter; plain decoding needs none whatever is configured."""
    name = config.drafter
    if config.scheduler.policy == "autoregressive" or name == "none":
        return NoDrafter()
    if name in ("auto", "ngram"):
        return NgramDrafter(NGRAM_DRAFTS)
    raise ConfigError(f"drafter {name!r} is unknown: choose auto, none or ngram")
