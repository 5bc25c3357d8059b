# SPDX-License-Identifier: Apache-2.0
"""Equal nodes are computed once and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs onnx (extra rtx)")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra dev)")

from trtllm_dspark.engines.onnx_sharing import merge_equal_nodes, share_common_nodes  # noqa: E402

GRAPH = """
<ir_version: 9, opset_import: ["" : 20, "own" : 1]>
g (float[N] x, int64[1] axis) => (float[N] y, float[N] z) {
  a = Abs (x)
  b = Abs (x)
  c = Add (a, b)
  two = Constant <value_float = 2.0> ()
  also_two = Constant <value_float = 2.0> ()
  three = Constant <value_float = 3.0> ()
  d = Mul (c, two)
  e = Mul (c, also_two)
  f = Mul (c, three)
  low, high = own.twice (d)
  low2, high2 = own.twice (e)
  y = Add (low, f)
  z = Add (low2, f)
}
<domain: "own", opset_import: ["" : 20]>
twice (v) => (p, q) {
  p = Add (v, v)
  q = Neg (p)
}
"""


@pytest.fixture
def model():
    return onnx.parser.parse_model(GRAPH)


def run(model) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([-1.5, 0.25, 3.0], np.float32)
    return session.run(None, {"x": x, "axis": np.array([0])})


def test_functions_are_inlined_equal_nodes_merged_and_the_values_stay(model, tmp_path):
    onnx.save(model, str(tmp_path / "a.onnx"))
    shared = onnx.load(str(share_common_nodes(tmp_path / "a.onnx", tmp_path / "b.onnx")))
    kinds = [node.op_type for node in shared.graph.node]
    assert not shared.functions
    assert (kinds.count("Abs"), kinds.count("Constant"), kinds.count("Mul")) == (1, 2, 2)
    assert kinds.count("Neg") == 1
    for ours, theirs in zip(run(shared), run(model), strict=True):
        assert np.array_equal(ours, theirs)


def test_outputs_of_the_graph_keep_their_names_even_if_they_are_equal(model):
    assert merge_equal_nodes(model.graph) == 4
    assert [o.name for o in model.graph.output] == ["y", "z"]
    made = {name for node in model.graph.node for name in node.output}
    assert {"y", "z"} <= made
    onnx.checker.check_model(model)


def test_other_attributes_or_inputs_make_another_node(model):
    merge_equal_nodes(model.graph)
    values = [n.attribute[0].f for n in model.graph.node if n.op_type == "Constant"]
    assert values == [2.0, 3.0]
