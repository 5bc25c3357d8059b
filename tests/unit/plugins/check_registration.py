# SPDX-License-Identifier: Apache-2.0
"""Run in the registration environment: registers every op, describes it, compiles its plugin.

Prints one JSON object. Dimensions are TensorRT's own stand-ins ("fake" shape expressions): launch
shapes are checked for type here and for value in test_tensorrt_ops.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import numpy.typing  # noqa: F401
import tensorrt as trt
import tensorrt.plugin as trtp
import triton
from dspark_plugins import tensorrt_plugins
from dspark_plugins.ptx import list_parameter_kinds, list_parameters
from dspark_plugins.tensorrt_ops import OPS, OpSpec
from dspark_plugins.tensorrt_plugins import (
    DATA_TYPES,
    ELEMENT_TYPES,
    make_aot_impl,
    make_autotune,
    make_describe,
    register_plugins,
)

CAPABILITY = 90
INPUT_RANKS = {"kv_pages": 5, "qkv": 2, "rope": 3, "q": 3, "page_table": 2, "partial": 4}
ATTRIBUTES: dict[str, Any] = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "eps": 1e-6,
    "has_norm": True,
    "page_size": 32,
    "scale": 0.0883,
    "is_causal": True,
    "window": 0,
    "num_splits": 4,
    "max_query_len": 8,
    "out_type": "bf16",
    "vocab_size": 49152,
    "rank": 64,
    "max_requests": 8,
    "slot": 2,
    "has_noise": False,
    "stores_logits": False,
    "with_peak": True,
    "hidden_size": 576,
    "with_markov": True,
    "num_drafts": 7,
    "rung": 64,
    "draft_form": 0,
    "has_thresholds": True,
    "has_coupled": False,
}


THREADS: list[int] = []
"""Threads per block of every launch so far: without a builder TensorRT keeps no constants."""


def note_threads(launch: Any, num_threads: int, shared: int) -> Any:
    """Launch parameters as the plugins make them, with their block noted."""
    THREADS.append(num_threads)
    return launch_params(launch, num_threads, shared)


launch_params, tensorrt_plugins._launch_params = tensorrt_plugins._launch_params, note_threads


def make_tensors(spec: OpSpec) -> list[Any]:
    """One descriptor per input, of the op's first type combination."""
    kinds = [text.strip().replace("*", "|").split("|")[0] for text in spec.io_types.split(",")]
    found = []
    for name, kind in zip(spec.inputs, kinds, strict=False):
        data_type = getattr(trt.DataType, {"FP32": "FLOAT"}.get(kind, kind))
        dims = trtp.ShapeExprs(INPUT_RANKS.get(name, 2), _is_dummy=True)
        found.append(trtp.TensorDesc(dims, data_type))
    return found


def assemble(ptx: str) -> int:
    """Exit code of the assembler on the stripped PTX."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        tool = triton.knobs.nvidia.ptxas_blackwell.path
        command = [tool, f"--gpu-name=sm_{CAPABILITY}a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True).returncode


def check_op(spec: OpSpec) -> dict[str, Any]:
    """What the op's three functions return."""
    tensors = make_tensors(spec)
    attributes = {name: ATTRIBUTES[name] for name in spec.attributes}
    outputs = make_describe(spec)(*tensors, **attributes)
    (combination,) = make_autotune(spec)(*tensors, **attributes, outputs=outputs)
    tactic = spec.tactics[-1] if spec.tactics else 0
    entry, ptx, launch, integers = make_aot_impl(spec, CAPABILITY)(
        *tensors, *attributes.values(), outputs, tactic
    )
    return {
        "num_inputs": len(tensors),
        "output_types": [ELEMENT_TYPES[desc.dtype] for desc in outputs],
        "aliased": [desc.get_aliased() is not None for desc in outputs],
        "combination_sizes": sorted({len(c.types) for c in combination._get_combinations()}),
        "num_combinations": len(combination._get_combinations()),
        "num_parameters": len(list_parameters(ptx, entry)),
        "parameter_kinds": list_parameter_kinds(ptx, entry),
        "num_threads": THREADS[-1],
        "threads_of_ptx": int(re.findall(r"\.reqntid (\d+)", ptx)[0]),
        "num_integers": len(integers),
        "integers_are_int32": all(isinstance(x, trtp.SymInt32) for x in integers),
        "launch": type(launch).__name__,
        "assembler": assemble(ptx),
    }


def main() -> int:
    """Register, then check every op."""
    report: dict[str, Any] = {"registered": register_plugins(CAPABILITY)}
    try:
        register_plugins(CAPABILITY)
    except ValueError as error:
        report["second_time"] = str(error)
    registry = trt.get_plugin_registry()
    report["creators"] = [
        spec.name for spec in OPS if registry.get_creator(spec.name, "1", "dspark") is not None
    ]
    report["round_trip"] = all(ELEMENT_TYPES[kind] == name for name, kind in DATA_TYPES.items())
    report["ops"] = {spec.name: check_op(spec) for spec in OPS}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
