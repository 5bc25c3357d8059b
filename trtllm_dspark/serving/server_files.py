# SPDX-License-Identifier: Apache-2.0
"""Finds the tritonserver that the nvidia-pytriton wheel carries and lays it out to run from here.

Nothing is copied: a work directory gets links to the wheel's files, and a small Python environment
in which model processes see exactly what this interpreter sees. Starts nothing.
"""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import ServerError


@dataclass(frozen=True)
class ServerFiles:
    """What is needed to start the server."""

    binary: Path
    backend_dir: Path
    python_bin_dir: Path
    """First on PATH: the embedded interpreter of a model process finds its environment there."""
    libpython_dir: Path
    """First on LD_LIBRARY_PATH."""


def lay_out_server(work_dir: Path) -> ServerFiles:
    """Link the wheel's server and this Python environment into `work_dir`."""
    wheel = find_wheel_server()
    backend = work_dir / "backends" / "python"
    backend.mkdir(parents=True, exist_ok=True)
    for path in (wheel / "backends" / "python").iterdir():
        if path.is_file():
            _link(backend / path.name, path)
    _link(backend / "triton_python_backend_stub", find_stub(wheel))
    return ServerFiles(
        binary=wheel / "bin" / "tritonserver",
        backend_dir=backend.parent,
        python_bin_dir=lay_out_environment(work_dir / "python"),
        libpython_dir=find_libpython_dir(),
    )


def find_wheel_server() -> Path:
    """The tritonserver directory inside the installed wheel."""
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec else []:
        server = Path(location) / "tritonserver"
        if (server / "bin" / "tritonserver").is_file():
            return server
    raise ServerError(
        "tritonserver was not found: install the serving extra (pip install 'trtllm-dspark[serve]')"
        ", which brings nvidia-pytriton (Linux x86-64 with glibc 2.35 or newer)"
    )


def find_stub(wheel: Path) -> Path:
    """The model-process program for this version of Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = sorted(path.name for path in (wheel / "python_backend_stubs").glob("*"))
        raise ServerError(
            f"nvidia-pytriton has no model-process program for Python {version}: use one of "
            f"{', '.join(found)}"
        )
    return stub


def find_libpython_dir() -> Path:
    """Directory of this interpreter's shared library."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if ".so" not in name:
        name = f"libpython{version}.so.1.0"
    candidates = [Path(sysconfig.get_config_var("LIBDIR") or "/"), Path(sys.base_prefix) / "lib"]
    candidates += _loaded_library_dirs(name)
    for directory in candidates:
        if (directory / name).exists():
            return directory
    raise ServerError(
        f"{name} was not found in {', '.join(str(c) for c in candidates)}: model processes embed "
        f"Python and need its shared library. Install it (Debian, Ubuntu: apt-get install "
        f"libpython{version}) or use a Python built with --enable-shared"
    )


def _loaded_library_dirs(name: str) -> list[Path]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    return [Path(line.split()[-1]).parent for line in maps.splitlines() if line.endswith(name)][:1]


def lay_out_environment(directory: Path) -> Path:
    """A virtual environment that adds this interpreter's site directories; returns its bin.

    The embedded interpreter ignores PYTHONPATH and finds its environment by looking for python3 on
    PATH; .pth files (editable installs) are honoured in what `addsitedir` adds.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / version / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    bin_dir = directory / "bin"
    bin_dir.mkdir(exist_ok=True)
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    _link(bin_dir / "python3", base)
    (directory / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\n", encoding="utf-8"
    )
    lines = [f"import site; site.addsitedir({path!r})" for path in _site_dirs()]
    package_root = str(Path(__file__).resolve().parents[2])
    lines.append(f"import sys; {package_root!r} in sys.path or sys.path.append({package_root!r})")
    (packages / "dspark.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return bin_dir


def _site_dirs() -> list[str]:
    directories = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return [path for path in directories if Path(path).is_dir()]


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() or link.exists():
        link.unlink()
    link.symlink_to(target)
