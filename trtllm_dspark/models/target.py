# SPDX-License-Identifier: Apache-2.0
"""The target decoder (Llama, Qwen3) as one module over packed ragged rows and paged K/V.

It returns hidden states and taps; logits are computed only for the rows that need them. It knows
nothing of requests, sampling or how the rows were packed.
"""

from __future__ import annotations

import torch
from torch import nn

from trtllm_dspark.config import ModelConfig
from trtllm_dspark.models.rope import build_rope_table
from trtllm_dspark.ops.attention import ragged_verify_attention
from trtllm_dspark.ops.kv_append import HeadShape, kv_append_
from trtllm_dspark.ops.linear import Linear
from trtllm_dspark.ops.norm import rms_norm
from trtllm_dspark.ops.ragged import RaggedBatch
from trtllm_dspark.ops.swiglu import swiglu


class RMSNorm(nn.Module):
    """Scale [n] of an RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] → [..., n]."""
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """SwiGLU with fused gate and up projections (rows gate | up)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] → [N, H]."""
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class SelfAttention(nn.Module):
    """Fused q|k|v projection, paged attention, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias
        )
        if config.qk_norm:
            self.q_norm: RMSNorm | None = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm: RMSNorm | None = RMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = None
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5

    def forward(
        self, x: torch.Tensor, kv_pages: torch.Tensor, rope: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        """[N, H] → [N, H]; appends K/V of the rows to this layer's pages."""
        q = kv_append_(
            kv_pages,
            self.qkv_proj(x),
            self.shape,
            rope,
            batch.slots,
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            eps=self.eps,
        )
        out = ragged_verify_attention(q, kv_pages, batch, self.scale)
        return self.o_proj(out.view(x.shape[0], -1))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: torch.Tensor, kv_pages: torch.Tensor, rope: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        """[N, H] → [N, H]."""
        x = x + self.self_attn(self.input_layernorm(x), kv_pages, rope, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class TargetModel(nn.Module):
    """Embedding, decoder layers, final norm, head (tied or not)."""

    rope_table: torch.Tensor

    def __init__(self, config: ModelConfig, max_positions: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_(self.embed_tokens)
        self.register_buffer("rope_table", torch.empty(0), persistent=False)
        self.set_rope_table(max_positions or config.max_position_embeddings)

    def set_rope_table(self, max_positions: int) -> None:
        """Make the rotary table for positions 0 … max_positions − 1, on the model's device."""
        config = self.config
        table = build_rope_table(
            config.head_dim, max_positions, config.rope_theta, config.rope_scaling
        )
        self.rope_table = table.to(self.embed_tokens.weight.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_pages: list[torch.Tensor],
        batch: RaggedBatch,
        tap_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run N packed rows: token_ids [N] → (hidden [N, H] before the final norm, taps [N, T·H]).

        kv_pages has one tensor per layer, changed in place. Tap i is the output of decoder layer i,
        −1 the embedding output, concatenated in the order of `tap_layers`.
        """
        x = self.embed_tokens(token_ids)
        rope = self.rope_table.index_select(0, batch.positions)
        wanted = set(tap_layers)
        tapped = {-1: x} if -1 in wanted else {}
        for index, layer in enumerate(self.layers):
            x = layer(x, kv_pages[index], rope, batch)
            if index in wanted:
                tapped[index] = x
        taps = torch.cat([tapped[i] for i in tap_layers], dim=-1) if tap_layers else None
        return x, taps

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] (before the final norm) → logits [M, V] float32."""
        return self.lm_head(self.norm(hidden)).float()

    def pack_(self) -> None:
        """Give every linear layer its machine-specific weight layout (after loading weights)."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_()
