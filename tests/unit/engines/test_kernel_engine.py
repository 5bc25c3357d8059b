# SPDX-License-Identifier: Apache-2.0
"""The engine by kernels, interpreted on the CPU: its tokens are those of the torch ops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.decoding.loops import TinyModel, generate, random_prompts, request
from tests.unit.engines.kernel_loops import make_drafter, make_engine, make_loop
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.engines.protocol import (
    ContextAppend,
    DrafterStep,
    DraftSampling,
    TargetStep,
)
from trtllm_dspark.errors import EngineError
from trtllm_dspark.models.drafter import DSparkModel

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(3)


PROMPTS = random_prompts(2, seed=1, longest=9)
GREEDY: dict[str, object] = {}
SEEDED = {"temperature": 0.8, "seed": 5}


def tokens(
    tiny: TinyModel,
    drafter: DSparkModel,
    params: tuple[dict[str, object], ...] = (GREEDY, GREEDY),
    *,
    by_kernel: bool,
    policy: str = "fixed",
) -> dict[str, list[int]]:
    """What two requests with these parameters get."""
    loop = make_loop(make_engine(tiny, drafter, by_kernel=by_kernel), policy)
    assert (loop.rounds is not None) == (by_kernel and policy != "fixed")
    pairs = enumerate(zip(PROMPTS, params, strict=True))
    return generate(loop, [request(i, p, max_tokens=4, **own) for i, (p, own) in pairs])


@pytest.mark.parametrize(
    "changes",
    [
        {"head_type": "markov"},
        {"head_type": "markov", "confidence_with_peak": True},
        {"head_type": "rnn", "label_shift": False, "confidence_with_markov": False},
        {"head_type": "none", "markov_rank": 0, "confidence_head": False,
         "confidence_with_markov": False},
    ],
    ids=["markov", "markov, peak", "rnn, unshifted", "no head"],
)  # fmt: skip
def test_greedy_tokens_are_those_of_the_torch_ops(tiny: TinyModel, changes: dict) -> None:
    found = tokens(tiny, make_drafter(tiny, **changes), by_kernel=True)
    assert found == {str(i): tiny.greedy(p, 4) for i, p in enumerate(PROMPTS)}


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_seeded_tokens_are_those_of_the_torch_ops(tiny: TinyModel, policy: str) -> None:
    """Coupled noise: sampled tokens are a function of the request, whatever drafts it.

    `adaptive` decides before it drafts: its steps are whole rounds on the device.
    """
    drafter = make_drafter(tiny, head_type="gated")
    params = (GREEDY, {**SEEDED, "top_k": 7, "top_p": 0.9})
    found = tokens(tiny, drafter, params, by_kernel=True, policy=policy)
    assert found == tokens(tiny, drafter, params, by_kernel=False, policy=policy)


def draft_step(engine: KernelEngine, **sampling: object) -> DrafterStep:
    fields = {
        "temperature": np.array([0.0, 0.9], np.float32),
        "top_k": np.zeros(2, np.int32),
        "top_p": np.ones(2, np.float32),
        "min_p": np.zeros(2, np.float32),
        "seeds": np.array([3, 2**63 + 9], np.uint64),
        "coupled": np.array([False, False]),
    }
    return DrafterStep(
        anchor_ids=np.array([4, 5], np.int32),
        anchor_positions=np.array([3, 0], np.int32),
        page_table=np.array([[1], [2]], np.int32),
        sampling=DraftSampling(**{**fields, **sampling}),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("top_k", [0, 2])
def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(
    tiny: TinyModel, top_k: int
) -> None:
    engine = make_engine(tiny, make_drafter(tiny), by_kernel=True)
    assert isinstance(engine, KernelEngine)
    output = engine.run_drafter(draft_step(engine, top_k=np.array([0, top_k], np.int32)))
    q = output.draft_probs[1]
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(q.shape[0]), rtol=1e-5, atol=1e-5)
    assert ((q > 0).sum(dim=-1) == (top_k or q.shape[1])).all()
    assert (q.gather(1, torch.from_numpy(output.token_ids[1]).long()[:, None]) > 0).all()
    greedy = engine.run_drafter(draft_step(engine, temperature=np.zeros(2, np.float32)))
    assert greedy.draft_probs is None
    assert greedy.token_ids[0].tolist() == output.token_ids[0].tolist()


@pytest.mark.parametrize("top_k", [0, 2], ids=["unfiltered", "filtered"])
@pytest.mark.parametrize("with_markov", [False, True])
def test_the_confidence_sees_the_unfiltered_peak_at_temperature_one(
    tiny: TinyModel, with_markov: bool, top_k: int
) -> None:
    """The values are the torch ops'; the drafted tokens alone would not show a wrong one.

    Coupled draws: keyed ones are Gumbel-max here and the inverse CDF there, so other tokens.
    """
    drafter = make_drafter(tiny, confidence_with_markov=with_markov, confidence_with_peak=True)
    assert drafter.confidence is not None
    with torch.no_grad():
        drafter.confidence.proj.weight[:, -1] = 1.0  # a wrong peak must not hide in the tolerance
    outputs = []
    for by_kernel in (True, False):
        engine = make_engine(tiny, drafter, by_kernel=by_kernel)
        step = draft_step(  # type: ignore[arg-type]
            engine,
            temperature=np.array([0.0, 0.6], np.float32),
            top_k=np.array([0, top_k], np.int32),
            coupled=np.array([False, True]),
        )
        output = engine.run_drafter(step)
        outputs.append((np.array(output.token_ids), np.array(output.confidence_logits)))
    (ids, confidence), (expected_ids, expected) = outputs
    assert ids.tolist() == expected_ids.tolist()
    np.testing.assert_allclose(confidence, expected, rtol=1e-4, atol=1e-4)


def test_a_step_that_no_graph_holds_runs_uncaptured(tiny: TinyModel) -> None:
    """Logits of every prompt row: more than any decode step wants."""
    engine = make_engine(tiny, make_drafter(tiny), by_kernel=True)
    reference = make_engine(tiny, make_drafter(tiny), by_kernel=False)
    assert isinstance(engine, KernelEngine)
    rows = np.arange(9, dtype=np.int32)
    step = TargetStep(
        token_ids=rows,
        positions=rows,
        cu_query_lens=np.array([0, 9], np.int32),
        context_lens=np.zeros(1, np.int32),
        page_table=np.array([[3, 1]], np.int32),
        logit_rows=rows,
        rung=12,
    )
    assert not engine.target.fits(step) and len(engine.target.graphs) == 0
    expected = reference.run_target(step)
    torch.testing.assert_close(engine.run_target(step).logits, expected.logits)
    few = dataclasses.replace(step, logit_rows=rows[-1:])
    output = engine.run_target(few)
    torch.testing.assert_close(output.logits, expected.logits[-1:])
    torch.testing.assert_close(output.taps, expected.taps)
    assert len(engine.target.graphs) == 1
    with pytest.raises(EngineError, match="outside the page pool"):
        engine.run_target(dataclasses.replace(few, page_table=np.array([[3, 99]], np.int32)))


def test_more_requests_than_the_largest_bucket_are_refused(tiny: TinyModel) -> None:
    engine = make_engine(tiny, make_drafter(tiny), by_kernel=True)
    step = draft_step(engine)  # type: ignore[arg-type]
    three = dataclasses.replace(
        step,
        anchor_ids=np.zeros(3, np.int32),
        anchor_positions=np.zeros(3, np.int32),
        page_table=np.zeros((3, 1), np.int32),
    )
    with pytest.raises(EngineError, match=r"3 requests fit no requests bucket of \(1, 2\)"):
        engine.run_drafter(three)


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("page", [-1, 16])
def test_drafting_and_context_rows_outside_the_pool_are_refused_on_the_host(
    tiny: TinyModel, page: int, by_kernel: bool
) -> None:
    engine = make_engine(tiny, make_drafter(tiny), by_kernel=by_kernel)
    table = np.array([[1], [page]], np.int32)
    step = draft_step(engine)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="outside the page pool of 16"):
        engine.run_drafter(dataclasses.replace(step, page_table=table))
    unknown = np.array([4, tiny.target.config.vocab_size], np.int32)
    with pytest.raises(EngineError, match="anchor ids from 4"):
        engine.run_drafter(dataclasses.replace(step, anchor_ids=unknown))
    rows = ContextAppend(
        taps=torch.zeros(2, len(engine.tap_layers) * tiny.target.config.hidden_size),
        positions=np.zeros(2, np.int32),
        cu_row_lens=np.array([0, 1, 2], np.int32),
        page_table=table,
    )
    with pytest.raises(EngineError, match="outside the page pool of 16"):
        engine.append_context(rows)
