# SPDX-License-Identifier: Apache-2.0
"""The simulator itself: costs, queue, K/V limits, prefill, arrivals, determinism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.acceptance_models import (
    BetaAcceptance,
    MixedAcceptance,
    TraceAcceptance,
    fitted_model,
    model_for_length,
)
from trtllm_dspark.evaluation.hardware import MODELS
from trtllm_dspark.evaluation.published_numbers import h20_table, h20_throughput, published
from trtllm_dspark.evaluation.roofline import Roofline
from trtllm_dspark.evaluation.simulated_requests import Limits, Workload
from trtllm_dspark.evaluation.simulation import SimulatedSystem, Simulation
from trtllm_dspark.scheduling import PolicyResources, create_policy, policy_names
from trtllm_dspark.scheduling.survival import SurvivalEstimator


def simulation(
    policy: str = "fixed", workload: Workload | None = None, seed: int = 0, **limits: Any
) -> Simulation:
    estimator, table = SurvivalEstimator(15), h20_table()
    made = create_policy(policy, {}, PolicyResources(table, estimator))
    system = SimulatedSystem(table, made, estimator, fitted_model())
    fields = {"max_num_requests": 64, "max_num_tokens": 1024, **limits}
    return Simulation(system, workload or Workload(8), Limits(**fields), seed)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_runs_and_the_same_seed_gives_the_same_run(policy: str) -> None:
    reports = [simulation(policy, seed=s).run(40, 5) for s in (1, 1, 2)]
    assert reports[0] == reports[1]
    if policy not in ("autoregressive", "threshold"):
        assert reports[0] != reports[2]
    assert reports[0].tokens_per_s > 0


def test_a_plain_server_pays_the_plain_row_and_commits_one_token_a_request() -> None:
    report = simulation("autoregressive", Workload(32)).run(10)
    assert report.step_ms == pytest.approx(12.016)
    assert report.tokens_per_s == pytest.approx(32 / 12.016e-3)
    assert report.drafted_share == 0 and report.verified_per_request == 0


def test_full_verification_pays_the_rung_that_runs() -> None:
    report = simulation("fixed", Workload(8, output_tokens=(10**6, 10**6))).run(10)
    assert report.step_ms == pytest.approx(1.92 + 17.63)
    assert report.keep_ratio == 1.0 and report.rungs == {128: 10}


def test_the_oracle_is_above_every_policy() -> None:
    best = simulation("oracle").run(200).tokens_per_s
    assert best > max(simulation(p).run(200).tokens_per_s for p in ("adaptive", "best_uniform"))


def test_a_closed_loop_keeps_its_concurrency_and_finished_requests_leave() -> None:
    run = simulation("fixed", Workload(8, output_tokens=(20, 40)))
    report = run.run(200)
    assert report.mean_active == pytest.approx(8.0)
    assert report.num_finished > 50
    assert set(report.ms_per_token) == {"p50", "p95", "p99"}


def test_an_open_loop_serves_what_arrives_and_an_idle_server_waits() -> None:
    workload = Workload(arrivals_per_s=2.0, output_tokens=(20, 40))
    run = simulation("fixed", workload)
    for _ in range(300):
        run.step()
    rate = run.requests.num_finished / (run.now_ms / 1e3)
    assert rate == pytest.approx(2.0, rel=0.3)


def test_rates_of_an_open_loop_are_over_idle_time_too_and_steps_are_not() -> None:
    run = simulation("fixed", Workload(arrivals_per_s=0.5, output_tokens=(20, 40)))
    for _ in range(20):
        run.step()
    start_ms = run.now_ms
    report = run.run(200)
    elapsed_s, busy_s = (run.now_ms - start_ms) / 1e3, 200 * report.step_ms / 1e3
    assert 0 < busy_s < 0.5 * elapsed_s
    assert 7.5 < report.step_ms < 9.5  # the H20's steps of one or two requests
    assert report.tokens_per_s == pytest.approx(run.tally.tokens / elapsed_s)
    assert report.expected_tokens_per_s == pytest.approx(run.tally.expected / elapsed_s)
    assert report.tokens_per_s == pytest.approx(0.5 * 30, rel=0.35)
    assert report.mean_active == pytest.approx(report.tokens_per_s / report.tokens_per_s_user)
    assert report.mean_active < 0.5


def test_prompts_are_prefilled_in_chunks_that_leave_room_for_decoding() -> None:
    workload = Workload(4, prompt_tokens=(3000, 3000), output_tokens=(50, 50))
    run = simulation("fixed", workload)
    seen = []
    for _ in range(30):
        decoding = int((run.requests.rows["prompt_left"] == 0).sum())
        before = run.requests.rows["prompt_left"].sum()
        run.step()
        if len(run.requests) == 4 and before:
            seen.append(before - run.requests.rows["prompt_left"].sum())
            assert seen[-1] <= 1024 - decoding
    assert sum(seen) > 0
    assert (run.requests.rows["cached"] >= 0).all()


def test_kv_limits_hold_requests_back_and_growth_preempts_the_youngest() -> None:
    workload = Workload(16, output_tokens=(400, 400))
    run = simulation("fixed", workload, num_kv_tokens=1000)
    for _ in range(250):
        run.step()
        rows = run.requests.rows
        assert rows["cached"].sum() <= 1000 + 16 * len(run.requests)
        assert (np.diff(rows["key"]) != 0).all()
    assert run.requests.num_preemptions > 0
    assert len(run.requests) + len(run.requests.waiting) == 16
    assert run.requests.num_finished > 0


def test_no_more_requests_are_active_than_the_table_has_costs_for() -> None:
    estimator, table = SurvivalEstimator(15), h20_table()
    policy = create_policy("autoregressive", {}, PolicyResources(table, estimator))
    system = SimulatedSystem(table, policy, estimator, fitted_model())
    endless = Workload(100, output_tokens=(1000, 1000))
    for limits in (None, Limits(4096, 1 << 16), Limits(100, 200)):
        report = Simulation(system, endless, limits).run(3)
        assert report.mean_active == pytest.approx(64) and report.num_waiting == 36
    report = Simulation(system, endless, Limits(32, 200)).run(3)
    assert report.mean_active == pytest.approx(32) and report.num_waiting == 68


def test_4096_requests_run() -> None:
    line = Roofline("h200", "qwen3-4b", context_tokens=64, max_num_requests=4096, num_drafts=3)
    estimator, table = SurvivalEstimator(3), line.latency_table()
    policy = create_policy("adaptive", {}, PolicyResources(table, estimator))
    system = SimulatedSystem(table, policy, estimator, fitted_model(num_drafts=3))
    report = Simulation(system, Workload(4096)).run(3)
    assert report.mean_active == pytest.approx(4096)


# --- acceptance -----------------------------------------------------------------------------------


def test_the_beta_model_accepts_as_often_as_it_says() -> None:
    model, rng = BetaAcceptance(0.7, num_drafts=4), np.random.default_rng(0)
    blocks = model.draw(rng, model.new_states(rng, 40_000))
    assert blocks.true_probs is not None
    survivals = np.cumprod(blocks.true_probs, axis=1).mean(axis=0)
    found = [(blocks.accepted_lens >= k).mean() for k in (1, 2, 3, 4)]
    assert found == pytest.approx(survivals.tolist(), abs=0.01)
    assert 1 + blocks.accepted_lens.mean() == pytest.approx(model.expected_length(), abs=0.03)
    shown = 1 / (1 + np.exp(-blocks.logits.astype(float)))
    assert shown == pytest.approx(blocks.true_probs, abs=1e-5)


def test_a_model_is_found_for_an_acceptance_length() -> None:
    assert model_for_length(3.5, 7).expected_length() == pytest.approx(3.5, abs=1e-3)
    with pytest.raises(ConfigError, match="cannot be reached with γ = 7"):
        model_for_length(9.0, 7)


def test_a_mixture_draws_every_kind_equally_often_and_is_as_long_as_its_parts() -> None:
    parts = tuple(BetaAcceptance(mean, 1e6, num_drafts=3) for mean in (0.2, 0.5, 0.9))
    model, rng = MixedAcceptance(parts), np.random.default_rng(0)
    states = model.new_states(rng, 6000)
    shares = [(abs(states - part.mean) < 0.01).mean() for part in parts]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)
    length = 1 + model.draw(rng, states).accepted_lens.mean()
    assert length == pytest.approx(model.expected_length(), abs=0.05)
    assert model.num_drafts == 3
    with pytest.raises(ConfigError, match="alike but for mean and kappa"):
        MixedAcceptance((parts[0], BetaAcceptance(0.5, num_drafts=4)))


def test_a_trace_gives_back_its_own_blocks_by_prompt(tmp_path: Path) -> None:
    logits = np.arange(12, dtype=np.float32).reshape(6, 2)
    path = tmp_path / "trace.npz"
    np.savez(path, logits=logits, accepted_lens=np.array([0, 1, 2, 0, 1, 2]),
             prompt_ids=np.array([1, 0, 1, 0, 0, 1]))  # fmt: skip
    trace = TraceAcceptance.load(str(path))
    rng = np.random.default_rng(0)
    blocks = trace.draw(rng, np.array([0.0] * 50 + [1.0] * 50))
    rows = blocks.logits[:, 0].astype(int) // 2
    assert set(rows[:50].tolist()) == {1, 3, 4} and set(rows[50:].tolist()) == {0, 2, 5}
    assert (blocks.accepted_lens == np.array([0, 1, 2, 0, 1, 2])[rows]).all()
    with pytest.raises(ConfigError, match="is no trace"):
        TraceAcceptance.load(str(tmp_path / "absent.npz"))


# --- roofline and published files -----------------------------------------------------------------


def test_experts_woken_grow_from_k_to_all_and_dense_models_read_everything() -> None:
    moe = MODELS["qwen3-30b-a3b"]
    assert moe.expected_experts(1) == pytest.approx(8)
    assert moe.expected_experts(10_000) == pytest.approx(128)
    assert MODELS["qwen3-8b"].read_params(1) == MODELS["qwen3-8b"].read_params(512)
    assert moe.all_params == pytest.approx(30.5e9, rel=0.01)
    assert moe.active_params == pytest.approx(3.3e9, rel=0.1)
    assert MODELS["qwen3-32b"].all_params == pytest.approx(32.8e9, rel=0.01)


def test_a_roofline_rises_with_tokens_and_falls_with_gpus_and_precision() -> None:
    one = Roofline("h100", "qwen3-32b", "fp8")
    two = Roofline("h100", "qwen3-32b", "fp8", tensor_parallel=2)
    assert one.step_ms(64, 512) > one.step_ms(64, 256) > two.step_ms(64, 256)
    assert Roofline("h200", "qwen3-32b").plain_ms(8) > Roofline(
        "h200", "qwen3-32b", "fp8"
    ).plain_ms(8)
    with pytest.raises(ConfigError, match="use more GPUs"):
        Roofline("h100", "qwen3-32b", context_tokens=100_000)
    with pytest.raises(ConfigError, match="GPU 'a100' is unknown"):
        Roofline("a100")


def test_unknown_published_names_are_refused() -> None:
    for call in (lambda: published("x"), lambda: h20_table("x"), lambda: h20_throughput("x")):
        with pytest.raises(ConfigError):
            call()
