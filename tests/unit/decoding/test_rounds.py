# SPDX-License-Identifier: Apache-2.0
"""Rounds on the device in the loop: the same tokens, and decisions made while the device works."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.decoding.loops import TinyModel, generate, random_prompts, request, run_all
from tests.unit.decoding.round_double import RoundDouble
from tests.unit.decoding.test_dspark_loop import GAMMA, random_drafter
from trtllm_dspark.config import BucketConfig
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets
from trtllm_dspark.scheduling.latency_table import LatencyTable
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import EngineInfo, FinishReason

BUCKETS = BucketConfig(max_num_requests=4, max_num_tokens=64)
RUNGS = build_ladder(BUCKETS, GAMMA)


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(3)


def steep_table() -> LatencyTable:
    """Every row costs: policies that look at it trim."""
    sizes = np.array(request_buckets(BUCKETS), float)
    return LatencyTable(
        request_buckets=request_buckets(BUCKETS),
        rungs=RUNGS,
        step_ms=np.add.outer(0.2 * sizes, 2.0 + 0.6 * np.array(RUNGS)),
        autoregressive_ms=3.0 + sizes,
        no_draft_ms=3.1 + sizes,
        draft_ms=0.2 + 0.01 * sizes,
        fingerprint="tiny",
        num_drafts=GAMMA,
    )


def make_loop(
    tiny: TinyModel, *, on_device: bool, policy: str = "prefix_async", table: object = None
) -> DecodingLoop:
    info = EngineInfo(
        vocab_size=tiny.config.vocab_size,
        max_num_requests=4,
        max_seq_len=160,
        page_size=8,
        num_pages=60,
        rungs=RUNGS,
        num_drafts=GAMMA,
        fingerprint="tiny",
        device="cpu",
    )
    engine_class = RoundDouble if on_device else TorchEngine
    engine = engine_class(tiny.target, info, random_drafter(tiny.target))
    estimator = SurvivalEstimator(GAMMA)
    resources = PolicyResources(table=table, estimator=estimator)
    chosen = create_policy(policy, {"staleness": 1}, resources)
    return DecodingLoop(engine, DSparkDrafter(engine), chosen, estimator, draw_seed=lambda: 77)


@pytest.mark.parametrize("policy", ["prefix_async", "adaptive"])
@pytest.mark.parametrize("has_table", [False, True])
def test_rounds_change_no_greedy_and_no_seeded_token(
    tiny: TinyModel, policy: str, has_table: bool
) -> None:
    table = steep_table() if has_table else None
    prompts = random_prompts(7, seed=2)
    params = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "seed": 4, "top_k": 8}]
    outputs = []
    for on_device in (True, False):
        loop = make_loop(tiny, on_device=on_device, policy=policy, table=table)
        assert (loop.rounds is not None) == on_device
        requests = [request(i, p, **params[i % 3]) for i, p in enumerate(prompts)]
        outputs.append(generate(loop, requests))
        if loop.rounds is not None:
            assert loop.rounds.num_decided_ahead > 5
            assert loop.stats().num_drafted_tokens > 0
    assert outputs[0] == outputs[1]
    assert all(outputs[0][str(i)] == tiny.greedy(prompts[i], 20) for i in (0, 3, 6))


def test_capacity_is_spent_exactly_and_by_the_device(tiny: TinyModel) -> None:
    loop = make_loop(tiny, on_device=True, table=steep_table())
    prompts = random_prompts(4, seed=5, longest=10)  # one step for all of them
    generate(loop, [request(i, p) for i, p in enumerate(prompts)])
    lens = [sum(step) for step in loop.engine.verify_lens]
    assert min(lens) < max(lens) <= 4 * GAMMA
    assert loop.stats().num_verified_tokens == sum(lens)


class NotingPolicy:
    """Writes down when it is asked and what it has been shown by then."""

    def __init__(self, policy, events: list[str]) -> None:
        self.policy, self.events, self.num_shown = policy, events, 0
        self.shown_at_decision: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self.policy, name)

    def decide(self, view):
        self.events.append("decide")
        self.shown_at_decision.append(self.num_shown)
        return self.policy.decide(view)

    def plan(self, view, decision, survivals):
        self.events.append("learn")
        self.num_shown += 1
        return self.policy.plan(view, decision, survivals)


def test_the_next_step_is_decided_between_start_and_read_on_survivals_two_steps_old(
    tiny: TinyModel,
) -> None:
    loop = make_loop(tiny, on_device=True)
    events = loop.engine.events
    noting = NotingPolicy(loop.policy, events)
    loop.policy = loop.rounds.policy = noting
    generate(loop, [request(0, random_prompts(1, seed=9)[0], max_tokens=12)])
    first = events.index("start")
    body = events[first:]
    rounds = body.count("start")
    assert rounds >= 4
    assert body[:3] == ["start", "decide", "read"]  # nothing to learn from before the first round
    assert body[3 : 4 * rounds - 1] == ["start", "learn", "decide", "read"] * (rounds - 1)
    assert body[4 * rounds - 1 :] == ["learn"]  # the loop ran out of work
    # While round t runs (t = 0, 1, …) step t + 1 is decided; rounds 0..t − 1 have been shown.
    during = noting.shown_at_decision[-rounds:]
    assert during == list(range(rounds))


def test_a_batch_that_changed_is_decided_anew(tiny: TinyModel) -> None:
    loop = make_loop(tiny, on_device=True)
    prompts = random_prompts(2, seed=4)
    loop.add(request(0, prompts[0]))
    for _ in range(3):
        loop.step()
    ahead = loop.rounds.num_decided_ahead
    loop.add(request(1, prompts[1]))
    loop.step()
    assert loop.rounds.num_decided_ahead == ahead
    outputs = run_all(loop)
    assert outputs["1"]


def test_requests_that_need_the_host_take_the_ordinary_step(tiny: TinyModel) -> None:
    loop = make_loop(tiny, on_device=True)
    plain = make_loop(tiny, on_device=False)
    prompt = random_prompts(1, seed=6)[0]
    params = {"repetition_penalty": 1.3}
    found = generate(loop, [request(0, prompt, **params)])
    assert loop.engine.events == []
    assert found == generate(plain, [request(0, prompt, **params)])
    loop.add(request(1, prompt, return_log_probs=True, max_tokens=3))
    run_all(loop)
    assert loop.engine.events == []


def test_a_request_whose_logits_are_no_numbers_ends_and_the_others_go_on(tiny: TinyModel) -> None:
    loop = make_loop(tiny, on_device=True)
    prompts = random_prompts(2, seed=8)
    for i, prompt in enumerate(prompts):
        loop.add(request(i, prompt))
    loop.step()
    loop.step()
    loop.engine.poisoned_request = 0
    outputs = loop.step()
    loop.engine.poisoned_request = None
    (failed,) = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert failed.request_id == "0" and "finite" in str(failed.error)
    rest = run_all(loop)
    assert set(rest) == {"1"}


def test_unseeded_requests_are_drawn_in_rounds_too(tiny: TinyModel) -> None:
    loop = make_loop(tiny, on_device=True)
    prompt = random_prompts(1, seed=1)[0]
    found = generate(loop, [request(0, prompt, temperature=0.9, top_p=0.9)])
    assert len(found["0"]) == 20 and "start" in loop.engine.events
