# SPDX-License-Identifier: Apache-2.0
"""The ops of one decode step as torch custom ops that export to nodes of the ONNX domain `dspark`.

Functional twins of `ops`: pages go in and come out, so that order is data flow. They have shapes
but no implementation in torch: they exist to be traced. Knows schemas, not models or bodies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trtllm_dspark.errors import EngineError

DOMAIN = "dspark"
DOMAIN_VERSION = 1
FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
INTS = ["tensor(int32)", "tensor(int64)"]

# name → (inputs as "name:type variable", outputs, attributes as "name:type")
SCHEMAS: dict[str, tuple[str, str, str]] = {
    "kv_append_": (
        "kv_pages:T qkv:T rope:F slots:L q_norm:T k_norm:T",
        "q:T new_pages:T",
        "num_heads:INT num_kv_heads:INT head_dim:INT has_norm:INT eps:FLOAT",
    ),
    "ragged_verify_attention": (
        "q:T kv_pages:T page_table:I cu_query_lens:I context_lens:I query_offsets:I slots:L",
        "partials:F lse:F",
        "scale:FLOAT is_causal:INT",
    ),
    "ragged_verify_reduce": ("partials:F lse:F cu_query_lens:I context_lens:I like:T", "out:T", ""),
    "markov_tile": ("base_logits:T features:T w2:T", "tile_logits:F tile_ids:I tile_mass:F", ""),
    "markov_select": ("tile_logits:F tile_ids:I", "token_ids:I", ""),
    "select_drafts": (
        "survivals:F capacity:I caps:I anchor_ids:I anchor_positions:I draft_ids:I",
        "verify_lens:I cu_query_lens:I token_ids:I positions:I row_requests:I",
        "num_drafts:INT max_requests:INT rung:INT",
    ),
    "accept_drafts": (
        "logits:T thresholds:F scales:F cu_rows:I draft_ids:I draft_lens:I draft_probs:Q "
        "draft_stats:F draft_thresholds:F sampled:B rules:I accept_uniforms:L final_uniforms:L "
        "seeds:L anchor_positions:L",
        "accepted_lens:I next_token_ids:I dropped_accept_probs:F",
        "vocab_size:INT num_drafts:INT draft_form:INT has_thresholds:INT has_coupled:INT",
    ),
}
"""Every node of the domain; `query_offsets` [Q] = 0..Q−1 carries the longest query by its length,
the attention's `slots` [N] the number of rows (q would do; but all layers share the slots).

markov_tile also stands for its own kernel's tiles: [R, tiles]; the function bodies use one tile.
select_drafts and accept_drafts have the plugins' inputs and attributes (`export_round_ops`);
uniforms are int64: their 53 bits.
"""
TYPES = {
    "T": FLOATS,
    "Q": FLOATS,
    "F": ["tensor(float)"],
    "I": ["tensor(int32)"],
    "L": ["tensor(int64)"],
    "B": ["tensor(bool)"],
}


def _only_traced(name: str) -> EngineError:
    return EngineError(f"{DOMAIN}::{name} has no torch implementation: export it, or use ops")


@torch.library.custom_op("dspark::kv_append", mutates_args=())
def kv_append(
    kv_pages: torch.Tensor,
    qkv: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, rotate and scatter N rows; returns (q [N, num_heads, head_dim], the new pages)."""
    raise _only_traced("kv_append")


@kv_append.register_fake
def _(
    kv_pages: torch.Tensor,
    qkv: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return qkv.new_empty((qkv.shape[0], num_heads, head_dim)), torch.empty_like(kv_pages)


@torch.library.custom_op("dspark::ragged_verify_attention", mutates_args=())
def ragged_verify_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    query_offsets: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q [N, heads, d]; returns float32 (partials [splits, N, heads, d], lse)."""
    raise _only_traced("ragged_verify_attention")


@ragged_verify_attention.register_fake
def _(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    query_offsets: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        q.new_empty((1, *q.shape), dtype=torch.float32),
        q.new_empty((1, *q.shape[:2]), dtype=torch.float32),
    )


@torch.library.custom_op("dspark::ragged_verify_reduce", mutates_args=())
def ragged_verify_reduce(
    partials: torch.Tensor,
    lse: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    like: torch.Tensor,
) -> torch.Tensor:
    """Combine the splits: [N, heads, d] in the dtype of `like`."""
    raise _only_traced("ragged_verify_reduce")


@ragged_verify_reduce.register_fake
def _(
    partials: torch.Tensor,
    lse: torch.Tensor,
    cu_query_lens: torch.Tensor,
    context_lens: torch.Tensor,
    like: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(like)


@torch.library.custom_op("dspark::markov_tile", mutates_args=())
def markov_tile(
    base_logits: torch.Tensor, features: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tile-wise arg-max of U_k + W2 f: (logits, ids int32, mass), each [R, tiles].

    The mass Σ exp(logit − the tile's largest) and the logits are float32.
    """
    raise _only_traced("markov_tile")


@markov_tile.register_fake
def _(
    base_logits: torch.Tensor, features: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (base_logits.shape[0], 1)
    return (
        base_logits.new_empty(shape, dtype=torch.float32),
        base_logits.new_empty(shape, dtype=torch.int32),
        base_logits.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op("dspark::markov_select", mutates_args=())
def markov_select(tile_logits: torch.Tensor, tile_ids: torch.Tensor) -> torch.Tensor:
    """The best tile's id, of equals the lowest: [R] int32."""
    raise _only_traced("markov_select")


@markov_select.register_fake
def _(tile_logits: torch.Tensor, tile_ids: torch.Tensor) -> torch.Tensor:
    return tile_ids.new_empty((tile_ids.shape[0],))


@functools.lru_cache(maxsize=1)
def register_schemas() -> Any:
    """Register the schemas with ONNX once and return the onnxscript opset of the domain."""
    import onnx.defs
    from onnxscript.values import Opset

    for name, (inputs, outputs, attributes) in SCHEMAS.items():
        types = {entry.split(":")[1] for entry in f"{inputs} {outputs}".split()}
        schema = onnx.defs.OpSchema(
            name,
            DOMAIN,
            DOMAIN_VERSION,
            inputs=[onnx.defs.OpSchema.FormalParameter(*e.split(":")) for e in inputs.split()],
            outputs=[onnx.defs.OpSchema.FormalParameter(*e.split(":")) for e in outputs.split()],
            type_constraints=[(t, TYPES[t], "") for t in sorted(types)],
            attributes=[
                onnx.defs.OpSchema.Attribute(n, getattr(onnx.defs.OpSchema.AttrType, t))
                for n, t in (e.split(":") for e in attributes.split())
            ],
        )
        onnx.defs.register_schema(schema)
    return Opset(DOMAIN, DOMAIN_VERSION)


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Custom op → function that makes its ONNX node, for torch.onnx.export."""
    opset = register_schemas()

    def make_node(name: str, *names: str) -> Callable[..., Any]:
        """Tensor arguments become the node's inputs, the others its attributes."""
        count = len(SCHEMAS[name][0].split())

        def make(*inputs: Any, **attributes: Any) -> Any:
            values = _attributes(names, inputs[count:], attributes)
            return getattr(opset, name)(*inputs[:count], **values)

        return make

    ops = torch.ops.dspark
    return {
        ops.kv_append.default: make_node(
            "kv_append_", "num_heads", "num_kv_heads", "head_dim", "has_norm", "eps"
        ),
        ops.ragged_verify_attention.default: make_node(
            "ragged_verify_attention", "scale", "is_causal"
        ),
        ops.ragged_verify_reduce.default: make_node("ragged_verify_reduce"),
        ops.markov_tile.default: make_node("markov_tile"),
        ops.markov_select.default: make_node("markov_select"),
    }


def _attributes(
    names: tuple[str, ...], positional: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    values = {**dict(zip(names, positional, strict=False)), **named}
    return {name: int(v) if isinstance(v, bool) else v for name, v in values.items()}
