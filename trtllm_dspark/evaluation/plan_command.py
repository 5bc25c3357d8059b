# SPDX-License-Identifier: Apache-2.0
"""`dspark plan`: which γ and concurrency meet a tokens/s-per-user target on a machine that may not
have been measured, and what is gained over plain decoding. Prints every assumption.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from trtllm_dspark.evaluation.acceptance_models import (
    AcceptanceModel,
    TraceAcceptance,
    model_for_length,
)
from trtllm_dspark.evaluation.progress import ProgressReport, make_console
from trtllm_dspark.evaluation.roofline import Roofline
from trtllm_dspark.evaluation.simulated_requests import Workload
from trtllm_dspark.evaluation.simulation_setup import (
    acceptance_model,
    add_acceptance_options,
    add_roofline_options,
    roofline,
    simulate_policy,
)
from trtllm_dspark.evaluation.sweep_file import SweepFile
from trtllm_dspark.options import configure_logging

POLICIES = ("autoregressive", "fixed", "adaptive")
MIN_RUNG_SHARE = 0.05
"""A rung that fewer steps run is not worth building."""
GAMMAS = (3, 7, 15)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class PlanRow:
    """One candidate: a block length, a load, a policy."""

    gamma: int
    concurrency: int
    policy: str
    tokens_per_s: float
    tokens_per_s_user: float
    keep_ratio: float
    verified_per_request: float
    rungs: dict[str, int]

    @property
    def key(self) -> tuple[int, int, str]:
        """Which candidate it is."""
        return self.gamma, self.concurrency, self.policy

    @property
    def ratios(self) -> list[float]:
        """Ratios ρ = (rung − R) / (R·γ) of the rungs that its steps run, to build."""
        least = MIN_RUNG_SHARE * sum(self.rungs.values())
        drafts = self.concurrency * self.gamma
        found = {
            min(round((int(rung) - self.concurrency) / drafts, 3), 1.0)
            for rung, count in self.rungs.items()
            if count >= least
        }
        return sorted(ratio for ratio in found if ratio > 0)


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark plan`."""
    parser = argparse.ArgumentParser(
        prog="dspark plan",
        description="Choose block length, ratios and concurrency for a tokens/s-per-user target.",
        epilog="example: dspark plan --gpu h100 --model qwen3-8b --sla 50",
    )
    parser.add_argument("--sla", type=float, required=True, help="tokens/s that each user gets")
    parser.add_argument(
        "--gammas", type=int, nargs="+", help="default: 3 7 15; with --trace the trace's γ"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", help="write (and resume from) this file")
    add_roofline_options(parser)
    add_acceptance_options(parser)
    parser.add_argument(
        "--acceptance-gamma",
        type=int,
        help="γ of the drafter that has --acceptance-length (default: the largest of --gammas); "
        "every other γ is the same drafter with shorter or longer blocks",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate all candidates, show the best per γ; 1 when nothing meets the target."""
    arguments = build_parser().parse_args(argv)
    configure_logging(False)
    resolve_defaults(arguments)
    console = make_console()
    rows, assumptions = find_candidates(arguments)
    best = [row for row in best_rows(rows, arguments.sla) if row is not None]
    console.print(render(best, arguments.sla))
    for line in assumptions:
        console.print(f"assumed: {line}")
    if not best:
        console.print(f"nothing reaches {arguments.sla} tokens/s per user on this machine")
        return 1
    top = max(best, key=lambda row: row.tokens_per_s)
    console.print(advice(top, rows, arguments.sla))
    return 0


def resolve_defaults(arguments: argparse.Namespace) -> None:
    """Fill in what depends on other options; a trace has one γ and cannot be had at another."""
    arguments.gpu = arguments.gpu or "h100"
    if not arguments.gammas:
        trace = arguments.trace
        arguments.gammas = [TraceAcceptance.load(trace).num_drafts] if trace else list(GAMMAS)
    if arguments.acceptance_length is None:
        arguments.acceptance_gamma = None
    elif arguments.acceptance_gamma is None:
        arguments.acceptance_gamma = max(arguments.gammas)


def acceptance_models(arguments: argparse.Namespace) -> dict[int, AcceptanceModel]:
    """Blocks of every γ, all of one drafter: position k is accepted as often whatever γ is."""
    if arguments.trace or arguments.acceptance_length is None:
        return {gamma: acceptance_model(arguments, gamma) for gamma in arguments.gammas}
    model = model_for_length(arguments.acceptance_length, arguments.acceptance_gamma)
    return {gamma: dataclasses.replace(model, num_drafts=gamma) for gamma in arguments.gammas}


def find_candidates(arguments: argparse.Namespace) -> tuple[list[PlanRow], list[str]]:
    """Simulate plain decoding, full verification and `adaptive` at every load that K/V allow."""
    ignored = ("json", "sla", "gammas", "concurrency")
    file = SweepFile(
        arguments.json, {k: v for k, v in vars(arguments).items() if k != "json"}, ignored
    )
    models = acceptance_models(arguments)
    rows = {row.key: row for row in (PlanRow(**fields) for fields in file.rows)}
    lines = [roofline(arguments, gamma, max(arguments.concurrency)) for gamma in arguments.gammas]
    wanted = [
        (line, load, policy)
        for line in lines
        for load in fitting_loads(line, arguments.concurrency)
        for policy in POLICIES
    ]
    missing = [case for case in wanted if (case[0].num_drafts, *case[1:]) not in rows]
    with ProgressReport("planning", len(missing)) as progress:
        for line, load, policy in missing:
            row = simulate_candidate(arguments, models[line.num_drafts], line, load, policy)
            rows[row.key] = row
            file.add(vars(row))
            progress.advance(f"γ = {line.num_drafts}: {policy} at {load}")
    source = arguments.trace or (
        f"acceptance length {arguments.acceptance_length} at γ = {arguments.acceptance_gamma}, the "
        "same drafter at every γ"
        if arguments.acceptance_length is not None
        else "the acceptance fitted to the published H20 results (0.761 per draft)"
    )
    drafts = f"drafts: {source}; calibrated confidences; decode only"
    assumptions = [*lines[-1].describe(), drafts]
    file.save(sla=arguments.sla, assumptions=assumptions)
    return [rows[line.num_drafts, load, policy] for line, load, policy in wanted], assumptions


def simulate_candidate(
    arguments: argparse.Namespace, model: AcceptanceModel, line: Roofline, load: int, policy: str
) -> PlanRow:
    """Run one policy at one load on the roofline's costs."""
    workload = Workload(load, output_tokens=(100_000, 100_000))
    report = simulate_policy(
        policy, {}, line.latency_table(), model, workload,
        num_steps=arguments.steps, warm_up=50, seed=arguments.seed,
    )  # fmt: skip
    fields: dict[str, Any] = report.to_json_dict()
    names = ("tokens_per_s", "tokens_per_s_user", "keep_ratio", "verified_per_request", "rungs")
    return PlanRow(line.num_drafts, load, policy, **{name: fields[name] for name in names})


def fitting_loads(line: Roofline, concurrencies: Sequence[int]) -> list[int]:
    """Loads whose K/V fit."""
    return [n for n in concurrencies if n * line.context_tokens <= line.kv_tokens]


def best_rows(rows: Sequence[PlanRow], sla: float) -> list[PlanRow | None]:
    """For every (γ, policy) the candidate of highest throughput that meets the target."""
    found: list[PlanRow | None] = []
    for gamma in dict.fromkeys(row.gamma for row in rows):
        for policy in POLICIES:
            fitting = [
                row
                for row in rows
                if (row.gamma, row.policy) == (gamma, policy) and row.tokens_per_s_user >= sla
            ]
            found.append(max(fitting, key=lambda row: row.tokens_per_s, default=None))
    return found


def advice(top: PlanRow, rows: Sequence[PlanRow], sla: float) -> str:
    """The answer in one paragraph."""
    plain = max(
        (r for r in rows if r.policy == "autoregressive" and r.tokens_per_s_user >= sla),
        key=lambda row: row.tokens_per_s,
        default=None,
    )
    gain = (
        f"{top.tokens_per_s / plain.tokens_per_s:.2f} × the {plain.tokens_per_s:.0f} tokens/s of "
        f"plain decoding at {plain.concurrency} requests"
        if plain
        else "plain decoding never reaches the target"
    )
    return (
        f"γ = {top.gamma}, policy {top.policy}, up to {top.concurrency} requests at once: "
        f"{top.tokens_per_s:.0f} tokens/s, {top.tokens_per_s_user:.0f} per user; {gain}; "
        f"it verifies {top.verified_per_request:.1f} drafts per request (keep ratio "
        f"{top.keep_ratio:.2f}){build_advice(top)}"
    )


def build_advice(top: PlanRow) -> str:
    """The ratios to build, where drafts are verified."""
    ratios = ",".join(f"{ratio:g}" for ratio in top.ratios)
    return f": build with --ratios {ratios}" if ratios else ""


def render(rows: Sequence[PlanRow], sla: float) -> Table:
    """The best candidate per γ and policy."""
    view = Table(title=f"best throughput with at least {sla:g} tokens/s per user")
    for name in ("γ", "policy", "requests", "tokens/s", "tok/s/user", "verified/request", "keep"):
        view.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        view.add_row(
            str(row.gamma), row.policy, str(row.concurrency), f"{row.tokens_per_s:.0f}",
            f"{row.tokens_per_s_user:.1f}", f"{row.verified_per_request:.2f}",
            f"{row.keep_ratio:.2f}",
        )  # fmt: skip
    return view
