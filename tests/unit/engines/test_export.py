# SPDX-License-Identifier: Apache-2.0
"""The exported graphs in ONNX Runtime equal the torch engine over ragged decode steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.engines.exported import (
    PAGE_SIZE,
    ExportedEngine,
    make_drafter,
    make_limits,
    make_target,
    make_torch_engine,
)
from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.engines.protocol import (
    ContextAppend,
    DrafterStep,
    DraftSampling,
    TargetStep,
)
from trtllm_dspark.ops.linear import Linear

pytest.importorskip("onnx", reason="needs onnx (extra rtx)")
pytest.importorskip("onnxscript", reason="needs onnxscript (extra rtx)")
pytest.importorskip("onnxruntime", reason="needs onnxruntime")

VOCAB, HIDDEN, GAMMA = 61, 48, 3
PAGES = np.array(
    [[3, 7, 1, 12, 9, 30, 31], [4, 5, 6, 13, 14, 32, 33], [20, 22, 21, 23, 24, 34, 35]], np.int32
)
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=3,
    max_position_embeddings=64,
)


def llama():
    from transformers import LlamaConfig

    return LlamaConfig(
        **COMMON, num_attention_heads=6, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    )


def qwen3():
    from transformers import Qwen3Config

    return Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=4, head_dim=10)


def drafter_config(**changes) -> DrafterConfig:
    fields = dict(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        vocab_size=VOCAB,
        num_drafts=GAMMA,
        mask_token_id=60,
        target_layer_ids=(-1, 1),
        num_target_layers=3,
        target_hidden_size=HIDDEN,
    )
    return DrafterConfig(**{**fields, **changes})


CASES = {
    "llama-markov-shifted": (
        llama,
        dict(head_type="markov", markov_rank=5, confidence_head=True, confidence_with_markov=True),
    ),
    "qwen3-rnn-unshifted": (
        qwen3,
        dict(head_type="rnn", markov_rank=4, confidence_head=True, label_shift=False),
    ),
    "llama-markov-with-peak": (
        llama,
        dict(
            head_type="markov",
            markov_rank=5,
            confidence_head=True,
            confidence_with_markov=True,
            confidence_with_peak=True,
        ),
    ),
    "llama-gated-without-confidence": (llama, dict(head_type="gated", markov_rank=4)),
    "qwen3-no-head": (qwen3, dict(qk_norm=False)),
}


@pytest.fixture(scope="module", params=CASES)
def engines(request, tmp_path_factory):
    make, changes = CASES[request.param]
    target = make_target(make())
    drafter = make_drafter(drafter_config(**changes), target)
    limits = make_limits(drafter)
    path = tmp_path_factory.mktemp("onnx")
    return make_torch_engine(target, drafter, limits), ExportedEngine(path, target, drafter, limits)


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), atol=1e-4, rtol=1e-4)


def target_step(rng, contexts, lens, rung) -> TargetStep:
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    positions = [np.arange(c, c + n) for c, n in zip(contexts, lens, strict=True)]
    return TargetStep(
        token_ids=rng.integers(0, VOCAB, cu[-1]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        cu_query_lens=cu,
        context_lens=np.asarray(contexts, np.int32),
        page_table=PAGES[: len(lens)],
        logit_rows=np.arange(cu[-1], dtype=np.int32)[-16:],
        rung=rung,
    )


def greedy(count: int) -> DraftSampling:
    zeros = np.zeros(count, np.float32)
    ints = np.zeros(count, np.int32)
    return DraftSampling(
        zeros, ints, zeros + 1, zeros, np.zeros(count, np.uint64), np.zeros(count, bool)
    )


def drafter_step(rng, positions) -> DrafterStep:
    count = len(positions)
    return DrafterStep(
        anchor_ids=rng.integers(0, VOCAB, count).astype(np.int32),
        anchor_positions=np.asarray(positions, np.int32),
        page_table=PAGES[:count],
        sampling=greedy(count),
    )


def compare_pages(ours, theirs):
    """Everything but the scratch page."""
    for a, b in zip(ours, theirs, strict=True):
        close(a[1:], b[1:])


STEPS = [((5, 1, 9), 16), ((1, 2, 4), 8), ((4, 4, 4), 16), ((1, 1, 1), 4), ((2, 1, 1), 4)]


def test_logits_taps_pages_drafts_and_confidences_equal_torch_over_ragged_steps(engines):
    reference, exported = engines
    rng = np.random.default_rng(0)
    contexts = np.zeros(3, np.int64)
    for number, (lens, rung) in enumerate(STEPS):
        step = target_step(rng, contexts, lens, rung)
        expected = reference.run_target(step)
        logits, taps = exported.run_target(step)
        close(logits, expected.logits)
        close(taps, expected.taps)
        rows = ContextAppend(
            expected.taps.numpy(), step.positions, step.cu_query_lens, step.page_table
        )
        reference.append_context(dataclasses.replace(rows, taps=expected.taps))
        fused = number % 2 == 1 and len(step.positions) <= 16
        if not fused:
            exported.append_context(rows)
        contexts = contexts + lens
        draft = drafter_step(rng, contexts)
        block = reference.run_drafter(draft)
        token_ids, confidence = exported.run_drafter(draft, rows if fused else None)
        assert token_ids.tolist() == block.token_ids.tolist()
        close(confidence, block.confidence_logits)
    compare_pages(exported.kv_pages, reference.kv_pages)
    compare_pages(exported.drafter_pages, reference.drafter_pages)


def test_fewer_requests_than_the_engine_holds_leave_the_padding_out(engines):
    reference, exported = engines
    rng = np.random.default_rng(1)
    step = target_step(rng, [0], [6], 8)
    expected = reference.run_target(step)
    close(exported.run_target(step)[0], expected.logits)
    draft = drafter_step(rng, [6])
    assert (
        exported.run_drafter(draft)[0].tolist() == reference.run_drafter(draft).token_ids.tolist()
    )


def test_the_widest_shapes_give_the_same_as_the_exact_ones(engines):
    _, exported = engines
    step = target_step(np.random.default_rng(2), [0, 0], [3, 2], 8)
    exact, _ = exported.run_target(step)
    exported.exact_shapes = False
    try:
        widest, _ = exported.run_target(step)
    finally:
        exported.exact_shapes = True
    close(exact, widest)


def test_plugin_nodes_have_exactly_the_inputs_and_attributes_of_the_registered_ops(tmp_path):
    pytest.importorskip("triton", reason="the table of ops names Triton-language kernels")
    import onnx
    from dspark_plugins.tensorrt_ops import OPS

    from trtllm_dspark.engines.export import export_target

    path = export_target(
        make_target(qwen3()), tmp_path / "t.onnx", page_size=PAGE_SIZE, with_functions=False
    )
    model = onnx.load(str(path), load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == "dspark"]
    layer = ["kv_append_", "ragged_verify_attention", "ragged_verify_reduce"]
    assert [node.op_type for node in nodes] == layer * 3
    assert not [f for f in model.functions if f.name in layer]
    specs = {spec.name: spec for spec in OPS}
    for node in nodes:
        spec = specs[node.op_type]
        assert len(node.input) == len(spec.inputs)
        assert {a.name for a in node.attribute} == set(spec.attributes)
    append, attend = nodes[0], nodes[1]
    values = {a.name: onnx.helper.get_attribute_value(a) for a in append.attribute}
    assert (values["num_heads"], values["head_dim"], values["has_norm"]) == (4, 10, 1)
    assert append.output[1] == attend.input[0] and append.output[0] == attend.input[1]
    assert "query_offsets" not in {i.name for i in model.graph.input}


@pytest.mark.parametrize("with_peak", [False, True])
@pytest.mark.parametrize("head", ["markov", "gated", "rnn"])
def test_without_bodies_the_drafters_markov_pairs_are_the_plugins_nodes_too(
    tmp_path, head, with_peak
):
    pytest.importorskip("triton", reason="the table of ops names Triton-language kernels")
    import onnx
    from dspark_plugins.tensorrt_ops import OPS

    from trtllm_dspark.engines.export import export_drafter

    config = drafter_config(
        head_type=head, markov_rank=4, confidence_head=True, confidence_with_peak=with_peak
    )
    model = make_drafter(config, make_target(llama()))
    path = export_drafter(
        model, tmp_path / "d.onnx", page_size=PAGE_SIZE, with_functions=False, max_requests=32
    )
    proto = onnx.load(str(path), load_external_data=False)
    assert not [f for f in proto.functions if f.domain == "dspark"]
    nodes = [node for node in proto.graph.node if node.op_type.startswith("markov_")]
    assert [node.op_type for node in nodes] == ["markov_tile", "markov_select"] * GAMMA
    specs = {spec.name: spec for spec in OPS}
    made = {i.name for i in [*proto.graph.input, *proto.graph.initializer]}
    for node in proto.graph.node:
        assert {name for name in node.input if name} <= made, node.op_type
        made.update(node.output)
        if node in nodes:
            spec = specs[node.op_type]
            assert len(node.input) == len(spec.inputs)
            assert len(node.input) + len(node.output) == spec.io_types.count(",") + 1
            assert {a.name for a in node.attribute} == set(spec.attributes)
    tile, select = nodes[:2]
    values = {a.name: onnx.helper.get_attribute_value(a) for a in tile.attribute}
    assert (values["vocab_size"], values["rank"], values["max_requests"]) == (VOCAB, 4, 32)
    assert values["with_peak"] == with_peak  # masses are made only where they are read
    assert list(select.input[:6]) == list(tile.output[:6])
    weights = {i.name: tuple(i.dims) for i in proto.graph.initializer}
    assert {weights[name] for name in select.input[8:]} == {(VOCAB, 4)}


def test_packed_weights_are_refused(tmp_path):
    from trtllm_dspark.engines.export import export_target
    from trtllm_dspark.errors import EngineError

    target = make_target(llama())
    next(m for m in target.modules() if isinstance(m, Linear))._packed = torch.zeros(1)
    with pytest.raises(EngineError, match="without packing"):
        export_target(target, tmp_path / "t.onnx", page_size=PAGE_SIZE)
