# SPDX-License-Identifier: Apache-2.0
"""What TensorRT must know of each op: inputs, attributes, outputs, and how its kernel is launched.

A table, no registration (see `tensorrt_plugins`). Dimensions are TensorRT's shape expressions, or
plain integers in tests. Attributes become compile-time constants of the kernel. An argument that a
variant never reads is still an input: pass any tensor of that type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl
from dspark_plugins import accept_drafts, filter_thresholds
from dspark_plugins.heuristics import (
    SPLIT_ALIGN,
    ceil_div,
    choose_attention_tiles,
    choose_vocabulary_tile,
    next_power_of_2,
)
from dspark_plugins.kernels.accept_drafts import accept_drafts_kernel
from dspark_plugins.kernels.filter_thresholds import filter_thresholds_kernel
from dspark_plugins.kernels.kv_append import kv_append_kernel
from dspark_plugins.kernels.markov_select import markov_select_kernel
from dspark_plugins.kernels.markov_tile import markov_tile_kernel
from dspark_plugins.kernels.ragged_attention import (
    ragged_verify_attention_kernel,
    ragged_verify_reduce_kernel,
)
from dspark_plugins.kernels.select_drafts import select_drafts_kernel
from dspark_plugins.kv_append import BLOCK_HEADS
from dspark_plugins.launch import LOG2_E

Dim = Any
"""A shape expression or an int."""
Attributes = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """Dimensions of an op's inputs, by name."""

    dims: dict[str, tuple[Dim, ...]]
    element_types: dict[str, str]
    """Triton-language element type of every input: bf16, fp16, i32, u8 (fp8), …"""
    capability: int
    tactic: int = 0


@dataclass(frozen=True)
class Output:
    """One output: aliased to an input, or a new tensor."""

    dims: tuple[Dim, ...] = ()
    element_type: str = ""
    aliased_to: str | None = None


@dataclass(frozen=True)
class Launch:
    """How the kernel is specialised and launched."""

    kernel: Any
    constants: dict[str, Any]
    grid: tuple[Dim, ...]
    integers: tuple[Dim, ...]
    """Run-time integer arguments, between inputs and outputs."""
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class OpSpec:
    """One op of the `dspark` domain."""

    name: str
    inputs: tuple[str, ...]
    attributes: dict[str, type]
    outputs: Callable[[Shapes, Attributes], list[Output]]
    launch: Callable[[Shapes, Attributes], Launch]
    io_types: str
    """TensorRT's type combinations over inputs and outputs."""
    tactics: tuple[int, ...] = ()


def divide_up(a: Dim, b: int) -> Dim:
    """⌈a / b⌉ of ints or shape expressions."""
    return ceil_div(a, b) if isinstance(a, int) else (a + (b - 1)) // b


_DOT_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
_HEADS: dict[str, type] = {"num_heads": int, "num_kv_heads": int, "head_dim": int}


def _kv_append_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    rows = shapes.dims["qkv"][0]
    q = Output((rows, a["num_heads"], a["head_dim"]), shapes.element_types["qkv"])
    return [Output(aliased_to="kv_pages"), q]


def _kv_append_launch(shapes: Shapes, a: Attributes) -> Launch:
    rows = shapes.dims["qkv"][0]
    constants = {
        "NUM_HEADS": a["num_heads"],
        "NUM_KV_HEADS": a["num_kv_heads"],
        "HEAD_DIM": a["head_dim"],
        "HAS_NORM": a["has_norm"],
        "EPS": a["eps"],
        "IS_FP8": shapes.element_types["kv_pages"] == "u8",
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": next_power_of_2(a["head_dim"] // 2),
    }
    all_heads = a["num_heads"] + 2 * a["num_kv_heads"]
    return Launch(kv_append_kernel, constants, (rows, ceil_div(all_heads, BLOCK_HEADS)), (rows,))


def _attention_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    cells = (a["num_splits"], shapes.dims["q"][0], a["num_heads"])
    return [Output((*cells, a["head_dim"]), "fp32"), Output(cells, "fp32")]


def _attention_launch(shapes: Shapes, a: Attributes) -> Launch:
    """Tactic 2 halves the K/V block: more programs fit a multiprocessor."""
    rows, requests = shapes.dims["q"][0], shapes.dims["context_lens"][0]
    q_per_kv = a["num_heads"] // a["num_kv_heads"]
    is_fp8 = shapes.element_types["kv_pages"] == "u8"
    tiles = choose_attention_tiles(
        a["max_query_len"], q_per_kv, a["head_dim"], shapes.capability, is_fp8=is_fp8
    )
    if shapes.tactic == 2:
        tiles = replace(tiles, block_n=max(tiles.block_n // 2, 16))
    constants = {
        "NUM_HEADS": a["num_heads"],
        "NUM_KV_HEADS": a["num_kv_heads"],
        "HEAD_DIM": a["head_dim"],
        "PAGE_SIZE": a["page_size"],
        "SCALE_LOG2": a["scale"] * LOG2_E,
        "IS_CAUSAL": a["is_causal"],
        "WINDOW": a["window"],
        "IS_FP8": is_fp8,
        "SPLIT_ALIGN": SPLIT_ALIGN,
        "DOT_DTYPE": _DOT_TYPES[shapes.element_types["q"]],
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": max(next_power_of_2(a["head_dim"]), 16),
    }
    num_tiles = rows // (tiles.block_m // q_per_kv) + requests
    return Launch(
        ragged_verify_attention_kernel,
        constants,
        (num_tiles, a["num_kv_heads"], a["num_splits"]),
        (rows, requests, shapes.dims["page_table"][1], a["num_splits"]),
        tiles.num_warps,
        tiles.num_stages,
    )


def _reduce_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    return [Output((shapes.dims["partial"][1], a["num_heads"], a["head_dim"]), a["out_type"])]


def _reduce_launch(shapes: Shapes, a: Attributes) -> Launch:
    rows, block_heads = shapes.dims["partial"][1], min(next_power_of_2(a["num_heads"]), 8)
    constants = {
        "NUM_HEADS": a["num_heads"],
        "HEAD_DIM": a["head_dim"],
        "WINDOW": a["window"],
        "SPLIT_ALIGN": SPLIT_ALIGN,
        "BLOCK_H": block_heads,
        "BLOCK_D": next_power_of_2(a["head_dim"]),
    }
    return Launch(
        ragged_verify_reduce_kernel,
        constants,
        (rows, ceil_div(a["num_heads"], block_heads)),
        (rows, shapes.dims["context_lens"][0], a["num_splits"]),
    )


def _num_tiles(a: Attributes) -> int:
    return ceil_div(a["vocab_size"], choose_vocabulary_tile(1, a["rank"]).num_tokens)


def _tile_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    requests = shapes.dims["scales"][0]
    cells = (requests, _num_tiles(a))
    logits = (requests, a["vocab_size"]) if a["stores_logits"] else (1, 1)
    kinds = ("fp32", "i32", "fp32", "fp32", "fp32", "fp32")
    return [*(Output(cells, kind) for kind in kinds), Output(logits, "fp32")]


def _tile_launch(shapes: Shapes, a: Attributes) -> Launch:
    requests, num_tiles = shapes.dims["scales"][0], _num_tiles(a)
    tile = choose_vocabulary_tile(a["max_requests"], a["rank"])
    constants = {
        "VOCAB": a["vocab_size"],
        "RANK": a["rank"],
        "HAS_HEAD": True,
        "HAS_NOISE": a["has_noise"],
        "STORE_LOGITS": a["stores_logits"],
        "WITH_PEAK": a["with_peak"],
        "DOT_DTYPE": _DOT_TYPES[shapes.element_types["w2"]],
        "BLOCK_R": tile.num_requests,
        "BLOCK_V": tile.num_tokens,
        "BLOCK_K": min(max(next_power_of_2(a["rank"]), 16), 64),
    }
    return Launch(
        markov_tile_kernel,
        constants,
        (divide_up(requests, tile.num_requests), num_tiles),
        (requests, num_tiles, 1, 0, a["slot"]),
        tile.num_warps,
    )


def _select_slot_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    requests = shapes.dims["scales"][0]
    features = Output((requests, a["rank"]), shapes.element_types["w1"])
    per_request = Output((requests,), "fp32")
    ids = Output((requests,), "i32")
    return [ids, features, ids, per_request, per_request, Output((requests, 2), "fp32")]


def _select_slot_launch(shapes: Shapes, a: Attributes) -> Launch:
    constants = {
        "HIDDEN": a["hidden_size"],
        "RANK": a["rank"],
        "HAS_HEAD": True,
        "HAS_CONFIDENCE": a["hidden_size"] > 0,
        "WITH_MARKOV": a["with_markov"],
        "WITH_PEAK": a["with_peak"] or not a["hidden_size"],
        "BLOCK_T": next_power_of_2(_num_tiles(a)),
        "BLOCK_H": 1024,
        "BLOCK_K": next_power_of_2(a["rank"]),
    }
    requests = shapes.dims["scales"][0]
    return Launch(markov_select_kernel, constants, (requests,), (_num_tiles(a), 1, 0))


def _select_drafts_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    requests = shapes.dims["caps"][0]
    rows = Output((a["rung"],), "i32")
    return [Output((requests,), "i32"), Output((requests + 1,), "i32"), rows, rows, rows]


def _select_drafts_launch(shapes: Shapes, a: Attributes) -> Launch:
    drafts, requests = a["num_drafts"], next_power_of_2(a["max_requests"])
    constants = {
        "NUM_DRAFTS": drafts,
        "BLOCK_DRAFTS": next_power_of_2(drafts),
        "BLOCK_REQUESTS": requests,
        "BLOCK_ROWS": 1024,
    }
    warps = min(max(requests * next_power_of_2(drafts) // 1024, 4), 16)
    integers = (shapes.dims["caps"][0], a["rung"])
    return Launch(select_drafts_kernel, constants, (1,), integers, warps)


def _accept_outputs(shapes: Shapes, a: Attributes) -> list[Output]:
    requests = (shapes.dims["scales"][0],)
    return [Output(requests, "i32"), Output(requests, "i32"), Output(requests, "fp32")]


def _accept_launch(shapes: Shapes, a: Attributes) -> Launch:
    requests = shapes.dims["scales"][0]
    constants = {
        "VOCAB": a["vocab_size"],
        "NUM_DRAFTS": a["num_drafts"],
        "HAS_THRESHOLDS": a["has_thresholds"],
        "HAS_COUPLED": a["has_coupled"],
        "DRAFT_FORM": a["draft_form"],
        "BLOCK": accept_drafts.BLOCK_TOKENS,
    }
    warps = accept_drafts.NUM_WARPS
    return Launch(accept_drafts_kernel, constants, (requests,), (requests,), warps)


def _filter_launch(shapes: Shapes, a: Attributes) -> Launch:
    rows = shapes.dims["logits"][0]
    constants = {
        "VOCAB": a["vocab_size"],
        "BLOCK": filter_thresholds.BLOCK_TOKENS,
        "BLOCK_MASS": filter_thresholds.BLOCK_MASS_TOKENS,
        "FAN": filter_thresholds.NUM_PIVOTS,
    }
    warps = filter_thresholds.NUM_WARPS
    return Launch(filter_thresholds_kernel, constants, (rows,), (rows,), warps)


OPS: tuple[OpSpec, ...] = (
    OpSpec(
        "kv_append_",
        ("kv_pages", "qkv", "rope", "slots", "q_norm", "k_norm", "kv_scales"),
        {**_HEADS, "eps": float, "has_norm": bool},
        _kv_append_outputs,
        _kv_append_launch,
        "BF16|HALF|FP8, BF16|HALF|BF16, FP32, INT64, BF16|HALF|BF16, BF16|HALF|BF16, FP32, "
        "BF16|HALF|FP8, BF16|HALF|BF16",
    ),
    OpSpec(
        "ragged_verify_attention",
        ("q", "kv_pages", "page_table", "cu_query_lens", "context_lens", "kv_scales"),
        {
            **_HEADS,
            "page_size": int,
            "scale": float,
            "is_causal": bool,
            "window": int,
            "num_splits": int,
            "max_query_len": int,
        },
        _attention_outputs,
        _attention_launch,
        "BF16|HALF|BF16, BF16|HALF|FP8, INT32, INT32, INT32, FP32, FP32, FP32",
        tactics=(1, 2),
    ),
    OpSpec(
        "ragged_verify_reduce",
        ("partial", "lse", "cu_query_lens", "context_lens"),
        {"num_heads": int, "head_dim": int, "window": int, "num_splits": int, "out_type": str},
        _reduce_outputs,
        _reduce_launch,
        "FP32, FP32, INT32, INT32, BF16*HALF",
    ),
    OpSpec(
        "markov_tile",
        (
            "base_logits",
            "features",
            "w2",
            "scales",
            "thresholds",
            "modes",
            "seeds",
            "anchor_positions",
        ),
        {
            "vocab_size": int,
            "rank": int,
            "max_requests": int,
            "slot": int,
            "has_noise": bool,
            "stores_logits": bool,
            "with_peak": bool,
        },
        _tile_outputs,
        _tile_launch,
        "BF16*HALF*FP32, BF16|HALF, BF16|HALF, FP32, FP32, INT32, INT64, INT32, "
        "FP32, INT32, FP32, FP32, FP32, FP32, FP32",
    ),
    OpSpec(
        "markov_select",
        (
            "tile_scores",
            "tile_ids",
            "tile_logits",
            "tile_max",
            "tile_mass",
            "tile_plain_mass",
            "scales",
            "previous_ids",
            "hidden",
            "w1",
            "confidence_weight",
            "confidence_bias",
        ),
        {
            "vocab_size": int,
            "rank": int,
            "hidden_size": int,
            "with_markov": bool,
            "with_peak": bool,
        },
        _select_slot_outputs,
        _select_slot_launch,
        "FP32, INT32, FP32, FP32, FP32, FP32, FP32, INT32, BF16|HALF, BF16|HALF, BF16|HALF, "
        "BF16|HALF, INT32, BF16|HALF, INT32, FP32, FP32, FP32",
    ),
    OpSpec(
        "select_drafts",
        ("survivals", "capacity", "caps", "anchor_ids", "anchor_positions", "draft_ids"),
        {"num_drafts": int, "max_requests": int, "rung": int},
        _select_drafts_outputs,
        _select_drafts_launch,
        "FP32, INT32, INT32, INT32, INT32, INT32, INT32, INT32, INT32, INT32, INT32",
    ),
    OpSpec(
        "accept_drafts",
        (
            "logits",
            "thresholds",
            "scales",
            "cu_rows",
            "draft_ids",
            "draft_lens",
            "draft_probs",
            "draft_stats",
            "draft_thresholds",
            "sampled",
            "rules",
            "accept_uniforms",
            "final_uniforms",
            "seeds",
            "anchor_positions",
        ),
        {
            "vocab_size": int,
            "num_drafts": int,
            "draft_form": int,
            "has_thresholds": bool,
            "has_coupled": bool,
        },
        _accept_outputs,
        _accept_launch,
        "FP32*BF16*HALF, FP32, FP32, INT32, INT32, INT32, FP32, FP32, FP32, BOOL, INT32, INT64, "
        "INT64, INT64, INT64, INT32, INT32, FP32",
    ),
    OpSpec(
        "filter_thresholds",
        ("logits", "scales", "top_k", "top_p", "min_p"),
        {"vocab_size": int},
        lambda shapes, a: [Output((shapes.dims["logits"][0],), "fp32")],
        _filter_launch,
        "FP32*BF16*HALF, FP32, INT32, FP32, FP32, FP32",
    ),
)
