# SPDX-License-Identifier: Apache-2.0
"""Every request gets exactly one last answer; only the engine thread touches the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.unit.serving.toys import ByteTokenizer, Recorder, ToyLoop
from trtllm_dspark.decoding.stats import LoopStats
from trtllm_dspark.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
)
from trtllm_dspark.serving.engine_thread import EngineThread
from trtllm_dspark.serving.requests import EngineRequest, TextOptions
from trtllm_dspark.types import FinishReason, GenerationRequest, RequestStats, SamplingParams


class Observed:
    def __init__(self) -> None:
        self.stats: list[LoopStats] = []
        self.finished: list[tuple[int, int]] = []

    def observe_stats(self, stats: LoopStats) -> None:
        self.stats.append(stats)

    def observe_finish(self, stats: RequestStats, num_output_tokens: int) -> None:
        self.finished.append((stats.num_prompt_tokens, num_output_tokens))


class Rig:
    def __init__(self, loop: ToyLoop) -> None:
        self.loop, self.observed, self.count = loop, Observed(), 0
        self.engine = EngineThread(loop, ByteTokenizer(), observer=self.observed)
        self.engine.start()

    def submit(self, text: str, **options: object) -> Recorder:
        self.count += 1
        recorder = Recorder()
        self.engine.submit(make_request(text, f"key{self.count}", **options), recorder)
        return recorder


def make_request(
    text: str,
    key: str,
    *,
    streaming: bool = True,
    stops: tuple[str, ...] = (),
    exclude_input: bool = True,
    client_id: str = "",
    handle: str = "",
    timeout_s: float | None = None,
    max_tokens: int = 10**9,
    log_probs: bool = False,
) -> EngineRequest:
    generation = GenerationRequest(
        key,
        np.array(list(text.encode()), np.int32),
        SamplingParams(max_tokens=max_tokens, return_log_probs=log_probs),
        time.monotonic(),
        timeout_s,
    )
    options = TextOptions(streaming, exclude_input, stops)
    return EngineRequest(generation, options, client_id, handle)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: int) -> Rig:
        rigs.append(Rig(ToyLoop(**options)))
        return rigs[-1]

    yield make
    for one in rigs:
        one.loop.gate.set()
        one.engine.drain(5)


def test_a_streamed_request_gets_groups_and_one_final_response(rig: Callable[..., Rig]) -> None:
    answer = rig().submit("hello").wait()
    assert [r.text for r in answer.responses] == ["he", "ll", "o"]
    assert [r.finish_reason for r in answer.responses] == [None, None, FinishReason.EOS]
    assert [r.num_output_tokens for r in answer.responses] == [2, 4, 5]
    assert answer.num_finals == 1


def test_without_streaming_there_is_exactly_one_response(rig: Callable[..., Rig]) -> None:
    answer = rig().submit("hello", streaming=False).wait()
    assert [r.text for r in answer.responses] == ["hello"]
    assert answer.responses[0].token_ids == tuple(b"hello")


def test_the_input_is_repeated_only_where_asked_and_not_streamed(rig: Callable[..., Rig]) -> None:
    one = rig()
    repeated = one.submit("ab", streaming=False, exclude_input=False).wait().responses[0]
    assert repeated.text == "abab" and repeated.prompt_token_ids is not None
    assert one.submit("ab", exclude_input=False).wait().text == "ab"


def test_a_stop_string_ends_the_request_in_the_loop_too(rig: Callable[..., Rig]) -> None:
    one = rig()
    answer = one.submit("one STOP two", stops=("STOP",)).wait()
    assert answer.text == "one "
    assert answer.responses[-1].finish_reason is FinishReason.STOP
    assert one.loop.cancelled == [("key1", FinishReason.STOP)]


def test_a_stop_string_completed_by_the_last_token_counts_as_a_stop(
    rig: Callable[..., Rig],
) -> None:
    one = rig()
    answer = one.submit("x!", stops=("!",)).wait()
    assert (answer.text, answer.responses[-1].finish_reason) == ("x", FinishReason.STOP)
    assert one.loop.cancelled == [] and answer.num_finals == 1


def test_log_probs_are_accumulated(rig: Callable[..., Rig]) -> None:
    answer = rig().submit("abc", log_probs=True).wait()
    assert [r.cum_log_prob for r in answer.responses] == [-97.0 - 98.0, -97.0 - 98.0 - 99.0]


def test_refusals_of_the_loop_reach_the_client(rig: Callable[..., Rig]) -> None:
    answer = rig().submit("").wait()
    assert isinstance(answer.errors[0], InvalidRequestError) and answer.num_finals == 1


def test_a_full_queue_is_refused(rig: Callable[..., Rig]) -> None:
    one = rig(num_slots=1, max_queue_size=1)
    one.loop.gate.clear()
    answers = [one.submit("abcdefgh") for _ in range(4)]
    one.loop.gate.set()
    errors = [e for a in answers for e in a.wait().errors]
    assert len(errors) >= 1 and all(isinstance(e, QueueFullError) for e in errors)
    assert all(a.num_finals == 1 for a in answers)


def test_a_gone_client_frees_its_slot(rig: Callable[..., Rig]) -> None:
    one = rig(num_slots=1)
    endless = one.submit("x" * 100000)
    endless.is_gone = True
    endless.wait()
    assert isinstance(endless.errors[0], RequestCancelledError)
    assert one.loop.cancelled == [("key1", FinishReason.CANCELLED)]
    assert one.submit("next").wait().text == "next"


def test_stop_ends_all_requests_with_the_client_id_and_no_other(rig: Callable[..., Rig]) -> None:
    one = rig(num_slots=3)
    one.loop.gate.clear()
    twins = [one.submit("x" * 100000, client_id="7") for _ in range(2)]
    other = one.submit("other", client_id="8")
    one.engine.stop(client_id="7")
    one.loop.gate.set()
    assert [type(twin.wait().errors[0]) for twin in twins] == [RequestCancelledError] * 2
    assert other.wait().text == "other"


def test_a_stop_that_overtakes_its_request_still_stops_it(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.engine.stop(handle="h")
    assert isinstance(one.submit("abc", handle="h").wait().errors[0], RequestCancelledError)
    assert one.submit("abc", handle="h").wait().text == "abc"


def test_an_empty_client_id_stops_nothing(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.engine.stop(client_id="")
    assert one.submit("abc").wait().text == "abc"


def test_a_timed_out_request_says_so(rig: Callable[..., Rig]) -> None:
    answer = rig().submit("x" * 100000, timeout_s=0.01).wait()
    assert isinstance(answer.errors[0], RequestTimeoutError) and answer.num_finals == 1


def test_a_failed_step_fails_its_requests_and_serves_the_next(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.loop.gate.clear()
    lost = [one.submit("abc"), one.submit("def")]
    one.loop.fail_next_step = RuntimeError("boom")
    one.loop.gate.set()
    assert all(isinstance(a.wait().errors[0], EngineError) for a in lost)
    assert all("boom" not in str(a.errors[0]) for a in lost)
    assert one.submit("next").wait().text == "next"


def test_draining_finishes_what_runs_and_refuses_what_comes(rig: Callable[..., Rig]) -> None:
    one = rig(num_slots=1)
    one.loop.gate.clear()
    running = [one.submit("first"), one.submit("second")]
    drain = threading.Thread(target=one.engine.drain, args=(10,))
    drain.start()
    while not (late := one.submit("late")).errors:
        time.sleep(0.005)
    one.loop.gate.set()
    drain.join()
    assert [a.wait().text for a in running] == ["first", "second"]
    assert isinstance(late.errors[0], ShuttingDownError)


def test_draining_cancels_what_takes_too_long(rig: Callable[..., Rig]) -> None:
    one = rig()
    endless = one.submit("x" * 1000000)
    one.engine.drain(0.05)
    assert isinstance(endless.wait().errors[0], RequestCancelledError)
    assert endless.num_finals == 1


def test_only_one_thread_touches_the_loop(rig: Callable[..., Rig]) -> None:
    one = rig(num_slots=8)
    answers: list[Recorder] = []
    lock = threading.Lock()

    def send(number: int) -> None:
        recorder = one_submit(number)
        with lock:
            answers.append(recorder)

    def one_submit(number: int) -> Recorder:
        recorder = Recorder()
        one.engine.submit(make_request(f"text {number}", f"k{number}"), recorder)
        return recorder

    threads = [threading.Thread(target=send, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a.wait().text for a in answers) == sorted(f"text {n}" for n in range(40))
    assert len(one.loop.threads) == 1


def test_the_observer_sees_the_idle_state_and_every_length(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.submit("abc").wait()
    one.submit("de").wait()
    one.engine.drain(5)
    assert one.observed.finished == [(3, 3), (2, 2)]
    assert one.observed.stats[-1].num_running == 0
