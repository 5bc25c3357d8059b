# SPDX-License-Identifier: Apache-2.0
"""Calls into TensorRT exist in the real bindings with these arguments, and refusals are named."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.unit.engines.recording_double import Parameter, Recorder, accepts, parse_signatures
from tests.unit.plugins.registration_environment import lay_out_environment, missing_parts
from trtllm_dspark.engines.tensorrt_engine_buffers import TensorSpec
from trtllm_dspark.engines.tensorrt_engine_session import EngineSession
from trtllm_dspark.errors import EngineError

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


@pytest.fixture(params=["tensorrt_rtx_bindings", "tensorrt"])
def bindings(request):
    """TensorRT's own are importable in the registration environment only (see the last test)."""
    if request.param == "tensorrt" and "DSPARK_REGISTRATION" not in os.environ:
        pytest.skip("runs in the child of test_the_same_calls_exist_in_full_tensorrt")
    try:
        return importlib.import_module(request.param)
    except ImportError:
        pytest.skip(f"needs {request.param} (extra dev)")


SHAPES = {"token_ids": [-1], "logits": [-1, 7]}


def double(trt, calls, *, deserialises=True, aliased=None, **answers):
    """A module like the bindings whose objects record what they are asked."""
    names = list(SHAPES)
    context = Recorder(trt.IExecutionContext, {"infer_shapes": [], **answers}, calls)
    engine = Recorder(
        trt.ICudaEngine,
        {
            "device_memory_size_v2": 4096,
            "num_io_tensors": len(names),
            "get_tensor_name": lambda i: names[i],
            "get_tensor_dtype": lambda n: trt.DataType.FLOAT,
            "get_tensor_shape": lambda n: SHAPES[n],
            "get_tensor_mode": lambda n: (
                trt.TensorIOMode.OUTPUT if n == "logits" else trt.TensorIOMode.INPUT
            ),
            "get_aliased_input_tensor": aliased,
            "create_runtime_config": lambda: Recorder(trt.IRuntimeConfig, {}, calls),
            "create_execution_context": lambda settings: context,
        },
        calls,
    )
    answer = (lambda plan: engine) if deserialises else (lambda plan: None)
    runtime = Recorder(trt.Runtime, {"deserialize_cuda_engine": answer}, calls)
    strategies = "DynamicShapesKernelSpecializationStrategy"
    extra = {strategies: getattr(trt, strategies)} if hasattr(trt, strategies) else {}
    return types.SimpleNamespace(
        Logger=trt.Logger,
        Runtime=lambda logger: runtime,
        TensorIOMode=trt.TensorIOMode,
        ExecutionContextAllocationStrategy=trt.ExecutionContextAllocationStrategy,
        **extra,
    )


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "rank0.engine"
    path.write_bytes(b"plan")
    return path


def test_a_session_binds_shapes_and_addresses_and_enqueues_on_its_stream(bindings, plan):
    calls: list = []
    session = EngineSession(double(bindings, calls), plan, 7, lambda size: 256 * size)
    context = session.make_context(2)
    session.bind(context, {"token_ids": (16,)}, {"token_ids": 1024, "logits": 2048})
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
    assert session.specs == (
        TensorSpec("token_ids", "FLOAT", (-1,), True),
        TensorSpec("logits", "FLOAT", (-1, 7), False),
    )


def test_contexts_own_no_memory_and_kernels_are_not_swapped_behind_a_graph(bindings, plan):
    calls: list = []
    EngineSession(double(bindings, calls), plan, 7, lambda size: 256).make_context(0)
    user_managed = bindings.ExecutionContextAllocationStrategy.USER_MANAGED
    if not hasattr(bindings, "DynamicShapesKernelSpecializationStrategy"):
        assert ("ICudaEngine", "create_execution_context", user_managed) in calls
        return
    settings = [call[1:] for call in calls if call[0] == "IRuntimeConfig"]
    eager = bindings.DynamicShapesKernelSpecializationStrategy.EAGER
    assert settings == [
        ("set_execution_context_allocation_strategy", user_managed),
        ("dynamic_shapes_kernel_specialization_strategy =", eager),
    ]


def test_aliases_are_the_engines_own_words(bindings, plan):
    none = EngineSession(double(bindings, [], aliased=lambda n: None), plan, 7, lambda s: 256)
    some = EngineSession(double(bindings, [], aliased=lambda n: "pages"), plan, 7, lambda s: 256)
    assert none.aliases() == {} and some.aliases() == {"logits": "pages"}


@pytest.mark.parametrize(
    "answers,message",
    [
        ({"set_input_shape": False}, "outside its profile"),
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
        context = session.make_context(2)
        session.bind(context, {"token_ids": (16,)}, {"token_ids": 1, "logits": 2})
        session.enqueue(context)


def test_an_engine_of_another_version_or_gpu_is_refused_with_what_to_do(bindings, plan):
    with pytest.raises(EngineError, match="build again here"):
        EngineSession(double(bindings, [], deserialises=False), plan, 7, lambda size: 256)


def test_a_tensor_without_a_buffer_is_named(bindings, plan):
    session = EngineSession(double(bindings, []), plan, 7, lambda size: 256)
    with pytest.raises(EngineError, match="'logits' has no buffer"):
        session.bind(session.make_context(0), {"token_ids": (16,)}, {"token_ids": 1})


def test_the_double_refuses_calls_that_the_bindings_do_not_have(bindings):
    context = Recorder(bindings.IExecutionContext, {}, [])
    with pytest.raises(AttributeError, match="execute_async_v9"):
        context.execute_async_v9(1)
    with pytest.raises(AttributeError, match="settable 'speed'"):
        context.speed = 9
    with pytest.raises(TypeError, match="fits none of"):
        context.set_tensor_address("x")
    with pytest.raises(TypeError, match="fits none of"):
        context.set_tensor_address(1, "x")


@pytest.mark.skipif("DSPARK_REGISTRATION" in os.environ, reason="is the child itself")
@pytest.mark.skipif(bool(missing_parts()), reason=f"needs {', '.join(missing_parts())}")
def test_the_same_calls_exist_in_full_tensorrt(tmp_path):
    """Its bindings load against the RTX libraries under TensorRT's names, in a child process."""
    variables = {**os.environ, **lay_out_environment(tmp_path), "DSPARK_REGISTRATION": "1"}
    chosen = "tensorrt] or tensorrt-"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-k", chosen, str(Path(__file__))]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout and "skipped" not in done.stdout, done.stdout
