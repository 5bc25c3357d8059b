# SPDX-License-Identifier: Apache-2.0
"""`dspark simulate`: policies against concurrency or arrival rate on a measured, published or
estimated latency table. Results go to JSON after every run, so that a long sweep can be resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.progress import ProgressReport, make_console
from trtllm_dspark.evaluation.published_numbers import H20_BATCHES, h20_throughput, published
from trtllm_dspark.evaluation.reproduction_tables import NAMES, reproduce
from trtllm_dspark.evaluation.simulated_requests import Limits, Workload
from trtllm_dspark.evaluation.simulation_setup import (
    acceptance_model,
    add_acceptance_options,
    add_roofline_options,
    cost_table,
    roofline,
    simulate_policy,
)
from trtllm_dspark.evaluation.sweep_file import SweepFile, loop_kind
from trtllm_dspark.evaluation.throughput_plots import plot_budget, plot_pareto
from trtllm_dspark.options import configure_logging
from trtllm_dspark.scheduling import policy_names
from trtllm_dspark.scheduling.latency_table import LatencyTable

OUTPUTS = ("json", "pareto", "budget", "reproduce")
ENDLESS = (100_000, 100_000)
"""Answers of a closed loop: nobody finishes, the batch stays stationary."""
OPEN_LOOP_ANSWERS = (64, 512)
"""In an open loop requests must finish, or they only pile up."""
PUBLISHED_SYSTEMS = ("autoregressive", "eagle3", "dflash_b8", "dflash_b16", "dcut_b8", "dcut_b16")


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark simulate`."""
    parser = argparse.ArgumentParser(
        prog="dspark simulate",
        description="Simulate the serving loop with the server's own policy objects.",
        epilog="example: dspark simulate --policies autoregressive fixed adaptive "
        "--concurrency 4 8 16 32 64 --pareto pareto.png",
    )
    parser.add_argument(
        "--table", help="latency table of `dspark profile`, SGLang or TensorRT-LLM; default: H20"
    )
    parser.add_argument("--gamma", type=int, default=15, help="drafts per block (default: 15)")
    parser.add_argument(
        "--policies", nargs="+", default=["autoregressive", "fixed", "ratio_bucket", "adaptive"]
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--arrivals", type=float, nargs="+", help="requests/s: open loop instead")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(0, 0))
    parser.add_argument(
        "--output-tokens",
        type=int,
        nargs=2,
        help="shortest and longest answer (default: 100000 100000, longer than the run; with "
        "--arrivals 64 512)",
    )
    parser.add_argument(
        "--difficulty-steps",
        type=float,
        default=64.0,
        help="steps after which a request's acceptance changes; 0 = never",
    )
    parser.add_argument(
        "--kv-tokens",
        type=int,
        help="K/V limit in tokens; 0 = none (default: what fits on --gpu, else none)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=4096,
        help="requests active at once, others wait (default: 4096; never more than the costs are "
        "of, 64 on the H20)",
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--json", help="write (and resume from) this file")
    parser.add_argument("--pareto", help="PNG: throughput against tokens/s per user")
    parser.add_argument("--budget", help="PNG: verified drafts per request against load")
    parser.add_argument(
        "--reproduce",
        nargs="+",
        choices=NAMES,
        help="print published tables beside the simulator's and do nothing else",
    )
    add_roofline_options(parser)
    add_acceptance_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, write, show."""
    arguments = build_parser().parse_args(argv)
    configure_logging(False)
    console = make_console()
    for name in arguments.reproduce or ():
        console.print(reproduce(name))
    if arguments.reproduce:
        return 0
    unknown = sorted(set(arguments.policies) - set(policy_names()))
    if unknown:
        raise ConfigError(f"policies {unknown} are unknown: choose of {', '.join(policy_names())}")
    if arguments.output_tokens is None:
        arguments.output_tokens = OPEN_LOOP_ANSWERS if arguments.arrivals else ENDLESS
    most = most_active(arguments)
    table = cost_table(arguments, arguments.gamma, most)
    check_costs(arguments, table)
    if table.num_drafts != arguments.gamma and arguments.table:
        arguments.gamma = table.num_drafts
    if arguments.kv_tokens is None:
        arguments.kv_tokens = kv_limit(arguments, most)
    rows = sweep(arguments, table)
    console.print(render(rows))
    if not (arguments.table or arguments.gpu or arguments.arrivals):
        console.print(render_published())
        console.print(render_published_mtp())
    console.print(f"costs: {table.machine.get('device', arguments.table)}; γ = {arguments.gamma}")
    if arguments.pareto:
        plot_pareto(rows, arguments.pareto)
    if arguments.budget:
        plot_budget(rows, arguments.budget)
    return 0


def most_active(arguments: argparse.Namespace) -> int:
    """Requests that may be active at once; an open loop may come to any number."""
    limit: int = arguments.max_batch_size
    return limit if arguments.arrivals else min(limit, max(arguments.concurrency))


def check_costs(arguments: argparse.Namespace, table: LatencyTable) -> None:
    """Refuse a closed loop of more requests than the table has costs for; open loops queue."""
    last = table.request_buckets[-1]
    if not arguments.arrivals and most_active(arguments) > last:
        raise ConfigError(
            f"--concurrency {max(arguments.concurrency)}: the costs end at {last} requests, no "
            f"more are allowed at once; lower it, let the others wait (--max-batch-size {last}) or "
            "take costs of more requests (--table, --gpu)"
        )


def kv_limit(arguments: argparse.Namespace, most: int) -> int:
    """Tokens whose K/V fit on the GPU that is estimated; 0 = no limit."""
    return roofline(arguments, arguments.gamma, most).kv_tokens if arguments.gpu else 0


def sweep(arguments: argparse.Namespace, table: LatencyTable) -> list[dict[str, Any]]:
    """Run every (load, policy) that the JSON file does not hold yet."""
    settings = {k: v for k, v in vars(arguments).items() if k not in OUTPUTS}
    settings["loop"] = loop_kind(arguments.arrivals)
    file = SweepFile(arguments.json, settings, ("policies", "concurrency", "arrivals"))
    done = {(row["load"], row["policy"]) for row in file.rows}
    loads = arguments.arrivals or arguments.concurrency
    cases = [(load, p) for load in loads for p in arguments.policies if (load, p) not in done]
    model = acceptance_model(arguments, arguments.gamma)
    limits = Limits(
        min(arguments.max_batch_size, table.rungs[-1]), table.rungs[-1], arguments.kv_tokens
    )
    with ProgressReport("simulating", len(cases)) as progress:
        for load, policy in cases:
            workload = Workload(
                concurrency=1 if arguments.arrivals else int(load),
                arrivals_per_s=load if arguments.arrivals else None,
                prompt_tokens=tuple(arguments.prompt_tokens),
                output_tokens=tuple(arguments.output_tokens),
                difficulty_steps=arguments.difficulty_steps,
            )
            report = simulate_policy(
                policy, {}, table, model, workload, limits=limits,
                num_steps=arguments.steps, warm_up=arguments.warm_up, seed=arguments.seed,
            )  # fmt: skip
            file.add({"load": load, "policy": policy, **report.to_json_dict()})
            progress.advance(f"{policy} at {load:g}")
    order = {name: i for i, name in enumerate(arguments.policies)}
    return sorted(file.rows, key=lambda row: (row["load"], order.get(row["policy"], 99)))


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per run, with the ratio to plain decoding at the same load."""
    view = Table()
    for name in ("load", "policy", "tokens/s", "× plain", "tok/s/user", "step ms",
                 "verified/request", "keep", "drafted steps"):  # fmt: skip
        view.add_column(name, justify="left" if name == "policy" else "right")
    plain = {r["load"]: r["tokens_per_s"] for r in rows if r["policy"] == "autoregressive"}
    for row in rows:
        base = plain.get(row["load"])
        view.add_row(
            f"{row['load']:g}",
            row["policy"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_s'] / base:.2f}" if base else "",
            f"{row['tokens_per_s_user']:.1f}",
            f"{row['step_ms']:.1f}",
            f"{row['verified_per_request']:.2f}",
            f"{row['keep_ratio']:.2f}",
            f"{row['drafted_share']:.0%}",
        )
    return view


def render_published() -> Table:
    """What others reach on the machine and model whose published costs are the default."""
    view = Table(title="published: tokens/s measured on one H20, Qwen3-8B (D-Cut page)")
    view.add_column("requests", justify="right")
    for system in PUBLISHED_SYSTEMS:
        view.add_column(system, justify="right")
    for load in H20_BATCHES:
        values = (h20_throughput(system)[load] for system in PUBLISHED_SYSTEMS)
        view.add_row(str(load), *(f"{value:.0f}" for value in values))
    return view


def render_published_mtp() -> Table:
    """MTP drafters, published for other models only: no row of ours is comparable with them."""
    view = Table(title="published: tokens/s of other models, MTP among their drafters (D-Cut page)")
    for name in ("model", "system", *map(str, H20_BATCHES)):
        view.add_column(name, justify="left" if name in ("model", "system") else "right")
    for model, rows in published("dcut_h20")["other_models_tokens_per_second_new"].items():
        for system in ("autoregressive", "mtp", "dflash_b16", "dcut_b16"):
            view.add_row(model, system, *(f"{value:.0f}" for value in rows[system]))
        view.add_section()
    return view
