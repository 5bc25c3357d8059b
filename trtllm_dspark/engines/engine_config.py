# SPDX-License-Identifier: Apache-2.0
"""What an engine directory decides of a system's configuration: backend, precision, every limit.

A plain model directory passes through unchanged. Reads the directory's JSON, loads nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from trtllm_dspark.config import BucketConfig, SystemConfig, load_json
from trtllm_dspark.engines.engine_dir import CONFIG, MODEL_DIR, EngineDirectory, load_engine_dir
from trtllm_dspark.errors import ConfigError

logger = logging.getLogger(__name__)

TORCH = "torch"


def is_engine_dir(path: str | Path) -> bool:
    """Whether config.json is an engine directory's (ours, or TensorRT-LLM's own)."""
    config = Path(path) / CONFIG
    return config.is_file() and "pretrained_config" in load_json(config)


def resolve_engine_dir(config: SystemConfig) -> SystemConfig:
    """The configuration with what the engine directory at `model_dir` decides; idempotent.

    Backend torch: `model_dir` becomes the model inside the directory. Others keep the directory.
    """
    if is_engine_dir(config.model_dir):
        return apply_engine_dir(config, load_engine_dir(config.model_dir))
    if config.backend != TORCH:
        raise ConfigError(
            f"backend = {config.backend!r} needs an engine directory and {config.model_dir!r} is "
            "none: make one with `dspark build`"
        )
    return config


def apply_engine_dir(config: SystemConfig, directory: EngineDirectory) -> SystemConfig:
    """Pure: limits, page pool and precision come from the directory, the rest stays."""
    facts, limits = directory.facts, directory.facts.limits
    is_torch = facts.backend == TORCH
    found = dataclasses.replace(
        config,
        model_dir=str(directory.path / MODEL_DIR if is_torch else directory.path),
        drafter=_drafter(config.drafter, is_torch),
        backend=facts.backend,
        dtype=config.dtype if is_torch and config.dtype != "auto" else facts.dtype,
        max_seq_len=limits.max_seq_len,
        buckets=BucketConfig(
            max_num_requests=limits.max_num_requests,
            max_num_tokens=limits.max_num_tokens,
            request_buckets=limits.request_buckets,
            ratios=facts.ratios,
        ),
        cache=dataclasses.replace(
            config.cache, page_size=limits.page_size, num_pages=limits.num_pages
        ),
    )
    for name in ("max_seq_len", "buckets", "cache"):
        before, after = getattr(config, name), getattr(found, name)
        if before != after:
            logger.info("%s is the engine directory's: %s instead of %s", name, after, before)
    return found


def _drafter(name: str, is_torch: bool) -> str:
    """A drafter that is no part of a TensorRT directory cannot be used with it."""
    if not is_torch and name not in ("auto", "none", "ngram"):
        raise ConfigError(
            f"drafter = {name!r} is not allowed with this engine directory: it must be auto (the "
            "one built in), ngram or none; build again with --drafter-dir"
        )
    return name
