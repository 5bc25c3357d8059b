# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model's config.pbtxt, as the server hands them to a model.

A parameter that was never filled still reads "${key}" and counts as unset. Upstream parameters
without effect here are accepted and logged once. Knows no tensors and no server.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtllm_dspark.config import BucketConfig, SystemConfig, from_json_dict, load_json
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.serving.template import DEFAULTS

logger = logging.getLogger(__name__)

_PARAMETER = re.compile(
    r'key:\s*"([^"]*)"\s*,?\s*value:?\s*\{\s*string_value:\s*"((?:[^"\\]|\\.)*)"\s*\}'
)
"""A parameter as the templates write it."""
_TRUE = ("true", "1", "t", "y", "yes")
_FALSE = ("false", "0", "f", "n", "no")


class ModelParameters:
    """The set parameters of one model, by key."""

    def __init__(self, model_config: dict[str, Any], model_dir: str | Path = "") -> None:
        raw = {k: v.get("string_value", "") for k, v in model_config.get("parameters", {}).items()}
        self.values = {k: v for k, v in raw.items() if v and not v.startswith("${")}
        self.max_batch_size = int(model_config.get("max_batch_size", 0))
        self.is_decoupled = bool(
            model_config.get("model_transaction_policy", {}).get("decoupled", False)
        )
        self.model_dir = Path(model_dir)

    def sibling(self, model: str) -> ModelParameters:
        """The parameters of another model of the same repository, read from its config.pbtxt."""
        path = self.model_dir.parent / model / "config.pbtxt"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        found = {key: {"string_value": value} for key, value in _PARAMETER.findall(text)}
        return ModelParameters({"parameters": found}, path.parent)

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        return self.values.get(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean as upstream spells them."""
        value = self.values.get(key, "").strip().lower()
        if not value:
            return default
        if value not in _TRUE + _FALSE:
            raise ConfigError(
                f"parameter {key} = {value!r} is not allowed: it must be true or false"
            )
        return value in _TRUE

    def number(self, key: str, default: int) -> int:
        """A whole number."""
        value = self.values.get(key, "")
        if not value:
            return default
        try:
            return int(value)
        except ValueError as error:
            raise ConfigError(
                f"parameter {key} = {value!r} is not allowed: it must be a whole number"
            ) from error

    def log_unused(self, used: Iterable[str]) -> list[str]:
        """Log each set parameter that has no effect here; returns their keys."""
        unused = sorted(
            key for key in set(self.values) - set(used) if DEFAULTS.get(key) != self.values[key]
        )
        for key in unused:
            logger.warning("parameter %s = %r has no effect here", key, self.values[key])
        return unused


ENGINE_PARAMETERS = (
    "dspark_config",
    "gpt_model_path",
    "max_tokens_in_paged_kv_cache",
    "enable_kv_cache_reuse",
    "max_queue_size",
    "exclude_input_in_output",
    "skip_special_tokens",
    "drafter",
    "policy",
    "device",
    "dtype",
    "max_seq_len",
    "max_num_tokens",
    "profile",
    "drain_timeout_s",
)
"""Parameters of `tensorrt_llm` that have an effect."""


def read_system_config(parameters: ModelParameters) -> SystemConfig:
    """The system of a `tensorrt_llm` model: its dspark_config file, then single parameters."""
    path = parameters.text("dspark_config")
    config = SystemConfig()
    if path:
        file = parameters.model_dir / path
        config = from_json_dict(SystemConfig, load_json(file), str(file))
    return _override(config, parameters)


def _override(config: SystemConfig, parameters: ModelParameters) -> SystemConfig:
    changes: dict[str, Any] = {
        field: parameters.text(key)
        for key, field in (
            ("gpt_model_path", "model_dir"),
            ("drafter", "drafter"),
            ("device", "device"),
            ("dtype", "dtype"),
            ("profile", "profile"),
        )
        if parameters.text(key)
    }
    changes["max_seq_len"] = parameters.number("max_seq_len", config.max_seq_len)
    changes["max_queue_size"] = parameters.number("max_queue_size", config.max_queue_size)
    if parameters.text("policy"):
        changes["scheduler"] = dataclasses.replace(
            config.scheduler, policy=parameters.text("policy")
        )
    changes["cache"] = _cache(config, parameters)
    changes["buckets"] = _buckets(config, parameters)
    config = dataclasses.replace(config, **changes)
    if not config.model_dir:
        raise ConfigError("engine_dir is not filled: give the model directory to tensorrt_llm")
    return config


def _buckets(config: SystemConfig, parameters: ModelParameters) -> BucketConfig:
    """The limits of a step; an engine directory overrules them later."""
    buckets = config.buckets
    if parameters.max_batch_size and not parameters.text("dspark_config"):
        buckets = dataclasses.replace(
            buckets,
            max_num_requests=parameters.max_batch_size,
            max_num_tokens=max(buckets.max_num_tokens, 8 * parameters.max_batch_size),
        )
    num_tokens = parameters.number("max_num_tokens", buckets.max_num_tokens)
    return dataclasses.replace(buckets, max_num_tokens=num_tokens)


def _cache(config: SystemConfig, parameters: ModelParameters) -> Any:
    cache = config.cache
    num_tokens = parameters.number("max_tokens_in_paged_kv_cache", 0)
    return dataclasses.replace(
        cache,
        num_pages=1 + -(-num_tokens // cache.page_size) if num_tokens else cache.num_pages,
        enable_prefix_reuse=parameters.flag("enable_kv_cache_reuse", cache.enable_prefix_reuse),
    )


def parse_model_args(args: dict[str, str]) -> tuple[dict[str, Any], ModelParameters]:
    """The configuration and parameters of a model from the arguments of `initialize`."""
    model_config = json.loads(args["model_config"])
    return model_config, ModelParameters(model_config, args.get("model_repository", ""))
