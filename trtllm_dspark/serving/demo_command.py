# SPDX-License-Identifier: Apache-2.0
"""`dspark demo`: prepares the demonstration model, serves it and streams some answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.checkpoints import prepare_model
from trtllm_dspark.options import add_system_options, configure_logging, system_config
from trtllm_dspark.serving.demo import PROMPTS, run_demo
from trtllm_dspark.serving.server_options import (
    add_server_options,
    repository_options,
    server_ports,
)

DEMO_MODEL = "smollm2"
DEMO_MODEL_DIR = "models/smollm2"


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark demo`."""
    parser = argparse.ArgumentParser(
        prog="dspark demo",
        description="Prepare SmolLM2-135M-Instruct, start Triton on it, stream several answers.",
        epilog="example: dspark demo --keep",
    )
    parser.add_argument("prompts", nargs="*", default=list(PROMPTS), help="default: four of ours")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--keep", action="store_true", help="leave it serving until Ctrl-C")
    add_system_options(parser, model_dir=DEMO_MODEL_DIR)
    add_server_options(parser)
    parser.add_argument("--verbose", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 1 when an answer failed."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    if arguments.model_dir == DEMO_MODEL_DIR:
        print(f"preparing {DEMO_MODEL} in {DEMO_MODEL_DIR}", flush=True)
        prepare_model(DEMO_MODEL, Path(DEMO_MODEL_DIR))
    return run_demo(
        system_config(arguments),
        prompts=arguments.prompts,
        max_tokens=arguments.max_tokens,
        ports=server_ports(arguments),
        host=arguments.host,
        options=repository_options(arguments),
        work_dir=Path(arguments.work_dir) if arguments.work_dir else None,
        keep=arguments.keep,
    )
