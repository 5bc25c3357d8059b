# SPDX-License-Identifier: Apache-2.0
"""The native CPU kernel of `ragged_verify_attention`: compiled once per machine, called per layer.

It needs a C compiler (`cc`); without one `can_run` is false and torch attends instead. Its results
do not depend on the batch around a row, which torch's bfloat16 attention cannot promise.
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
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trtllm_dspark.environment import cache_dir, native_kernels_wanted
from trtllm_dspark.errors import EngineError

if TYPE_CHECKING:
    from trtllm_dspark.ops.attention import AttentionPlan

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native") / "ragged_attention.c"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_CHUNK, _MAX_HEAD_DIM = 32, 256
_DTYPES = (torch.float32, torch.bfloat16)


class _Arguments(ctypes.Structure):
    """`Arguments` of the C file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("cu_query_lens", "context_lens", "page_table")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_requests", "table_stride")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("page_size", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_causal", "is_bf16", "num_threads")),
    )


def can_run(q: torch.Tensor, kv_pages: torch.Tensor) -> bool:
    """Whether the kernel exists here and takes these tensors."""
    head_dim = q.shape[-1]
    return (
        q.device.type == "cpu"
        and q.dtype in _DTYPES
        and kv_pages.dtype == q.dtype
        and head_dim % _CHUNK == 0
        and head_dim <= _MAX_HEAD_DIM
        and _library() is not None
    )


def run(q: torch.Tensor, kv_pages: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """As `ragged_verify_attention`; page ids and lengths must already have been checked."""
    library = _library()
    if library is None:
        raise EngineError("the native attention kernel is not available: ask can_run first")
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = _Arguments(
        q.data_ptr(),
        kv_pages.data_ptr(),
        out.data_ptr(),
        plan.cu_query_lens.ctypes.data,
        plan.context_lens.ctypes.data,
        plan.page_table.ctypes.data,
        len(q),
        len(plan.context_lens),
        plan.page_table.shape[1],
        q.shape[1],
        kv_pages.shape[-2],
        q.shape[2],
        plan.page_size,
        plan.window,
        scale,
        plan.is_causal,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if library.ragged_attention(ctypes.byref(arguments)):
        raise EngineError(f"attention over {len(plan.context_lens)} requests ran out of memory")
    return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel, or None with the reason in the log."""
    if not native_kernels_wanted():
        return None
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning("no C compiler (cc): attention runs through torch, which is slower")
        return None
    try:
        return ctypes.CDLL(str(compile_library(compiler, cache_dir() / "native")))
    except (OSError, subprocess.CalledProcessError) as error:
        details = getattr(error, "stderr", "") or str(error)
        logger.warning("attention runs through torch: its kernel did not compile: %s", details)
        return None


def compile_library(compiler: str, directory: Path) -> Path:
    """Compile the kernel into `directory` unless it is there; safe against other processes."""
    target = directory / f"ragged_attention-{_key(compiler)}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(suffix=".so", dir=directory)
    os.close(handle)
    command = [compiler, *FLAGS, "-o", made, str(SOURCE), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        Path(made).replace(target)
    finally:
        Path(made).unlink(missing_ok=True)
    return target


def _key(compiler: str) -> str:
    """Names the source, the compiler and the processor: what the machine code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    parts = [SOURCE.read_text("utf-8"), " ".join(FLAGS), version.stdout, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Model and instruction sets of this processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(
        sorted({line for line in lines if line.startswith(wanted)}) or [platform.processor()]
    )
