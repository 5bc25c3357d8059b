# SPDX-License-Identifier: Apache-2.0
"""ONNX function bodies of the `dspark` nodes, specialised to one exported file.

Ragged attention is padded attention with a gather before and after it. One split, one vocabulary
tile: the partial outputs that the kernels need are there in shape only.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx.parser

from trtllm_dspark.engines.export_ops import DOMAIN, DOMAIN_VERSION

OPSET = 20
_DTYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
FLOAT, INT32, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64


@dataclass(frozen=True)
class FunctionShape:
    """What the bodies of one file are specialised to."""

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    has_norm: bool
    eps: float
    scale: float
    is_causal: bool


def build_functions(shape: FunctionShape) -> list[onnx.FunctionProto]:
    """The body of every node type of the domain."""
    texts = [
        _kv_append(shape),
        _attention(shape),
        _reduce(shape),
        _markov_tile(),
        _MARKOV_SELECT,
    ]
    header = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n'
    return [onnx.parser.parse_function(header + text) for text in texts]


def append_functions(model: onnx.ModelProto, shape: FunctionShape) -> None:
    """Make `model` whole without plugins: append the bodies of the nodes it uses."""
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    model.functions.extend(f for f in build_functions(shape) if f.name in used)
    if DOMAIN not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION))


def _kv_append(s: FunctionShape) -> str:
    dtype, half = _DTYPES[s.dtype], s.head_dim // 2
    lines = [
        f"rows_shape = Constant <value_ints = [-1, {s.num_heads + 2 * s.num_kv_heads}, "
        f"{s.head_dim}]> ()",
        "rows = Reshape (qkv, rows_shape)",
        f"sizes = Constant <value_ints = [{s.num_heads}, {s.num_kv_heads}, {s.num_kv_heads}]> ()",
        "q_rows, k_rows, v = Split <axis = 1> (rows, sizes)",
        "zero = Constant <value_int = 0> ()",
        "one = Constant <value_int = 1> ()",
        "axis = Constant <value_ints = [1]> ()",
        "last = Constant <value_ints = [-1]> ()",
        f"halves = Constant <value_ints = [{half}, {half}]> ()",
        f"eps = Constant <value_float = {s.eps}> ()",
        "cos_rows = Gather <axis = 1> (rope, zero)",
        "sin_rows = Gather <axis = 1> (rope, one)",
        "cos = Unsqueeze (cos_rows, axis)",
        "sin = Unsqueeze (sin_rows, axis)",
    ]
    for name, weight in (("q", "q_norm"), ("k", "k_norm")):
        lines.append(f"{name}_wide = Cast <to = {FLOAT}> ({name}_rows)")
        source = f"{name}_wide"
        if s.has_norm:
            lines += [
                f"{name}_square = Mul ({source}, {source})",
                f"{name}_mean = ReduceMean <keepdims = 1> ({name}_square, last)",
                f"{name}_safe = Add ({name}_mean, eps)",
                f"{name}_rms = Sqrt ({name}_safe)",
                f"{name}_unit = Div ({source}, {name}_rms)",
                f"{name}_cast = Cast <to = {dtype}> ({name}_unit)",
                f"{name}_scaled = Mul ({name}_cast, {weight})",
                f"{name}_normed = Cast <to = {FLOAT}> ({name}_scaled)",
            ]
            source = f"{name}_normed"
        lines += [
            f"{name}_low, {name}_high = Split <axis = -1> ({source}, halves)",
            f"{name}_a = Mul ({name}_low, cos)",
            f"{name}_b = Mul ({name}_high, sin)",
            f"{name}_c = Mul ({name}_high, cos)",
            f"{name}_d = Mul ({name}_low, sin)",
            f"{name}_new_low = Sub ({name}_a, {name}_b)",
            f"{name}_new_high = Add ({name}_c, {name}_d)",
            f"{name}_turned = Concat <axis = -1> ({name}_new_low, {name}_new_high)",
        ]
    lines += [
        f"q = Cast <to = {dtype}> (q_turned)",
        f"k = Cast <to = {dtype}> (k_turned)",
        "k_one = Unsqueeze (k, axis)",
        "v_one = Unsqueeze (v, axis)",
        "updates = Concat <axis = 1> (k_one, v_one)",
        f"flat_shape = Constant <value_ints = [-1, 2, {s.num_kv_heads}, {s.head_dim}]> ()",
        "flat = Reshape (kv_pages, flat_shape)",
        "indices = Unsqueeze (slots, axis)",
        "written = ScatterND (flat, indices, updates)",
        f"pages_shape = Constant <value_ints = [-1, {s.page_size}, 2, {s.num_kv_heads}, "
        f"{s.head_dim}]> ()",
        "new_pages = Reshape (written, pages_shape)",
    ]
    return _function(
        "kv_append_ (kv_pages, qkv, rope, slots, q_norm, k_norm) => (q, new_pages)", lines
    )


ROW_OWNER = f"""
row_column = Unsqueeze (row_ids, second)
is_passed = LessOrEqual (ends, row_column)
passed = Cast <to = {INT64}> (is_passed)
owner = ReduceSum <keepdims = 0> (passed, second)
last_request = Sub (num_requests, one)
is_row = Less (owner, num_requests)
request = Min (owner, last_request)
""".strip()
"""`request` of every row, and `is_row`: false on rows of no request, which are given the last one.

Reads `row_ids`, `ends` (exclusive sums), `num_requests` and the constants `one` and `second` = [1].
"""
_LENGTHS = f"""
cu = Cast <to = {INT64}> (cu_query_lens)
contexts = Cast <to = {INT64}> (context_lens)
offsets = Cast <to = {INT64}> (query_offsets)
zero = Constant <value_int = 0> ()
one = Constant <value_int = 1> ()
first = Constant <value_ints = [0]> ()
second = Constant <value_ints = [1]> ()
before_last = Constant <value_ints = [-1]> ()
far = Constant <value_ints = [9223372036854775807]> ()
starts = Slice (cu, first, before_last, first)
ends = Slice (cu, second, far, first)
lens = Sub (ends, starts)
starts_column = Unsqueeze (starts, second)
lens_column = Unsqueeze (lens, second)
contexts_column = Unsqueeze (contexts, second)
rows_of_call = Shape (slots)
num_rows = Gather <axis = 0> (rows_of_call, zero)
last_row = Sub (num_rows, one)
"""
_GATHER_QUERIES = """
wanted_rows = Add (starts_column, offsets)
query_rows = Min (wanted_rows, last_row)
gathered = Gather <axis = 0> (q, query_rows)
grouped = Reshape (gathered, grouped_shape)
turned = Transpose <perm = [0, 2, 3, 1, 4]> (grouped)
queries = Reshape (turned, flat_queries_shape)
"""
_GATHER_KEYS = """
kv = Gather <axis = 0> (kv_pages, page_table)
kv_flat = Reshape (kv, kv_shape)
keys = Gather <axis = 2> (kv_flat, zero)
values = Gather <axis = 2> (kv_flat, one)
keys_turned = Transpose <perm = [0, 2, 3, 1]> (keys)
values_turned = Transpose <perm = [0, 2, 1, 3]> (values)
"""
_MASK = """
is_real = Less (offsets, lens_column)
own_position = Add (contexts_column, offsets)
no_offset = Mul (offsets, zero)
kv_lens_column = Add (contexts_column, lens_column)
last_key = Sub (kv_lens_column, one)
block_end = Add (last_key, no_offset)
last_seen = Where (is_real, {last_seen}, zero)
last_seen_column = Unsqueeze (last_seen, third)
table_shape = Shape (page_table)
table_width = Gather <axis = 0> (table_shape, one)
num_keys = Mul (table_width, page_size)
key_ids = Range (zero, num_keys, one)
seen = LessOrEqual (key_ids, last_seen_column)
seen_groups = Concat <axis = 1> ({copies})
seen_heads = Unsqueeze (seen_groups, second)
"""
_SOFTMAX = """
products = MatMul (queries, keys_turned)
products_wide = Cast <to = {wide}> (products)
scores = Mul (products_wide, scale)
masked = Where (seen_heads, scores, never)
probs_wide = Softmax <axis = -1> (masked)
probs = Cast <to = {dtype}> (probs_wide)
mixed = MatMul (probs, values_turned)
ungrouped = Reshape (mixed, ungrouped_shape)
untwisted = Transpose <perm = [0, 3, 1, 2, 4]> (ungrouped)
padded_rows = Reshape (untwisted, rows_shape)
"""
_SCATTER_BACK = """
row_ids = Range (zero, num_rows, one)
starts_shape = Shape (starts)
num_requests = Gather <axis = 0> (starts_shape, zero)
{row_owner}
own_start = Gather <axis = 0> (starts, request)
own_offset = Sub (row_ids, own_start)
offsets_shape = Shape (offsets)
query_len = Gather <axis = 0> (offsets_shape, zero)
last_offset = Sub (query_len, one)
offset = Min (own_offset, last_offset)
request_base = Mul (request, query_len)
padded_id = Add (request_base, offset)
result = Gather <axis = 0> (padded_rows, padded_id)
result_wide = Cast <to = {wide}> (result)
is_row_column = Unsqueeze (is_row, last_two)
kept = Where (is_row_column, result_wide, nothing)
partials = Unsqueeze (kept, first)
one_head = ReduceMax <keepdims = 0> (partials, last_axis)
lse = Mul (one_head, nothing)
"""


def _attention(s: FunctionShape) -> str:
    dtype, group = _DTYPES[s.dtype], s.num_heads // s.num_kv_heads
    heads, dim = s.num_kv_heads, s.head_dim
    ints = {
        "third": "[2]",
        "last_two": "[1, 2]",
        "last_axis": "[-1]",
        "grouped_shape": f"[0, 0, {heads}, {group}, {dim}]",
        "flat_queries_shape": f"[0, {heads}, -1, {dim}]",
        "kv_shape": f"[0, -1, 2, {heads}, {dim}]",
        "ungrouped_shape": f"[0, {heads}, {group}, -1, {dim}]",
        "rows_shape": f"[-1, {s.num_heads}, {dim}]",
    }
    lines = [f"{name} = Constant <value_ints = {value}> ()" for name, value in ints.items()]
    lines += [
        f"page_size = Constant <value_int = {s.page_size}> ()",
        f"scale = Constant <value_float = {s.scale}> ()",
        "never = Constant <value_float = -1.0e30> ()",
        "nothing = Constant <value_float = 0.0> ()",
    ]
    mask = _MASK.format(
        last_seen="own_position" if s.is_causal else "block_end", copies=", ".join(["seen"] * group)
    )
    softmax = _SOFTMAX.format(wide=FLOAT, dtype=dtype)
    back = _SCATTER_BACK.format(wide=FLOAT, row_owner=ROW_OWNER)
    for text in (_LENGTHS, _GATHER_QUERIES, _GATHER_KEYS, mask, softmax, back):
        lines += text.strip().splitlines()
    signature = (
        "ragged_verify_attention (q, kv_pages, page_table, cu_query_lens, context_lens, "
        "query_offsets, slots) => (partials, lse)"
    )
    return _function(signature, lines)


def _reduce(s: FunctionShape) -> str:
    return _function(
        "ragged_verify_reduce (partials, lse, cu_query_lens, context_lens, like) => (out)",
        [
            "split = Constant <value_ints = [0]> ()",
            "only = Squeeze (partials, split)",
            f"out = Cast <to = {_DTYPES[s.dtype]}> (only)",
        ],
    )


def _markov_tile() -> str:
    return _function(
        "markov_tile (base_logits, features, w2) => (tile_logits, tile_ids, tile_mass)",
        [
            f"base = Cast <to = {FLOAT}> (base_logits)",
            "w2_turned = Transpose <perm = [1, 0]> (w2)",
            "bias_narrow = MatMul (features, w2_turned)",
            f"bias = Cast <to = {FLOAT}> (bias_narrow)",
            "logits = Add (base, bias)",
            "axis = Constant <value_ints = [1]> ()",
            "tile_logits = ReduceMax <keepdims = 1> (logits, axis)",
            "best = ArgMax <axis = 1, keepdims = 1> (logits)",
            f"tile_ids = Cast <to = {INT32}> (best)",
            "below = Sub (logits, tile_logits)",
            "weights = Exp (below)",
            "tile_mass = ReduceSum <keepdims = 1> (weights, axis)",
        ],
    )


_MARKOV_SELECT = """markov_select (tile_logits, tile_ids) => (token_ids) {
best = ArgMax <axis = 1, keepdims = 1> (tile_logits)
axis = Constant <value_ints = [1]> ()
column = GatherElements <axis = 1> (tile_ids, best)
token_ids = Squeeze (column, axis)
}"""


def _function(signature: str, lines: list[str]) -> str:
    return signature + " {\n" + "\n".join(lines) + "\n}"
