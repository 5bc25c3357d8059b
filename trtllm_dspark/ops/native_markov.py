# SPDX-License-Identifier: Apache-2.0
"""Native CPU kernel for a greedy draft slot: the arg-max of U + W2 f without reading all of W2.

It returns None where the kernel cannot run; the caller then adds up all logits with torch.
"""

from __future__ import annotations

import ctypes

import torch

from trtllm_dspark.ops import native_library

LANES = 16
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
# base, stride, features, w2, norms, out, peaks, num_rows, width, rank, num_threads
SIGNATURE = (_POINTER, _SIZE, *[_POINTER] * 5, _SIZE, _SIZE, _SIZE, ctypes.c_int32)
"""Parameters of the C function `markov_argmax`."""


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """[V, r] → ‖W2[v]‖ [V] float32, what `markov_argmax` bounds products with."""
    return torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)


def markov_argmax(
    base_logits: torch.Tensor, features: torch.Tensor, weight: torch.Tensor, norms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Token ids [R] int64 and their log-odds [R] float32.

    Ids: arg-max of float(U) + float(bf16(W2 f)), of equal sums the lowest. Log-odds are those
    among the tokens that were added up: at least those of `peak_log_odds`, which counts all.

    base_logits U [R, V] (rows may lie apart), features f [R, r], weight W2 [V, r], all bfloat16;
    norms [V] from `row_norms`. By Cauchy–Schwarz only tokens with U + ‖W2[v]‖ ‖f‖ ≥ the best sum
    so far are added up.
    """
    vocab_size, rank = weight.shape
    if weight.dtype != torch.bfloat16 or not native_library.takes(base_logits, features, weight):
        return None
    if vocab_size % LANES or rank % LANES or base_logits.stride(1) != 1:
        return None
    wide, weight = features.float().contiguous(), weight.contiguous()
    out = torch.empty(len(base_logits), dtype=torch.int64)
    peaks = torch.empty(len(base_logits), dtype=torch.float32)
    native_library.kernel("markov_argmax", SIGNATURE)(
        base_logits.data_ptr(),
        base_logits.stride(0),
        wide.data_ptr(),
        weight.data_ptr(),
        norms.data_ptr(),
        out.data_ptr(),
        peaks.data_ptr(),
        len(base_logits),
        vocab_size,
        rank,
        torch.get_num_threads(),
    )
    return out, peaks
