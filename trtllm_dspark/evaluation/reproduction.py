# SPDX-License-Identifier: Apache-2.0
"""The published tables, run again in the simulator: what each number is made of. The tests hold
these functions to tolerances, `dspark simulate --reproduce` prints them beside publication.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from trtllm_dspark.evaluation.acceptance_models import (
    BetaAcceptance,
    MixedAcceptance,
    fitted_model,
    model_for_length,
)
from trtllm_dspark.evaluation.long_run_optimum import LongRunOptimum
from trtllm_dspark.evaluation.oracle_calibration import OracleEstimator
from trtllm_dspark.evaluation.published_numbers import (
    H20_BATCHES,
    H20_NUM_DRAFTS,
    h20_table,
    published,
)
from trtllm_dspark.evaluation.roofline import Roofline
from trtllm_dspark.evaluation.simulated_requests import Workload
from trtllm_dspark.evaluation.simulation import SimulatedSystem, Simulation
from trtllm_dspark.evaluation.simulation_report import SimulationReport
from trtllm_dspark.evaluation.simulation_setup import simulate_policy
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.selection import select_drafts
from trtllm_dspark.scheduling.survival import SurvivalEstimator

LONG = (10**6, 10**6)
"""Requests that never end: the batch stays stationary, as the published fit assumes."""
NOISY = BetaAcceptance(0.761, bias=0.7, noise=1.9, sharpness=0.65)
"""As poor and over-confident as published confidences."""
OLD_LENGTH = 3.05
"""Acceptance length under full verification that fits the older published throughputs."""
NUM_STEPS = 2000
BUDGET_REQUESTS = 32
BUDGET_SAMPLES = 400
DSPARK_NUM_DRAFTS = 7
"""The paper's block."""
BUDGET_DIFFICULTY_STEPS = 16.0
"""Steps to another text, on average: short, so that a few requests see all nine sets."""


@cache
def simulate_h20(
    policy: str,
    batch: int,
    num_steps: int = 800,
    version: str = "new",
    difficulty_steps: float = 64.0,
) -> SimulationReport:
    """Run a policy on the published H20 costs.

    'fixed_ratio-0.5' names a ratio as the page counts it, anchors included: half of 16·R rows.
    """
    model = fitted_model() if version == "new" else model_for_length(OLD_LENGTH, H20_NUM_DRAFTS)
    name, _, ratio = policy.partition("-")
    options: dict[str, Any] = {}
    if ratio:
        options = {"ratio": (float(ratio) * (H20_NUM_DRAFTS + 1) - 1) / H20_NUM_DRAFTS}
    workload = Workload(batch, output_tokens=LONG, difficulty_steps=difficulty_steps)
    return simulate_policy(
        name, options, h20_table(version), model, workload,
        num_steps=num_steps, warm_up=0,
    )  # fmt: skip


@cache
def optimum_tokens_per_s(batch: int, num_samples: int, num_steps: int = NUM_STEPS) -> float:
    """Two rounds of Dinkelbach's iteration, from the rate that `adaptive` achieves.

    `num_samples` old survivals per request are averaged: 1 is the newest that may be seen, 8 is
    what `adaptive` itself averages.
    """
    rate = simulate_h20("adaptive", batch, num_steps).expected_tokens_per_s / 1e3
    found = []
    for _ in range(2):
        estimator, table = SurvivalEstimator(H20_NUM_DRAFTS), h20_table()
        policy = LongRunOptimum(rate, PolicyResources(table, estimator), num_samples=num_samples)
        system = SimulatedSystem(table, policy, estimator, fitted_model())
        report = Simulation(system, Workload(batch, output_tokens=LONG)).run(num_steps)
        rate = report.expected_tokens_per_s / 1e3
        found.append(report.expected_tokens_per_s)
    return max(found)


@cache
def noisy_tokens_per_s(batch: int, kind: str) -> float:
    """`adaptive` on noisy confidences, calibrated 'online' or by an 'oracle' of true outcomes."""
    rng = np.random.default_rng(9)
    estimator = SurvivalEstimator(H20_NUM_DRAFTS, learns=kind == "online")
    if kind == "oracle":
        estimator = OracleEstimator(NOISY.draw(rng, NOISY.new_states(rng, 100_000)))
    table = h20_table()
    policy = create_policy("adaptive", {}, PolicyResources(table, estimator))
    system = SimulatedSystem(table, policy, estimator, NOISY)
    workload = Workload(batch, output_tokens=LONG)
    return Simulation(system, workload, seed=1).run(1200).expected_tokens_per_s


def full_verification_tokens_per_s(batch: int) -> float:
    """Expected tokens of full verification over its published cost."""
    cost_ms = h20_table().step_cost(batch, (H20_NUM_DRAFTS + 1) * batch)
    return 1e3 * batch * fitted_model().expected_length() / cost_ms


def accepted_at_depth(depth: int) -> float:
    """Tokens that 32 requests commit if each verifies `depth` rows, its anchor included."""
    return BUDGET_REQUESTS * fitted_model("budget_table").expected_length(depth - 1)


def accepted_by_survival(num_rows: int) -> float:
    """Tokens that 32 requests commit if `num_rows` rows go to the highest survivals."""
    rng, model, found = np.random.default_rng(0), fitted_model("budget_table"), []
    caps = np.full(BUDGET_REQUESTS, H20_NUM_DRAFTS, np.int32)
    for _ in range(BUDGET_SAMPLES):
        blocks = model.draw(rng, model.new_states(rng, BUDGET_REQUESTS))
        assert blocks.true_probs is not None
        survivals = np.cumprod(blocks.true_probs, axis=1).astype(np.float32)
        lens = select_drafts(survivals, num_rows - BUDGET_REQUESTS, caps)
        kept = np.arange(H20_NUM_DRAFTS) < lens[:, None]
        found.append(BUDGET_REQUESTS + float((survivals * kept).sum()))
    return float(np.mean(found))


def nine_sets() -> MixedAcceptance:
    """Requests of all nine sets, accepted as by the DSpark paper's Qwen3-8B drafter (Table 1)."""
    rows = published("dspark_paper")["table1_acceptance_length_incl_bonus"]["Qwen3-8B"]["dspark"]
    return MixedAcceptance(tuple(model_for_length(length, DSPARK_NUM_DRAFTS) for length in rows))


@cache
def dspark_budget(load: int, policy: str = "prefix_async") -> float:
    """Tokens verified per request and step, anchor included, on a roofline of one H20.

    `prefix_async` is the scheduler of the paper's server. Few requests run more steps: each load
    sees about as many passages.
    """
    table = Roofline("h20", "qwen3-8b", num_drafts=DSPARK_NUM_DRAFTS).latency_table()
    workload = Workload(load, output_tokens=LONG, difficulty_steps=BUDGET_DIFFICULTY_STEPS)
    num_steps = max(100, 4000 // load)
    report = simulate_policy(
        policy, {}, table, nine_sets(), workload, num_steps=num_steps, warm_up=30
    )
    return 1.0 + report.verified_per_request


def published_dcut_budget(batch: int) -> float:
    """Tokens that D-Cut-B16 verified per request on one H20 (older page): keep ratio × 16."""
    data = published("dcut_h20")
    return float(data["keep_ratio_old_dcut_b16"][H20_BATCHES.index(batch)]) * (H20_NUM_DRAFTS + 1)
