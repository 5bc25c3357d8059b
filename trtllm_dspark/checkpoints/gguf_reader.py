# SPDX-License-Identifier: Apache-2.0
"""Reads a GGUF file of the Llama architecture into Hugging Face names, shapes and row order.

Knows GGUF's metadata keys, tensor names and the q/k row permutation that llama.cpp applies. Does
not know tokenizers (`gguf_tokenizer`) nor where the file came from (`prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from trtllm_dspark.errors import CheckpointError

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufFile:
    """One opened GGUF file: metadata by key, a Hugging Face config, and dequantised tensors."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._reader = gguf.GGUFReader(str(self.path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.path} as GGUF: {error}") from error
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                f"{self.path}: architecture {architecture!r} is not supported in GGUF form; only "
                "'llama' is. Use the model's Hugging Face directory instead."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key as plain Python data, or `default` where it is absent."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Value of a metadata key that must be present."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def hf_config(self) -> dict[str, Any]:
        """The model as a Hugging Face `LlamaForCausalLM` config (without torch_dtype)."""
        hidden_size = int(self.require("llama.embedding_length"))
        num_heads = int(self.require("llama.attention.head_count"))
        head_dim = int(self.get("llama.attention.key_length", hidden_size // num_heads))
        rotary_dim = int(self.get("llama.rope.dimension_count", head_dim))
        if rotary_dim != head_dim:
            raise CheckpointError(
                f"{self.path}: rotary dimension {rotary_dim} differs from head dimension "
                f"{head_dim}; partial rotary embeddings are not supported"
            )
        scaling = self.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise CheckpointError(
                f"{self.path}: rope scaling {scaling!r} is not supported in GGUF form"
            )
        names = {tensor.name for tensor in self._reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": int(self.require("llama.feed_forward_length")),
            "max_position_embeddings": int(self.require("llama.context_length")),
            "mlp_bias": False,
            "num_attention_heads": num_heads,
            "num_hidden_layers": int(self.require("llama.block_count")),
            "num_key_value_heads": int(self.get("llama.attention.head_count_kv", num_heads)),
            "rms_norm_eps": _short_float(self.require("llama.attention.layer_norm_rms_epsilon")),
            "rope_scaling": None,
            "rope_theta": float(self.get("llama.rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in names,
            "use_cache": True,
            "vocab_size": self._vocab_size(),
        }

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, fp32 tensor) for every tensor, dequantised and un-permuted."""
        config = self.hf_config()
        heads = {
            "attn_q.weight": config["num_attention_heads"],
            "attn_k.weight": config["num_key_value_heads"],
        }
        for tensor in self._reader.tensors:
            values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            suffix = tensor.name.split(".", 2)[-1]
            if suffix in heads:
                values = unpermute_rows(values, heads[suffix])
            yield self._hf_name(tensor.name), torch.from_numpy(np.ascontiguousarray(values))

    def _vocab_size(self) -> int:
        for tensor in self._reader.tensors:
            if tensor.name == "token_embd.weight":
                return int(tensor.shape[-1])
        raise CheckpointError(f"{self.path}: tensor 'token_embd.weight' is missing")

    def _hf_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        prefix, _, rest = name.partition(".")
        layer, _, suffix = rest.partition(".")
        if prefix != "blk" or not layer.isdigit() or suffix not in _LAYER_NAMES:
            raise CheckpointError(f"{self.path}: unexpected tensor {name!r} in a llama model")
        return f"model.layers.{layer}.{_LAYER_NAMES[suffix]}"


def unpermute_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q/k: pairs (2i, 2i+1) of a head become (i, i + head_dim/2)."""
    head_dim = values.shape[0] // num_heads
    pairs = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _short_float(value: float) -> float:
    """The shortest decimal that is the same fp32 number (GGUF keeps 1e-5 as 9.9999997e-06)."""
    return float(np.format_float_scientific(np.float32(value), unique=True))
