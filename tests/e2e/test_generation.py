# SPDX-License-Identifier: Apache-2.0
"""The same text by every way through the real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.support import metrics, post, wait_until
from trtllm_dspark.runtime import load_tokenizer
from trtllm_dspark.serving.client import Answer, GrpcClient
from trtllm_dspark.serving.launcher import TritonServer

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
PROMPTS = ("hello there", "abcabcabc", "é😀 né", " leading space")


def ask(client: GrpcClient, prompt: str, model: str = "ensemble", **options: Any) -> Answer:
    answer = client.ask({"text_input": prompt, "max_tokens": 48, **options}, model=model)
    assert answer.error is None
    return answer


@pytest.mark.parametrize("prompt", PROMPTS)
def test_all_models_give_the_same_text_streaming_or_not(client: GrpcClient, prompt: str) -> None:
    texts = {
        (model, stream): ask(client, prompt, model, stream=stream).text
        for model in TEXT_MODELS
        for stream in (False, True)
    }
    assert len(set(texts.values())) == 1
    ids = list(prompt.encode())
    engine = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 48}
    streamed = client.ask({**engine, "streaming": True}, model="tensorrt_llm")
    assert streamed.text == texts["ensemble", False]
    assert client.ask(engine, model="tensorrt_llm").text == streamed.text


def test_without_streaming_there_is_one_response_and_it_is_final(client: GrpcClient) -> None:
    for model in TEXT_MODELS:
        events = ask(client, "abc", model).events
        assert len(events) == 1 and events[0].is_final


def test_the_last_streamed_response_is_final_and_says_why(client: GrpcClient) -> None:
    events = ask(client, "abc", stream=True).events
    assert [event.is_final for event in events] == [False] * (len(events) - 1) + [True]
    reasons = [bytes(event.outputs["finish_reason"].reshape(-1)[0]) for event in events]
    assert reasons == [b""] * (len(events) - 1) + [b"length"]


def test_each_group_decodes_by_itself(
    client: GrpcClient, server: TritonServer, model_dir: Any
) -> None:
    ids = list("né 😀".encode())
    answer = client.ask(
        {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 64, "streaming": True},
        model="tensorrt_llm",
    )
    tokenizer = load_tokenizer(model_dir)
    groups = [event.outputs["output_ids"].reshape(-1).tolist() for event in answer.events]
    whole = tokenizer.decode([i for group in groups for i in group])
    assert "".join(tokenizer.decode(group) for group in groups) == whole == answer.text
    decoded = client.ask(
        {
            "TOKENS_BATCH": np.array([[groups[0]]], np.int32),
            "SEQUENCE_LENGTH": np.array([[len(groups[0])]], np.int32),
        },
        model="postprocessing",
    )
    assert (
        bytes(decoded.events[0].outputs["OUTPUT"].reshape(-1)[0]).decode() == answer.events[0].text
    )


def test_a_stop_string_cuts_the_text_exactly_there(client: GrpcClient) -> None:
    whole = ask(client, "hello there").text
    stop = whole[7:10]
    expected = whole[: whole.index(stop)]
    for model in TEXT_MODELS:
        for stream in (False, True):
            answer = ask(client, "hello there", model, stop_words=[stop], stream=stream)
            assert (answer.text, answer.finish_reason) == (expected, "stop")


def test_the_input_is_repeated_on_request(client: GrpcClient) -> None:
    alone = ask(client, "né ").text
    repeated = ask(client, "né ", exclude_input_in_output=False)
    assert repeated.text == "né " + alone


def test_the_chat_template_is_applied_on_request(client: GrpcClient) -> None:
    chat = ask(client, "hi", apply_chat_template=True)
    assert chat.last.number("num_input_tokens") == 1 + 2 + 1
    assert ask(client, "hi").last.number("num_input_tokens") == 2


def test_speculation_changes_nothing_and_is_reported(client: GrpcClient) -> None:
    plain = ask(client, "abcabcabc", max_tokens=200, num_draft_tokens=0)
    drafted = ask(client, "abcabcabc", max_tokens=200)
    assert plain.text == drafted.text
    assert plain.last.number("total_draft_tokens") == 0
    total = drafted.last.number("total_draft_tokens")
    accepted = drafted.last.number("total_accepted_draft_tokens")
    assert total >= accepted > 0
    assert drafted.last.number("acceptance_rate") == pytest.approx(accepted / total)
    steps = drafted.last.number("num_decode_steps")
    assert steps + accepted >= 200 and steps < 200


def test_a_seed_makes_sampling_reproducible(client: GrpcClient) -> None:
    def sample(seed: int, **options: Any) -> str:
        return ask(client, "hello", temperature=1.5, top_k=40, seed=seed, **options).text

    assert sample(1) == sample(1) == sample(1, num_draft_tokens=0)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_both_spellings_of_options_work(client: GrpcClient) -> None:
    one = ask(client, "hello", temperature=1.5, seed=5, min_tokens=3).text
    assert ask(client, "hello", temperature=1.5, random_seed=5, min_length=3).text == one


def test_bad_words_are_never_generated(client: GrpcClient) -> None:
    whole = ask(client, "hello there").text
    banned = whole[5]
    text = ask(client, "hello there", bad_words=[banned]).text
    assert banned not in text and text.startswith(whole[: whole.index(banned)])


def test_a_bias_forces_a_word(client: GrpcClient) -> None:
    text = ask(
        client, "x", max_tokens=5, embedding_bias_words=["Q"], embedding_bias_weights=[1000.0]
    ).text
    assert text == "QQQQQ"


def test_end_id_ends_the_output_before_that_token(client: GrpcClient) -> None:
    whole = ask(client, "hello there").text
    end = next(c for c in whole if c.isascii())
    answer = ask(client, "hello there", end_id=ord(end))
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(end)], "eos")


def test_log_probs_and_perf_metrics_come_on_request(client: GrpcClient) -> None:
    outputs = ask(client, "hello", return_log_probs=True, return_perf_metrics=True).last.outputs
    log_probs = outputs["output_log_probs"]
    assert log_probs.shape == (1, 1, 48) and (log_probs <= 0).all()
    assert outputs["cum_log_probs"][0, 0] == pytest.approx(log_probs.sum(), rel=1e-4)
    names = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [int(outputs[f"{name}_time_ns"].reshape(-1)[0]) for name in names]
    assert times == sorted(times) and times[0] > 0
    assert outputs["kv_cache_alloc_total_blocks"].reshape(-1)[0] == 2


def test_streamed_log_probs_join_to_those_of_the_whole(client: GrpcClient) -> None:
    whole = ask(client, "abcabc", return_log_probs=True).last.outputs["output_log_probs"]
    events = ask(client, "abcabc", return_log_probs=True, stream=True).events
    parts = [e.outputs["output_log_probs"].reshape(-1) for e in events if e.text]
    np.testing.assert_allclose(np.concatenate(parts), whole.reshape(-1), atol=1e-4)


def test_http_generate_and_generate_stream_agree(server: TritonServer) -> None:
    body = {"text_input": "hello there", "max_tokens": 32, "bad_words": "", "stop_words": ""}
    for model in TEXT_MODELS:
        status, whole = post(server, model, "generate", body)
        assert status == 200
        status, events = post(server, model, "generate_stream", {**body, "stream": True})
        assert status == 200
        assert "".join(event["text_output"] for event in events) == whole["text_output"]


def test_a_timed_out_request_says_so(client: GrpcClient) -> None:
    answer = client.ask(
        {"text_input": "hello", "max_tokens": 8000, "stream": True}, timeout_us=200_000
    )
    assert "time-out of 0.2 s" in (answer.error or "")


def test_preprocessing_answers_by_itself(client: GrpcClient) -> None:
    answer = client.ask(
        {
            "QUERY": np.array([[b"ab"]], object),
            "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32),
            "STOP_WORDS_DICT": np.array([[b"xy", b"z"]], object),
        },
        model="preprocessing",
        outputs=("INPUT_ID", "STOP_WORDS_IDS", "OUT_END_ID"),
    )
    outputs = answer.events[0].outputs
    assert outputs["INPUT_ID"].tolist() == [[97, 98]]
    assert outputs["STOP_WORDS_IDS"].tolist() == [[[120, 121, 122], [2, 3, -1]]]
    assert outputs["OUT_END_ID"].tolist() == [[256]]


def test_metrics_count_what_was_done(client: GrpcClient, server: TritonServer) -> None:
    before = metrics(server)
    ask(client, "abcabcabc", max_tokens=100)

    def grown(name: str, **labels: str) -> float:
        return metrics(server).total(name, **labels) - before.total(name, **labels)

    wait_until(lambda: grown("dspark_requests_total", reason="length") == 1, "one request counted")
    assert grown("dspark_committed_tokens_total") >= 100 - 1
    assert grown("dspark_accepted_tokens_per_step_sum") == grown("dspark_committed_tokens_total")
    assert grown("dspark_steps_total") == grown("dspark_bucket_steps_total") > 0
    assert grown("nv_llm_output_token_len_sum") == 100
    assert grown("nv_llm_input_token_len_sum") == 9
    names = metrics(server).names
    assert {"nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"} <= names
