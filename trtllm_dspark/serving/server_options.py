# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that start a server, and the objects made from them."""

from __future__ import annotations

import argparse

from trtllm_dspark.serving.ports import Ports
from trtllm_dspark.serving.repository import RepositoryOptions


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Ports, address, working directory and text defaults."""
    group = parser.add_argument_group("server")
    group.add_argument("--http-port", type=int, default=8000)
    group.add_argument("--grpc-port", type=int, default=8001)
    group.add_argument("--metrics-port", type=int, default=8002)
    group.add_argument("--host", default="0.0.0.0", help="address to listen on")
    group.add_argument("--work-dir", help="keeps the log here (default: a temporary directory)")
    group.add_argument(
        "--no-chat-template", action="store_true", help="do not wrap prompts unless asked to"
    )
    group.add_argument(
        "--include-input", action="store_true", help="answers begin with the prompt unless asked"
    )


def server_ports(arguments: argparse.Namespace) -> Ports:
    """The wanted ports; others are chosen where they are taken."""
    return Ports(arguments.http_port, arguments.grpc_port, arguments.metrics_port)


def repository_options(arguments: argparse.Namespace) -> RepositoryOptions:
    """Text defaults that a request can override."""
    return RepositoryOptions(
        apply_chat_template=not arguments.no_chat_template,
        exclude_input_in_output=not arguments.include_input,
    )
