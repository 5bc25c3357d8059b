#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check and time the kernels on one GPU, in one command and a few minutes.

  python benchmarks/gpu_check.py --out gpu_report            # on a machine with a CUDA device
  python benchmarks/gpu_check.py --out smoke --interpret     # on the CPU: tiny shapes

Needs torch and triton, no installation, no network, no model files. Writes gpu_check.json and
gpu_check.txt into --out. Exits with 1 when a check fails, 2 when the machine cannot run it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_bench.environment import Target, describe_machine, interpret_kernels, make_importable

SECTIONS = ("checks", "loop", "engine", "kernels", "rounds")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument(
        "--interpret", action="store_true", help="run kernels in the interpreter, tiny shapes"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the inputs (default: the clock)")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to run"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen sections; see the module docstring for the exit codes."""
    args = parse_args(argv)
    make_importable()
    if args.interpret:
        interpret_kernels()
    import torch

    if not args.interpret and not torch.cuda.is_available():
        print("no CUDA device was found: run on a machine with one, or pass --interpret")
        return 2
    seed = int(time.time()) % 2**31 if args.seed is None else args.seed
    torch.manual_seed(seed)
    device = torch.device("cpu" if args.interpret else "cuda")
    target = Target(device, args.interpret, seed)
    report = run_sections(target, args.sections)
    from gpu_bench.report import format_report, judge_bars, write_report

    report["bars"] = judge_bars(report)
    path = write_report(args.out, report)
    print(format_report(report))
    print(f"report written to {path}")
    failed = [row["name"] for row in report["checks"] if not row["ok"]]
    for name in ("loop", "engine"):
        failed += [name] * any(row["num_wrong"] for row in report[name])
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def run_sections(target: Target, sections: list[str]) -> dict[str, Any]:
    """Run every chosen section and note its wall-clock seconds."""
    report: dict[str, Any] = {
        "machine": describe_machine(target.device),
        "is_interpreted": target.is_interpreted,
        "seed": target.seed,
        "seconds": {},
        **{name: [] for name in ("checks", "loop", "engine", "overlap", "kernels")},
        **{name: [] for name in ("block_sizes", "latency_table")},
    }
    runners = {
        "checks": run_checks,
        "loop": run_loop,
        "engine": run_engine,
        "kernels": run_kernels,
        "rounds": run_rounds,
    }
    for name in sections:
        start = time.perf_counter()
        print(f"… {name}", flush=True)
        runners[name](target, report)
        if target.is_cuda:
            release_memory()
        report["seconds"][name] = round(time.perf_counter() - start, 1)
    return report


def release_memory() -> None:
    """Give the pages of a finished section back before the next one allocates its own."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def run_checks(target: Target, report: dict[str, Any]) -> None:
    """Correctness of every kernel."""
    from gpu_bench.correctness import list_paged_checks
    from gpu_bench.sampling_correctness import list_sampling_checks

    found = [check() for check in list_paged_checks(target)]
    for checks in list_sampling_checks(target):
        found += checks()
    report["checks"] = [
        {"name": c.name, "error": c.error, "tolerance": c.tolerance, "ok": c.is_ok} for c in found
    ]


def run_loop(target: Target, report: dict[str, Any]) -> None:
    """The end-to-end loop."""
    from gpu_bench.decode_loop import run_decode_loop

    report["loop"] = [vars(run_decode_loop(target))]


def run_engine(target: Target, report: dict[str, Any]) -> None:
    """The product's own engine and loop: tokens, then the scheduler's overlap."""
    from gpu_bench.engine_loop import run_engine_loops
    from gpu_bench.engine_overlap import bench_overlap

    report["engine"] = [vars(result) for result in run_engine_loops(target)]
    if target.is_cuda:
        release_memory()
    report["overlap"] = bench_overlap(target)


def run_kernels(target: Target, report: dict[str, Any]) -> None:
    """Kernel timings."""
    from gpu_bench.kernel_bench import bench_attention, bench_markov, bench_small_ops

    bandwidth = copy_bandwidth(target, report)
    for bench in (bench_small_ops, bench_markov, bench_attention):
        report["kernels"] += bench(target, bandwidth)


def run_rounds(target: Target, report: dict[str, Any]) -> None:
    """Whole rounds."""
    from gpu_bench.round_bench import (
        RoundBench,
        average_contexts,
        bench_block_sizes,
        bench_latency_table,
    )

    bandwidth = copy_bandwidth(target, report)
    bench = RoundBench(target, *((128, 4096 + 32) if target.is_cuda else (2, 32)))
    report["latency_table"] = list(bench_latency_table(bench, bandwidth))
    report["block_size_cells"] = list(bench_block_sizes(bench))
    report["block_sizes"] = average_contexts(report["block_size_cells"])


def copy_bandwidth(target: Target, report: dict[str, Any]) -> float:
    """Measured once per report."""
    from gpu_bench.timing import measure_copy_bandwidth

    if "copy_bytes_per_second" not in report["machine"]:
        report["machine"]["copy_bytes_per_second"] = measure_copy_bandwidth(target)
    return float(report["machine"]["copy_bytes_per_second"])


if __name__ == "__main__":
    sys.exit(main())
