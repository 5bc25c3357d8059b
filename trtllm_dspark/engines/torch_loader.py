# SPDX-License-Identifier: Apache-2.0
"""Puts a `TorchEngine` together: weights, dtype, pages, ladder, fingerprint."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dspark.checkpoints import load_drafter, load_model_config, load_target_weights
from trtllm_dspark.config import DrafterConfig, ModelConfig, SystemConfig
from trtllm_dspark.engines.device import check_device
from trtllm_dspark.engines.fingerprint import describe_device, fingerprint, hash_checkpoint
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.engines.precision import resolve_dtype
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.huge_pages import back_weights
from trtllm_dspark.types import EngineInfo

logger = logging.getLogger(__name__)


def load_target(
    model_dir: str | Path, dtype: torch.dtype, device: str, max_positions: int | None = None
) -> TargetModel:
    """The target of a Hugging Face directory, weights cast to `dtype`, packed for the device."""
    config = load_model_config(model_dir)
    weights = load_target_weights(model_dir, config)
    with torch.device("meta"):
        skeleton = TargetModel(config, max_positions=1)
    model = skeleton.to_empty(device="cpu")
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    if config.tie_word_embeddings:
        cast["lm_head.weight"] = cast["embed_tokens.weight"]
    model.load_state_dict(cast, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.tie_(model.embed_tokens)
    model.requires_grad_(False)
    model.set_rope_table(max_positions or config.max_position_embeddings)
    model.to(device)
    model.pack_()
    return model.eval()


def num_pages_for(config: SystemConfig, block_rows: int) -> int:
    """Configured pages, or enough for max_num_requests sequences of max_seq_len, plus scratch."""
    if config.cache.num_pages:
        return config.cache.num_pages
    rows = config.max_seq_len + block_rows
    return config.buckets.max_num_requests * math.ceil(rows / config.cache.page_size) + 1


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter as read from disk."""

    config: DrafterConfig
    weights: dict[str, torch.Tensor]
    checkpoint_hash: str


def read_drafter(directory: str | Path, model_dir: str | Path) -> LoadedDrafter:
    """Read a drafter of any known layout and check it against its target."""
    config, weights = load_drafter(directory, load_model_config(model_dir))
    return LoadedDrafter(config, weights, hash_checkpoint(directory))


def load_torch_engine(
    config: SystemConfig,
    rungs: tuple[int, ...],
    *,
    num_drafts: int = 0,
    drafter: LoadedDrafter | None = None,
    request_buckets: tuple[int, ...] = (),
) -> TorchEngine:
    """Load the target of `config.model_dir` (and its drafter) and allocate their pages.

    `num_drafts` is γ of whatever drafts, inside the engine or outside. On CUDA the steps are
    kernels under captured graphs, drafting ones per requests bucket (empty: powers of two).
    """
    check_device(config.device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model_config = load_model_config(config.model_dir)
    check_lengths(config, model_config)
    dtype = resolve_dtype(config.dtype, config.device)
    block_rows = 0 if drafter is None else num_drafts + 1
    model = load_target(config.model_dir, dtype, config.device, config.max_seq_len + block_rows)
    facts = {
        "checkpoint": hash_checkpoint(config.model_dir),
        "drafter": None if drafter is None else drafter.checkpoint_hash,
        "dtype": str(dtype),
        "backend": "torch",
        "rungs": rungs,
        "buckets": dataclasses.asdict(config.buckets),
        "page_size": config.cache.page_size,
    }
    info = EngineInfo(
        vocab_size=model_config.vocab_size,
        max_num_requests=config.buckets.max_num_requests,
        max_seq_len=config.max_seq_len,
        page_size=config.cache.page_size,
        num_pages=num_pages_for(config, block_rows),
        rungs=rungs,
        num_drafts=num_drafts,
        fingerprint=fingerprint(facts, config.device),
        device=config.device,
        extra={
            "dtype": str(dtype).removeprefix("torch."),
            "machine": describe_device(config.device),
        },
    )
    module = None if drafter is None else make_drafter(drafter, model, config.max_seq_len)
    if config.device != "cpu":
        return KernelEngine(model, info, module, request_buckets=request_buckets)
    back_weights()
    return TorchEngine(model, info, module)


def make_drafter(drafter: LoadedDrafter, target: TargetModel, max_seq_len: int) -> DSparkModel:
    """The module in the target's dtype and on its device, borrowing its embedding and head."""
    like = target.embed_tokens.weight
    model = DSparkModel(drafter.config, target.embed_tokens, target.lm_head, max_seq_len)
    model.load_state_dict({name: w.to(like.dtype) for name, w in drafter.weights.items()})
    model.to(device=like.device, dtype=like.dtype)
    model.rope_table = model.rope_table.float()
    model.requires_grad_(False)
    model.pack_()
    return model.eval()


def check_lengths(config: SystemConfig, model: ModelConfig) -> None:
    """Refuse a sequence limit beyond the model's positions."""
    if config.max_seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_seq_len = {config.max_seq_len} is not allowed: the model has "
            f"{model.max_position_embeddings} positions"
        )
