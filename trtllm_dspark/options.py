# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several subcommands share, and the `SystemConfig` made from them."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from trtllm_dspark.config import (
    BucketConfig,
    CacheConfig,
    SchedulerConfig,
    SystemConfig,
)
from trtllm_dspark.errors import ConfigError


def add_system_options(
    parser: argparse.ArgumentParser, *, policy: str = "adaptive", model_dir: str | None = None
) -> None:
    """Options of everything that loads a model; `model_dir` is a default for --model-dir."""
    group = parser.add_argument_group("system")
    group.add_argument(
        "--model-dir",
        required=model_dir is None,
        default=model_dir,
        help="directory made by `dspark prepare`",
    )
    group.add_argument(
        "--drafter", default="auto", help="auto, none, ngram or a drafter directory (default: auto)"
    )
    group.add_argument("--policy", default=policy, help=f"scheduling policy (default: {policy})")
    group.add_argument(
        "--policy-options", type=parse_json_object, default={}, help="JSON object for the policy"
    )
    group.add_argument("--strict-policy", action="store_true", help="refuse what it cannot cover")
    group.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    group.add_argument("--dtype", default="auto", help="auto, bfloat16, float32 (default: auto)")
    group.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores)")
    group.add_argument("--max-batch-size", type=int, default=16)
    group.add_argument("--max-num-tokens", type=int, default=512, help="rows of one step at most")
    group.add_argument("--max-seq-len", type=int, default=2048)
    group.add_argument("--max-queue-size", type=int, default=0, help="0 = unbounded")
    group.add_argument("--num-pages", type=int, default=0, help="K/V pages; 0 = enough for all")
    group.add_argument("--tokens-per-block", type=int, default=32, help="tokens per K/V page")
    group.add_argument(
        "--profile", default="auto", choices=("never", "auto", "force"), help="latency table"
    )


def add_flag(group: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """An option that may be written with dashes or, as upstream does, with underscores."""
    group.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name, **options)


def system_config(arguments: argparse.Namespace) -> SystemConfig:
    """The configuration that the options of `add_system_options` describe."""
    return SystemConfig(
        model_dir=arguments.model_dir,
        drafter=arguments.drafter,
        device=arguments.device,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        max_seq_len=arguments.max_seq_len,
        max_queue_size=arguments.max_queue_size,
        buckets=BucketConfig(
            max_num_requests=arguments.max_batch_size, max_num_tokens=arguments.max_num_tokens
        ),
        cache=CacheConfig(page_size=arguments.tokens_per_block, num_pages=arguments.num_pages),
        scheduler=SchedulerConfig(
            policy=arguments.policy,
            options=arguments.policy_options,
            strict=arguments.strict_policy,
        ),
        profile=arguments.profile,
    )


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object given on the command line."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{text!r} is not a JSON object")
    return data


def configure_logging(verbose: bool) -> None:
    """One line per record on stderr; only command-line entry points call this."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
