# SPDX-License-Identifier: Apache-2.0
"""The rooms import in one direction only, and heavy or optional packages only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trtllm_dspark"

BASE = {"errors", "_version"}
ALLOWED = {
    "_version": set(),
    "errors": set(),
    "config": {"errors"},
    "types": {"errors"},
    "checkpoints": {"config", "errors"},
    "ops": {"types", "errors", "plugins", "environment"},
    "models": {"ops", "config", "types", "errors"},
    "scheduling": {"types", "config", "errors"},
    "engines": {"models", "ops", "plugins", "checkpoints", "config", "types", "errors", "_version"},
    "decoding": {"scheduling", "engines", "ops", "types", "config", "errors"},
    "runtime": {
        "checkpoints", "engines", "decoding", "scheduling", "config", "types", "errors",
        "environment",
    },
    "environment": {"errors"},
    "options": {"config", "errors"},
    "build_command": {
        "engines", "scheduling", "checkpoints", "options", "config", "errors", "environment",
    },
    "convert_checkpoint_command": {"checkpoints", "options", "config"},
    "trtllm_build_command": {"checkpoints", "options", "config", "errors"},
    "serving": {
        "runtime", "decoding", "checkpoints", "types", "config", "errors", "options", "_version",
    },
    "training": {
        "runtime", "models", "ops", "checkpoints", "engines", "scheduling", "decoding", "config",
        "types", "errors", "options", "_version",
    },
    "evaluation": {
        "runtime", "serving", "decoding", "engines", "scheduling", "checkpoints", "training",
        "config", "types", "errors", "options", "_version",
    },
}  # fmt: skip
OPTIONAL = {
    "tensorrt": {"engines", "plugins"},
    "tensorrt_rtx": {"engines", "plugins"},
    "triton": {"plugins"},
    "tritonclient": set(),
    "triton_python_backend_utils": set(),
    "matplotlib": set(),
}


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_modules(path: Path, *, module_level_only: bool) -> set[str]:
    """Dotted names of imports; type-checking blocks and, if asked, function bodies left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if module_level_only and is_function:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text("utf-8")))
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_file_imports_only_along_the_arrows(path):
    room = room_of(path)
    if room == "cli":
        return
    assert room in ALLOWED, f"{room} is a new room: add its arrows here and to the design"
    for name in imported_modules(path, module_level_only=False):
        parts = name.split(".")
        if parts[0] == "dspark_plugins":
            target = "plugins"
        elif parts[0] == "trtllm_dspark" and len(parts) > 1:
            target = parts[1]
        else:
            continue
        if target == "__version__" or target == room:
            continue
        assert target in ALLOWED[room], f"{path.name} ({room}) imports {name}: not an allowed arrow"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_packages_are_imported_when_used_not_when_loaded(path):
    for name in imported_modules(path, module_level_only=True):
        top = name.split(".")[0]
        if top in OPTIONAL:
            assert room_of(path) in OPTIONAL[top], f"{path.name} imports {top} at module level"


def test_scheduling_knows_no_torch():
    for path in (PACKAGE / "scheduling").rglob("*.py"):
        names = {n.split(".")[0] for n in imported_modules(path, module_level_only=False)}
        assert "torch" not in names, path


def test_the_plugins_import_nothing_of_ours():
    for path in (ROOT / "plugins").rglob("*.py"):
        names = {n.split(".")[0] for n in imported_modules(path, module_level_only=False)}
        assert "trtllm_dspark" not in names, path


def test_every_package_directory_is_installed():
    listed = (ROOT / "pyproject.toml").read_text("utf-8")
    for init in PACKAGE.rglob("__init__.py"):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        assert f'"{package}"' in listed, f"{package} is missing in pyproject.toml's packages"


def test_every_source_file_carries_its_licence_line():
    for folder in (
        "trtllm_dspark",
        "plugins",
        "tests",
        "benchmarks",
        "build_scripts",
        "triton_repo",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            head = path.read_text("utf-8").splitlines()[:2]
            assert not head or "# SPDX-License-Identifier: Apache-2.0" in head, path


NOT_IN_DEMO = (
    "onnx", "onnxscript", "onnxruntime", "scipy", "hypothesis", "pytest", "triton", "tensorrt",
    "tensorrt_rtx", "tensorrt_bindings", "tensorrt_rtx_bindings", "cuda",
)  # fmt: skip
"""Packages that the extra `demo` does not bring."""


START_EVERYTHING = """
import contextlib, importlib, io, sys
for name in {blocked!r}:
    sys.modules[name] = None
from trtllm_dspark.cli import COMMANDS, main
for command in COMMANDS:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main([command, "--help"])
    except ImportError as error:
        print(f"dspark {{command}}: {{error}}")
for model in ("engine_model", "text_model", "preprocessing_model", "postprocessing_model"):
    try:
        importlib.import_module(f"trtllm_dspark.serving.{{model}}")
    except ImportError as error:
        print(f"serving.{{model}}: {{error}}")
"""


def test_every_command_and_every_served_model_starts_with_what_the_demo_installs():
    """In one process in which the packages of the other extras cannot be imported."""
    code = START_EVERYTHING.format(blocked=NOT_IN_DEMO)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("", 0), result.stdout + result.stderr
