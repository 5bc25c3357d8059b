# SPDX-License-Identifier: Apache-2.0
"""What the launchers share: checks of tensors that never synchronise, and the machine's size.

A launcher is a plan/run pair: `plan_*` may read host arrays, allocate and synchronise, `run_*` only
launches (it can be captured in a CUDA graph).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from dspark_plugins.heuristics import Machine

LOG2_E = math.log2(math.e)
INTERPRETED_MACHINE = Machine(num_sms=8, capability=90)
"""What plans assume when kernels run in the interpreter."""


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Multiprocessors and compute capability of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETED_MACHINE
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, 10 * properties.major + properties.minor)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operand type of tensor-core products: the activations' own.

    The interpreter multiplies bfloat16 as raw integers, so it gets (exactly) widened operands.
    """
    if dtype == torch.bfloat16:
        return tl.float32 if is_interpreting() else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


def require_tensor(
    name: str, x: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    """Refuse a tensor that is not contiguous or not of this shape and one of these dtypes."""
    if tuple(x.shape) != shape or x.dtype not in dtypes or not x.is_contiguous():
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} is {tuple(x.shape)} {x.dtype} with strides {x.stride()}: it must be "
            f"a contiguous {shape} of {allowed}"
        )


def page_bytes(kv_pages: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Pages as the kernels take them: float8_e4m3fn as bytes, and whether they are fp8."""
    if kv_pages.dtype == torch.float8_e4m3fn:
        return kv_pages.view(torch.uint8), True
    return kv_pages, False
