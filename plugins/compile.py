# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of every kernel variant to PTX and cubin, with a table of resources.

Needs no GPU: the compiler's own assembler targets each capability. Registers and the local stack
are read back from the cubin; a stack frame is what registers were spilled to, and a failure.
Compiled kernels take two more pointers after their own arguments (global and profile scratch).
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from dspark_plugins.heuristics import SHARED_MEMORY_LIMIT
from dspark_plugins.kernel_variant import KernelVariant
from dspark_plugins.paged_variants import list_paged_variants
from dspark_plugins.sampling_variants import list_sampling_variants
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100, 120)
PTX_VERSION = 87
"""Lowest that knows every target here; PTX loads on drivers that know at least this version."""


@dataclass(frozen=True)
class CompiledKernel:
    """One variant on one target. `ptx` and `cubin` are what a plugin or a loader takes."""

    op: str
    variant: str
    capability: int
    entry: str
    """Name of the kernel inside the PTX."""
    num_warps: int
    num_registers: int
    shared_bytes: int
    """Dynamic shared memory of a launch."""
    spill_bytes: int
    """Local stack per thread; 0 = nothing spilled."""
    ptx: str
    cubin: bytes

    def problems(self) -> list[str]:
        """Why this kernel must not ship; empty when it may."""
        found = []
        if self.spill_bytes:
            found.append(f"spilled {self.spill_bytes} bytes per thread")
        limit = SHARED_MEMORY_LIMIT.get(self.capability)
        if limit is not None and self.shared_bytes > limit:
            found.append(f"{self.shared_bytes} bytes of shared memory exceed {limit}")
        return found


def list_variants() -> list[KernelVariant]:
    """Every specialisation of every kernel, in a fixed order."""
    return [*list_paged_variants(), *list_sampling_variants()]


def compile_variant(variant: KernelVariant, capability: int) -> CompiledKernel:
    """Compile one variant for sm_<capability> (Triton-language caches the result on disk)."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET=1 turns kernels into Python functions that cannot be compiled: "
            "unset it and run again"
        )
    kernel = variant.kernel
    signature = {**variant.argument_types, **dict.fromkeys(variant.constants, "constexpr")}
    missing = [name for name in kernel.arg_names if name not in signature]
    if missing or len(signature) != len(kernel.arg_names):
        raise ValueError(
            f"variant {variant.op}/{variant.name} does not name the kernel's arguments: missing "
            f"{missing}, unknown {sorted(set(signature) - set(kernel.arg_names))}"
        )
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, variant.constants, aligned)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "ptx_version": PTX_VERSION,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = read_resources(built.asm["cubin"])
    return CompiledKernel(
        op=variant.op,
        variant=variant.name,
        capability=capability,
        entry=built.metadata.name,
        num_warps=variant.num_warps,
        num_registers=registers,
        shared_bytes=built.metadata.shared,
        spill_bytes=stack,
        ptx=built.asm["ptx"],
        cubin=built.asm["cubin"],
    )


def read_resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, stack bytes per thread) of a cubin, as the assembler recorded them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        listing = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    if len(found) != 1:
        raise RuntimeError(f"expected one kernel in the cubin, cuobjdump listed {len(found)}")
    return int(found[0][0]), int(found[0][1])


def compile_kernels(
    capabilities: Sequence[int] = CAPABILITIES,
    *,
    ops: Iterable[str] | None = None,
    out_dir: Path | None = None,
    report: Callable[[CompiledKernel], None] | None = None,
) -> list[CompiledKernel]:
    """Compile every variant of the named ops (default: all) for the capabilities it is meant for.

    With `out_dir`, writes <op>.<variant>.sm<capability>.{ptx,cubin} and kernels.json there.
    `report` is called after each kernel. Spills do not raise: see `find_problems`.
    """
    variants = list_variants()
    known = {variant.op for variant in variants}
    chosen = known if ops is None else set(ops)
    if chosen - known:
        raise ValueError(
            f"no kernel of op {sorted(chosen - known)}: choose from {', '.join(sorted(known))}"
        )
    if set(capabilities) - set(CAPABILITIES):
        raise ValueError(
            f"capabilities {list(capabilities)} are not all supported: choose from {CAPABILITIES}"
        )
    table = []
    for variant in variants:
        for capability in capabilities:
            if variant.op in chosen and capability in variant.capabilities:
                table.append(compile_variant(variant, capability))
                if report is not None:
                    report(table[-1])
    if out_dir is not None:
        write_kernels(table, out_dir)
    return table


def find_problems(table: Iterable[CompiledKernel]) -> list[str]:
    """One line per kernel that must not ship (spills, too much shared memory)."""
    return [
        f"{row.op}/{row.variant} on sm_{row.capability}: {problem}"
        for row in table
        for problem in row.problems()
    ]


def write_kernels(table: Sequence[CompiledKernel], out_dir: Path) -> None:
    """Write PTX, cubins and the table without their bytes."""
    out_dir.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in table:
        stem = f"{row.op}.{row.variant}.sm{row.capability}"
        (out_dir / f"{stem}.ptx").write_text(row.ptx)
        (out_dir / f"{stem}.cubin").write_bytes(row.cubin)
        fields = asdict(row)
        del fields["ptx"], fields["cubin"]
        rows.append({**fields, "file": stem})
    text = json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1)
    (out_dir / "kernels.json").write_text(text + "\n")


def format_table(table: Iterable[CompiledKernel]) -> str:
    """The resource table as aligned text, one kernel per line."""
    header = (
        f"{'op':<24} {'variant':<34} {'sm':>4} {'warps':>5} {'regs':>5} {'shared':>7} {'spill':>6}"
    )
    lines = [header]
    for row in table:
        lines.append(
            f"{row.op:<24} {row.variant:<34} {row.capability:>4} {row.num_warps:>5} "
            f"{row.num_registers:>5} {row.shared_bytes:>7} {row.spill_bytes:>6}"
        )
    return "\n".join(lines)
