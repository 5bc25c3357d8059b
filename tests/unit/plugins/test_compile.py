# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation, in child processes: there the kernels are not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dspark_plugins import compile as compile_module
from dspark_plugins import kernels_command
from dspark_plugins.compile import (
    CAPABILITIES,
    CompiledKernel,
    compile_kernels,
    find_problems,
    format_table,
    list_variants,
)

ONE_PER_OP = """
import json, sys
from dspark_plugins.compile import compile_variant, list_variants
rows, seen = [], set()
for variant in list_variants():
    for capability in variant.capabilities:
        if (variant.op, capability) not in seen:
            seen.add((variant.op, capability))
            row = compile_variant(variant, capability)
            rows.append([row.op, row.capability, row.entry, row.num_registers, row.problems(),
                         f".target sm_{capability}" in row.ptx, f".entry {row.entry}(" in row.ptx,
                         row.cubin[:4].hex()])
print(json.dumps(rows))
"""

ALL_TARGETS = """
import sys
from pathlib import Path
from dspark_plugins.compile import compile_kernels, find_problems, format_table
table = compile_kernels(out_dir=Path(sys.argv[1]))
print(format_table(table))
sys.exit("; ".join(find_problems(table)) or 0)
"""


def run_python(source: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", source, *args], capture_output=True, text=True, env=environment
    )


def make_row(**changes: int) -> CompiledKernel:
    fields = {"capability": 90, "num_warps": 4, "num_registers": 40, "shared_bytes": 0}
    return CompiledKernel(
        op="kv_append_",
        variant="v",
        entry="k",
        ptx="",
        cubin=b"",
        **{"spill_bytes": 0, **fields, **changes},
    )


def test_every_op_compiles_for_every_target_without_spills() -> None:
    done = run_python(ONE_PER_OP)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    ops = {variant.op for variant in list_variants()}
    assert {(row[0], row[1]) for row in rows} == {(op, c) for op in ops for c in CAPABILITIES}
    for op, capability, entry, registers, problems, has_target, has_entry, magic in rows:
        assert problems == [], (op, capability)
        assert 0 < registers <= 255
        assert has_target, (op, capability)
        assert has_entry, entry
        assert magic == b"\x7fELF".hex()


@pytest.mark.slow
def test_every_variant_compiles_for_every_target(tmp_path: Path) -> None:
    done = run_python(ALL_TARGETS, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    pairs = {(row["op"], row["variant"], row["capability"]) for row in rows}
    expected = {(v.op, v.name, c) for v in list_variants() for c in v.capabilities}
    assert pairs == expected
    assert all((tmp_path / f"{row['file']}.cubin").stat().st_size > 1000 for row in rows)


def test_every_variant_names_its_kernels_arguments_and_every_target_has_one() -> None:
    targets: dict[tuple[str, str], set[int]] = {}
    for variant in list_variants():
        names = [*variant.argument_types, *variant.constants]
        assert names == list(variant.kernel.arg_names), variant.name
        targets.setdefault((variant.op, variant.name), set()).update(variant.capabilities)
    assert all(found == set(CAPABILITIES) for found in targets.values())


def test_spills_and_too_much_shared_memory_are_problems() -> None:
    assert find_problems([make_row()]) == []
    assert find_problems([make_row(spill_bytes=8)]) == [
        "kv_append_/v on sm_90: spilled 8 bytes per thread"
    ]
    assert find_problems([make_row(capability=120, shared_bytes=102400)]) == [
        "kv_append_/v on sm_120: 102400 bytes of shared memory exceed 101376"
    ]


def test_the_table_has_one_line_per_kernel() -> None:
    lines = format_table([make_row(), make_row(num_registers=77)]).splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["kv_append_", "v", "90", "4", "77", "0", "0"]


def test_unknown_ops_and_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no kernel of op \['conv'\]: choose from accept_drafts"):
        compile_kernels(ops=["conv"])
    with pytest.raises(ValueError, match="not all supported"):
        compile_kernels([75])


def test_interpreted_kernels_are_not_compiled() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        compile_kernels([90], ops=["kv_append_"])


def test_the_command_prints_the_table_and_fails_on_spills(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for spill, code in ((0, 0), (8, 1)):
        rows = [make_row(spill_bytes=spill)]
        monkeypatch.setattr(compile_module, "compile_kernels", lambda *a, r=rows, **k: r)
        assert kernels_command.main(["compile", "--targets", "90"]) == code
        printed = capsys.readouterr()
        assert "kv_append_" in printed.out
        assert ("spilled 8 bytes" in printed.err) == bool(spill)


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_command.main(["compile", "--ops", "conv"]) == 2
    assert "no kernel of op ['conv']" in capsys.readouterr().err
