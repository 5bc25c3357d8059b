# SPDX-License-Identifier: Apache-2.0
"""Writes a random two-layer Llama with a byte tokenizer as an ordinary Hugging Face directory.

Only printable ASCII and the bytes of é and 😀 get logits: greedy text is printable, sometimes
splits characters over tokens, and runs until max_tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trtllm_dspark.checkpoints import drafter_shapes, load_model_config, write_drafter
from trtllm_dspark.config import DrafterConfig

HIDDEN, INNER, LAYERS, HEADS, VOCAB = 32, 64, 2, 2, 259
END_ID, USER_ID, REPLY_ID = 256, 257, 258
SPECIALS = ("<|end|>", "<|user|>", "<|reply|>")
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|reply|>{% endif %}"
)


def write_tiny_model(directory: Path) -> Path:
    """Write the model and return its directory."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": END_ID,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": SPECIALS[0], "chat_template": TEMPLATE})
    )
    return directory


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": 4 * random(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 6 * random(VOCAB, HIDDEN),
    }
    spoken = [*range(32, 127), *"é😀".encode()]
    silent = [i for i in range(VOCAB) if i not in spoken]
    tensors["lm_head.weight"][silent] = 0.0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = random(HIDDEN, HIDDEN)
        tensors[f"{prefix}mlp.gate_proj.weight"] = random(INNER, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = random(INNER, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = random(HIDDEN, INNER)
    return tensors


def _tokenizer() -> Tokenizer:
    """Token i is byte i (in the tokenizer library's byte alphabet), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    return tokenizer


def _byte_of(character: str) -> int:
    """The byte that a character of GPT-2's printable byte alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(character) in printable:
        return ord(character)
    others = [byte for byte in range(256) if byte not in printable]
    return others[ord(character) - 256]


def write_tiny_drafter(model_dir: Path, **heads: Any) -> Path:
    """A random one-layer drafter (γ = 4) for the tiny model in `model_dir`/drafter; `heads` are
    fields of `DrafterConfig`.
    """
    target = load_model_config(model_dir)
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        num_drafts=4,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        **heads,
    )
    generator = torch.Generator().manual_seed(0)
    shapes = drafter_shapes(config).items()
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes}
    write_drafter(model_dir / "drafter", config, weights)
    return model_dir / "drafter"
