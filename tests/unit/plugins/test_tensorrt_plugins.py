# SPDX-License-Identifier: Apache-2.0
"""Plugin registration against TensorRT's own Python validation, in a child without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dspark_plugins.tensorrt_ops import OPS

from tests.unit.plugins.registration_environment import lay_out_environment, missing_parts

MISSING = missing_parts()
SCRIPT = Path(__file__).with_name("check_registration.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    variables = lay_out_environment(tmp_path_factory.mktemp("tensorrt"))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env={**environment, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


def test_every_op_is_registered_once_per_process(report: dict[str, Any]) -> None:
    assert report["registered"] == [f"dspark::{spec.name}" for spec in OPS]
    assert report["creators"] == [spec.name for spec in OPS]
    assert "already has a" in report["second_time"]
    assert report["round_trip"]


def test_kernels_take_exactly_inputs_integers_and_outputs(report: dict[str, Any]) -> None:
    for name, op in report["ops"].items():
        expected = op["num_inputs"] + op["num_integers"] + len(op["output_types"])
        assert op["num_parameters"] == expected, name
        assert op["integers_are_int32"], name
        pointers = [["u64"] * op["num_inputs"], ["u64"] * len(op["output_types"])]
        order = [*pointers[0], *["u32"] * op["num_integers"], *pointers[1]]
        assert op["parameter_kinds"] == order, name
        assert op["num_threads"] == op["threads_of_ptx"], name
        assert op["launch"] == "KernelLaunchParams"
        assert op["assembler"] == 0, name


def test_type_combinations_cover_every_tensor(report: dict[str, Any]) -> None:
    for name, op in report["ops"].items():
        assert op["combination_sizes"] == [op["num_inputs"] + len(op["output_types"])], name
    assert report["ops"]["kv_append_"]["num_combinations"] == 3


def test_only_the_pages_of_kv_append_are_written_in_place(report: dict[str, Any]) -> None:
    aliased = {name: op["aliased"] for name, op in report["ops"].items()}
    assert aliased.pop("kv_append_") == [True, False]
    assert not any(any(flags) for flags in aliased.values())


def test_output_types_follow_the_inputs(report: dict[str, Any]) -> None:
    types = {name: op["output_types"] for name, op in report["ops"].items()}
    assert types["kv_append_"] == ["bf16", "bf16"]
    assert types["ragged_verify_attention"] == ["fp32", "fp32"]
    assert types["ragged_verify_reduce"] == ["bf16"]
    assert types["markov_select"] == ["i32", "bf16", "i32", "fp32", "fp32", "fp32"]
    assert types["select_drafts"] == ["i32"] * 5
    assert types["accept_drafts"] == ["i32", "i32", "fp32"]
