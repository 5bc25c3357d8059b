# SPDX-License-Identifier: Apache-2.0
"""A tiny model directory with a random drafter, and prompt files, for tests of commands."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.e2e.tiny_model import write_tiny_model
from trtllm_dspark.checkpoints import drafter_shapes, load_model_config, write_drafter
from trtllm_dspark.config import DrafterConfig

GAMMA = 4
TEXTS = {
    "math": ("sums", ["1+1 = 1+1 = 1+1 = ", "3+4?", "half of ten is", "9-1", "2*2*2*2*2"]),
    "code": ("snippets", ["def f(x):", "for i in range", "x = x = x = ", "print(", "import os"]),
    "chat": ("talk", ["hello", "how are you you you", "tell me a tale", "why?", "a poem, please"]),
}


def write_model(directory: Path, *, head: str = "markov", num_layers: int = 1) -> Path:
    """The tiny target with a random drafter in its `drafter` subdirectory."""
    write_tiny_model(directory)
    write_random_drafter(directory / "drafter", directory, head=head, num_layers=num_layers)
    return directory


def write_random_drafter(
    directory: Path, model_dir: Path, *, head: str = "markov", num_layers: int = 1, seed: int = 0
) -> Path:
    """A drafter of random weights for a target."""
    target = load_model_config(model_dir)
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        num_drafts=GAMMA,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        head_type=head,
        markov_rank=0 if head == "none" else 8,
        confidence_head=True,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in drafter_shapes(config).items()
    }
    write_drafter(directory, config, weights)
    return directory


def write_prompts(directory: Path) -> list[str]:
    """One JSONL file per domain; returns the files."""
    files = []
    for domain, (name, texts) in TEXTS.items():
        path = directory / f"{name}.jsonl"
        rows = [
            {"id": f"{name}/{i}", "domain": domain, "prompt": text} for i, text in enumerate(texts)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(str(path))
    return files
