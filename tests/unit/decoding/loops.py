# SPDX-License-Identifier: Apache-2.0
"""Loops over a tiny random Llama for tests, and a plain reference decoder that knows no cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.models.builders import config_from_hf, target_from_hf
from trtllm_dspark.config import BucketConfig
from trtllm_dspark.decoding.drafters.ngram import NgramDrafter
from trtllm_dspark.decoding.drafters.none import NoDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.buckets import build_ladder
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import EngineInfo, GenerationRequest, RequestOutput, SamplingParams

VOCAB = 31


class TinyModel:
    """A random Llama whose greedy continuations repeat themselves often enough for n-grams."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
        self.reference = LlamaForCausalLM(config).eval()
        for parameter in self.reference.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.15)
        self.config = config_from_hf(config)
        self.target = target_from_hf(self.reference)
        self._greedy: dict[tuple[int, ...], int] = {}

    def greedy(self, prompt: Iterable[int], count: int) -> list[int]:
        """Arg-max continuation by full recomputation (remembered per prefix)."""
        tokens = [int(t) for t in prompt]
        start = len(tokens)
        for _ in range(count):
            key = tuple(tokens)
            if key not in self._greedy:
                with torch.inference_mode():
                    logits = self.reference(torch.tensor([tokens])).logits[0, -1]
                self._greedy[key] = int(logits.argmax())
            tokens.append(self._greedy[key])
        return tokens[start:]


def make_loop(
    model: TinyModel,
    *,
    drafter: str | object = "none",
    policy: str = "autoregressive",
    options: dict | None = None,
    max_num_requests: int = 8,
    max_num_tokens: int = 128,
    num_pages: int = 100,
    page_size: int = 8,
    **loop_options: object,
) -> DecodingLoop:
    """A loop over the tiny model."""
    chosen = {"none": NoDrafter, "ngram": lambda: NgramDrafter(5, 1, 4)}
    built = chosen[drafter]() if isinstance(drafter, str) else drafter
    buckets = BucketConfig(max_num_requests=max_num_requests, max_num_tokens=max_num_tokens)
    info = EngineInfo(
        vocab_size=VOCAB,
        max_num_requests=max_num_requests,
        max_seq_len=200,
        page_size=page_size,
        num_pages=num_pages,
        rungs=build_ladder(buckets, built.num_drafts),
        num_drafts=built.num_drafts,
        fingerprint="tiny",
        device="cpu",
    )
    return DecodingLoop(
        TorchEngine(model.target, info),
        built,
        create_policy(policy, options),
        SurvivalEstimator(built.num_drafts),
        **loop_options,
    )


def request(name: object, prompt: Iterable[int], **params: object) -> GenerationRequest:
    """A request with defaults that suit tests (greedy, 20 tokens)."""
    defaults: dict = {"max_tokens": 20, "temperature": 0.0}
    timeout_s = params.pop("timeout_s", None)
    return GenerationRequest(
        request_id=str(name),
        prompt_token_ids=np.asarray(list(prompt), np.int32),
        params=SamplingParams(**{**defaults, **params}),
        timeout_s=timeout_s,
    )


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of mixed lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def run_all(loop: DecodingLoop, max_steps: int = 2000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; outputs per request."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not loop.has_work:
            return outputs
        for output in loop.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"the loop did not finish in {max_steps} steps")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """All tokens of a request."""
    return [token for output in outputs for token in output.new_token_ids]


def generate(loop: DecodingLoop, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    """Add all, run to the end, check that nothing leaked, return tokens per request."""
    for one in requests:
        loop.add(one)
    outputs = run_all(loop)
    stats = loop.stats()
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_running == stats.num_waiting == 0
    assert all(o.finish_reason is None for many in outputs.values() for o in many[:-1])
    assert all(many[-1].finish_reason is not None for many in outputs.values())
    return {name: tokens_of(many) for name, many in outputs.items()}
