# SPDX-License-Identifier: Apache-2.0
"""Fits compiled PTX to a caller that knows nothing of Triton-language's hidden parameters.

Compiled kernels declare two more pointers after the kernel's own arguments (global and profile
scratch). TensorRT passes inputs, integers and outputs and nothing else, so they are taken away.
"""

from __future__ import annotations

import re

NUM_HIDDEN = 2


def strip_hidden_parameters(ptx: str, entry: str, num_arguments: int) -> str:
    """Remove the two trailing parameters of `entry`, which must not be read by its body."""
    names = list_parameters(ptx, entry)
    if len(names) != num_arguments + NUM_HIDDEN:
        raise ValueError(
            f"{entry} declares {len(names)} parameters: {num_arguments} arguments and {NUM_HIDDEN} "
            "hidden pointers were expected; this Triton-language version differs, update ptx.py"
        )
    for name in names[num_arguments:]:
        if len(re.findall(rf"\b{re.escape(name)}\b", ptx)) != 1:
            raise ValueError(f"{entry} reads its hidden parameter {name}: it cannot be removed")
        ptx = re.sub(rf",\s*\.param [^,()]*\b{re.escape(name)}\b", "", ptx)
    return ptx


def list_parameters(ptx: str, entry: str) -> list[str]:
    """Parameter names of an entry function, in order."""
    return [line.split()[-1] for line in _declarations(ptx, entry)]


def list_parameter_kinds(ptx: str, entry: str) -> list[str]:
    """PTX types of an entry function's parameters, in order: `u64` pointers, `u32` integers."""
    return [line.split()[1].removeprefix(".") for line in _declarations(ptx, entry)]


def _declarations(ptx: str, entry: str) -> list[str]:
    found = re.search(rf"\.entry {re.escape(entry)}\((.*?)\)", ptx, flags=re.DOTALL)
    if found is None:
        raise ValueError(f"the PTX has no entry function {entry}")
    return [line for line in found.group(1).strip().split(",") if line.strip()]
