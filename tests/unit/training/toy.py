# SPDX-License-Identifier: Apache-2.0
"""A toy language with a known answer: after token x comes a fixed permutation of x."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trtllm_dspark.config import DrafterConfig, ModelConfig
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.training.token_store import TokenStore, TokenStoreWriter

VOCAB = 64
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)


def permutation() -> np.ndarray:
    """One cycle through all tokens: the next token of each."""
    order = np.random.default_rng(7).permutation(VOCAB)
    following = np.empty(VOCAB, np.int64)
    following[order] = np.roll(order, -1)
    return following


def make_target() -> TargetModel:
    """A target that is certain of `permutation()`; its layers add nothing to the residual."""
    model = TargetModel(CONFIG)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    embedding = torch.linalg.qr(torch.randn(VOCAB, VOCAB, generator=generator))[0]
    model.embed_tokens.weight.data = embedding
    model.lm_head.weight.data = torch.empty(VOCAB, VOCAB)
    model.lm_head.weight.data[permutation()] = 2.0 * embedding
    return model.requires_grad_(False).eval()


def make_drafter(target: TargetModel, **changes: object) -> DSparkModel:
    """An untrained drafter for `make_target()`."""
    fields: dict[str, object] = dict(
        hidden_size=64,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        vocab_size=VOCAB,
        num_drafts=3,
        mask_token_id=0,
        target_layer_ids=(-1, 0),
        num_target_layers=2,
        target_hidden_size=64,
        head_type="markov",
        markov_rank=8,
        confidence_head=True,
        confidence_with_markov=True,
        confidence_bias=True,
    )
    config = DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]
    return DSparkModel(config, target.embed_tokens, target.lm_head)


def write_answers(directory: Path, num_sequences: int, seed: int, length: int = 24) -> TokenStore:
    """A store of true answers to random prompts."""
    writer = TokenStoreWriter(directory, vocab_size=VOCAB, model_hash="toy")
    rng, following = np.random.default_rng(seed), permutation()
    for number in range(num_sequences):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()
        tokens = list(prompt)
        while len(tokens) < length:
            tokens.append(int(following[tokens[-1]]))
        writer.append(tokens, len(prompt), number)
    return TokenStore(directory)
