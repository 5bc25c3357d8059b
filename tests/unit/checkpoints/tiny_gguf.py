# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny Llama as a GGUF file the way llama.cpp's converter does, tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.unit.checkpoints import layouts
from trtllm_dspark.config import ModelConfig

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2"))
"""`1 2` can never apply where digits are split one by one."""

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    """GPT-2's 256 printable byte stand-ins, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def vocabulary() -> list[str]:
    """Specials, bytes, merged tokens."""
    return [*SPECIALS, *byte_tokens(), *(a + b for a, b in MERGES)]


def config(**changes: Any) -> ModelConfig:
    """A Llama whose rows fit GGUF's blocks of 32."""
    values: dict[str, Any] = dict(
        architecture="llama",
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    return ModelConfig(**{**values, **changes})


def permute_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: row j of a half and row j of the other half become neighbours."""
    out = np.empty_like(values)
    head_dim = values.shape[0] // num_heads
    for head in range(num_heads):
        for j in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * j] = values[start + j]
            out[start + 2 * j + 1] = values[start + head_dim // 2 + j]
    return out


def write_gguf(
    path: Path,
    model: ModelConfig | None = None,
    quantization: str = "F32",
    overrides: dict[str, Any] | None = None,
    extra_tensors: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Write a random model; returns its exact tensors in Hugging Face names.

    `overrides` replaces metadata values by key (None leaves the key out).
    """
    model = model or config()
    tensors = layouts.hf_target_tensors(model)
    writer = gguf.GGUFWriter(str(path), "llama")
    overrides = overrides or {}
    for key, value in {**_metadata(model), **overrides}.items():
        if value is not None:
            _add(writer, key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if ".q_proj." in name:
            values = permute_rows(values, model.num_heads)
        if ".k_proj." in name:
            values = permute_rows(values, model.num_kv_heads)
        if values.ndim == 2 and quantization != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    for name in extra_tensors:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _metadata(model: ModelConfig) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "llama.block_count": model.num_layers,
        "llama.context_length": model.max_position_embeddings,
        "llama.embedding_length": model.hidden_size,
        "llama.feed_forward_length": model.intermediate_size,
        "llama.attention.head_count": model.num_heads,
        "llama.attention.head_count_kv": model.num_kv_heads,
        "llama.rope.freq_base": model.rope_theta,
        "llama.rope.dimension_count": model.head_dim,
        "llama.attention.layer_norm_rms_epsilon": model.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
