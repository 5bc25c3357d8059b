# SPDX-License-Identifier: Apache-2.0
"""The engine's own decode loop (graphs, rounds, paging) against float32 greedy decoding on the CPU.

A small random-weight model always; the demo model where its files are present. Tokens must agree up
to the first position whose two best logits are closer than rounding can tell.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_bench.engine_models import EngineLimits, build_modules, generate, make_engine, make_loop
from gpu_bench.environment import ROOT, Target
from gpu_bench.shapes import SMALL, TINY
from trtllm_dspark.engines.protocol import TargetStep
from trtllm_dspark.engines.torch_engine import TorchEngine

NEAR_TIE = 2e-3
DEMO_PROMPT_SEEDS = (0, 1)


@dataclass(frozen=True)
class EngineLoopResult:
    """One comparison."""

    model: str
    num_compared: int
    """Tokens compared, near-ties and what follows them left out."""
    num_wrong: int
    num_rounds: int
    """Steps that ran as whole rounds."""
    skipped: str = ""
    """Why nothing ran."""


def decode_greedily(
    engine: TorchEngine, prompt: np.ndarray, count: int
) -> tuple[list[int], list[float]]:
    """Tokens and top-two margins of plain decoding, one request on pages 1, 2, …"""
    info = engine.info
    pages = -(-(len(prompt) + count) // info.page_size)
    table = np.arange(1, pages + 1, dtype=np.int32)[None]
    tokens, margins = [], []
    pending, context = prompt.astype(np.int32), 0
    for _ in range(count):
        rows = len(pending)
        step = TargetStep(
            token_ids=pending,
            positions=np.arange(context, context + rows, dtype=np.int32),
            cu_query_lens=np.array([0, rows], np.int32),
            context_lens=np.array([context], np.int32),
            page_table=table,
            logit_rows=np.array([rows - 1], np.int32),
            rung=next(n for n in info.rungs if n >= rows),
        )
        top = engine.run_target(step).logits[0].float().topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
        context += rows
        pending = np.array(tokens[-1:], np.int32)
    return tokens, margins


def compare(name: str, engine: TorchEngine, reference: TorchEngine, prompts: list) -> Any:
    """Decode with rounds on one engine and plainly on the other."""
    count = 24 if engine.device.type == "cuda" else 5
    loop = make_loop(engine, "adaptive")
    found = generate(loop, prompts, max_tokens=count)
    compared = wrong = 0
    for tokens, prompt in zip(found, prompts, strict=True):
        expected, margins = decode_greedily(reference, prompt, count)
        for token, other, margin in zip(tokens, expected, margins, strict=True):
            if margin < NEAR_TIE:
                break
            compared += 1
            wrong += token != other
    ahead = 0 if loop.rounds is None else loop.rounds.num_started
    return EngineLoopResult(name, compared, wrong, ahead)


def run_engine_loops(target: Target) -> list[EngineLoopResult]:
    """The random model, then the demo model or why it was left out."""
    return [run_random_model(target), run_demo_model(target)]


def run_random_model(target: Target) -> EngineLoopResult:
    """The small random-weight model in float32 on both sides."""
    spec = SMALL if target.is_cuda else TINY
    limits = EngineLimits(4, 64, 160, 5) if target.is_cuda else EngineLimits(2, 8, 40, 3)
    modules = build_modules(spec, limits.num_drafts, torch.float32, target)
    on_cpu = tuple(copy.deepcopy(module).to("cpu") for module in modules)
    generator = np.random.default_rng(target.seed)
    lens = (40, 5, 70, 12) if target.is_cuda else (5, 3)
    prompts = [generator.integers(0, spec.vocab_size, n).astype(np.int32) for n in lens]
    reference = make_engine(on_cpu, spec, limits, TorchEngine)  # type: ignore[arg-type]
    return compare(spec.name, make_engine(modules, spec, limits), reference, prompts)


def run_demo_model(target: Target) -> EngineLoopResult:
    """SmolLM2-135M with its drafter, as `dspark prepare` leaves it in models/smollm2."""
    directory = ROOT / "models" / "smollm2"
    name = "smollm2"
    if not target.is_cuda:
        return EngineLoopResult(name, 0, 0, 0, "interpreted: too slow")
    if not (directory / "config.json").is_file() or not (directory / "drafter").is_dir():
        return EngineLoopResult(name, 0, 0, 0, f"{directory} has no model with a drafter")
    try:
        engine, reference = _load_demo(directory, "cuda"), _load_demo(directory, "cpu")
    except ImportError as error:
        return EngineLoopResult(name, 0, 0, 0, f"reading the model needs a package: {error}")
    vocab = engine.info.vocab_size
    prompts = [
        np.random.default_rng(seed).integers(0, vocab, 48).astype(np.int32)
        for seed in DEMO_PROMPT_SEEDS
    ]
    return compare(name, engine, reference, prompts)


def _load_demo(directory: Path, device: str) -> TorchEngine:
    from trtllm_dspark.config import BucketConfig, SystemConfig
    from trtllm_dspark.engines.torch_loader import load_torch_engine, read_drafter
    from trtllm_dspark.scheduling.buckets import build_ladder

    config = SystemConfig(
        model_dir=str(directory),
        device=device,
        dtype="float32",
        max_seq_len=256,
        buckets=BucketConfig(max_num_requests=4, max_num_tokens=64),
    )
    drafter = read_drafter(directory / "drafter", directory)
    gamma = drafter.config.num_drafts
    rungs = build_ladder(config.buckets, gamma)
    return load_torch_engine(config, rungs, num_drafts=gamma, drafter=drafter)
