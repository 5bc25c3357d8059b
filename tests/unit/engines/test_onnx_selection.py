# SPDX-License-Identifier: Apache-2.0
"""The ONNX body of `select_drafts` in ONNX Runtime equals the torch op and the numpy policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trtllm_dspark.ops.select_drafts import select_drafts
from trtllm_dspark.scheduling.selection import select_drafts as select_by_policy

onnx = pytest.importorskip("onnx", reason="needs onnx (extra rtx)")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra dev)")
pytest.importorskip("onnxscript", reason="needs onnxscript (extra rtx)")

from trtllm_dspark.engines.build_profiles import Profile, Range  # noqa: E402
from trtllm_dspark.engines.build_tensorrt import BuildOptions, build_engine  # noqa: E402
from trtllm_dspark.engines.export_round_ops import export_selection  # noqa: E402

NAMES = ("verify_lens", "cu_query_lens", "token_ids", "positions", "row_requests")


def open_session(path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """By (γ, rung)."""
    path = tmp_path_factory.mktemp("selection")
    return {
        (drafts, rung): open_session(
            export_selection(
                path / f"{drafts}-{rung}.onnx", num_drafts=drafts, max_requests=8, rung=rung
            )
        )
        for drafts, rung in ((1, 8), (2, 6), (2, 8), (5, 64))
    }


def make_inputs(survivals, capacity, caps) -> dict[str, np.ndarray]:
    count, drafts = survivals.shape
    return {
        "survivals": survivals.astype(np.float32),
        "capacity": np.array([capacity], np.int32),
        "caps": np.asarray(caps, np.int32),
        "anchor_ids": np.arange(100, 100 + count, dtype=np.int32),
        "anchor_positions": np.arange(7, 7 + count, dtype=np.int32) * 3,
        "draft_ids": np.arange(count * drafts, dtype=np.int32).reshape(count, drafts) + 200,
    }


def check(session, rung: int, survivals, capacity: int, caps) -> None:
    inputs = make_inputs(survivals, capacity, caps)
    expected = select_drafts(**{n: torch.from_numpy(x) for n, x in inputs.items()}, rung=rung)
    found = dict(zip(NAMES, session.run(list(NAMES), inputs), strict=True))
    for name in NAMES:
        assert found[name].dtype == np.int32
        assert found[name].tolist() == getattr(expected, name).tolist(), (name, inputs)
    present = np.maximum(inputs["caps"], 0)
    by_policy = select_by_policy(inputs["survivals"], capacity, present)
    assert found["verify_lens"].tolist() == by_policy.tolist()


def test_every_small_batch_with_ties_caps_absent_requests_and_capacities_equals_the_op(sessions):
    rows = [(a, b) for a, b in itertools.product((1.0, 0.5, 0.0), repeat=2) if a >= b]
    for pair in itertools.product(rows, repeat=2):
        for caps in itertools.product((-1, 0, 1, 3), repeat=2):
            for capacity in range(6):
                check(sessions[2, 6], 6, np.array(pair), capacity, caps)


def test_one_request_one_draft_and_rows_that_fill_the_rung_exactly(sessions):
    for survival, capacity, cap in itertools.product((0.0, 0.3), (-1, 0, 1), (-1, 0, 1)):
        check(sessions[1, 8], 8, np.array([[survival]]), capacity, [cap])
    check(sessions[2, 8], 8, np.full((3, 2), 0.5), 5, [2, 2, 2])
    check(sessions[2, 8], 8, np.full((4, 2), 0.5), 4, [2, 2, 2, 2])


def test_larger_ragged_batches_equal_the_op(sessions):
    rng = np.random.default_rng(0)
    for _ in range(150):
        count = int(rng.integers(1, 9))
        grid = rng.integers(0, 9, (count, 5)) / 8 if rng.random() < 0.5 else rng.random((count, 5))
        survivals = np.minimum.accumulate(grid, axis=1)
        caps = rng.integers(-1, 7, count)
        check(sessions[5, 64], 64, survivals, int(rng.integers(0, 46)), caps)


def test_the_node_is_the_plugins_and_the_body_can_be_left_out(tmp_path):
    pytest.importorskip("triton", reason="the table of ops names Triton-language kernels")
    from dspark_plugins.tensorrt_ops import OPS

    path = export_selection(
        tmp_path / "s.onnx", num_drafts=3, max_requests=4, rung=16, with_functions=False
    )
    model = onnx.load(str(path))
    spec = next(spec for spec in OPS if spec.name == "select_drafts")
    (node,) = model.graph.node
    assert not model.functions and (node.domain, node.op_type) == ("dspark", "select_drafts")
    assert tuple(node.input) == spec.inputs and len(node.output) == 5
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert values == {"num_drafts": 3, "max_requests": 4, "rung": 16}
    assert set(values) == set(spec.attributes)


def test_tensorrt_rtx_builds_the_graph_with_its_body(tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra rtx")
    path = export_selection(tmp_path / "s.onnx", num_drafts=2, max_requests=4, rung=8)
    inputs = {
        value.name: tuple(d.dim_value or None for d in value.type.tensor_type.shape.dim)
        for value in onnx.load(str(path)).graph.input
    }

    def of(shape, requests) -> tuple[int, ...]:
        return tuple(requests if size is None else size for size in shape)

    ranges = {n: Range(of(s, 1), of(s, 4), of(s, 4)) for n, s in inputs.items()}
    plan = build_engine(path, [Profile("8", ranges)], (0, 0), BuildOptions())
    assert len(plan) > 10_000
