# SPDX-License-Identifier: Apache-2.0
"""What `dspark simulate` and `dspark plan` share: options, where costs and blocks come from, one
simulated run of a named policy.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import numpy as np

from trtllm_dspark.config import BucketConfig, load_json
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.acceptance_models import (
    AcceptanceModel,
    TraceAcceptance,
    fitted_model,
    model_for_length,
)
from trtllm_dspark.evaluation.hardware import GPUS, MODELS
from trtllm_dspark.evaluation.published_numbers import h20_table
from trtllm_dspark.evaluation.roofline import PRECISION_BYTES, Roofline
from trtllm_dspark.evaluation.simulated_requests import Limits, Workload
from trtllm_dspark.evaluation.simulation import SimulatedSystem, Simulation
from trtllm_dspark.evaluation.simulation_report import SimulationReport
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.buckets import request_buckets
from trtllm_dspark.scheduling.interchange import table_from_json_form
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.survival import SurvivalEstimator

logger = logging.getLogger(__name__)


def add_roofline_options(parser: argparse.ArgumentParser) -> None:
    """Options that describe a machine nobody has measured."""
    group = parser.add_argument_group("roofline")
    group.add_argument("--gpu", type=str.lower, choices=sorted(GPUS), help="H100 or h100 alike")
    group.add_argument("--model", type=str.lower, choices=sorted(MODELS), default="qwen3-8b")
    group.add_argument("--precision", choices=sorted(PRECISION_BYTES), default="bf16")
    group.add_argument("--tp", type=int, default=1, help="tensor parallelism (default: 1)")
    group.add_argument("--context", type=int, default=2048, help="tokens held by each request")


def add_acceptance_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how well drafts are accepted."""
    group = parser.add_argument_group("acceptance")
    group.add_argument(
        "--acceptance-length",
        type=float,
        help="tokens a block commits under full verification (default: the published H20 fit)",
    )
    group.add_argument("--trace", help="blocks recorded by `dspark evaluate --trace`")
    group.add_argument("--seed", type=int, default=0)


def roofline(arguments: argparse.Namespace, num_drafts: int, max_num_requests: int) -> Roofline:
    """The roofline that the options describe."""
    return Roofline(
        gpu=arguments.gpu,
        model=arguments.model,
        precision=arguments.precision,
        tensor_parallel=arguments.tp,
        context_tokens=arguments.context,
        num_drafts=num_drafts,
        max_num_requests=max_num_requests,
    )


def acceptance_model(arguments: argparse.Namespace, num_drafts: int) -> AcceptanceModel:
    """The source of blocks that the options name, with blocks of γ = `num_drafts`."""
    if arguments.trace:
        trace = TraceAcceptance.load(arguments.trace)
        if trace.num_drafts != num_drafts:
            raise ConfigError(
                f"{arguments.trace} holds blocks of γ = {trace.num_drafts}, the costs are for "
                f"γ = {num_drafts}: they must be of one drafter"
            )
        return trace
    if arguments.acceptance_length is not None:
        return model_for_length(arguments.acceptance_length, num_drafts)
    return fitted_model(num_drafts=num_drafts)


def cost_table(arguments: argparse.Namespace, num_drafts: int, most: int) -> LatencyTable:
    """A measured table (of this or another server), a roofline, or (default) the H20 table."""
    if arguments.table and arguments.gpu:
        raise ConfigError("--table and --gpu were given: costs must come from one of them")
    if arguments.table:
        return measured_table(arguments.table, num_drafts, most)
    if arguments.gpu:
        return roofline(arguments, num_drafts, most).latency_table()
    return h20_table(num_drafts=num_drafts)


def measured_table(path: str, num_drafts: int, most: int) -> LatencyTable:
    """A table of `dspark profile`, SGLang or TensorRT-LLM; says what the last two lack."""
    buckets = request_buckets(BucketConfig(max_num_requests=most, max_num_tokens=most))
    table = table_from_json_form(
        load_json(path), request_buckets=buckets, num_drafts=num_drafts, fingerprint=path
    )
    if np.isnan(table.no_draft_ms).all():
        logger.warning(
            "%s has no times of plain steps: they are priced as drafted steps with one row per "
            "request, which overstates them",
            path,
        )
    return table


def simulate_policy(
    name: str,
    options: dict[str, Any],
    table: LatencyTable,
    model: AcceptanceModel,
    workload: Workload,
    *,
    limits: Limits | None = None,
    num_steps: int = 1000,
    warm_up: int = 100,
    seed: int = 0,
) -> SimulationReport:
    """Run one policy, made as the server makes it, on an estimator of its own."""
    estimator = SurvivalEstimator(model.num_drafts)
    policy = create_policy(name, options, PolicyResources(table, estimator))
    system = SimulatedSystem(table, policy, estimator, model)
    return Simulation(system, workload, limits, seed).run(num_steps, warm_up)
