# SPDX-License-Identifier: Apache-2.0
"""Calls into TensorRT exist in the real bindings with these arguments; inputs, keys are right."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tests.unit.engines.recording_double import Parameter, Recorder, accepts, parse_signatures
from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.protocol import TargetStep
from trtllm_dspark.engines.tensorrt_engine_inputs import (
    GraphKey,
    append_key,
    fits_drafting,
    table_width,
    target_inputs,
    target_key,
)
from trtllm_dspark.engines.tensorrt_engine_session import EngineSession
from trtllm_dspark.errors import ConfigError, EngineError

LIMITS = EngineLimits((1, 2, 4, 8, 16, 32), (1, 2, 4), 3, 3, 40, 4, 41)


def step(lens=(3, 1, 4), rung=16, width=3) -> TargetStep:
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    table = np.arange(1, 1 + len(lens) * width, dtype=np.int32).reshape(len(lens), width)
    return TargetStep(
        token_ids=np.arange(cu[-1], dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in lens]).astype(np.int32),
        cu_query_lens=cu,
        context_lens=np.zeros(len(lens), np.int32),
        page_table=table,
        logit_rows=np.array([2, 3, 7], np.int32),
        rung=rung,
    )


def test_with_plugins_the_rung_alone_is_the_key():
    keys = {target_key(step(lens), LIMITS, exact_shapes=False) for lens in ((3, 1, 4), (9, 1, 1))}
    assert keys == {GraphKey(4, 16, LIMITS.max_table_width)}


def test_with_bodies_query_and_table_lengths_fall_into_few_classes():
    short = target_key(step((3, 1, 4)), LIMITS, exact_shapes=True)
    chunk = target_key(step((9, 1, 1)), LIMITS, exact_shapes=True)
    assert (short.query_len, chunk.query_len) == (4, 16)
    assert short.table_width == 4


@pytest.mark.parametrize("columns,width", [(0, 1), (1, 1), (3, 4), (4, 4), (9, 11), (11, 11)])
def test_tables_are_a_power_of_two_wide_up_to_the_engines_widest(columns, width):
    assert table_width(np.zeros((1, columns), np.int32), LIMITS) == width


def test_a_table_wider_than_the_engine_is_refused():
    with pytest.raises(ConfigError, match="page table columns = 12"):
        table_width(np.zeros((1, 12), np.int32), LIMITS)


def test_padding_rows_go_to_the_scratch_page_and_padding_requests_have_no_rows():
    inputs = target_inputs(step(), GraphKey(4, 4, 4), LIMITS)
    assert inputs["token_ids"].tolist() == [*range(8), *[0] * 8]
    assert inputs["cu_query_lens"].tolist() == [0, 3, 4, 8, 8]
    assert inputs["slots"].tolist() == [4, 5, 6, 16, 28, 29, 30, 31, *[0] * 8]
    assert inputs["page_table"].tolist()[2:] == [[7, 8, 9, 0], [0, 0, 0, 0]]
    assert inputs["logit_rows"].tolist() == [2, 3, 7, *[0] * 13]
    assert inputs["slots"].dtype == np.int64 and inputs["positions"].dtype == np.int32


def test_context_rows_ride_with_a_draft_while_they_are_one_steps_worth():
    assert fits_drafting(3, 16, LIMITS) and not fits_drafting(3, 17, LIMITS)
    assert append_key(17, LIMITS) == GraphKey(3, 0, 1, 32)


DOC = """create(*args, **kwargs)
Overloaded function.

1. create(self: a.b.Engine, strategy: a.b.Strategy = <Strategy.STATIC: 0>) -> a.b.Context

2. create(self: a.b.Engine, name: str, size: typing.SupportsInt) -> bool
"""


def test_overloads_are_parsed_and_calls_checked_against_them():
    first, second = parse_signatures(DOC, "create")
    assert first == [Parameter("strategy", "a.b.Strategy", True)]
    assert accepts(first, ()) and not accepts(first, (1, 2))
    assert accepts(second, ("x", 3)) and not accepts(second, (3, "x"))
    assert not accepts(second, ("x",))


@pytest.fixture
def bindings():
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra rtx")


def double(trt, calls, *, deserialises=True, known=("token_ids", "logits"), **answers):
    """A module like the bindings whose objects record what they are asked."""
    context = Recorder(trt.IExecutionContext, {"infer_shapes": [], **answers}, calls)
    engine = Recorder(
        trt.ICudaEngine,
        {
            "device_memory_size_v2": 4096,
            "num_io_tensors": len(known),
            "get_tensor_name": lambda i: known[i],
            "get_tensor_mode": lambda n: (
                trt.TensorIOMode.OUTPUT if n == "logits" else trt.TensorIOMode.INPUT
            ),
            "create_execution_context": context,
        },
        calls,
    )
    # A Recorder is not callable: answers that are objects come back as they are.
    runtime = Recorder(
        trt.Runtime, {"deserialize_cuda_engine": engine if deserialises else None}, calls
    )
    return types.SimpleNamespace(
        Logger=trt.Logger,
        Runtime=lambda logger: runtime,
        TensorIOMode=trt.TensorIOMode,
        ExecutionContextAllocationStrategy=trt.ExecutionContextAllocationStrategy,
    )


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "rank0.engine"
    path.write_bytes(b"plan")
    return path


def test_a_session_binds_shapes_and_addresses_and_enqueues_on_its_stream(bindings, plan):
    calls: list = []
    session = EngineSession(double(bindings, calls), plan, 7, lambda size: 256 * size)
    context = session.bind(2, {"token_ids": (16,)}, {"token_ids": 1024, "logits": 2048})
    session.enqueue(context)
    wanted = [call[1:] for call in calls if call[0] == "IExecutionContext"]
    assert wanted == [
        ("set_device_memory", 256 * 4096, 4096),
        ("set_optimization_profile_async", 2, 7),
        ("set_input_shape", "token_ids", (16,)),
        ("set_tensor_address", "token_ids", 1024),
        ("set_tensor_address", "logits", 2048),
        ("infer_shapes",),
        ("execute_async_v3", 7),
    ]
    session.bind(2, {"token_ids": (8,)}, {"token_ids": 1024, "logits": 2048})
    assert [c[1] for c in calls].count("create_execution_context") == 1


@pytest.mark.parametrize(
    "answers,message",
    [
        ({"set_input_shape": False}, "outside profile 2"),
        ({"set_tensor_address": False}, "was refused"),
        ({"infer_shapes": ["logits"]}, "missing for"),
        ({"set_optimization_profile_async": False}, "has no profile 2"),
        ({"execute_async_v3": False}, "enqueueing failed"),
    ],
)
def test_every_refusal_of_the_backend_becomes_an_error_that_names_it(
    bindings, plan, answers, message
):
    session = EngineSession(double(bindings, [], **answers), plan, 7, lambda size: 256)
    with pytest.raises(EngineError, match=message):
        session.enqueue(session.bind(2, {"token_ids": (16,)}, {"token_ids": 1, "logits": 2}))


def test_an_engine_of_another_version_or_gpu_is_refused_with_what_to_do(bindings, plan):
    with pytest.raises(EngineError, match="build again here"):
        EngineSession(double(bindings, [], deserialises=False), plan, 7, lambda size: 256)


def test_a_tensor_without_a_buffer_is_named(bindings, plan):
    session = EngineSession(double(bindings, []), plan, 7, lambda size: 256)
    with pytest.raises(EngineError, match="'logits' has no buffer"):
        session.bind(0, {"token_ids": (16,)}, {"token_ids": 1})


def test_the_double_refuses_calls_that_the_bindings_do_not_have(bindings):
    context = Recorder(bindings.IExecutionContext, {}, [])
    with pytest.raises(AttributeError, match="execute_async_v9"):
        context.execute_async_v9(1)
    with pytest.raises(TypeError, match="fits none of"):
        context.set_tensor_address("x")
    with pytest.raises(TypeError, match="fits none of"):
        context.set_tensor_address(1, "x")
