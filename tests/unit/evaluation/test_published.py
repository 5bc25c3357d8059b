# SPDX-License-Identifier: Apache-2.0
"""The simulator against published numbers: D-Cut's tables on one H20 and DSpark's shape, and the
bars that the default policy must clear there.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trtllm_dspark.evaluation import simulate_command
from trtllm_dspark.evaluation.published_numbers import (
    H20_BATCHES,
    h20_table,
    h20_throughput,
    published,
)
from trtllm_dspark.evaluation.reproduction import (
    NOISY,
    accepted_at_depth,
    accepted_by_survival,
    dspark_budget,
    full_verification_tokens_per_s,
    nine_sets,
    noisy_tokens_per_s,
    optimum_tokens_per_s,
    published_dcut_budget,
)
from trtllm_dspark.evaluation.reproduction import simulate_h20 as h20
from trtllm_dspark.evaluation.roofline import Roofline
from trtllm_dspark.scheduling.reliability import expected_calibration_error, roc_auc

# --- tables ---------------------------------------------------------------------------------------


def test_the_additive_fit_reproduces_all_twenty_published_costs() -> None:
    table, costs = h20_table(), published("dcut_h20")["verify_cost_ms"]
    for batch in H20_BATCHES:
        for ratio, ms in zip(costs["ratios"], costs[str(batch)], strict=True):
            assert table.step_cost(batch, int(ratio * 16 * batch)) == pytest.approx(ms, abs=0.065)


def test_full_verification_of_64_requests_costs_2_42_times_a_quarter_of_it() -> None:
    table = h20_table()
    assert table.step_cost(64, 1024) / table.step_cost(64, 256) == pytest.approx(2.42, abs=0.01)


@pytest.mark.parametrize("depth", [4, 8, 12, 16])
def test_uniform_depths_accept_what_the_budget_table_says(depth: int) -> None:
    rows, accepted = published("dcut_h20")["budget_table_bs32_accepted_incl_anchor"][
        "uniform_depth"
    ][str(depth)]
    assert rows == 32 * depth
    assert accepted_at_depth(depth) == pytest.approx(accepted, rel=0.02)


@pytest.mark.parametrize("ratio", ["0.25", "0.5", "0.75"])
def test_the_best_drafts_by_survival_accept_what_the_budget_table_says(ratio: str) -> None:
    rows, accepted = published("dcut_h20")["budget_table_bs32_accepted_incl_anchor"][
        "top_by_survival"
    ][ratio]
    assert accepted_by_survival(rows) == pytest.approx(accepted, rel=0.02)


@pytest.mark.parametrize("batch", H20_BATCHES)
def test_full_verification_has_the_published_throughput(batch: int) -> None:
    theirs = h20_throughput("dflash_b16")[batch]
    assert full_verification_tokens_per_s(batch) == pytest.approx(theirs, rel=0.05)
    # Another text at every step: the same mean, and a few requests show it after 800 steps.
    simulated = h20("fixed", batch, 800, difficulty_steps=1.0).expected_tokens_per_s
    assert simulated == pytest.approx(theirs, rel=0.05)


def test_full_verification_falls_below_plain_decoding_as_load_grows() -> None:
    wins = [
        h20("fixed", b, 400).tokens_per_s > h20("autoregressive", b, 5).tokens_per_s
        for b in H20_BATCHES
    ]
    theirs = [h20_throughput("dflash_b16")[b] > h20_throughput("autoregressive")[b]
              for b in H20_BATCHES]  # fmt: skip
    assert wins == theirs == [True, True, True, False, False]


@pytest.mark.parametrize("batch", [8, 16, 32, 64])
def test_the_ablation_is_ordered_as_published(batch: int) -> None:
    names = ("fixed", "fixed_ratio-0.75", "fixed_ratio-0.5", "ratio_bucket")
    ours = [h20(name, batch, 400, "old").expected_tokens_per_s for name in names]
    theirs = [
        h20_throughput(n, "old")[batch] for n in ("dflash_b16", "fixed_75", "fixed_50", "dcut_b16")
    ]
    assert theirs == sorted(theirs)
    assert ours == sorted(set(ours)) and len(ours) == 4
    rows = [round(16 * batch * ratio) for ratio in (0.75, 0.5)]
    assert [h20(name, batch, 400, "old").rungs for name in names[1:3]] == [{r: 400} for r in rows]


def test_experts_make_the_cost_of_verification_flatter_than_a_dense_models() -> None:
    row = published("dcut_h20")["other_models_tokens_per_second_new"]["qwen3.5-35b-a3b_tp4_moe"]
    costs = row["verify_cost_ms_bs64_at_25_50_75_100_percent_tp2"]
    dense = h20_table().step_cost(64, 1024) / h20_table().step_cost(64, 256)
    assert costs[-1] / costs[0] < dense
    lines = [Roofline("h20", name, num_drafts=15) for name in ("qwen3-8b", "qwen3-30b-a3b")]
    rises = [line.step_ms(64, 1024) / line.step_ms(64, 256) for line in lines]
    assert rises[1] < rises[0]


def test_the_roofline_of_an_h20_is_near_the_published_costs() -> None:
    line, table = Roofline("h20", "qwen3-8b", num_drafts=15, max_num_requests=64), h20_table()
    for batch in H20_BATCHES:
        for rows in (4 * batch, 8 * batch, 16 * batch):
            ours, theirs = line.step_ms(batch, rows), table.step_cost(batch, rows)
            assert ours == pytest.approx(theirs, rel=0.2)


LOADS = (4, 8, 16, 32, 64, 128)


def test_dsparks_budget_shrinks_smoothly_and_is_the_published_4_to_6_from_8_requests_on() -> None:
    """The paper names no load and serves another model on other machines.

    At 4 requests verifying costs next to nothing here: the budget is above 6, as D-Cut's measured
    one is.
    """
    low, high = published("dspark_paper")["serving"]["verify_tokens_per_request_light_load"]
    found = [dspark_budget(load) for load in LOADS]
    assert all(0 < a - b < 1 for a, b in itertools.pairwise(found)), found
    assert all(low - 0.1 <= budget <= high for budget in found[1:]), found
    assert high < found[0] < published_dcut_budget(4) < 7.5


def test_adaptive_shrinks_its_budget_below_dsparks_as_it_stops_to_draft() -> None:
    found = [dspark_budget(load, "adaptive") for load in LOADS]
    assert all(b < a for a, b in itertools.pairwise(found)), found
    assert found[0] < published_dcut_budget(4) and found[-1] < 0.5 * dspark_budget(LOADS[-1])


def test_the_nine_sets_are_as_long_as_published_and_differ_between_requests() -> None:
    rows = published("dspark_paper")["table1_acceptance_length_incl_bonus"]["Qwen3-8B"]["dspark"]
    lengths = [part.expected_length() for part in nine_sets().parts]
    assert lengths == pytest.approx(rows, abs=1e-2) and len(lengths) == 9
    assert nine_sets().expected_length() == pytest.approx(np.mean(rows), abs=1e-2)


def test_the_command_prints_published_tables_beside_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate_command.main(["--reproduce", "budget-table", "full", "experts"]) == 0
    printed = capsys.readouterr().out
    for shown in ("top_by_survival 0.25", "201.200", "2226.800", "experts, published", "1.13"):
        assert shown in printed


# --- bars -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", H20_BATCHES)
def test_adaptive_beats_plain_decoding_the_best_depth_and_published_dcut(batch: int) -> None:
    adaptive = h20("adaptive", batch, 2000).expected_tokens_per_s
    assert adaptive >= h20("autoregressive", batch, 5).expected_tokens_per_s
    assert adaptive >= h20("best_uniform", batch).expected_tokens_per_s
    assert adaptive >= h20_throughput("dcut_b16")[batch]


@pytest.mark.parametrize("batch", H20_BATCHES)
@pytest.mark.parametrize("num_samples", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_adaptive_reaches_98_percent_of_the_long_run_optimum(batch: int, num_samples: int) -> None:
    adaptive = h20("adaptive", batch, 2000).expected_tokens_per_s
    assert adaptive >= 0.98 * optimum_tokens_per_s(batch, num_samples)


def test_the_noisy_confidences_are_as_poor_as_published_ones() -> None:
    rng = np.random.default_rng(0)
    blocks = NOISY.draw(rng, NOISY.new_states(rng, 20_000))
    survivals = np.cumprod(1 / (1 + np.exp(-np.clip(blocks.logits, -12, 12))), axis=1)
    for position in (1, 3, 5, 7):
        events = blocks.accepted_lens >= position
        predicted = survivals[:, position - 1]
        assert 0.03 <= expected_calibration_error(predicted, events) <= 0.08
        assert 0.81 <= roc_auc(predicted, events) <= 0.907
    assert survivals[:, 0].mean() > (blocks.accepted_lens >= 1).mean()


@pytest.mark.parametrize("batch", H20_BATCHES)
def test_online_calibration_is_worth_98_percent_of_an_oracles(batch: int) -> None:
    assert noisy_tokens_per_s(batch, "online") >= 0.98 * noisy_tokens_per_s(batch, "oracle")
