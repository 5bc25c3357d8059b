# SPDX-License-Identifier: Apache-2.0
"""The native CPU kernels as one library: compiled once per machine and kept in the cache.

It needs a C compiler (`cc`); without one, or with DSPARK_NATIVE=0, torch's operators do the same
work. What a kernel computes is the business of the other `native_*.py`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from trtllm_dspark.environment import cache_dir, native_kernels_wanted

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).with_name("native")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
DTYPES = (torch.float32, torch.bfloat16)


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the kernels exist here and may run on these tensors.

    One floating type that they know, on the CPU, nothing to differentiate and nobody tracing.
    """
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and first.dtype in DTYPES
        and all(tensor.dtype == first.dtype for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and not _is_tracing(first)
        and library() is not None
    )


def _is_tracing(x: torch.Tensor) -> bool:
    """Whether a compiler or exporter looks on: it must see torch's operators, not a pointer."""
    known = type(x) in (torch.Tensor, torch.nn.Parameter)
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or not known


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None with the reason in the log."""
    if not native_kernels_wanted():
        return None
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning("no C compiler (cc): the CPU runs torch's operators only, which is slower")
        return None
    try:
        loaded = ctypes.CDLL(str(compile_library(compiler, cache_dir() / "native")))
    except (OSError, subprocess.CalledProcessError) as error:
        details = getattr(error, "stderr", "") or str(error)
        logger.warning(
            "the CPU runs torch's operators only: the native kernels did not compile: %s", details
        )
        return None
    return loaded


@functools.cache
def kernel(name: str, parameters: tuple[type, ...]) -> Callable[..., None]:
    """A C function that returns nothing; `takes` has said that the library is there.

    With its parameters declared ctypes converts and checks what it is called with: undeclared, a
    Python int becomes a C int, and addresses would be cut.
    """
    loaded = library()
    assert loaded is not None
    function = getattr(loaded, name)
    function.argtypes, function.restype = parameters, None
    return function


def sources() -> list[Path]:
    """The C files, headers too."""
    return sorted(SOURCE_DIR.glob("*.[ch]"))


def compile_library(compiler: str, directory: Path) -> Path:
    """Compile the kernels into `directory` unless they are there; safe against other processes."""
    target = directory / f"kernels-{_key(compiler)}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(suffix=".so", dir=directory)
    os.close(handle)
    files = [str(path) for path in sources() if path.suffix == ".c"]
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", made, *files, "-lm"],
            check=True,
            capture_output=True,
            text=True,
        )
        Path(made).replace(target)
    finally:
        Path(made).unlink(missing_ok=True)
    return target


def _key(compiler: str) -> str:
    """Names the sources, the compiler and the processor: what the machine code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    texts = [path.read_text("utf-8") for path in sources()]
    parts = [*texts, " ".join(FLAGS), version.stdout, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Model and instruction sets of this processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(
        sorted({line for line in lines if line.startswith(wanted)}) or [platform.processor()]
    )
