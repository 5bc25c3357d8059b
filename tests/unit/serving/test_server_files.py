# SPDX-License-Identifier: Apache-2.0
"""The server is laid out from links, and its Python sees what this Python sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trtllm_dspark.errors import ServerError
from trtllm_dspark.serving import launcher, server_files
from trtllm_dspark.serving.launcher import make_environment


def test_the_layout_is_links_into_the_wheel(tmp_path: Path) -> None:
    for _ in range(2):  # a second time over the first
        files = server_files.lay_out_server(tmp_path)
    backend = files.backend_dir / "python"
    names = {path.name for path in backend.iterdir()}
    assert names >= {
        "libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py",
    }  # fmt: skip
    assert all(path.is_symlink() and path.exists() for path in backend.iterdir())
    assert os.access(files.binary, os.X_OK)


def test_the_laid_out_python_imports_this_package_and_its_dependencies(tmp_path: Path) -> None:
    bin_dir = server_files.lay_out_environment(tmp_path)
    code = "import numpy, tokenizers, trtllm_dspark; print(numpy.__file__, trtllm_dspark.__file__)"
    output = subprocess.run(
        [bin_dir / "python3", "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    import numpy

    import trtllm_dspark

    assert output == [numpy.__file__, trtllm_dspark.__file__]


def test_the_environment_puts_the_layout_first_and_drops_python_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    files = server_files.lay_out_server(tmp_path)
    environment = make_environment(files)
    assert environment["PATH"].split(os.pathsep)[0] == str(files.python_bin_dir)
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(files.libpython_dir)
    assert "PYTHONHOME" not in environment


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"install the serving extra .*nvidia-pytriton"):
        server_files.find_wheel_server()


def test_a_python_without_a_model_process_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "python_backend_stubs" / "3.8").mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(ServerError, match=rf"for Python {version}: use one of 3\.8"):
        server_files.find_stub(tmp_path)


def test_a_python_without_a_shared_library_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"INSTSONAME": "libpython3.99.so.1.0", "LIBDIR": "/nowhere"}
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    with pytest.raises(ServerError, match=r"libpython3\.99.* was not found .*--enable-shared"):
        server_files.find_libpython_dir()


def test_a_model_process_gets_shared_memory_that_need_not_grow_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, expected in ((24 << 30, 256 << 20), (64 << 20, 4 << 20), (1 << 30, 64 << 20)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(launcher.shutil, "disk_usage", lambda path, found=usage: found)
        assert launcher.shared_memory_bytes() == expected
    monkeypatch.undo()
    assert launcher.shared_memory_bytes(str(tmp_path / "none")) == 4 << 20
