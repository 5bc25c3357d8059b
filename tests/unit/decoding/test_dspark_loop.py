# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter inside the decoding loop: every draft equals one made from scratch, drafters
that know the target are accepted in full, and greedy output never changes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.decoding.loops import (
    VOCAB,
    TinyModel,
    generate,
    random_prompts,
    request,
)
from trtllm_dspark.config import BucketConfig, DrafterConfig, ModelConfig
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.models.dense_target import DenseTarget
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.buckets import build_ladder
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.training.block_forward import forward_blocks
from trtllm_dspark.training.packing import TokenSequence, pack_blocks
from trtllm_dspark.types import EngineInfo

GAMMA = 4


def drafter_config(target: ModelConfig, **changes: object) -> DrafterConfig:
    fields: dict[str, object] = dict(
        hidden_size=target.hidden_size,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        vocab_size=target.vocab_size,
        num_drafts=GAMMA,
        mask_token_id=1,
        target_layer_ids=(-1, 0),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        head_type="rnn",
        markov_rank=6,
        confidence_head=True,
        confidence_with_markov=True,
    )
    return DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]


def random_drafter(target: TargetModel, **changes: object) -> DSparkModel:
    config = drafter_config(target.config, **changes)
    model = DSparkModel(config, target.embed_tokens, target.lm_head)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = noise + 1 if parameter.dim() == 1 else noise
    return model.requires_grad_(False).eval()


class CheckedDrafter(DSparkDrafter):
    """Recomputes every block from the committed tokens alone."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine)
        self.num_checked = 0
        self.target = DenseTarget(engine.model, engine.tap_layers)

    def propose(self, sources):
        block = super().propose(sources)
        for row, source in enumerate(sources):
            tokens = np.array(source.token_ids, np.int64)
            packed = pack_blocks(
                [TokenSequence(np.append(tokens, 0), 1)], [np.array([len(tokens) - 1])], GAMMA
            )
            taps, _ = self.target.run(packed.token_ids, packed.cu_seq_lens)
            hidden = forward_blocks(self.engine.drafter, taps, packed)
            expected = self.engine.drafter.draft_from_hidden(torch.tensor([tokens[-1]]), hidden)
            assert block.token_ids[row].tolist() == expected.token_ids[0].tolist()
            np.testing.assert_allclose(
                block.confidence_logits[row], expected.confidence_logits[0], atol=2e-4, rtol=1e-3
            )
            self.num_checked += 1
        return block


def make_loop(
    target: TargetModel,
    drafter: DSparkModel,
    *,
    policy: str = "fixed",
    options: dict | None = None,
    num_pages: int = 100,
    max_num_tokens: int = 64,
    max_num_requests: int = 4,
    drafter_class: type[DSparkDrafter] = CheckedDrafter,
) -> DecodingLoop:
    buckets = BucketConfig(max_num_requests=max_num_requests, max_num_tokens=max_num_tokens)
    info = EngineInfo(
        vocab_size=target.config.vocab_size,
        max_num_requests=max_num_requests,
        max_seq_len=160,
        page_size=8,
        num_pages=num_pages,
        rungs=build_ladder(buckets, GAMMA),
        num_drafts=GAMMA,
        fingerprint="tiny",
        device="cpu",
    )
    engine = TorchEngine(target, info, drafter)
    return DecodingLoop(
        engine,
        drafter_class(engine),
        create_policy(policy, options),
        SurvivalEstimator(GAMMA),
    )


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(3)


@pytest.mark.parametrize("label_shift", [True, False])
def test_every_draft_in_the_loop_equals_one_from_scratch(
    tiny: TinyModel, label_shift: bool
) -> None:
    drafter = random_drafter(tiny.target, label_shift=label_shift)
    loop = make_loop(tiny.target, drafter, max_num_tokens=24)
    prompts = random_prompts(6, seed=1)
    outputs = generate(loop, [request(i, p) for i, p in enumerate(prompts)])
    assert loop.drafter.num_checked > 40
    assert {k: tiny.greedy(prompts[int(k)], 20) for k in outputs} == outputs


def test_preempted_requests_get_their_context_back(tiny: TinyModel) -> None:
    loop = make_loop(tiny.target, random_drafter(tiny.target), num_pages=14)
    prompts = random_prompts(5, seed=2, longest=16)
    outputs = generate(loop, [request(i, p, max_tokens=30) for i, p in enumerate(prompts)])
    assert loop.stats().num_preemptions > 0
    assert {k: tiny.greedy(prompts[int(k)], 30) for k in outputs} == outputs


def test_a_shared_prefix_brings_its_drafter_rows_along(tiny: TinyModel) -> None:
    loop = make_loop(tiny.target, random_drafter(tiny.target))
    prompt = random_prompts(1, seed=3)[0] + list(range(20))
    for number in range(3):
        outputs = generate(loop, [request(number, prompt)])
        assert outputs[str(number)] == tiny.greedy(prompt, 20)


def test_steps_without_drafts_do_not_leave_the_context_behind(tiny: TinyModel) -> None:
    class Sometimes(CheckedDrafter):
        steps = 0

    loop = make_loop(tiny.target, random_drafter(tiny.target), drafter_class=Sometimes)
    plan, decide = loop.policy.plan, loop.policy.decide

    def decide_sometimes(view):
        decision = decide(view)
        Sometimes.steps += 1
        if Sometimes.steps % 3:
            decision.draft_mask[:] = False
        return decision

    loop.policy.decide, loop.policy.plan = decide_sometimes, plan
    prompts = random_prompts(4, seed=4)
    outputs = generate(loop, [request(i, p) for i, p in enumerate(prompts)])
    assert loop.drafter.num_checked > 0
    assert {k: tiny.greedy(prompts[int(k)], 20) for k in outputs} == outputs


def permutation_target() -> tuple[TargetModel, np.ndarray]:
    """A target whose next token is a fixed permutation of the last one."""
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB + 1,
        intermediate_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    model = TargetModel(config)
    for name, parameter in model.named_parameters():
        value = torch.ones if name.endswith("norm.weight") else torch.zeros
        parameter.data = value(parameter.shape)
    following = np.roll(np.arange(VOCAB), 7)
    eye = torch.eye(VOCAB, VOCAB + 1)
    model.embed_tokens.weight.data = eye
    model.lm_head.weight.data = torch.zeros(VOCAB, VOCAB + 1)
    model.lm_head.weight.data[following] = eye
    return model.requires_grad_(False).eval(), following


@pytest.mark.parametrize("label_shift", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 21])
def test_a_perfect_drafter_is_accepted_in_full(label_shift: bool, max_tokens: int) -> None:
    """Its backbone is silent and its Markov head holds the target's own transitions."""
    target, following = permutation_target()
    drafter = random_drafter(target, label_shift=label_shift, head_type="markov", markov_rank=VOCAB)
    drafter.norm.weight.data.zero_()
    drafter.markov.w1.weight.data = torch.eye(VOCAB)
    drafter.markov.w2.weight.data = torch.zeros(VOCAB, VOCAB)
    drafter.markov.w2.weight.data[following, np.arange(VOCAB)] = 1.0
    loop = make_loop(target, drafter)
    output = generate(loop, [request("a", [5, 3], max_tokens=max_tokens)])["a"]
    expected, token = [], 3
    for _ in range(max_tokens):
        token = int(following[token])
        expected.append(token)
    assert output == expected
    stats = loop.stats()
    assert stats.num_accepted_tokens == stats.num_verified_tokens
    # The first token comes from the prompt; each later step commits γ+1, the last what is left.
    assert stats.num_steps == 1 - (1 - max_tokens) // (GAMMA + 1)


@pytest.mark.parametrize("label_shift", [True, False])
def test_a_drafter_read_under_the_other_convention_is_hardly_accepted(label_shift: bool) -> None:
    """A backbone that copies the anchor's successor into its first draft slot tells them apart."""
    target, following = permutation_target()
    drafter = random_drafter(
        target,
        label_shift=label_shift,
        head_type="none",
        markov_rank=0,
        confidence_head=False,
        confidence_with_markov=False,
    )
    for layer in drafter.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    # Rows are their own embeddings now: the anchor's row says "after the anchor", a mask's row
    # says "after the mask", whatever the position.
    drafter.norm.weight.data.fill_(1.0)
    pages = make_loop(target, drafter, drafter_class=DSparkDrafter)
    output = generate(pages, [request("a", [5, 3], max_tokens=24)])["a"]
    assert output[0] == int(following[3])
    accepted = pages.stats().num_accepted_tokens
    steps = pages.stats().num_steps
    if label_shift:
        assert accepted >= steps - 2
    else:
        assert accepted <= steps // 4 + 1
