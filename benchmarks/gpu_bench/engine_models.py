# SPDX-License-Identifier: Apache-2.0
"""The product's own engine and loop on random weights: what `--device cuda` runs, without files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_bench.environment import Target
from gpu_bench.shapes import ModelSpec
from trtllm_dspark.config import BucketConfig, DrafterConfig, ModelConfig
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.scheduling import PolicyResources, create_policy
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import EngineInfo, GenerationRequest, SamplingParams


@dataclass(frozen=True)
class EngineLimits:
    """How large an engine is."""

    max_num_requests: int
    max_num_tokens: int
    max_seq_len: int
    num_drafts: int

    @property
    def buckets(self) -> BucketConfig:
        """The bucket grid."""
        return BucketConfig(
            max_num_requests=self.max_num_requests, max_num_tokens=self.max_num_tokens
        )


def build_modules(
    spec: ModelSpec, num_drafts: int, dtype: torch.dtype, target: Target
) -> tuple[TargetModel, DSparkModel]:
    """Target and drafter with weights drawn on the device."""
    config = ModelConfig(
        architecture="qwen3",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=8192,
        qk_norm=True,
    )
    taps = tuple(layer - 1 for layer in spec.tap_layers)  # the last layer cannot be tapped
    drafter_config = DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.drafter_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=8192,
        vocab_size=spec.vocab_size,
        num_drafts=num_drafts,
        target_layer_ids=taps,
        num_target_layers=spec.num_layers,
        target_hidden_size=spec.hidden_size,
        head_type="markov",
        markov_rank=spec.markov_rank,
        confidence_head=True,
        confidence_with_markov=True,
    )
    with torch.device("meta"):
        model = TargetModel(config, max_positions=1)
    model = model.to_empty(device=target.device).to(dtype)
    model.set_rope_table(8192)
    with target.device:
        drafter = DSparkModel(drafter_config, model.embed_tokens, model.lm_head, 1)
    drafter = drafter.to(dtype)
    drafter.rope_table = model.rope_table
    draw_weights_(model, target.seed)
    draw_weights_(drafter, target.seed + 1)
    return model.eval(), drafter.eval()


def draw_weights_(module: nn.Module, seed: int) -> None:
    """Fill every parameter: rows of unit gain, scales near one."""
    for index, (name, parameter) in enumerate(module.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 1000 + index)
        scale = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        if name.startswith("embed_tokens"):
            scale = 1.0
        parameter.data.normal_(0.0, scale, generator=generator)
        if parameter.dim() == 1:
            parameter.data.add_(1.0)
        parameter.requires_grad_(False)


def make_info(spec: ModelSpec, limits: EngineLimits, device: str) -> EngineInfo:
    """An engine's facts; pages for every request at full length."""
    rows = limits.max_seq_len + limits.num_drafts + 1
    return EngineInfo(
        vocab_size=spec.vocab_size,
        max_num_requests=limits.max_num_requests,
        max_seq_len=limits.max_seq_len,
        page_size=spec.page_size,
        num_pages=limits.max_num_requests * -(-rows // spec.page_size) + 1,
        rungs=build_ladder(limits.buckets, limits.num_drafts),
        num_drafts=limits.num_drafts,
        fingerprint="random",
        device=device,
    )


def make_engine(
    modules: tuple[TargetModel, DSparkModel],
    spec: ModelSpec,
    limits: EngineLimits,
    engine_class: type[TorchEngine] = KernelEngine,
) -> TorchEngine:
    """The engine under test, or the torch one."""
    device = str(modules[0].embed_tokens.weight.device)
    arguments: dict[str, Any] = {}
    if issubclass(engine_class, KernelEngine):
        arguments["request_buckets"] = request_buckets(limits.buckets)
    return engine_class(modules[0], make_info(spec, limits, device), modules[1], **arguments)


def make_loop(engine: TorchEngine, policy: str, table: Any = None) -> DecodingLoop:
    """The product's loop; decisions made ahead see survivals that are two steps old."""
    estimator = SurvivalEstimator(engine.info.num_drafts)
    options = {"staleness": 1} if policy in ("adaptive", "prefix_async") else {}
    resources = PolicyResources(table=table, estimator=estimator)
    chosen = create_policy(policy, options, resources)
    return DecodingLoop(engine, DSparkDrafter(engine), chosen, estimator, draw_seed=lambda: 4321)


def generate(loop: DecodingLoop, prompts: list[Any], **params: Any) -> list[list[int]]:
    """Tokens of every prompt."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        loop.add(GenerationRequest(str(index), prompt, sampling))
    tokens: dict[str, list[int]] = {}
    while loop.has_work:
        for output in loop.step():
            if output.error is not None:
                raise output.error
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return [tokens[str(index)] for index in range(len(prompts))]
