# SPDX-License-Identifier: Apache-2.0
"""The target against transformers: prompts, increments and ragged multi-token steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.unit.models.builders import paged_engine, target_from_hf
from trtllm_dspark.engines.protocol import TargetStep

COMMON = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
CASES = {
    "llama-gqa3-tied": LlamaConfig(
        **COMMON, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "llama-mha-bias": LlamaConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=4, attention_bias=True
    ),
    "llama3-rope": LlamaConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen3-head-dim": Qwen3Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    ),
}


@pytest.fixture(params=CASES, scope="module")
def pair(request):
    torch.manual_seed(0)
    config = CASES[request.param]
    cls = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM
    reference = cls(config).eval()
    for parameter in reference.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return reference, target_from_hf(reference)


def reference_logits(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def run(engine, requests, *, rung):
    """requests: list of (context_len, new tokens, page ids); returns logits of every row."""
    lens = [len(tokens) for _, tokens, _ in requests]
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    width = max(len(pages) for _, _, pages in requests)
    table = np.zeros((len(requests), width), np.int32)
    for row, (_, _, pages) in enumerate(requests):
        table[row, : len(pages)] = pages
    positions = np.concatenate([np.arange(c, c + len(t)) for c, t, _ in requests])
    step = TargetStep(
        token_ids=np.concatenate([np.asarray(t) for _, t, _ in requests]).astype(np.int32),
        positions=positions.astype(np.int32),
        cu_query_lens=cu,
        context_lens=np.array([c for c, _, _ in requests], np.int32),
        page_table=table,
        logit_rows=np.arange(cu[-1], dtype=np.int32),
        rung=rung,
    )
    logits = engine.run_target(step).logits
    return [logits[cu[i] : cu[i + 1]] for i in range(len(requests))]


def test_a_prompt_gives_the_reference_logits(pair):
    reference, model = pair
    tokens = list(np.random.default_rng(1).integers(0, 97, 37))
    (logits,) = run(paged_engine(model), [(0, tokens, [5, 2, 9, 1, 7])], rung=64)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_ragged_steps_of_one_to_many_tokens_give_the_reference_logits(pair):
    reference, model = pair
    rng = np.random.default_rng(2)
    streams = [list(rng.integers(0, 97, 60)) for _ in range(4)]
    pages = [
        [3, 11, 4, 20, 21, 22, 23, 24],
        [5, 6, 7, 8, 25, 26, 27, 28],
        [1, 2, 29, 30, 31, 32, 33, 34],
        [9, 10, 12, 13, 14, 15, 16, 17],
    ]
    done = [0, 0, 0, 0]
    engine = paged_engine(model)
    steps = [(8, 1, 0, 33), (1, 7, 16, 1), (5, 0, 1, 8), (8, 8, 8, 8), (1, 1, 1, 1), (7, 40, 2, 3)]
    expected = [reference_logits(reference, s) for s in streams]
    for lens in steps:
        requests = [
            (done[i], streams[i][done[i] : done[i] + n], pages[i]) for i, n in enumerate(lens)
        ]
        for i, (logits, n) in enumerate(zip(run(engine, requests, rung=64), lens, strict=True)):
            torch.testing.assert_close(
                logits, expected[i][done[i] : done[i] + n], atol=1e-4, rtol=1e-4
            )
            done[i] += n


def test_rejected_rows_are_overwritten_by_the_next_step(pair):
    reference, model = pair
    tokens = list(np.random.default_rng(3).integers(0, 97, 20))
    engine = paged_engine(model)
    run(engine, [(0, tokens[:10], [4, 5, 6])], rung=64)
    run(engine, [(10, [1, 2, 3, 4, 5, 6], [4, 5, 6])], rung=64)
    (logits,) = run(engine, [(10, tokens[10:], [4, 5, 6])], rung=64)
    torch.testing.assert_close(
        logits, reference_logits(reference, tokens)[10:], atol=1e-4, rtol=1e-4
    )


def test_padding_rows_change_nothing_but_the_scratch_page(pair):
    _, model = pair
    tokens = list(np.random.default_rng(4).integers(0, 97, 9))
    small, large = paged_engine(model), paged_engine(model)
    (a,) = run(small, [(0, tokens, [3, 4])], rung=16)
    (b,) = run(large, [(0, tokens, [3, 4])], rung=128)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(small.kv_pages, large.kv_pages, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-5, rtol=1e-5)
        assert not ours[5:].any()


def test_taps_are_the_outputs_of_the_named_layers(pair):
    reference, model = pair
    tokens = list(np.random.default_rng(5).integers(0, 97, 12))
    engine = paged_engine(model, tap_layers=(1, -1, 0))
    step = TargetStep(
        token_ids=np.asarray(tokens, np.int32),
        positions=np.arange(12, dtype=np.int32),
        cu_query_lens=np.array([0, 12], np.int32),
        context_lens=np.array([0], np.int32),
        page_table=np.array([[1, 2]], np.int32),
        logit_rows=np.array([11], np.int32),
        rung=16,
    )
    taps = engine.run_target(step).taps
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[2][0], states[0][0], states[1][0]], dim=-1)
    torch.testing.assert_close(taps, expected, atol=1e-4, rtol=1e-4)
