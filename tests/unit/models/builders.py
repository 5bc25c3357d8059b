# SPDX-License-Identifier: Apache-2.0
"""Small targets and engines for tests: ours from a Hugging Face module, with its weights."""

from __future__ import annotations

import torch

from trtllm_dspark.config import ModelConfig, RopeScaling
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.types import EngineInfo


def config_from_hf(config) -> ModelConfig:
    """ModelConfig of a transformers Llama or Qwen3 config (independent of our own readers)."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    scaling = None
    if rope.get("rope_type") == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        scaling = RopeScaling(
            *(rope[n] for n in names),
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )
    return ModelConfig(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=bool(getattr(config, "attention_bias", False)),
        qk_norm=config.model_type == "qwen3",
    )


def target_from_hf(reference) -> TargetModel:
    """Our target with the weights of a transformers model."""
    model = TargetModel(config_from_hf(reference.config))
    theirs = reference.state_dict()
    ours = {}
    for name in model.state_dict():
        key = name if name.startswith("lm_head") else f"model.{name}"
        for fused, parts in (("qkv_proj", "q k v"), ("gate_up_proj", "gate up")):
            if fused in name:
                pieces = [theirs[key.replace(fused, f"{p}_proj")] for p in parts.split()]
                ours[name] = torch.cat(pieces)
                break
        else:
            ours[name] = theirs[key]
    model.load_state_dict(ours)
    return model.eval()


def paged_engine(
    model: TargetModel,
    tap_layers: tuple[int, ...] = (),
    *,
    num_pages: int = 40,
    page_size: int = 8,
    rungs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128),
) -> TorchEngine:
    """A torch engine with a small page pool."""
    info = EngineInfo(
        vocab_size=model.config.vocab_size,
        max_num_requests=8,
        max_seq_len=model.config.max_position_embeddings,
        page_size=page_size,
        num_pages=num_pages,
        rungs=rungs,
        num_drafts=0,
        fingerprint="test",
        device="cpu",
    )
    engine = TorchEngine(model, info)
    engine.tap_layers = tap_layers
    return engine
