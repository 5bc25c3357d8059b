# SPDX-License-Identifier: Apache-2.0
"""The latency table: ceiling look-up, plain rows, completion, refusals, and its JSON forms."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduling.builders import DCUT_ALPHA_MS, DCUT_THETA_MS, dcut_table, make_table
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.scheduling.interchange import (
    table_from_json_form,
    table_to_sglang_additive,
    table_to_sglang_steps,
    table_to_tensorrt_llm,
    temperatures_from_json_form,
    temperatures_to_sglang,
    temperatures_to_tensorrt_llm,
)
from trtllm_dspark.scheduling.isotonic import complete_cells, fit_additive, fit_isotonic
from trtllm_dspark.scheduling.latency_table import LatencyTable, refusal_reason, usable_table

NAN = float("nan")


def test_look_up_takes_the_ceiling_cell_and_never_interpolates() -> None:
    table = make_table([[1.0, 2.0, 8.0], [2.0, 3.0, 9.0]], buckets=(1, 4), rungs=(1, 4, 8))
    assert table.step_cost(1, 1) == 1.0
    assert table.step_cost(1, 2) == table.step_cost(1, 4) == 2.0
    assert table.step_cost(2, 5) == table.step_cost(4, 8) == 9.0


def test_more_requests_than_the_last_bucket_take_the_last_row_but_no_rung_is_invented() -> None:
    table = make_table([[1.0, 2.0]], buckets=(2,), rungs=(2, 4))
    assert table.step_cost(3, 4) == 2.0
    with pytest.raises(ConfigError, match="num_tokens = 5 is above the table's last rung 4"):
        table.step_cost(1, 5)


def test_prefill_rows_cost_what_they_add_to_the_drafted_row() -> None:
    table = make_table([[5.0, 6.0, 10.0]], buckets=(1,), rungs=(1, 2, 8), no_draft=[4.0])
    assert table.prefill_cost(1, 0) == 0.0
    assert table.prefill_cost(1, 7) == 5.0
    assert table.plain_cost(1) == 4.0
    assert table.plain_cost(1, 1) == 5.0


def test_the_draft_part_is_read_by_the_number_of_drafted_requests() -> None:
    table = make_table([[1.0, 2.0], [1.5, 2.5]], buckets=(1, 4), rungs=(1, 4), draft=[0.2, 0.6])
    assert [table.draft_cost(n) for n in (0, 1, 2, 4)] == [0.0, 0.2, 0.6, 0.6]


def test_unknown_plain_rows_stay_unknown() -> None:
    table = make_table([[1.0, 2.0]], buckets=(1,), rungs=(1, 2))
    assert np.isnan(table.plain_cost(1)) and np.isnan(table.draft_cost(1))


def test_holes_are_filled_from_the_nearest_row_by_the_additive_model() -> None:
    grid = np.array([[1.0, 2.0, NAN, NAN], [NAN, 5.0, 6.0, 9.0]])
    expected = [[1.0, 2.0, 3.0, 6.0], [4.0, 5.0, 6.0, 9.0]]
    np.testing.assert_allclose(complete_cells(grid), expected)


def test_a_row_without_any_cell_copies_its_larger_neighbour() -> None:
    grid = np.array([[1.0, 2.0], [NAN, NAN], [3.0, 4.0]])
    np.testing.assert_allclose(complete_cells(grid)[1], [3.0, 4.0])


def test_completion_reproduces_the_cells_of_an_additive_machine() -> None:
    whole = np.add.outer([0.0, 2.0, 5.0], [1.0, 2.0, 4.0, 9.0])
    holes = whole.copy()
    holes[0, 3] = holes[2, 0] = holes[1, 1] = NAN
    np.testing.assert_allclose(complete_cells(holes), whole)


def test_a_table_without_any_cell_is_refused() -> None:
    with pytest.raises(ConfigError, match="no measured cell"):
        make_table([[NAN, NAN]], buckets=(1,), rungs=(1, 2))


def test_an_outlier_is_pooled_and_does_not_lift_every_dearer_rung() -> None:
    np.testing.assert_allclose(fit_isotonic(np.array([1.0, 3.0, 2.0, 4.0])), [1, 2.5, 2.5, 4])
    np.testing.assert_allclose(fit_isotonic(np.array([3.0, 2.0, 1.0])), [2, 2, 2])
    table = make_table([[1.0, 3.0, 2.0, 4.0]], buckets=(1,), rungs=(1, 2, 3, 4))
    assert table.step_cost(1, 2) == 2.5 and table.step_ms[0, 1] == 3.0


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30))
def test_isotonic_rows_never_fall_and_keep_the_mean(values: list[float]) -> None:
    fitted = fit_isotonic(np.array(values))
    assert np.all(np.diff(fitted) >= -1e-9)
    assert fitted.mean() == pytest.approx(np.mean(values))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"request_buckets": (4, 1)}, "request_buckets"),
        ({"rungs": (1, 1, 4)}, "rungs"),
        ({"step_ms": np.ones((1, 3))}, "step_ms.shape"),
        ({"step_ms": np.array([[1.0, 2.0, -1.0], [1.0, 2.0, 3.0]])}, "step_ms"),
        ({"step_ms": np.array([[1.0, 2.0, np.inf], [1.0, 2.0, 3.0]])}, "step_ms"),
        ({"no_draft_ms": np.ones(3)}, "no_draft_ms.shape"),
        ({"autoregressive_ms": np.array([0.0, 1.0])}, "autoregressive_ms"),
    ],
)
def test_malformed_tables_are_refused_by_field(change: dict[str, Any], match: str) -> None:
    fields: dict[str, Any] = {
        "request_buckets": (1, 4),
        "rungs": (1, 4, 8),
        "step_ms": np.array([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]),
        "autoregressive_ms": np.ones(2),
        "no_draft_ms": np.ones(2),
        "draft_ms": np.ones(2),
        "fingerprint": "f",
        "num_drafts": 3,
    }
    LatencyTable(**fields)
    with pytest.raises(ConfigError, match=match):
        LatencyTable(**{**fields, **change})


def test_a_missing_flat_or_foreign_table_is_refused_with_the_reason_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = make_table([[1.0, 2.0]], buckets=(1,), rungs=(1, 2))
    flat = make_table([[1.0, 1.04]], buckets=(1,), rungs=(1, 2))
    cases = [
        (None, "f", (1, 2), "there is no latency table"),
        (good, "other", (1, 2), "measured with fingerprint 'f'"),
        (good, "f", (1, 4), r"has rungs \(1, 2\)"),
        (flat, "f", (1, 2), "is flat: its dearest rung costs 4.0 % more"),
    ]
    assert refusal_reason(good, "f", (1, 2)) == "" and usable_table(good, "f", (1, 2)) is good
    for table, fingerprint, rungs, message in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert usable_table(table, fingerprint, rungs) is None
        assert caplog.records[0].getMessage().startswith("no trimming, every draft is verified")
        assert len(caplog.records) == 1
        assert re.search(message, caplog.text)


def test_a_table_that_is_flat_for_few_requests_but_not_for_many_is_used() -> None:
    table = make_table([[1.0, 1.0], [2.0, 3.0]], buckets=(1, 8), rungs=(8, 64))
    assert refusal_reason(table, "f", (8, 64)) == ""


def test_dear_prefill_rungs_do_not_hide_that_the_decode_rungs_are_flat() -> None:
    table = make_table([[1.0, 1.01, 50.0]], buckets=(2,), rungs=(2, 8, 512), num_drafts=3)
    assert "is flat" in refusal_reason(table, "f", (2, 8, 512))


def test_json_round_trip_keeps_every_cell_and_every_hole(tmp_path: Path) -> None:
    table = make_table(
        [[1.25, NAN, 3.0], [NAN, 2.5, 4.0]], buckets=(1, 4), rungs=(1, 4, 8), no_draft=[1.0, NAN]
    )
    path = tmp_path / "latency_table.json"
    table.save(path)
    text = json.loads(path.read_text())
    assert text["step_ms"] == [[1.25, None, 3.0], [None, 2.5, 4.0]]
    again = LatencyTable.load(path)
    np.testing.assert_array_equal(again.step_ms, table.step_ms)
    np.testing.assert_array_equal(again.costs, table.costs)
    assert again.no_draft_ms[0] == 1.0 and np.isnan(again.no_draft_ms[1])
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "format, version"),
        ({"format": "x"}, "format, version"),
        ({"rungs": None}, "cells must be numbers"),
        ({"step_ms": [["a", 1.0]]}, "cells must be numbers"),
    ],
)
def test_a_file_of_another_form_is_refused(change: dict[str, Any], match: str) -> None:
    data = make_table([[1.0, 2.0]], buckets=(1,), rungs=(1, 2)).to_json_dict()
    with pytest.raises(ConfigError, match=match):
        LatencyTable.from_json_dict({**data, **change})
    del data["draft_ms"]
    with pytest.raises(ConfigError, match="the key 'draft_ms' is missing"):
        LatencyTable.from_json_dict(data)


def test_the_published_cells_are_an_additive_machine_within_the_published_error() -> None:
    cells = np.array([
        [8.2, 8.7, 9.7, 10.9],
        [10.6, 12.8, 16.3, 19.6],
        [16.0, 22.7, 29.8, 35.8],
        [29.8, 43.1, 56.6, 70.1],
        [55.2, 82.2, 107.9, 133.9],
    ])  # fmt: skip
    table = dcut_table()
    for row, bucket in enumerate((4, 8, 16, 32, 64)):
        for column, ratio in enumerate((0.25, 0.5, 0.75, 1.0)):
            cost = table.step_cost(bucket, int(ratio * 16 * bucket))
            assert cost == pytest.approx(cells[row, column], abs=0.065)


def test_sglang_additive_and_tensorrt_llm_forms_round_trip_an_additive_machine() -> None:
    table = dcut_table()
    assert fit_additive(table.step_ms).max_error < 1e-9
    for form in (table_to_sglang_additive(table), table_to_tensorrt_llm(table)):
        data = json.loads(json.dumps(form))
        again = table_from_json_form(
            data, request_buckets=(1,), num_drafts=15, fingerprint=table.fingerprint
        )
        assert again.request_buckets == table.request_buckets and again.rungs == table.rungs
        known = ~np.isnan(table.step_ms)
        np.testing.assert_allclose(again.step_ms[known], table.step_ms[known], atol=1e-9)
        assert np.isnan(again.no_draft_ms).all()


def test_exported_forms_carry_the_keys_and_units_of_the_other_servers() -> None:
    table = make_table([[10.0, 12.0], [11.0, 13.0]], buckets=(1, 4), rungs=(4, 8))
    assert table_to_sglang_additive(table) == {
        "bias_seconds": pytest.approx(0.010),
        "bs_probes": [1, 4],
        "alpha_seconds": pytest.approx([0.0, 0.001]),
        "m_probes": [4, 8],
        "theta_seconds": pytest.approx([0.0, 0.002]),
    }
    form = table_to_tensorrt_llm(table)
    assert form["fixed_overhead_ms"] == pytest.approx(10.0)
    assert form["step_time_ms"] == pytest.approx([0.0, 2.0])
    assert form["batch_sizes"] == [1, 4] and form["token_counts"] == [4, 8]
    assert form["minimum_predicted_gain"] == 0.04


def test_the_steps_per_second_form_reads_back_as_one_curve_for_all_requests() -> None:
    table = make_table([[10.0, 20.0]], buckets=(1,), rungs=(4, 8), num_drafts=7)
    form = table_to_sglang_steps(table)
    assert form == {
        "sample_batch_tokens": [4, 8],
        "sample_steps_per_sec": pytest.approx([100.0, 50.0]),
        "max_batch_tokens": 8,
    }
    again = table_from_json_form(form, request_buckets=(1, 2), num_drafts=7, fingerprint="g")
    assert again.step_cost(2, 8) == again.step_cost(1, 5) == pytest.approx(20.0)


def test_an_unknown_form_or_a_missing_key_is_named() -> None:
    arguments: dict[str, Any] = {"request_buckets": (1,), "num_drafts": 3, "fingerprint": "f"}
    with pytest.raises(ConfigError, match="has no known form"):
        table_from_json_form({"tokens": [1]}, **arguments)
    with pytest.raises(ConfigError, match="sample_steps_per_sec"):
        table_from_json_form({"sample_batch_tokens": [1]}, **arguments)


def test_temperatures_are_read_and_written_as_both_servers_have_them() -> None:
    written = temperatures_to_sglang(
        [1.5, 2.0], dataset="d", num_samples=9, ece_before=[0.1, 0.2], ece_after=[0.0, 0.1]
    )
    assert set(written) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert temperatures_from_json_form(written) == (1.5, 2.0)
    assert temperatures_from_json_form({"sts_temperatures": [3]}) == (3.0,)
    assert temperatures_to_tensorrt_llm((1.5, 2)) == {"sts_temperatures": [1.5, 2.0]}
    for broken in ({}, {"temperatures": []}, {"temperatures": [0.0]}, {"temperatures": ["x"]}):
        with pytest.raises(ConfigError, match="temperatures"):
            temperatures_from_json_form(broken)


def test_the_published_constants_are_the_ones_of_the_fit() -> None:
    assert list(DCUT_ALPHA_MS) == [4, 8, 16, 32, 64] and len(DCUT_THETA_MS) == 12
