# SPDX-License-Identifier: Apache-2.0
"""`dspark profile`: measure the latency table of an engine, print it, and export or plot it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_dspark.evaluation.profile_plot import plot_latency_table
from trtllm_dspark.options import add_system_options, configure_logging, system_config
from trtllm_dspark.runtime import measure_latency_table
from trtllm_dspark.scheduling.interchange import (
    table_to_sglang_steps,
    table_to_tensorrt_llm,
)
from trtllm_dspark.scheduling.latency_table import LatencyTable, refusal_reason


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark profile`."""
    parser = argparse.ArgumentParser(
        prog="dspark profile",
        description="Time whole decode steps per (requests, rung) and keep the latency table.",
        epilog="example: dspark profile --model-dir models/smollm2 --plot latency.png",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="time to spend (default: 30)")
    parser.add_argument("--context-lens", type=int, nargs="+", help="default: one, ≤ 256")
    parser.add_argument("--output", help="also write the table here")
    parser.add_argument("--sglang", help="also write SGLang's SPS form here")
    parser.add_argument("--tensorrt-llm", help="also write TensorRT-LLM's form here")
    parser.add_argument("--plot", help="PNG of cost over tokens (needs the extra `plots`)")
    parser.add_argument("--verbose", action="store_true")
    add_system_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, save, show; 1 when the table is one that no policy may trust."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    config = dataclasses.replace(system_config(arguments), profile="force")
    table, path = measure_latency_table(
        config, context_lens=arguments.context_lens, budget_s=arguments.seconds
    )
    export(table, arguments)
    console = Console()
    console.print(render(table))
    console.print(f"kept in {path}")
    reason = refusal_reason(table, table.fingerprint, table.rungs)
    if reason:
        console.print(f"policies will not trim: {reason}")
    return 1 if reason else 0


def export(table: LatencyTable, arguments: argparse.Namespace) -> None:
    """Write the forms that were asked for."""
    if arguments.output:
        table.save(arguments.output)
    forms = (
        (arguments.sglang, table_to_sglang_steps),
        (arguments.tensorrt_llm, table_to_tensorrt_llm),
    )
    for path, form in forms:
        if path:
            Path(path).write_text(json.dumps(form(table), indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot_latency_table(table, arguments.plot)


def render(table: LatencyTable) -> Table:
    """Milliseconds per requests bucket: plain rows, then a drafted step at each rung."""
    view = Table(title=f"whole step, ms (γ={table.num_drafts}, contexts {table.context_lens})")
    for name in ("requests", "autoregressive", "no draft"):
        view.add_column(name, justify="right")
    for rung in table.rungs:
        view.add_column(str(rung), justify="right")
    for row, bucket in enumerate(table.request_buckets):
        cells = [table.autoregressive_ms[row], table.no_draft_ms[row], *table.step_ms[row]]
        view.add_row(str(bucket), *("" if c != c else f"{c:.1f}" for c in cells))
    return view
