# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml ships is what the checkout holds: a wheel serves without a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setuptools_table():
    """`[tool.setuptools]`; `tomllib` is Python 3.11's, so 3.10 takes setuptools' own reader."""
    try:
        import tomllib
    except ModuleNotFoundError:
        from setuptools.compat.py310 import tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]


def directory_of(package: str, mapping: dict[str, str]) -> Path:
    for prefix, directory in mapping.items():
        if package == prefix or package.startswith(prefix + "."):
            return ROOT / directory / package[len(prefix) + 1 :].replace(".", "/")
    return ROOT / package.replace(".", "/")


def test_every_package_of_the_checkout_is_listed(setuptools_table):
    listed = {
        directory_of(package, setuptools_table["package-dir"])
        for package in setuptools_table["packages"]
    }
    found = {
        path.parent
        for root in ("trtllm_dspark", "plugins")
        for path in (ROOT / root).rglob("__init__.py")
    }
    assert found <= listed
    assert all(path.is_dir() for path in listed)


def test_every_file_that_is_not_python_is_package_data(setuptools_table):
    shipped = {
        path
        for package, patterns in setuptools_table["package-data"].items()
        for pattern in patterns
        for path in directory_of(package, setuptools_table["package-dir"]).glob(pattern)
    }
    skipped = {".py", ".pyc", ".so"}
    for root in ("trtllm_dspark", "plugins"):
        files = {p for p in (ROOT / root).rglob("*") if p.is_file() and p.suffix not in skipped}
        assert files <= shipped, f"not shipped: {sorted(files - shipped)}"
    models = {p for p in (ROOT / "triton_repo").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert models <= shipped, f"not shipped: {sorted(models - shipped)}"
