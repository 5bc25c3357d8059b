# SPDX-License-Identifier: Apache-2.0
"""Target and drafter of a build: read from disk, cast, put into modules with unpacked weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dspark.checkpoints import (
    find_drafter,
    load_drafter,
    load_model_config,
    load_target_weights,
    load_trtllm_checkpoint,
)
from trtllm_dspark.config import DrafterConfig, ModelConfig, load_json
from trtllm_dspark.engines.fingerprint import hash_checkpoint
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """Where the models of a build lie, and their configurations."""

    path: Path
    is_trtllm: bool
    """A TensorRT-LLM checkpoint rather than a Hugging Face directory."""
    model: ModelConfig
    drafter_path: Path | None
    drafter: DrafterConfig | None

    @property
    def hashes(self) -> tuple[str, str]:
        """Digests of target and drafter ('' without one)."""
        drafter = "" if self.drafter_path is None else hash_checkpoint(self.drafter_path)
        return hash_checkpoint(self.path), drafter


def open_source(path: str | Path, drafter: str = "auto") -> Source:
    """Find a target and its drafter ('auto' = the directory's own, 'none', or a path)."""
    directory = Path(path)
    config = load_json(directory / "config.json")
    is_trtllm = "architecture" in config and "mapping" in config
    if is_trtllm:
        model, _ = load_trtllm_checkpoint(directory)
    else:
        model = load_model_config(directory)
    drafter_path = find_drafter(directory, drafter)
    drafter_config = None if drafter_path is None else load_drafter(drafter_path, model)[0]
    return Source(directory, is_trtllm, model, drafter_path, drafter_config)


def load_unpacked_target(source: Source, dtype: str, max_positions: int) -> TargetModel:
    """The target module in `dtype`, plain weights, a rotary table of `max_positions` rows."""
    if source.is_trtllm:
        _, weights = load_trtllm_checkpoint(source.path)
    else:
        weights = load_target_weights(source.path, source.model)
    with torch.device("meta"):
        skeleton = TargetModel(source.model, max_positions=1)
    model = skeleton.to_empty(device="cpu")
    cast = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
    tied = source.model.tie_word_embeddings
    if tied:
        cast["lm_head.weight"] = cast["embed_tokens.weight"]
    model.load_state_dict(cast, strict=True, assign=True)
    if tied:
        model.lm_head.tie_(model.embed_tokens)
    model.set_rope_table(max_positions)
    return model.requires_grad_(False).eval()


def load_unpacked_drafter(source: Source, target: TargetModel, max_positions: int) -> DSparkModel:
    """The drafter module in the target's dtype, borrowing its embedding and head."""
    if source.drafter_path is None or source.drafter is None:
        raise ConfigError(f"{source.path} has no drafter: give drafter_dir")
    _, weights = load_drafter(source.drafter_path, source.model)
    dtype = target.embed_tokens.weight.dtype
    model = DSparkModel(source.drafter, target.embed_tokens, target.lm_head, max_positions)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    model.to(dtype)
    return model.requires_grad_(False).eval()
