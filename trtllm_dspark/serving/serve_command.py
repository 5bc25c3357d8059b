# SPDX-License-Identifier: Apache-2.0
"""`dspark serve`: Triton Inference Server on a model directory until Ctrl-C, which drains."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.options import add_system_options, configure_logging, system_config
from trtllm_dspark.serving.server import serve
from trtllm_dspark.serving.server_options import (
    add_server_options,
    repository_options,
    server_ports,
)


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark serve`."""
    parser = argparse.ArgumentParser(
        prog="dspark serve",
        description="Serve a model directory with Triton; Ctrl-C drains.",
        epilog="example: dspark serve --model-dir models/smollm2 --http-port 8000",
    )
    add_system_options(parser)
    add_server_options(parser)
    parser.add_argument("--verbose", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    return serve(
        system_config(arguments),
        ports=server_ports(arguments),
        host=arguments.host,
        options=repository_options(arguments),
        work_dir=Path(arguments.work_dir) if arguments.work_dir else None,
        report=functools.partial(print, flush=True),
    )
