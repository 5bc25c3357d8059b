# SPDX-License-Identifier: Apache-2.0
"""Native CPU kernels for what lies between the products: RMSNorm, SwiGLU, rotary embedding, sums.

Each function returns None where the kernel cannot run; the caller then uses torch's operators,
which round at the same places.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from trtllm_dspark.ops import native_library

LANES = 16


class _RotateArguments(ctypes.Structure):
    """`RotateArguments` of the C file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "q_out", "kv_pages", "rope", "slots")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_heads", "num_kv_heads")),
        ("head_dim", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_bf16", "num_threads")),
    )


_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
SIGNATURES: dict[str, tuple[type, ...]] = {
    # x, weight, out, num_rows, width, eps, is_bf16, num_threads
    "rms_norm": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT, _INT, _INT),
    # x, out, num_rows, width, is_bf16, num_threads
    "swiglu": (_POINTER, _POINTER, _SIZE, _SIZE, _INT, _INT),
    # x, out, num_rows, width, block, num_threads
    "block_sums": (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT),
    "rotate_and_append": (ctypes.POINTER(_RotateArguments),),
}
"""Parameters of the C functions, which return nothing."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """As `ops.norm.rms_norm`."""
    width = x.shape[-1]
    if width % LANES or not native_library.takes(x, weight):
        return None
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _kernel("rms_norm")(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        eps,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def swiglu(x: torch.Tensor) -> torch.Tensor | None:
    """As `ops.swiglu.swiglu`."""
    width = x.shape[-1] // 2
    if width % LANES or not native_library.takes(x):
        return None
    x, out = x.contiguous(), torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    _kernel("swiglu")(
        x.data_ptr(),
        out.data_ptr(),
        x.numel() // (2 * width),
        width,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor | None:
    """As `ops.kv_append.apply_rope`."""
    num_rows, num_heads, dim = x.shape
    if dim % (2 * LANES) or not native_library.takes(x):
        return None
    return _rotate(x.contiguous(), rope, (num_rows, num_heads, 0, dim))


def kv_append_(
    kv_pages: torch.Tensor,
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    rope: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> torch.Tensor | None:
    """As `ops.kv_append.kv_append_`; heads: num_heads, num_kv_heads, head_dim."""
    if heads[2] % (2 * LANES) or not native_library.takes(qkv, kv_pages, *(norms or ())):
        return None
    shape = (len(qkv), *heads)
    return _rotate(
        qkv.contiguous(), rope, shape, kv_pages=kv_pages, slots=slots, norms=norms, eps=eps
    )


def block_sums(x: torch.Tensor, block: int) -> torch.Tensor | None:
    """As `ops.sample_tokens.block_sums`."""
    if x.dtype != torch.float32 or not native_library.takes(x):
        return None
    x = x.contiguous()
    out = torch.empty((len(x), -(-x.shape[1] // block)), dtype=torch.float64)
    _kernel("block_sums")(
        x.data_ptr(), out.data_ptr(), len(x), x.shape[1], block, torch.get_num_threads()
    )
    return out


def _rotate(
    x: torch.Tensor,
    rope: torch.Tensor,
    shape: tuple[int, int, int, int],
    *,
    kv_pages: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotated query heads [num_rows, num_heads, head_dim] of `shape`; K/V go to their slots."""
    num_rows, num_heads, num_kv_heads, dim = shape
    out = torch.empty((num_rows, num_heads, dim), dtype=x.dtype)
    rope = rope.contiguous()
    slots = None if slots is None else slots.contiguous()
    arguments = _RotateArguments(
        x.data_ptr(),
        out.data_ptr(),
        None if kv_pages is None else kv_pages.data_ptr(),
        rope.data_ptr(),
        None if slots is None else slots.data_ptr(),
        None if norms is None else norms[0].data_ptr(),
        None if norms is None else norms[1].data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        dim,
        eps,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    _kernel("rotate_and_append")(ctypes.byref(arguments))
    return out


def _kernel(name: str) -> Callable[..., None]:
    return native_library.kernel(name, SIGNATURES[name])
