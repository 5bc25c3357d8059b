# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/gpu_check.py`: its smoke mode on the CPU, its counting and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_bench.report import format_report, format_table, judge_bars
from gpu_bench.roofline import Work, attention_work, dense_work, markov_work
from gpu_bench.shapes import QWEN3_8B

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def run_check(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *args]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_decode_loop_equals_full_recomputation_in_smoke_mode(tmp_path: Path) -> None:
    done = run_check("--interpret", "--out", str(tmp_path), "--seed", "3", "--sections", "loop")
    assert done.returncode == 0, done.stdout + done.stderr
    (loop,) = json.loads((tmp_path / "gpu_check.json").read_text())["loop"]
    assert loop["num_wrong"] == 0
    assert loop["num_compared"] >= 10
    assert loop["num_rounds"] < loop["num_committed"] / 2 - 1  # some drafts were accepted


@pytest.mark.slow
def test_every_section_runs_in_smoke_mode(tmp_path: Path) -> None:
    done = run_check("--interpret", "--out", str(tmp_path), "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert all(row["ok"] for row in report["checks"])
    for section in ("checks", "loop", "kernels", "block_sizes", "latency_table", "overlap"):
        assert report[section], section
    random_model, demo_model = report["engine"]
    assert random_model["num_wrong"] == 0 and random_model["num_compared"] >= 6
    assert random_model["num_rounds"] >= 1
    assert demo_model["num_compared"] == 0 and demo_model["skipped"]
    assert "say nothing about a GPU" in (tmp_path / "gpu_check.txt").read_text()
    assert report["bars"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    done = run_check("--out", str(tmp_path))
    assert done.returncode == 2
    assert "pass --interpret" in done.stdout


NOT_ON_A_BARE_MACHINE = (
    "safetensors tokenizers transformers gguf jinja2 rich tritonclient pytriton psutil onnx "
    "onnxscript onnxruntime scipy matplotlib cuda tensorrt tensorrt_rtx tensorrt_rtx_bindings"
)
IMPORT_ALL = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split():
            raise ModuleNotFoundError(f"{name} is not there", name=name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
from gpu_bench.environment import make_importable
make_importable()
for name in ("sampling_correctness", "decode_loop", "engine_loop", "engine_overlap",
             "kernel_bench", "round_bench", "report"):
    importlib.import_module("gpu_bench." + name)
import trtllm_dspark.engines.kernel_engine
"""


def test_it_needs_torch_triton_and_numpy_only() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, str(BENCHMARKS), NOT_ON_A_BARE_MACHINE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_script_and_what_it_imports_stay_under_60_mb() -> None:
    root = BENCHMARKS.parent
    files = [
        path
        for part in ("benchmarks", "plugins", "trtllm_dspark")
        for path in (root / part).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    ]
    assert len(files) > 100
    assert sum(path.stat().st_size for path in files) < 60e6


def test_attention_counts_keys_once_per_request_and_rows_once() -> None:
    work = attention_work(2, 10, 3, num_heads=4, num_kv_heads=2, head_dim=8)
    assert work.num_bytes == 2 * 13 * 2 * 2 * 8 * 2 + 2 * 3 * 4 * 8 * 2 * 2
    seen = 2 * (11 + 12 + 13)  # rows see 11, 12 and 13 keys
    assert work.num_flops == 4 * seen * 4 * 8


def test_the_markov_head_reads_its_weights_once_per_slot() -> None:
    work = markov_work(64, 7, 151936, 256)
    assert work.num_bytes == 7 * 151936 * (256 + 64) * 2
    assert work.num_flops == 2 * 64 * 7 * 151936 * 256


def test_floors_take_the_larger_of_memory_and_arithmetic() -> None:
    assert Work(10.0, 0.0).floor_ms(1000.0, 1.0) == 10.0
    assert Work(10.0, 40.0).floor_ms(1000.0, 1000.0) == 40.0
    assert dense_work(3, 100) == Work(200.0, 600.0)


def test_the_shape_is_that_of_an_8b_model() -> None:
    weights = QWEN3_8B.num_layers * QWEN3_8B.layer_weights + 2 * QWEN3_8B.head_weights
    assert 8.1e9 < weights < 8.3e9


def make_report(**changes: Any) -> dict[str, Any]:
    attention = {"op": "ragged_verify_attention", "bytes": 1e9, "share_of_bandwidth": 0.8}
    small = {"op": "ragged_verify_attention", "bytes": 1e6, "share_of_bandwidth": 0.1}
    head = {"op": "markov block", "num_requests": 64, "num_drafts": 7, "median_ms": 0.2}
    table = [
        {"num_requests": 64, "ratio": ratio, "median_ms": ms}
        for ratio, ms in ((0.25, 10.0), (1.0, 20.0))
    ]
    report = {"machine": {}, "is_interpreted": False, "kernels": [attention, small, head]}
    return {**report, "latency_table": table, **changes}


def test_bars_are_judged_on_memory_bound_cells_of_a_gpu_only() -> None:
    bars = judge_bars(make_report())
    assert [bar["value"] for bar in bars] == [0.8, 0.01, 2.0]
    assert [bar.get("ok") for bar in bars] == [True, True, None]
    assert judge_bars(make_report(is_interpreted=True)) == []


def test_planning_counts_as_hidden_only_where_every_round_hid_it() -> None:
    for share, is_ok in ((1.0, True), (0.96, False)):
        overlap = [{"num_requests": 1, "share_hidden": 0.0}, {"num_requests": 64}]
        overlap[1]["share_hidden"] = share
        bar = judge_bars(make_report(overlap=overlap))[-1]
        assert (bar["value"], bar["ok"]) == (share, is_ok)


def test_tables_are_aligned_and_leave_missing_values_blank() -> None:
    text = format_table([{"a": 1.23456, "b": "x"}, {"a": 7}], ("a", "b"))
    assert text.splitlines() == ["    a  b", "1.235  x", "    7   "]
    assert "latency_table" in format_report(make_report(latency_table=[{"kind": "k"}]))
