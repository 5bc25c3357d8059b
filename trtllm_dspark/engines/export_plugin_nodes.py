# SPDX-License-Identifier: Apache-2.0
"""Turns the paged ops of an exported graph into nodes that TensorRT's parser makes plugins of.

The plugins read query lengths on the device and update pages in place; their nodes have other
inputs, attributes and output order than the bodies need. Markov nodes keep their bodies.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from trtllm_dspark.engines.export_ops import DOMAIN
from trtllm_dspark.engines.graph_names import PLUGIN_OPS
from trtllm_dspark.engines.onnx_functions import FunctionShape

NUM_SPLITS = 8
"""Splits of a request's K/V rows: partial results are outputs, so their number is fixed."""
SCALES = "dspark_kv_scales"
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def use_plugins(model: onnx.ModelProto, shape: FunctionShape, max_query_len: int) -> None:
    """Rewrite the nodes of PLUGIN_OPS in place, drop their bodies and inputs without a reader."""
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in PLUGIN_OPS:
            continue
        inputs, attributes = _plugin_form(node, shape, max_query_len)
        if node.op_type == "kv_append_":
            node.output[:] = [node.output[1], node.output[0]]
        node.input[:] = inputs
        del node.attribute[:]
        node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    scales = helper.make_tensor(SCALES, onnx.TensorProto.FLOAT, [2], [1.0, 1.0])
    model.graph.initializer.append(scales)
    kept = [f for f in model.functions if f.name not in PLUGIN_OPS]
    del model.functions[:]
    model.functions.extend(kept)
    _drop_unread_inputs(model)


def _plugin_form(
    node: Any, shape: FunctionShape, max_query_len: int
) -> tuple[list[str], dict[str, Any]]:
    """Inputs and attributes in the plugin's order."""
    heads = {"num_heads": shape.num_heads, "head_dim": shape.head_dim}
    grouped = {**heads, "num_kv_heads": shape.num_kv_heads}
    if node.op_type == "kv_append_":
        attributes = {**grouped, "eps": shape.eps, "has_norm": int(shape.has_norm)}
        return [*node.input, SCALES], attributes
    splits = {"window": 0, "num_splits": NUM_SPLITS}
    if node.op_type == "ragged_verify_reduce":
        return list(node.input[:4]), {**heads, **splits, "out_type": _SHORT[shape.dtype]}
    attributes = {
        **grouped,
        **splits,
        "page_size": shape.page_size,
        "scale": shape.scale,
        "is_causal": int(shape.is_causal),
        "max_query_len": max_query_len,
    }
    return [*node.input[:5], SCALES], attributes


def _drop_unread_inputs(model: onnx.ModelProto) -> None:
    read = {name for node in model.graph.node for name in node.input}
    kept = [value for value in model.graph.input if value.name in read]
    del model.graph.input[:]
    model.graph.input.extend(kept)
