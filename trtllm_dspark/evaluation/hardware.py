# SPDX-License-Identifier: Apache-2.0
"""Data sheets for the roofline: GPUs and published model shapes. Numbers only.

GPU figures are the makers' dense (not sparse) peaks; model shapes come from the models' own
config.json files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One accelerator."""

    memory_gb: float
    bandwidth_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    nvlink_gb_s: float
    """One direction, per GPU."""


@dataclass(frozen=True)
class TargetShape:
    """A decoder's sizes."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of a dense layer, or of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    num_experts: int = 0
    num_active_experts: int = 0

    @property
    def attention_params(self) -> float:
        """Per layer: q, k, v and o projections."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return float(self.hidden_size * self.head_dim * heads)

    @property
    def expert_params(self) -> float:
        """Per layer: one gated MLP (dense), or one expert."""
        return 3.0 * self.hidden_size * self.intermediate_size

    def expected_experts(self, num_tokens: int) -> float:
        """Distinct experts of a layer that `num_tokens` tokens wake: E·(1 − (1 − k/E)ⁿ)."""
        if not self.num_experts:
            return 1.0
        share = self.num_active_experts / self.num_experts
        return self.num_experts * (1.0 - (1.0 - share) ** num_tokens)

    def read_params(self, num_tokens: int) -> float:
        """Parameters that a step of `num_tokens` reads, the output projection included."""
        mlp = self.expected_experts(num_tokens) * self.expert_params
        head = float(self.vocab_size * self.hidden_size)
        return self.num_layers * (self.attention_params + mlp) + head

    @property
    def active_params(self) -> float:
        """Parameters that multiply each token."""
        mlp = max(self.num_active_experts, 1) * self.expert_params
        return self.num_layers * (self.attention_params + mlp) + self.vocab_size * self.hidden_size

    @property
    def all_params(self) -> float:
        """Parameters held, embeddings included."""
        mlp = max(self.num_experts, 1) * self.expert_params
        tables = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (self.attention_params + mlp) + tables

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> float:
        """K and V of all layers for one token."""
        return 2.0 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


GPUS = {
    "h20": Gpu(96, 4.0, 148, 296, 450),
    "h100": Gpu(80, 3.35, 989, 1979, 450),
    "h200": Gpu(141, 4.8, 989, 1979, 450),
    "b200": Gpu(180, 7.7, 2250, 4500, 900),
}

MODELS = {
    "qwen3-4b": TargetShape(36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "qwen3-8b": TargetShape(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-14b": TargetShape(40, 5120, 17408, 40, 8, 128, 151936),
    "qwen3-32b": TargetShape(64, 5120, 25600, 64, 8, 128, 151936),
    "qwen3-30b-a3b": TargetShape(
        48, 2048, 768, 32, 4, 128, 151936, num_experts=128, num_active_experts=8
    ),
}
