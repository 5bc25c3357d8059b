# SPDX-License-Identifier: Apache-2.0
"""Small random drafters, and an independent recomputation without any cache or batch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.ops.attention import plan_attention
from trtllm_dspark.ops.linear import Linear
from trtllm_dspark.ops.ragged import RaggedBatch, flatten_slots

PAGE_SIZE = 4


def make_config(**changes: object) -> DrafterConfig:
    fields: dict[str, object] = dict(
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        vocab_size=50,
        qk_norm=True,
        num_drafts=3,
        label_shift=True,
        mask_token_id=49,
        target_layer_ids=(-1, 1),
        num_target_layers=4,
        target_hidden_size=16,
        head_type="markov",
        markov_rank=5,
        confidence_head=True,
        confidence_with_markov=True,
        confidence_bias=True,
    )
    return DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]


def make_model(
    config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> DSparkModel:
    embed = nn.Embedding(config.vocab_size, config.hidden_size)
    head = Linear(config.hidden_size, config.vocab_size)
    model = DSparkModel(config, embed, head)
    generator = torch.Generator().manual_seed(seed)
    for module in (embed, head, model):
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = 1 + 0.1 * noise if parameter.dim() == 1 else 0.4 * noise
        module.requires_grad_(False)
        module.to(dtype)
    return model.eval()


def make_pages(model: DSparkModel, num_pages: int = 24) -> list[torch.Tensor]:
    config = model.config
    shape = (num_pages, PAGE_SIZE, 2, config.num_kv_heads, config.head_dim)
    dtype = model.fc.weight.dtype
    # Whatever was on a page before must not matter.
    return [torch.full(shape, 7.0, dtype=dtype) for _ in range(config.num_layers)]


def draft_batch(
    model: DSparkModel, anchor_positions: np.ndarray, page_table: np.ndarray
) -> RaggedBatch:
    config, block = model.config, model.block_len
    count = len(anchor_positions)
    cu = np.arange(0, (count + 1) * block, block, dtype=np.int32)
    positions = (anchor_positions[:, None] + np.arange(block)).reshape(-1).astype(np.int32)
    plan = plan_attention(
        cu,
        anchor_positions.astype(np.int32),
        page_table,
        PAGE_SIZE,
        q_per_kv=config.num_heads // config.num_kv_heads,
        dtype=model.fc.weight.dtype,
        is_causal=False,
    )
    return RaggedBatch(
        positions=torch.from_numpy(positions.astype(np.int64)),
        slots=torch.from_numpy(flatten_slots(positions, cu, page_table, PAGE_SIZE)),
        cu_query_lens=torch.from_numpy(cu),
        context_lens=torch.from_numpy(anchor_positions.astype(np.int32)),
        page_table=torch.from_numpy(page_table),
        page_size=PAGE_SIZE,
        is_causal=False,
        plan=plan,
    )


def append_rows(
    model: DSparkModel, pages: list[torch.Tensor], taps: torch.Tensor, start: int, row: np.ndarray
) -> None:
    """Rows start.. of one request whose page ids are `row`."""
    positions = np.arange(start, start + len(taps))
    slots = row[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    model.append_context(taps, torch.from_numpy(positions), torch.from_numpy(slots), pages)


class Recomputation:
    """One block of one request from scratch, in float64 and plain Python over heads and rows."""

    def __init__(self, model: DSparkModel) -> None:
        self.config = model.config
        self.w = {n: p.detach().double() for n, p in model.named_parameters()}
        self.embed = model._borrowed[0].weight.detach().double()
        self.head = model._borrowed[1].weight.detach().double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return x / scale * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2 * i / len(x))
            c, s = math.cos(angle), math.sin(angle)
            out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
        return out

    def heads(self, x: torch.Tensor, name: str, position: int, rotate: bool) -> list[torch.Tensor]:
        parts = list(self.linear(x, f"{name}_proj").split(self.config.head_dim))
        if rotate and self.config.qk_norm:
            parts = [self.norm(part, f"{name}_norm") for part in parts]
        return [self.rotate(part, position) for part in parts] if rotate else parts

    def hidden(self, taps: torch.Tensor, anchor_id: int) -> torch.Tensor:
        """taps [position of the anchor, T·H] → [γ, H]."""
        config, start = self.config, len(taps)
        block = config.num_drafts + (0 if config.label_shift else 1)
        ids = [anchor_id] + [config.mask_token_id] * (block - 1)
        rows = [self.embed[i] for i in ids]
        context = [self.norm(self.linear(t.double(), "fc"), "hidden_norm") for t in taps]
        for number in range(config.num_layers):
            name = f"layers.{number}"
            rows = self.layer(rows, context, start, name)
        rows = [self.norm(row, "norm") for row in rows]
        return torch.stack(rows[block - config.num_drafts :])

    def layer(
        self, rows: list[torch.Tensor], context: list[torch.Tensor], start: int, name: str
    ) -> list[torch.Tensor]:
        config, attn = self.config, f"{name}.self_attn"
        normed = [self.norm(row, f"{name}.input_layernorm") for row in rows]
        keys, values = [], []
        for position, row in enumerate(context + normed):
            keys.append(self.heads(row, f"{attn}.k", position, True))
            values.append(self.heads(row, f"{attn}.v", position, False))
        results = []
        for offset, row in enumerate(normed):
            queries = self.heads(row, f"{attn}.q", start + offset, True)
            out = []
            for index, query in enumerate(queries):
                group = index * config.num_kv_heads // config.num_heads
                scores = torch.stack([query @ k[group] for k in keys]) / config.head_dim**0.5
                weights = scores.softmax(0)
                out.append(sum(w * v[group] for w, v in zip(weights, values, strict=True)))
            x = rows[offset] + self.linear(torch.cat(out), f"{attn}.o_proj")
            inner = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = self.linear(inner, f"{name}.mlp.gate_up_proj").chunk(2)
            x = x + self.linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")
            results.append(x)
        return results

    def draft(self, taps: torch.Tensor, anchor_id: int) -> tuple[list[int], list[float]]:
        """Greedy drafts and confidence logits of one block."""
        config = self.config
        hidden = self.hidden(taps, anchor_id)
        previous, state = anchor_id, torch.zeros(config.markov_rank, dtype=torch.float64)
        ids, confidences = [], []
        for h in hidden:
            logits = self.head @ h
            e = None
            if config.head_type != "none":
                e = self.w["markov.w1.weight"][previous]
                features = e
                if config.head_type == "gated":
                    features = torch.sigmoid(self.linear(torch.cat((h, e)), "markov.gate_proj")) * e
                if config.head_type == "rnn":
                    joint = self.linear(torch.cat((state, e, h)), "markov.joint_proj")
                    gate, candidate, output = joint.chunk(3)
                    gate = torch.sigmoid(gate)
                    state = gate * state + (1 - gate) * torch.tanh(candidate)
                    features = torch.tanh(output)
                logits = logits + self.w["markov.w2.weight"] @ features
            previous = int(logits.argmax())
            ids.append(previous)
            p = logits.softmax(0).max()
            peak = (p / (1 - p)).log()
            if config.confidence_head:
                x = torch.cat((h, e)) if config.confidence_with_markov else h
                if config.confidence_with_peak:
                    x = torch.cat((x, peak.clamp(-12, 12)[None]))
                confidences.append(float(self.linear(x, "confidence.proj")))
            else:
                confidences.append(float(peak))
        return ids, confidences
