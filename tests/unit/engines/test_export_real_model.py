# SPDX-License-Identifier: Apache-2.0
"""The exported SmolLM2 and its drafter in ONNX Runtime equal torch over decode steps (slow set)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engines.exported import ExportedEngine, make_limits, make_torch_engine
from tests.unit.engines.test_export import drafter_step
from trtllm_dspark.checkpoints import drafter_shapes, load_model_config, write_drafter
from trtllm_dspark.checkpoints.tokenizer import load_tokenizer
from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.engines.build_models import (
    load_unpacked_drafter,
    load_unpacked_target,
    open_source,
)
from trtllm_dspark.engines.protocol import ContextAppend, TargetStep

pytest.importorskip("onnxscript", reason="needs the extra rtx")
pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra dev)")

TOLERANCE = 1e-4
PROMPTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Natalia sold clips to 48 of her friends in April",
    "The capital of France is Paris, and",
)
STEPS = (((14, 10, 8), 32), ((1, 4, 2), 8), ((3, 1, 4), 8))


def write_random_drafter(directory: Path, model_dir: Path) -> Path:
    """A seeded drafter of the demo's shape, for as long as none is shipped."""
    target = load_model_config(model_dir)
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=2,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        num_drafts=7,
        target_layer_ids=(1, 14, 27),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        head_type="markov",
        markov_rank=64,
        confidence_head=True,
        confidence_with_markov=True,
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else 0.05 * torch.randn(shape, generator=generator)
        for name, shape in drafter_shapes(config).items()
    }
    write_drafter(directory, config, weights)
    return directory


@pytest.fixture(scope="module")
def engines(smollm2_dir, tmp_path_factory):
    own = smollm2_dir / "drafter"
    if not own.is_dir():
        own = write_random_drafter(tmp_path_factory.mktemp("drafter") / "random", smollm2_dir)
    source = open_source(smollm2_dir, str(own))
    target = load_unpacked_target(source, "float32", 128)
    drafter = load_unpacked_drafter(source, target, 128)
    limits = make_limits(drafter)
    path = tmp_path_factory.mktemp("onnx")
    return make_torch_engine(target, drafter, limits), ExportedEngine(path, target, drafter, limits)


def agrees(ours, theirs) -> None:
    """Equal to 1e-4 of the largest magnitude (taps of this model reach the hundreds)."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


def take_step(texts, contexts, lens, rung, table) -> TargetStep:
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    spans = list(zip(texts, contexts, lens, strict=True))
    return TargetStep(
        token_ids=np.concatenate([ids[c : c + n] for ids, c, n in spans]).astype(np.int32),
        positions=np.concatenate([np.arange(c, c + n) for _, c, n in spans]).astype(np.int32),
        cu_query_lens=cu,
        context_lens=np.asarray(contexts, np.int32),
        page_table=table,
        logit_rows=np.arange(cu[-1], dtype=np.int32)[-8:],
        rung=rung,
    )


@pytest.mark.slow
def test_the_demo_model_and_its_drafter_equal_torch_over_decode_steps(engines, smollm2_dir):
    reference, exported = engines
    tokenizer = load_tokenizer(smollm2_dir)
    texts = [np.resize(np.array(tokenizer.encode(text)), 20) for text in PROMPTS]
    contexts, rng = np.zeros(3, np.int64), np.random.default_rng(0)
    for lens, rung in STEPS:
        table = drafter_step(rng, contexts).page_table
        step = take_step(texts, contexts, lens, rung, table)
        expected = reference.run_target(step)
        logits, taps = exported.run_target(step)
        agrees(logits, expected.logits)
        agrees(taps, expected.taps)
        assert logits.argmax(-1).tolist() == expected.logits.argmax(-1).tolist()
        rows = ContextAppend(expected.taps, step.positions, step.cu_query_lens, table)
        reference.append_context(rows)
        exported.append_context(
            ContextAppend(expected.taps.numpy(), step.positions, step.cu_query_lens, table)
        )
        contexts = contexts + lens
        draft = drafter_step(rng, contexts)
        block = reference.run_drafter(draft)
        token_ids, confidence = exported.run_drafter(draft)
        assert token_ids.tolist() == block.token_ids.tolist()
        agrees(confidence, block.confidence_logits)
    for ours, theirs in zip(exported.kv_pages, reference.kv_pages, strict=True):
        agrees(ours[1:], theirs[1:])
    for ours, theirs in zip(exported.drafter_pages, reference.drafter_pages, strict=True):
        agrees(ours[1:], theirs[1:])
