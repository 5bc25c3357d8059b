# SPDX-License-Identifier: Apache-2.0
"""fp8 e4m3 in integer arithmetic, so that one kernel serves every target (sm_80 has no fp8 casts).

Bytes are those of torch.float8_e4m3fn. Encoding rounds to nearest even and saturates at ±448.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(byte):
    """uint8 e4m3 → float16, exact: the 7 magnitude bits become a float16 that is 2^8 too small."""
    bits = byte.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode_e4m3(x):
    """float32 → uint8 e4m3. Values below 2^-6 are rounded by adding 2^14, whose ulp is 2^-9."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    mag_bits = magnitude.to(tl.uint32, bitcast=True)
    rounded = (mag_bits + 0x7FFFF + ((mag_bits >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, small, normal)
    return (sign | code).to(tl.uint8)
