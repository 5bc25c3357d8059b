# SPDX-License-Identifier: Apache-2.0
"""Turns the ops of an exported graph into nodes that TensorRT's parser makes plugins of.

The plugins read query lengths on the device and update pages in place, and the Markov pair can
sample; their nodes have other inputs, attributes and outputs than the bodies need.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from trtllm_dspark.engines.export_ops import DOMAIN
from trtllm_dspark.engines.graph_names import PLUGIN_OPS
from trtllm_dspark.engines.onnx_functions import FunctionShape
from trtllm_dspark.errors import EngineError

NUM_SPLITS = 8
"""Splits of a request's K/V rows: partial results are outputs, so their number is fixed."""
SCALES = "dspark_kv_scales"
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def use_plugins(
    model: onnx.ModelProto, shape: FunctionShape, max_query_len: int, max_requests: int
) -> None:
    """Rewrite the nodes of PLUGIN_OPS in place, drop their bodies and inputs without a reader.

    max_query_len and max_requests only steer the plugins' tiles.
    """
    markov = _MarkovNodes(model, max_requests)
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in PLUGIN_OPS:
            continue
        if node.op_type in ("markov_tile", "markov_select"):
            markov.rewrite(node)
        else:
            _rewrite_paged(node, shape, max_query_len)
    markov.add_inputs()
    scales = helper.make_tensor(SCALES, onnx.TensorProto.FLOAT, [2], [1.0, 1.0])
    model.graph.initializer.append(scales)
    kept = [f for f in model.functions if f.name not in PLUGIN_OPS]
    del model.functions[:]
    model.functions.extend(kept)
    _drop_unread_inputs(model)


def _rewrite_paged(node: Any, shape: FunctionShape, max_query_len: int) -> None:
    inputs, attributes = _plugin_form(node, shape, max_query_len)
    if node.op_type == "kv_append_":
        node.output[:] = [node.output[1], node.output[0]]
    node.input[:] = inputs
    _set_attributes(node, attributes)


def _set_attributes(node: Any, attributes: dict[str, Any]) -> None:
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())


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


class _MarkovNodes:
    """The greedy γ pairs as the plugins' nodes, which could also sample and rate what they chose.

    Confidence and W1's rows are nodes of the graph: of the select plugin only the token is read,
    and W2 [V, r], which has W1's shape, stands for every weight that is not.
    """

    PREFIX = "dspark_markov_"

    def __init__(self, model: onnx.ModelProto, max_requests: int) -> None:
        self._graph, self._max_requests = model.graph, max_requests
        self._sizes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
        self._read = {name for node in model.graph.node for name in node.input}
        self._tiles: dict[str, tuple[list[str], str]] = {}
        """Tile scores → (all outputs of their node, W2)."""

    def rewrite(self, node: Any) -> None:
        """Turn one node of the domain into the plugin's form."""
        if node.op_type == "markov_tile":
            self._rewrite_tile(node)
        else:
            self._rewrite_select(node)

    def _rewrite_tile(self, node: Any) -> None:
        base_logits, features, w2 = node.input
        scores, ids, plain_mass = node.output
        logits, largest, mass, stored = (
            f"{scores}_{name}" for name in ("logits", "max", "mass", "stored")
        )
        node.output[:] = [scores, ids, logits, largest, mass, plain_mass, stored]
        self._tiles[scores] = (list(node.output), w2)
        draws = [self.PREFIX + name for name in ("scales", "thresholds", "modes", "seeds")]
        node.input[:] = [base_logits, features, w2, *draws, "anchor_positions"]
        with_peak = int(plain_mass in self._read)
        greedy = {"slot": 0, "has_noise": 0, "stores_logits": 0, "with_peak": with_peak}
        _set_attributes(node, {**self._head(w2), "max_requests": self._max_requests, **greedy})

    def _rewrite_select(self, node: Any) -> None:
        tiles, w2 = self._tiles[node.input[0]]
        (token_ids,) = node.output
        unread = ("features", "ids", "probs", "confidence", "stats")
        node.output[:] = [token_ids, *(f"{token_ids}_{name}" for name in unread)]
        node.input[:] = [*tiles[:6], self.PREFIX + "scales", "anchor_ids", w2, w2, w2, w2]
        unused = {"hidden_size": 0, "with_markov": 0, "with_peak": 0}
        _set_attributes(node, {**self._head(w2), **unused})

    def _head(self, w2: str) -> dict[str, int]:
        if len(self._sizes.get(w2, ())) != 2:
            raise EngineError(
                f"W2 of the Markov head is {w2!r} in the exported graph and no [V, r] weight: "
                "install a version of torch that this package allows and export again"
            )
        return dict(zip(("vocab_size", "rank"), self._sizes[w2], strict=True))

    def add_inputs(self) -> None:
        """One value per request for everything a greedy draft does not depend on."""
        if not self._tiles:
            return
        shape, kinds = self.PREFIX + "shape", onnx.TensorProto
        fills = {
            "scales": (kinds.FLOAT, 1.0),
            "thresholds": (kinds.FLOAT, float("-inf")),
            "modes": (kinds.INT32, 0),
            "seeds": (kinds.INT64, 0),
        }
        nodes = [helper.make_node("Shape", ["anchor_ids"], [shape])]
        for name, (kind, value) in fills.items():
            fill = helper.make_tensor(f"{self.PREFIX}{name}_value", kind, [1], [value])
            nodes.append(
                helper.make_node("ConstantOfShape", [shape], [self.PREFIX + name], value=fill)
            )
        rest = [type(node).FromString(node.SerializeToString()) for node in self._graph.node]
        del self._graph.node[:]
        self._graph.node.extend([*nodes, *rest])


def _drop_unread_inputs(model: onnx.ModelProto) -> None:
    read = {name for node in model.graph.node for name in node.input}
    kept = [value for value in model.graph.input if value.name in read]
    del model.graph.input[:]
    model.graph.input.extend(kept)
