# SPDX-License-Identifier: Apache-2.0
"""The step loop on a tiny real model: token identity, batching, pre-emption, ends, cancellation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.decoding.loops import (
    VOCAB,
    TinyModel,
    generate,
    make_loop,
    random_prompts,
    request,
    run_all,
    tokens_of,
)
from trtllm_dspark.decoding.drafters.ngram import NgramDrafter
from trtllm_dspark.engines.protocol import TargetOutput
from trtllm_dspark.errors import InvalidRequestError, QueueFullError
from trtllm_dspark.types import FinishReason


@pytest.fixture(scope="module")
def model():
    return TinyModel()


def test_plain_greedy_decoding_equals_full_recomputation(model):
    prompts = random_prompts(6)
    got = generate(make_loop(model), [request(i, p) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert got[str(i)] == model.greedy(prompt, 20)


@pytest.mark.parametrize("max_num_requests", [1, 8])
def test_ngram_drafts_change_no_greedy_token(model, max_num_requests):
    prompts = random_prompts(12, seed=1)
    loop = make_loop(model, drafter="ngram", policy="fixed", max_num_requests=max_num_requests)
    got = generate(loop, [request(i, p, max_tokens=40) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert got[str(i)] == model.greedy(prompt, 40)
    stats = loop.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.num_accepted_tokens < stats.num_verified_tokens, "some drafts must be rejected"


def test_chunked_prefill_changes_no_token(model):
    prompts = random_prompts(6, seed=2, longest=90)
    loop = make_loop(model, drafter="ngram", policy="fixed", max_num_tokens=24, max_num_requests=4)
    got = generate(loop, [request(i, p) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert got[str(i)] == model.greedy(prompt, 20)


@pytest.mark.parametrize("drafter,policy", [("none", "autoregressive"), ("ngram", "fixed")])
def test_a_pool_that_is_too_small_preempts_and_loses_nothing(model, drafter, policy):
    prompts = random_prompts(8, seed=3, longest=20)
    loop = make_loop(model, drafter=drafter, policy=policy, num_pages=14)
    got = generate(loop, [request(i, p, max_tokens=50) for i, p in enumerate(prompts)])
    assert loop.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert got[str(i)] == model.greedy(prompt, 50)


@pytest.mark.parametrize("drafter,policy", [("none", "autoregressive"), ("ngram", "fixed")])
def test_a_seeded_request_is_the_same_alone_in_company_and_with_any_drafts(model, drafter, policy):
    prompts = random_prompts(8, seed=4)
    options = dict(max_tokens=30, temperature=1.0, seed=99, top_p=0.9)
    alone = {
        str(i): generate(make_loop(model), [request(i, p, **options)])[str(i)]
        for i, p in enumerate(prompts)
    }
    loop = make_loop(model, drafter=drafter, policy=policy, num_pages=40)
    company = generate(loop, [request(i, p, **options) for i, p in enumerate(prompts)])
    assert company == alone
    assert len({tuple(t) for t in alone.values()}) > 1


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_the_draft_cap_of_a_request_is_honoured_and_changes_nothing(model, num_draft_tokens):
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    loop = make_loop(model, drafter="ngram", policy="fixed")
    loop.add(request("a", prompt, max_tokens=40, num_draft_tokens=num_draft_tokens))
    outputs = run_all(loop)["a"]
    assert tokens_of(outputs) == model.greedy(prompt, 40)
    assert max(len(o.new_token_ids) for o in outputs) <= 1 + num_draft_tokens
    assert (outputs[-1].stats.num_verified_tokens > 0) == (num_draft_tokens > 0)


def test_equal_prompt_prefixes_share_pages_and_give_equal_tokens(model):
    prompt = random_prompts(1, seed=5, longest=1)[0] * 0 + list(range(30))
    loop = make_loop(model, drafter="ngram", policy="fixed")
    first = generate(loop, [request("a", prompt)])
    prefilled = loop.stats().num_prefill_tokens
    second = generate(loop, [request("b", prompt), request("c", [*prompt[:17], 7, 7])])
    assert first["a"] == second["b"] == model.greedy(prompt, 20)
    assert second["c"] == model.greedy([*prompt[:17], 7, 7], 20)
    assert loop.stats().num_prefill_tokens - prefilled == (30 - 24) + (19 - 16)


def test_a_full_step_budget_still_serves_everyone(model):
    prompts = random_prompts(20, seed=6)
    loop = make_loop(model, drafter="ngram", policy="fixed", max_num_tokens=8)
    got = generate(loop, [request(i, p, max_tokens=10) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert got[str(i)] == model.greedy(prompt, 10)


def first_repeat_free_index(tokens):
    """Index of a token that did not occur before it."""
    return max(i for i, t in enumerate(tokens[:15]) if t not in tokens[:i])


@pytest.mark.parametrize("drafter,policy", [("none", "autoregressive"), ("ngram", "fixed")])
def test_an_end_token_ends_the_request_and_is_not_part_of_it(model, drafter, policy):
    for prompt in random_prompts(6, seed=7):
        plain = model.greedy(prompt, 20)
        cut = first_repeat_free_index(plain)
        loop = make_loop(model, drafter=drafter, policy=policy)
        loop.add(request("a", prompt, end_ids=(plain[cut],)))
        outputs = run_all(loop)["a"]
        assert tokens_of(outputs) == plain[:cut]
        assert outputs[-1].finish_reason is FinishReason.EOS


@pytest.mark.parametrize("drafter,policy", [("none", "autoregressive"), ("ngram", "fixed")])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_word_is_cut_out_even_when_it_spans_steps_or_lies_in_a_block(
    model, drafter, policy, size
):
    for prompt in random_prompts(5, seed=8):
        plain = model.greedy(prompt, 20)
        word = tuple(plain[6 : 6 + size])
        start = next(i for i in range(20) if tuple(plain[i : i + size]) == word)
        loop = make_loop(model, drafter=drafter, policy=policy)
        loop.add(request("a", prompt, stop_token_ids=(word, (plain[0], VOCAB - 1, VOCAB - 1))))
        outputs = run_all(loop)["a"]
        assert tokens_of(outputs) == plain[:start]
        assert outputs[-1].finish_reason is FinishReason.STOP


def test_tokens_held_back_for_a_stop_word_come_out_when_it_does_not_complete(model):
    prompt = random_prompts(1, seed=9)[0]
    plain = model.greedy(prompt, 20)
    never = (plain[-1], VOCAB - 1, VOCAB - 2)
    loop = make_loop(model)
    loop.add(request("a", prompt, stop_token_ids=(never,)))
    outputs = run_all(loop)["a"]
    assert tokens_of(outputs) == plain
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_max_tokens_cuts_inside_a_block(model):
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    plain = model.greedy(prompt, 40)
    for max_tokens in range(1, 14):
        loop = make_loop(model, drafter="ngram", policy="fixed")
        outputs = generate(loop, [request("a", prompt, max_tokens=max_tokens)])
        assert outputs["a"] == plain[:max_tokens]


def test_cancelling_frees_slot_and_pages_at_once_and_answers_once(model):
    loop = make_loop(model, max_num_requests=2)
    for i, prompt in enumerate(random_prompts(4, seed=10)):
        loop.add(request(i, prompt, max_tokens=100))
    loop.cancel("3")
    loop.step()
    loop.step()
    loop.cancel("0")
    loop.cancel("0")
    loop.cancel("unknown")
    assert loop.stats().num_running == 1
    outputs = run_all(loop)
    assert [o.finish_reason for o in outputs["0"]] == [FinishReason.CANCELLED]
    assert outputs["1"][-1].finish_reason is FinishReason.LENGTH
    assert loop.stats().num_free_pages == loop.stats().num_pages


def test_a_request_past_its_timeout_ends_with_what_it_has(model):
    now = [0.0]
    loop = make_loop(model, clock=lambda: now[0])
    loop.add(request("slow", [1, 2, 3], max_tokens=100, timeout_s=5.0))
    loop.add(request("patient", [1, 2, 3], max_tokens=10))
    loop.step()
    now[0] = 6.0
    outputs = run_all(loop)
    assert outputs["slow"][-1].finish_reason is FinishReason.TIMEOUT
    assert len(tokens_of(outputs["patient"])) == 9


def test_logits_that_are_no_numbers_end_their_request_alone(model):
    prompts = random_prompts(3, seed=11)
    drawn = []
    loop = make_loop(
        model,
        drafter="ngram",
        policy="fixed",
        draw_seed=lambda: drawn.append(len(drawn)) or drawn[-1],
    )
    run_target = loop.engine.run_target

    def poisoned(step):
        """NaN wherever a row of position 45 or later asks for logits."""
        output = run_target(step)
        logits = output.logits.clone()
        logits[np.flatnonzero(step.positions[step.logit_rows] >= 45)] = np.nan
        return TargetOutput(logits, output.taps)

    loop.engine.run_target = poisoned
    for i, prompt in enumerate(prompts):
        loop.add(request(i, prompt, max_tokens=5))
    loop.add(request("long", [*range(20)] * 2, max_tokens=30))
    loop.add(request("sampled", [1, 2, 3], max_tokens=40, temperature=1.0))
    loop.step()
    seed = drawn[-1]
    outputs = run_all(loop)
    assert outputs["long"][-1].finish_reason is FinishReason.ERROR
    assert "finite" in str(outputs["long"][-1].error)
    greedy = model.greedy([*range(20)] * 2, 30)
    assert tokens_of(outputs["long"]) == greedy[1 : 1 + len(tokens_of(outputs["long"]))]
    for i, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(i)]) == model.greedy(prompt, 5)[1:]
    assert len(tokens_of(outputs["sampled"])) == 39
    assert drawn[-1] != seed, "the aborted step's noise must not come back"
    assert loop.stats().num_free_pages == loop.stats().num_pages


def test_bad_requests_are_refused_by_name_and_leave_no_trace(model):
    loop = make_loop(model, num_pages=10, max_queue_size=2)
    bad = {
        "empty": request("x", []),
        "vocabulary": request("x", [VOCAB]),
        "max_tokens": request("x", [1], max_tokens=0),
        "sequence length": request("x", [1], max_tokens=200),
        "pages": request("x", [1] * 60, max_tokens=60),
        "temperature": request("x", [1], temperature=float("nan")),
        "top_p": request("x", [1], top_p=0.0),
        "top_k": request("x", [1], top_k=-1),
        "stop_token_ids": request("x", [1], stop_token_ids=((VOCAB,),)),
        "num_draft_tokens": request("x", [1], num_draft_tokens=-1),
    }
    for word, one in bad.items():
        with pytest.raises(InvalidRequestError, match=word):
            loop.add(one)
    assert not loop.has_work
    loop.add(request("a", [1]))
    with pytest.raises(InvalidRequestError, match="in use"):
        loop.add(request("a", [1]))
    loop.add(request("b", [1]))
    with pytest.raises(QueueFullError, match="max_queue_size"):
        loop.add(request("c", [1]))


class RecordingDrafter(NgramDrafter):
    """Checks the invariant: rows committed for a request are exactly 0 … anchor − 1, in order."""

    def __init__(self, hold_back: int = 0):
        super().__init__(5, 1, 4)
        self.rows = {}
        self.hold_back = hold_back

    def propose(self, sources):
        for source in sources:
            assert self.rows[source.key] == source.anchor_position
        return super().propose(sources)

    def commit(self, rows, taps):
        for row in rows:
            assert row.start_position == self.rows.get(row.source.key, row.start_position)
            self.rows[row.source.key] = row.start_position + row.num_rows
            assert self.rows[row.source.key] <= row.source.anchor_position

    def synced_len(self, key):
        return max(0, self.rows[key] - self.hold_back)

    def release(self, key):
        self.rows.pop(key, None)


@pytest.mark.parametrize("seed", range(4))
def test_the_drafter_hears_of_every_row_whatever_happens(model, seed):
    """Random arrivals, cancellations, draft caps, pre-emption, chunked prefill."""
    rng = np.random.default_rng(seed)
    drafter = RecordingDrafter()
    loop = make_loop(
        model,
        drafter=drafter,
        policy="fixed",
        num_pages=20,
        max_num_tokens=32,
        max_num_requests=5,
    )
    prompts = random_prompts(25, seed=20 + seed, longest=30)
    waiting = list(enumerate(prompts))
    outputs, cancelled = {}, set()
    while waiting or loop.has_work:
        if waiting and rng.random() < 0.5:
            name, prompt = waiting.pop()
            cap = [None, 0, 2][name % 3]
            loop.add(request(name, prompt, max_tokens=30, num_draft_tokens=cap))
        if rng.random() < 0.05:
            victim = str(rng.integers(25))
            loop.cancel(victim)
        for output in loop.step():
            outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason is FinishReason.CANCELLED:
                cancelled.add(output.request_id)
    assert not drafter.rows
    assert loop.stats().num_free_pages == loop.stats().num_pages
    for name, prompt in enumerate(prompts):
        expected = model.greedy(prompt, 30)
        got = tokens_of(outputs[str(name)])
        assert got == (expected[: len(got)] if str(name) in cancelled else expected)


def test_pages_are_offered_for_reuse_only_below_the_rows_the_drafter_has_written(model):
    prompt = list(range(30))
    for hold_back, reused in ((0, 24), (7, 16), (100, 0)):
        loop = make_loop(model, drafter=RecordingDrafter(hold_back), policy="fixed")
        generate(loop, [request("a", prompt, max_tokens=2)])
        loop.add(request("b", prompt, max_tokens=3))
        before = loop.stats().num_prefill_tokens
        loop.step()
        assert loop.stats().num_prefill_tokens - before == 30 - reused
