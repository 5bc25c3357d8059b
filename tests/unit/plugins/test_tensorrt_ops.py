# SPDX-License-Identifier: Apache-2.0
"""The plugin table without TensorRT: every op is launched as TensorRT would (inputs, integers,
outputs; grid and constants from the table) in the interpreter, and compared with its launcher.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dspark_plugins.accept_drafts import plan_accept_drafts, run_accept_drafts
from dspark_plugins.filter_thresholds import run_filter_thresholds
from dspark_plugins.kv_append import KvAppendPlan, run_kv_append_
from dspark_plugins.launch import dot_dtype
from dspark_plugins.markov import run_markov_slot
from dspark_plugins.markov_plan import KEYED, HeadWeights, MarkovShape, plan_markov
from dspark_plugins.ptx import list_parameter_kinds, list_parameters, strip_hidden_parameters
from dspark_plugins.ragged_attention import (
    AttentionShape,
    plan_ragged_attention,
    run_ragged_attention,
)
from dspark_plugins.select_drafts import plan_select_drafts, run_select_drafts
from dspark_plugins.tensorrt_ops import OPS, Shapes

from tests.unit.plugins.paged_batches import make_paged_batch
from tests.unit.plugins.test_markov import make_case, make_draws

CPU = torch.device("cpu")
SPECS = {spec.name: spec for spec in OPS}
KINDS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


def launch_as_tensorrt(name: str, *tensors: torch.Tensor, **attributes: Any) -> list[torch.Tensor]:
    spec = SPECS[name]
    assert {k: type(v) for k, v in attributes.items()} == spec.attributes
    named = dict(zip(spec.inputs, tensors, strict=True))
    shapes = Shapes(
        {key: tuple(x.shape) for key, x in named.items()},
        {key: KINDS[x.dtype] for key, x in named.items()},
        capability=90,
    )
    outputs = [
        named[out.aliased_to]
        if out.aliased_to
        else torch.full(out.dims, -77, dtype=DTYPES[out.element_type])
        for out in spec.outputs(shapes, attributes)
    ]
    launch = spec.launch(shapes, attributes)
    launch.kernel[launch.grid](*tensors, *launch.integers, *outputs, **launch.constants)
    return outputs


def test_kv_append() -> None:
    qkv = torch.randn(4, 8 * 16)
    rope = torch.randn(4, 2, 8)
    slots = torch.tensor([5, 6, 9, 0])
    norms = [torch.rand(16), torch.rand(16)]
    pages = [torch.zeros(3, 4, 2, 2, 16) for _ in range(2)]
    q = torch.empty(4, 4, 16)
    plan = KvAppendPlan(4, 4, 2, 16, 1e-5)
    run_kv_append_(plan, pages[0], qkv, rope, slots, q, q_norm=norms[0], k_norm=norms[1])
    found = launch_as_tensorrt(
        "kv_append_",
        pages[1],
        qkv,
        rope,
        slots,
        *norms,
        torch.ones(2),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        eps=1e-5,
        has_norm=True,
    )
    assert torch.equal(found[0], pages[0])
    assert torch.equal(found[1], q)


def test_the_attention_pair() -> None:
    batch = make_paged_batch([3, 1, 4], [300, 7, 0])
    cu, context = torch.from_numpy(batch.cu_query_lens), torch.tensor([300, 7, 0]).int()
    table = torch.from_numpy(batch.page_table)
    shape = AttentionShape(4, 2, 16, 8, batch.kv_pages.shape[0])
    plan = plan_ragged_attention(
        shape,
        batch.cu_query_lens,
        np.array([300, 7, 0], np.int32),
        batch.page_table,
        num_rows=batch.num_rows,
        device=CPU,
        num_splits=2,
    )
    expected = run_ragged_attention(
        plan, batch.q, batch.kv_pages, table, cu, context, 0.25, torch.empty_like(batch.q)
    )
    heads = {"num_heads": 4, "head_dim": 16, "window": 0, "num_splits": 2}
    partial, lse = launch_as_tensorrt(
        "ragged_verify_attention",
        batch.q,
        batch.kv_pages,
        table,
        cu,
        context,
        torch.ones(2),
        num_kv_heads=2,
        page_size=8,
        scale=0.25,
        is_causal=True,
        max_query_len=4,
        **heads,
    )
    (out,) = launch_as_tensorrt(
        "ragged_verify_reduce", partial, lse, cu, context, out_type="fp32", **heads
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("with_peak", [False, True])
def test_the_markov_pair(with_peak: bool) -> None:
    case, slot = make_case(3, with_peak=with_peak), 1
    draws = make_draws([KEYED, 0, KEYED])
    shape = MarkovShape(3, 44, 16, 20, with_markov=True, with_peak=with_peak)
    plan = plan_markov(shape, 3, dtype=torch.float32, device=CPU)
    w = case.weights
    assert isinstance(w, HeadWeights)
    assert w.w1 is not None
    features = w.w1[case.anchors.long()]
    logits = torch.zeros_like(case.base)
    run_markov_slot(plan, slot, case.base, features, case.anchors, case.hidden, w, draws, logits)
    *tiles, logits_out = launch_as_tensorrt(
        "markov_tile",
        case.base[:, slot].contiguous(),
        features,
        w.w2,
        draws.scales,
        draws.thresholds,
        draws.modes,
        draws.seeds,
        draws.anchor_positions,
        vocab_size=44,
        rank=16,
        max_requests=3,
        slot=slot,
        has_noise=True,
        stores_logits=True,
        with_peak=with_peak,
    )
    assert torch.equal(logits_out, logits[:, slot])
    ids, next_features, same_ids, probs, confidence, stats = launch_as_tensorrt(
        "markov_select",
        *tiles,
        draws.scales,
        case.anchors,
        case.hidden[:, slot].contiguous(),
        w.w1,
        w.confidence_weight,
        w.confidence_bias,
        vocab_size=44,
        rank=16,
        hidden_size=20,
        with_markov=True,
        with_peak=with_peak,
    )
    assert ids.tolist() == same_ids.tolist() == plan.token_ids[:, slot].tolist()
    assert torch.equal(next_features, w.w1[ids.long()])
    assert torch.equal(probs, plan.draft_probs[:, slot])
    assert torch.equal(confidence, plan.confidence[:, slot])
    assert torch.equal(stats, plan.stats[:, slot])


def test_select_drafts() -> None:
    survivals = torch.tensor([[0.9, 0.5], [0.5, 0.4], [0.2, 0.0]])
    ids = torch.arange(6, dtype=torch.int32).view(3, 2)
    caps, three = torch.tensor([2, 2, 1]).int(), torch.arange(3, dtype=torch.int32)
    inputs = (survivals, torch.tensor([3]).int(), caps, three + 50, three * 9, ids)
    plan = run_select_drafts(plan_select_drafts(3, 2, rung=8, device=CPU), *inputs)
    found = launch_as_tensorrt("select_drafts", *inputs, num_drafts=2, max_requests=4, rung=8)
    names = ("verify_lens", "cu_query_lens", "token_ids", "positions", "row_requests")
    for out, name in zip(found, names, strict=True):
        assert out.tolist() == getattr(plan, name).tolist(), name


def test_accept_drafts_and_the_filter_pass() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(7, 30, generator=generator)
    top_k, ones = torch.full((7,), 9, dtype=torch.int32), torch.ones(7)
    thresholds = run_filter_thresholds(logits, ones, top_k, ones, ones * 0, torch.empty(7))
    (found,) = launch_as_tensorrt(
        "filter_thresholds", logits, ones, top_k, ones, ones * 0, vocab_size=30
    )
    assert torch.equal(found, thresholds)
    fields = {
        "logits": logits,
        "thresholds": thresholds,
        "scale": torch.tensor([1.0, 0.7, 1.0]),
        "cu_rows": torch.tensor([0, 3, 5, 7]).int(),
        "draft_token_ids": torch.randint(0, 30, (3, 2), generator=generator).int(),
        "draft_lens": torch.full((3,), 2).int(),
        "sampled": torch.zeros(3, dtype=torch.bool),
        "rules": torch.tensor([0, 1, 2]).int(),
        "accept_uniforms": torch.randint(0, 2**53, (3, 2), generator=generator),
        "final_uniforms": torch.randint(0, 2**53, (3,), generator=generator),
        "seeds": torch.tensor([3, 4, 5]),
        "anchor_positions": torch.tensor([10, 20, 30]),
    }
    plan = plan_accept_drafts(3, 2, 30, device=CPU)
    run_accept_drafts(plan, drafts=None, **fields)
    unused = torch.zeros(1)
    order = list(fields.values())
    accepted_lens, next_ids, dropped = launch_as_tensorrt(
        "accept_drafts",
        order[0],
        order[1],
        order[2],
        *order[3:6],
        unused,
        unused,
        unused,
        order[6].view(torch.int8),
        *order[7:],
        vocab_size=30,
        num_drafts=2,
        draft_form=0,
        has_thresholds=True,
        has_coupled=True,
    )
    assert accepted_lens.tolist() == plan.accepted_lens.tolist()
    assert next_ids.tolist() == plan.next_token_ids.tolist()
    torch.testing.assert_close(dropped, plan.dropped_accept_probs, equal_nan=True)


def test_every_op_of_the_table_is_covered_here_and_names_its_inputs_once() -> None:
    assert set(SPECS) == {
        "kv_append_",
        "ragged_verify_attention",
        "ragged_verify_reduce",
        "markov_tile",
        "markov_select",
        "select_drafts",
        "accept_drafts",
        "filter_thresholds",
    }
    for spec in OPS:
        assert len(set(spec.inputs) | set(spec.attributes)) == len(spec.inputs) + len(
            spec.attributes
        )
    assert dot_dtype(torch.float16).name == "fp16"


PTX = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u32 k_param_1,
	.param .u64 .ptr .global .align 1 k_param_2,
	.param .u64 .ptr .global .align 1 k_param_3
)
{ ld.param.b64 %rd1, [k_param_0]; }
"""


def test_hidden_parameters_are_stripped_only_when_nothing_reads_them() -> None:
    assert list_parameters(strip_hidden_parameters(PTX, "k", 2), "k") == ["k_param_0", "k_param_1"]
    assert list_parameter_kinds(PTX, "k") == ["u64", "u32", "u64", "u64"]
    with pytest.raises(ValueError, match="declares 4 parameters: 3 arguments"):
        strip_hidden_parameters(PTX, "k", 3)
    with pytest.raises(ValueError, match="reads its hidden parameter k_param_3"):
        strip_hidden_parameters(PTX.replace("[k_param_0]", "[k_param_3]"), "k", 2)
    with pytest.raises(ValueError, match="no entry function j"):
        list_parameters(PTX, "j")
