# SPDX-License-Identifier: Apache-2.0
"""The TensorRT engine class equals the torch engine, its CUDA and TensorRT being host doubles.

What this shows: memory, order, graphs, padding and page pools are right and every call exists. What
it cannot show is that a GPU does the same (docs/engines.md).
"""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from tests.unit.decoding.loops import generate, request
from tests.unit.engines.exported import make_drafter, make_limits, make_target, make_torch_engine
from tests.unit.engines.test_export import (
    CASES,
    HIDDEN,
    STEPS,
    close,
    compare_pages,
    drafter_config,
    drafter_step,
    target_step,
)
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.build_profiles import drafter_profiles, target_profiles
from trtllm_dspark.engines.engine_dir import EngineDirectory, EngineFacts
from trtllm_dspark.engines.export import export_drafter, export_target
from trtllm_dspark.engines.onnx_sharing import share_common_nodes
from trtllm_dspark.engines.protocol import ContextAppend
from trtllm_dspark.engines.tensorrt_engine_device import Device
from trtllm_dspark.engines.tensorrt_engine_exchange import HostCopies, TorchViews
from trtllm_dspark.engines.tensorrt_gpu import Gpu
from trtllm_dspark.engines.tensorrt_loader import Machine, assemble_engine
from trtllm_dspark.errors import EngineError
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.survival import SurvivalEstimator

bindings = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra rtx")
cuda_runtime = pytest.importorskip("cuda.bindings.runtime", reason="needs the extra rtx")
pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra dev)")

from tests.unit.engines.executing_double import (  # noqa: E402
    TORCH_STREAM,
    HostCuda,
    host_tensorrt,
    view_as_torch_would,
)

MACHINE = Machine("0", Gpu("A GPU", "8.9"))


@pytest.fixture(scope="module")
def models():
    make, changes = CASES["llama-markov-shifted"]
    target = make_target(make())
    drafter = make_drafter(drafter_config(**changes), target)
    return target, drafter, make_limits(drafter)


@pytest.fixture(scope="module")
def graphs(models, tmp_path_factory):
    """Exported once, prepared as for TensorRT-RTX; an engine file holds the path of its graph."""
    target, drafter, limits = models
    path = tmp_path_factory.mktemp("graphs")
    taps = drafter.config.target_layer_ids
    export_target(target, path / "t.onnx", taps, page_size=limits.page_size)
    export_drafter(drafter, path / "d.onnx", page_size=limits.page_size)
    share_common_nodes(path / "t.onnx", path / "target.onnx")
    share_common_nodes(path / "d.onnx", path / "drafter.onnx")
    return path


class Opened:
    """An engine over the doubles, and what was asked of them."""

    def __init__(
        self, models, graphs, directory, *, separate=False, plugins=False, views=False, **options
    ):
        _, drafter, limits = models
        facts = EngineFacts(
            backend="tensorrt_rtx",
            dtype="float32",
            limits=limits,
            tap_layers=drafter.config.target_layer_ids,
            tap_width=2 * HIDDEN,
            drafter=drafter.config,
            plugins=plugins,
            separate_engines=separate,
        )
        for profile, name in enumerate(facts.target_files()):
            chosen = f"#{profile}" if separate else ""
            (directory / name).write_text(f"{graphs / 'target.onnx'}{chosen}")
        for name in facts.drafter_files():
            (directory / name).write_text(str(graphs / "drafter.onnx"))
        profiles = {
            "target.onnx": target_profiles(limits),
            "drafter.onnx": drafter_profiles(limits, facts.tap_width),
        }
        self.calls: list = []
        self.cuda = HostCuda(cuda_runtime)
        device = Device(self.cuda)
        exchange = HostCopies(device)
        if views:
            exchange = TorchViews(device, lambda: TORCH_STREAM, view_as_torch_would)
        trt = host_tensorrt(bindings, self.cuda, profiles, self.calls)
        found = EngineDirectory(directory, facts, {}, {}, facts.fingerprint)
        self.engine = assemble_engine(found, trt, device, exchange, MACHINE, **options)

    def count(self, name: str) -> int:
        return self.cuda.calls.count(name) + sum(call[1] == name for call in self.calls)


@pytest.fixture(params=[False, True], ids=["host copies", "torch views"])
def opened(models, graphs, tmp_path, request):
    return Opened(models, graphs, tmp_path, views=request.param)


def pages_now(engine, calls) -> list[torch.Tensor]:
    """The pool that the next call reads."""
    engine.synchronize()
    pool = 0 if calls.in_place else calls._num_calls % 2
    return [view_as_torch_would(pages) for pages in calls._pools[pool].values()]


def test_logits_taps_pages_drafts_and_confidences_equal_torch_over_ragged_steps(models, opened):
    reference, engine = make_torch_engine(*models), opened.engine
    rng = np.random.default_rng(0)
    contexts = np.zeros(3, np.int64)
    for lens, rung in [*STEPS, *[((1, 1, 1), 4)] * 3]:
        step = target_step(rng, contexts, lens, rung)
        expected, found = reference.run_target(step), engine.run_target(step)
        close(found.logits, expected.logits)
        close(found.taps, expected.taps)
        for runner, taps in ((reference, expected.taps), (engine, found.taps)):
            runner.append_context(
                ContextAppend(taps, step.positions, step.cu_query_lens, step.page_table)
            )
        contexts = contexts + lens
        draft = drafter_step(rng, contexts)
        block, ours = reference.run_drafter(draft), engine.run_drafter(draft)
        assert ours.token_ids.tolist() == block.token_ids.tolist() and ours.draft_probs is None
        close(ours.confidence_logits, block.confidence_logits)
    compare_pages(pages_now(engine, engine._target), reference.kv_pages)
    compare_pages(pages_now(engine, engine._drafter), reference.drafter_pages)
    assert opened.count("cudaGraphLaunch") > 0


def test_a_shape_is_bound_and_captured_once_per_pool_and_launched_from_then_on(models, opened):
    rng = np.random.default_rng(1)
    for number in range(6):
        opened.engine.run_target(target_step(rng, [number, number, number], [1, 1, 1], 4))
    assert opened.count("create_execution_context") == 2
    assert opened.count("cudaStreamBeginCapture") == 2
    assert opened.count("cudaGraphLaunch") == 4
    copied_out = 0 if opened.engine._exchange.name == "device" else 2 * 6
    assert opened.count("cudaMemcpyAsync") == 6 + copied_out


def test_more_context_rows_than_one_call_holds_are_split_and_the_rest_rides_with_the_draft(
    models, opened
):
    reference, engine = make_torch_engine(*models), opened.engine
    rng = np.random.default_rng(2)
    taps = torch.from_numpy(rng.standard_normal((66, 2 * HIDDEN)).astype(np.float32))
    positions = np.concatenate([np.arange(n) for n in (20, 22, 24)]).astype(np.int32)
    cu = np.array([0, 20, 42, 66], np.int32)
    draft = drafter_step(rng, [20, 22, 24])
    for runner in (reference, engine):
        runner.append_context(ContextAppend(taps, positions, cu, draft.page_table))
    found, expected = engine.run_drafter(draft), reference.run_drafter(draft)
    assert engine._drafter._num_calls == 3
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    close(found.confidence_logits, expected.confidence_logits)
    compare_pages(pages_now(engine, engine._drafter), reference.drafter_pages)


def test_rows_that_nobody_drafts_from_are_written_before_the_next_ones(models, opened):
    reference, engine = make_torch_engine(*models), opened.engine
    rng = np.random.default_rng(3)
    for start in (0, 3, 6):
        taps = torch.from_numpy(rng.standard_normal((3, 2 * HIDDEN)).astype(np.float32))
        positions, cu = np.arange(start, start + 3, dtype=np.int32), np.array([0, 3], np.int32)
        table = drafter_step(rng, [9]).page_table
        for runner in (reference, engine):
            runner.append_context(ContextAppend(taps.clone(), positions, cu, table))
        taps.zero_()
    draft = drafter_step(rng, [9])
    expected = reference.run_drafter(draft)
    assert engine.run_drafter(draft).token_ids.tolist() == expected.token_ids.tolist()


def loop_over(engine) -> DecodingLoop:
    drafter = DSparkDrafter(engine, can_sample=False)
    policy = create_policy("fixed")
    return DecodingLoop(engine, drafter, policy, SurvivalEstimator(3, None))


def test_the_decoding_loop_generates_the_same_on_both_engines(models, opened):
    prompts = [list(np.random.default_rng(i).integers(0, 60, 4 + 5 * i)) for i in range(4)]
    requests = [request(i, prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    requests.append(request("sampled", prompts[0], max_tokens=9, temperature=0.8, seed=3))
    expected = generate(loop_over(make_torch_engine(*models)), requests)
    assert generate(loop_over(opened.engine), requests) == expected


def test_separate_files_per_rung_share_buffers_and_pages(models, graphs, tmp_path):
    opened = Opened(models, graphs, tmp_path, separate=True, use_drafter=False)
    reference = make_torch_engine(*models)
    rng = np.random.default_rng(4)
    contexts = np.zeros(3, np.int64)
    for lens, rung in STEPS[1:4]:
        step = target_step(rng, contexts, lens, rung)
        found = opened.engine.run_target(step)
        close(found.logits, reference.run_target(step).logits)
        assert found.taps is None
        contexts = contexts + lens
    with pytest.raises(EngineError, match="without a drafter"):
        opened.engine.run_drafter(drafter_step(rng, contexts))


def test_what_the_loop_must_know_comes_from_the_directory_and_the_engine(models, opened):
    info = opened.engine.info
    assert (info.vocab_size, info.rungs, info.num_drafts) == (61, models[2].rungs, 3)
    assert info.extra["backend"] == "tensorrt_rtx" and info.device == "cuda:0"
    assert info.extra["machine"] == "A GPU sm_89"


def test_a_directory_that_lies_about_plugins_is_refused(models, graphs, tmp_path):
    with pytest.raises(EngineError, match="does not update pages in place"):
        Opened(models, graphs, tmp_path, plugins=True)


def test_a_step_that_fits_no_profile_is_refused_before_anything_runs(models, opened):
    step = target_step(np.random.default_rng(5), [0], [3], 4)
    with pytest.raises(EngineError, match="rung 5"):
        opened.engine.run_target(dataclasses.replace(step, rung=5))
    draft = drafter_step(np.random.default_rng(5), [3])
    table = np.full_like(draft.page_table, opened.engine.info.num_pages)
    taps, cu = torch.zeros(3, 2 * HIDDEN), np.array([0, 3], np.int32)
    with pytest.raises(EngineError, match="outside the page pool"):
        opened.engine.run_drafter(dataclasses.replace(draft, page_table=table))
    with pytest.raises(EngineError, match="outside the page pool"):
        opened.engine.append_context(ContextAppend(taps, step.positions, cu, table))
    assert opened.count("execute_async_v3") == 0


def test_device_memory_is_allocated_once_and_given_back_with_the_engine(models, graphs, tmp_path):
    opened = Opened(models, graphs, tmp_path)
    allocated = opened.count("cudaMalloc")
    rng = np.random.default_rng(6)
    for number in range(3):
        step = target_step(rng, [number] * 3, [1, 1, 1], 4)
        held = opened.engine.run_target(step).logits
    assert opened.count("cudaMalloc") == allocated
    opened.engine = None
    gc.collect()
    assert opened.count("cudaFree") == allocated and not opened.cuda.memory["device"]
    assert len(opened.cuda.memory["host"]) == 1 and torch.isfinite(held).all()


def test_an_engine_opened_on_one_thread_runs_on_another(models, opened):
    step, found = target_step(np.random.default_rng(7), [0], [3], 4), []
    expected = make_torch_engine(*models).run_target(step)
    thread = threading.Thread(target=lambda: found.append(opened.engine.run_target(step)))
    thread.start()
    thread.join()
    opened.engine.synchronize()
    close(found[0].logits, expected.logits)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import trtllm_dspark.engines.tensorrt_engine
import trtllm_dspark.engines.tensorrt_engine_exchange
print("torch" in {name.split(".")[0] for name, found in sys.modules.items() if found})
"""


def test_the_engine_is_imported_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
