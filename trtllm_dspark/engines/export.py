# SPDX-License-Identifier: Apache-2.0
"""Exports a target (with taps) and a drafter to ONNX, once, dynamic in rows, requests and pages.

With the function bodies the file is whole (ONNX Runtime, TensorRT-RTX); without them the nodes of
the domain `dspark` are left to TensorRT plugins. Weights lie beside the file as external data.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trtllm_dspark.config import DrafterConfig, ModelConfig
from trtllm_dspark.engines import export_ops
from trtllm_dspark.engines.export_modules import ExportedDrafter, ExportedTarget
from trtllm_dspark.engines.export_plugin_nodes import use_plugins
from trtllm_dspark.engines.graph_names import pages_in, pages_out
from trtllm_dspark.engines.onnx_functions import OPSET, FunctionShape, append_functions
from trtllm_dspark.errors import EngineError
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.linear import Linear

TARGET_INPUTS = (
    "token_ids",
    "positions",
    "slots",
    "cu_query_lens",
    "context_lens",
    "page_table",
    "query_offsets",
    "logit_rows",
)
"""All int32 but `slots` (int64); pages follow as kv_pages_0..; all of them in the models' order."""
DRAFTER_INPUTS = (
    "taps",
    "row_positions",
    "row_slots",
    "anchor_ids",
    "anchor_positions",
    "page_table",
)
_DIMS: dict[str, tuple[str, ...]] = {
    "token_ids": ("num_rows",),
    "positions": ("num_rows",),
    "slots": ("num_rows",),
    "cu_query_lens": ("num_prefix_sums",),
    "context_lens": ("num_requests",),
    "page_table": ("num_requests", "table_width"),
    "query_offsets": ("query_len",),
    "logit_rows": ("num_logit_rows",),
    "taps": ("num_context_rows",),
    "row_positions": ("num_context_rows",),
    "row_slots": ("num_context_rows",),
    "anchor_ids": ("num_requests",),
    "anchor_positions": ("num_requests",),
}


@dataclass(frozen=True)
class PageShape:
    """Pages of one model: [num_pages, page_size, 2, num_kv_heads, head_dim] per layer."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def export_target(
    model: TargetModel,
    path: Path,
    tap_layers: tuple[int, ...] = (),
    *,
    page_size: int,
    with_functions: bool = True,
    max_query_len: int = 8,
) -> Path:
    """Write `path` (and `path`.data): logits, taps and pages of one packed ragged call.

    `max_query_len` (γ+1) only steers the plugins' tiles; longer queries run too.
    """
    _require_unpacked(model, "the target")
    config, like = model.config, model.embed_tokens.weight
    pages = PageShape(config.num_layers, page_size, config.num_kv_heads, config.head_dim)
    arguments = (
        _ints(9, like),
        _ints(9, like),
        _ints(9, like).long(),
        torch.tensor([0, 3, 5, 9], dtype=torch.int32, device=like.device),
        _ints(3, like),
        _ints((3, 5), like),
        torch.arange(4, dtype=torch.int32, device=like.device),
        _ints(6, like),
    )
    outputs = ["logits", *(["taps"] if tap_layers else [])]
    proto = _export(
        ExportedTarget(model, tap_layers), arguments, TARGET_INPUTS, outputs, pages, like.dtype
    )
    shape = _function_shape(config, like.dtype, page_size, is_causal=True)
    return _write(proto, path, shape, with_functions, (max_query_len, 1))


def _function_shape(
    config: ModelConfig | DrafterConfig, dtype: torch.dtype, page_size: int, *, is_causal: bool
) -> FunctionShape:
    """What the function bodies of one graph are made for."""
    return FunctionShape(
        dtype=str(dtype).removeprefix("torch."),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        has_norm=config.qk_norm,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        is_causal=is_causal,
    )


def export_drafter(
    model: DSparkModel,
    path: Path,
    *,
    page_size: int,
    with_functions: bool = True,
    max_requests: int = 16,
) -> Path:
    """Write `path` (and `path`.data): context append and one greedy block per request.

    `max_requests` only steers the plugins' tiles; more requests run too.
    """
    _require_unpacked(model, "the drafter")
    config, like = model.config, model.fc.weight
    pages = PageShape(config.num_layers, page_size, config.num_kv_heads, config.head_dim)
    width = len(config.target_layer_ids) * config.target_hidden_size
    arguments = (
        torch.zeros((7, width), dtype=like.dtype, device=like.device),
        _ints(7, like),
        _ints(7, like).long(),
        _ints(3, like),
        _ints(3, like),
        _ints((3, 5), like),
    )
    proto = _export(
        ExportedDrafter(model, page_size),
        arguments,
        DRAFTER_INPUTS,
        ["token_ids", "confidence_logits"],
        pages,
        like.dtype,
    )
    shape = _function_shape(config, like.dtype, page_size, is_causal=False)
    return _write(proto, path, shape, with_functions, (model.block_len, max_requests))


def _ints(shape: int | tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)


def _require_unpacked(model: nn.Module, what: str) -> None:
    if any(isinstance(m, Linear) and m._packed is not None for m in model.modules()):
        raise EngineError(
            f"{what} has weights packed for this machine's CPU: load it without packing to export"
        )


def _export(
    module: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    names: Sequence[str],
    outputs: list[str],
    pages: PageShape,
    dtype: torch.dtype,
) -> Any:
    dims = {name: torch.export.Dim(name) for names_ in _DIMS.values() for name in names_}
    num_pages = torch.export.Dim("num_pages")
    page_shape = (11, pages.page_size, 2, pages.num_kv_heads, pages.head_dim)
    buffers = [
        torch.zeros(page_shape, dtype=dtype, device=arguments[0].device)
        for _ in range(pages.num_layers)
    ]
    dynamic = [{i: dims[d] for i, d in enumerate(_DIMS[name])} for name in names]
    layers = range(pages.num_layers)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            module.eval(),
            (*arguments, buffers),
            dynamo=True,
            input_names=[*names, *(pages_in(i) for i in layers)],
            output_names=[*outputs, *(pages_out(i) for i in layers)],
            dynamic_shapes=(*dynamic, [{0: num_pages} for _ in layers]),
            custom_translation_table=export_ops.translation_table(),
            opset_version=OPSET,
            verbose=False,
        )
    if program is None:
        raise EngineError("torch.onnx.export returned nothing: this torch cannot export to ONNX")
    return program


def _write(
    program: Any,
    path: Path,
    shape: FunctionShape,
    with_functions: bool,
    tile_sizes: tuple[int, int],
) -> Path:
    """Save with external weights, then rewrite the small proto with or without the bodies.

    `tile_sizes`: longest query and most requests that the plugins' tiles are made for.
    """
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(str(path), external_data=True)
    model = onnx.load(str(path), load_external_data=False)
    del model.graph.value_info[:]
    append_functions(model, shape)
    if not with_functions:
        use_plugins(model, shape, *tile_sizes)
    path.write_bytes(model.SerializeToString())
    return path
