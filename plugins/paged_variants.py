# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the paged kernels that are compiled ahead of time.

Importing this file imports the kernels, hence Triton-language; it needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton.language as tl
from dspark_plugins.heuristics import SPLIT_ALIGN, choose_attention_tiles, next_power_of_2
from dspark_plugins.kernel_variant import QWEN3_8B, SMOLLM2, HeadSpec, KernelVariant
from dspark_plugins.kernels.kv_append import kv_append_kernel
from dspark_plugins.kernels.ragged_attention import (
    ragged_verify_attention_kernel,
    ragged_verify_reduce_kernel,
)


def list_paged_variants() -> list[KernelVariant]:
    """Every specialisation of `kv_append_` and the attention pair, in a fixed order."""
    return [*_kv_append_variants(), *_attention_variants(), *_reduce_variants()]


def _kv_append_variants() -> Iterator[KernelVariant]:
    for heads, has_norm, is_fp8 in (
        (SMOLLM2, False, False),
        (QWEN3_8B, True, False),
        (QWEN3_8B, True, True),
    ):
        types = {
            "kv_pages_in_ptr": "*u8" if is_fp8 else "*bf16",
            "qkv_ptr": "*bf16",
            "rope_ptr": "*fp32",
            "slots_ptr": "*i64",
            "q_norm_ptr": "*bf16",
            "k_norm_ptr": "*bf16",
            "kv_scales_ptr": "*fp32",
            "num_rows": "i32",
            "kv_pages_ptr": "*u8" if is_fp8 else "*bf16",
            "q_ptr": "*bf16",
        }
        constants = {
            "NUM_HEADS": heads.num_heads,
            "NUM_KV_HEADS": heads.num_kv_heads,
            "HEAD_DIM": heads.head_dim,
            "HAS_NORM": has_norm,
            "EPS": 1e-6,
            "IS_FP8": is_fp8,
            "BLOCK_HEADS": 16,
            "BLOCK_HALF": next_power_of_2(heads.head_dim // 2),
        }
        name = f"{heads.name}{'_fp8' if is_fp8 else ''}"
        yield KernelVariant("kv_append_", name, kv_append_kernel, types, constants)


ATTENTION_CASES: tuple[tuple[HeadSpec, int, bool, int, bool], ...] = (
    # heads, longest query, causal, window, fp8
    (SMOLLM2, 8, True, 0, False),
    (QWEN3_8B, 1, True, 0, False),
    (QWEN3_8B, 8, True, 0, False),
    (QWEN3_8B, 16, False, 2048, False),
    (QWEN3_8B, 512, True, 0, False),
    (QWEN3_8B, 8, True, 0, True),
    (QWEN3_8B, 512, True, 0, True),
)


def _attention_variants() -> Iterator[KernelVariant]:
    for heads, query_len, is_causal, window, is_fp8 in ATTENTION_CASES:
        groups: dict[Any, list[int]] = {}
        for capability in (80, 90, 100, 120):
            tiles = choose_attention_tiles(
                query_len,
                heads.num_heads // heads.num_kv_heads,
                heads.head_dim,
                capability,
                is_fp8=is_fp8,
            )
            groups.setdefault(tiles, []).append(capability)
        for tiles, capabilities in groups.items():
            kind = "causal" if is_causal else "block"
            suffix = f"{'_w' + str(window) if window else ''}{'_fp8' if is_fp8 else ''}"
            yield KernelVariant(
                "ragged_verify_attention",
                f"{heads.name}_{kind}_q{query_len}{suffix}",
                ragged_verify_attention_kernel,
                {
                    "q_ptr": "*bf16",
                    "kv_pages_ptr": "*u8" if is_fp8 else "*bf16",
                    "page_table_ptr": "*i32",
                    "cu_query_lens_ptr": "*i32",
                    "context_lens_ptr": "*i32",
                    "kv_scales_ptr": "*fp32",
                    "num_rows": "i32",
                    "num_requests": "i32",
                    "table_width": "i32",
                    "num_splits": "i32",
                    "partial_ptr": "*fp32",
                    "lse_ptr": "*fp32",
                },
                {
                    "NUM_HEADS": heads.num_heads,
                    "NUM_KV_HEADS": heads.num_kv_heads,
                    "HEAD_DIM": heads.head_dim,
                    "PAGE_SIZE": 32,
                    "SCALE_LOG2": heads.head_dim**-0.5 * 1.4426950408889634,
                    "IS_CAUSAL": is_causal,
                    "WINDOW": window,
                    "IS_FP8": is_fp8,
                    "SPLIT_ALIGN": SPLIT_ALIGN,
                    "DOT_DTYPE": tl.bfloat16,
                    "BLOCK_M": tiles.block_m,
                    "BLOCK_N": tiles.block_n,
                    "BLOCK_D": heads.head_dim,
                },
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                capabilities=tuple(capabilities),
            )


def _reduce_variants() -> Iterator[KernelVariant]:
    for heads in (SMOLLM2, QWEN3_8B):
        types = {
            "partial_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "cu_query_lens_ptr": "*i32",
            "context_lens_ptr": "*i32",
            "num_rows": "i32",
            "num_requests": "i32",
            "num_splits": "i32",
            "out_ptr": "*bf16",
        }
        constants = {
            "NUM_HEADS": heads.num_heads,
            "HEAD_DIM": heads.head_dim,
            "WINDOW": 0,
            "SPLIT_ALIGN": SPLIT_ALIGN,
            "BLOCK_H": 8,
            "BLOCK_D": heads.head_dim,
        }
        yield KernelVariant(
            "ragged_verify_reduce", heads.name, ragged_verify_reduce_kernel, types, constants
        )
