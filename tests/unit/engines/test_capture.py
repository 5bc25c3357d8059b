# SPDX-License-Identifier: Apache-2.0
"""Captured steps touch only static buffers, do the same at every replay, and allocate nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.unit.decoding.loops import TinyModel
from tests.unit.engines.capture_double import CaptureDouble, NoAllocation
from tests.unit.engines.kernel_loops import GAMMA, make_drafter, make_engine
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.engines.protocol import (
    AcceptSampling,
    ContextAppend,
    DrafterStep,
    DraftSampling,
    RoundStep,
    TargetStep,
)
from trtllm_dspark.engines.round_graphs import MAX_ABS_LOGIT
from trtllm_dspark.engines.static_inputs import StaticBlock, fill
from trtllm_dspark.engines.torch_graphs import GraphSet, run_again
from trtllm_dspark.ops.accept_drafts import AcceptRule
from trtllm_dspark.scheduling import logit_map

pytest.importorskip("triton")


def static_tensors(engine: KernelEngine) -> Iterator[torch.Tensor]:
    """Everything that outlives a step."""
    assert engine.drafter is not None and engine.blocks is not None and engine.rounds is not None
    for module in (engine.model, engine.drafter):
        yield from module.parameters()
        yield from module.buffers()
    yield from engine.kv_pages + engine.drafter_pages
    blocks = (
        engine.target.inputs,
        engine.blocks.inputs,
        engine.blocks.results,
        engine.blocks.row_inputs,
        engine.rounds.inputs,
        engine.rounds.results,
    )
    for block in blocks:
        yield from (block._device, block._host)
    yield from (engine.target.logits, engine.target.taps, engine.blocks.taps)
    weights = engine.blocks.drafter.weights
    yield from (x for x in vars(weights).values() if x is not None)


@pytest.fixture(scope="module")
def captured() -> tuple[KernelEngine, CaptureDouble]:
    tiny, capture = TinyModel(3), CaptureDouble()
    engine = make_engine(tiny, make_drafter(tiny), by_kernel=True, capture=capture)
    assert isinstance(engine, KernelEngine)
    capture.register(static_tensors(engine))
    return engine, capture


def target_step(seed: int) -> TargetStep:
    """Two requests with 1 and 2 drafts, or 2 and 0: other arrangements of one rung."""
    lens = np.array([[2, 3], [3, 1]][seed], np.int32)
    contexts = np.array([[4, 0], [1, 9]][seed], np.int32)
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    positions = np.concatenate([c + np.arange(n) for c, n in zip(contexts, lens, strict=True)])
    rows = np.arange(cu[-1], dtype=np.int32)
    return TargetStep(
        token_ids=(rows * 3 + seed).astype(np.int32),
        positions=positions.astype(np.int32),
        cu_query_lens=cu,
        context_lens=contexts,
        page_table=np.array([[1, 2], [3, 4]], np.int32) + seed,
        logit_rows=rows,
        rung=5,
    )


def drafter_step(seed: int) -> DrafterStep:
    sampling = DraftSampling(
        temperature=np.zeros(2, np.float32),
        top_k=np.zeros(2, np.int32),
        top_p=np.ones(2, np.float32),
        min_p=np.zeros(2, np.float32),
        seeds=np.array([seed, 7], np.uint64),
        coupled=np.zeros(2, np.bool_),
    )
    return DrafterStep(
        anchor_ids=np.array([seed + 1, 2], np.int32),
        anchor_positions=np.array([seed + 2, 5], np.int32),
        page_table=np.array([[1, 2], [3, 4]], np.int32) + seed,
        sampling=sampling,
    )


def round_step(seed: int) -> RoundStep:
    accept = AcceptSampling(
        rules=np.full(2, AcceptRule.GREEDY, np.int32),
        temperature=np.zeros(2, np.float32),
        top_k=np.zeros(2, np.int32),
        top_p=np.ones(2, np.float32),
        min_p=np.zeros(2, np.float32),
        accept_uniforms=np.zeros((2, GAMMA)),
        final_uniforms=np.zeros(2),
    )
    return RoundStep(
        draft=drafter_step(seed),
        draft_caps=np.array([GAMMA, 1 + seed], np.int32),
        capacity=2 + seed,
        rung=5,
        confidence_scale=np.ones((2, GAMMA), np.float32),
        confidence_offset=np.zeros((2, GAMMA), np.float32),
        accept=accept,
    )


def sampled_round_step(seed: int, top_k: int) -> RoundStep:
    """One request that samples by rejection and one that is seeded; `top_k` 0 filters nothing."""
    step = round_step(seed)
    drawn = {
        "temperature": np.array([0.8, 1.3], np.float32),
        "top_k": np.array([top_k, 0], np.int32),
    }
    uniforms = np.random.default_rng(seed).random((2, GAMMA + 1))
    accept = dataclasses.replace(
        step.accept,
        rules=np.array([AcceptRule.REJECTION, AcceptRule.COUPLED], np.int32),
        accept_uniforms=uniforms[:, :GAMMA],
        final_uniforms=uniforms[:, GAMMA],
        **drawn,
    )
    coupled = np.array([False, True])
    sampling = dataclasses.replace(step.draft.sampling, coupled=coupled, **drawn)
    draft = dataclasses.replace(step.draft, sampling=sampling)
    return dataclasses.replace(step, draft=draft, accept=accept)


def append_rows(seed: int, taps: torch.Tensor) -> ContextAppend:
    return ContextAppend(
        taps=taps,
        positions=np.arange(seed, seed + 3, dtype=np.int32),
        cu_row_lens=np.array([0, 3], np.int32),
        page_table=np.array([[5 + seed, 6]], np.int32),
    )


def test_steps_replay_on_static_buffers_and_allocate_nothing(captured) -> None:
    engine, capture = captured
    taps = [torch.randn(3, engine.target.taps.shape[1]) for _ in range(2)]
    calls = {
        "target": lambda seed: engine.run_target(target_step(seed)),
        "drafter": lambda seed: engine.run_drafter(drafter_step(seed)),
        "context": lambda seed: engine.append_context(append_rows(seed, taps[seed])),
        "round": lambda seed: engine.start_round(round_step(seed)).read(),
    }
    for number, (name, call) in enumerate(calls.items()):
        call(0)
        assert capture.num_captured == number + 1, name
        replayed = capture.num_replayed
        with NoAllocation(capture):
            call(1)
        assert (capture.num_captured, capture.num_replayed) == (number + 1, replayed + 1), name


@pytest.mark.parametrize("top_k", [0, 3], ids=["unfiltered", "filtered"])
def test_rounds_that_sample_replay_on_static_buffers_too(captured, top_k: int) -> None:
    engine, capture = captured
    engine.start_round(sampled_round_step(0, top_k)).read()
    before = (capture.num_captured, capture.num_replayed)
    with NoAllocation(capture):
        output = engine.start_round(sampled_round_step(1, top_k)).read()
    assert (capture.num_captured, capture.num_replayed) == (before[0], before[1] + 1)
    assert output.is_finite.all() and (output.next_token_ids >= 0).all()
    assert (output.accepted_lens <= output.verify_lens).all()


def test_a_replay_reads_the_new_inputs_not_those_of_the_capture(captured) -> None:
    engine, _ = captured
    reference = make_engine(TinyModel(3), make_drafter(TinyModel(3)), by_kernel=False)
    for pages in (engine.kv_pages, reference.kv_pages):
        for layer in pages:
            layer.zero_()
    for seed in (0, 1, 0):
        found = engine.run_target(target_step(seed)).logits
        torch.testing.assert_close(found, reference.run_target(target_step(seed)).logits)


def test_a_round_spends_its_capacity_within_the_caps(captured) -> None:
    engine, _ = captured
    for seed in (0, 1):
        output = engine.start_round(round_step(seed)).read()
        assert output.verify_lens.sum() == 2 + seed
        assert (output.verify_lens <= round_step(seed).draft_caps).all()
        assert (output.accepted_lens <= output.verify_lens).all() and output.is_finite.all()


def test_the_double_refuses_other_memory_and_other_operations() -> None:
    capture, x = CaptureDouble(), torch.zeros(3)
    with pytest.raises(AssertionError, match="neither static nor made"):
        capture(lambda: x.add_(1))
    capture.register([x])
    numbers = iter([1.0, 1.0, 2.0])
    replay = capture(lambda: x.add_(next(numbers)))
    replay()
    with pytest.raises(AssertionError, match="captured"):
        replay()
    with pytest.raises(AssertionError, match="allocates"), NoAllocation(capture):
        x.clone()


def test_a_key_is_captured_once() -> None:
    made: list[str] = []
    graphs = GraphSet("test", run_again)
    for key in ("a", "b", "a"):
        graphs.run(key, lambda k=key: lambda: made.append(k))
    assert made == ["a", "b", "a"] and len(graphs) == 2


def test_a_block_moves_all_fields_at_once_and_keeps_their_addresses() -> None:
    fields = {"a": (torch.int32, (3,)), "b": (torch.float64, (2, 2)), "c": (torch.int64, (0,))}
    block = StaticBlock(fields, torch.device("cpu"))
    addresses = {name: x.data_ptr() for name, x in block.device.items()}
    fill(block.begin()["a"], np.array([5, 6]), padding=9)
    fill(block.host["b"], np.full((1, 2), 0.5))
    block.upload()
    assert block.device["a"].tolist() == [5, 6, 9]
    assert block.device["b"].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    block.device["a"].add_(1)
    block.download()
    assert block.begin()["a"].tolist() == [6, 7, 10]
    assert addresses == {name: x.data_ptr() for name, x in block.device.items()}
    assert all(address % 8 == 0 for address in addresses.values())


def test_the_device_clips_logits_like_the_host() -> None:
    assert logit_map.MAX_ABS_LOGIT == MAX_ABS_LOGIT
